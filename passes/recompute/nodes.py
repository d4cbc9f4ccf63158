"""Nodes of a forward part: values that may be kept, few enough for exact solvers.

A transformer block has about two dozen, beside what its gradients compute from them. Views are their base. Small values
are always there. A fusible value that only the forward part reads is looked through, if it is no smaller than its
sources and needs no buffer when recomputed: keeping it could only save fused elementwise work. It is never kept, so its
op reruns with each op that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxtensile.ir.ir import Graph, consumers
from jaxtensile.passes.lifetimes.fusion import IN_PLACE, REDUCTIONS, VIEWS, is_fusible
from jaxtensile.passes.lifetimes.liveness import Liveness, inner_temp
from jaxtensile.passes.recompute.stages import Boundary

_SMALL = 2e-4
"""Values below this share of the plain program's temporaries are always kept: a thousand of them are a fifth of it. A
guess. At half and double no plan changes."""


class Nodes:
    """One boundary, coarsened: what may be kept, what makes it, and when it is read.

    ``of[v]``: nodes from which ``v`` is computed for nothing. ``first``, ``last``: steps of the descent that read a
    node. ``solid``: nodes that are buffers when recomputed. ``small``: values always kept. ``through``: ops looked
    through, by the ops of nodes that rerun them. ``forced``: nodes that only a stage's barrier stores when kept.
    Without ``fused``, values that the descent computes inside its kernels are looked through too: a chain would have
    one more at each end.
    """

    def __init__(self, graph: Graph, live: Liveness, boundary: Boundary, *, fused: bool = True) -> None:
        self.graph, self.step = graph, boundary.step
        least = int(_SMALL * live.temp)
        pinned = frozenset(r for o in boundary.cone if graph.ops[o].pinned for r in graph.ops[o].results)
        stored = _stored_again(graph, boundary.step)
        self.of: dict[int, tuple[int, ...]] = {}
        self.maker: dict[int, int] = {}
        self.makes: dict[int, list[int]] = {}
        self.reads: dict[int, tuple[int, ...]] = {}
        self.solid: set[int] = set()
        small: set[int] = set()
        read = _read_after(graph, boundary)
        for o in boundary.cone:
            op = graph.ops[o]
            made = [r for r in op.results if r not in boundary.always]
            before = self._leaves(op.operands)
            if op.primitive in VIEWS and not op.pinned:
                self.of.update((r, before) for r in made)
                continue
            large = [r for r in made if r in pinned or graph.values[r].nbytes > least]
            small.update(r for r in made if r not in large)
            sources = sum(graph.values[v].nbytes for v in before)
            again = stored | pinned | (read if fused else set[int]())
            if (
                is_fusible(op.primitive)
                and not live.kernels.is_root[o]
                and all(r not in again and graph.values[r].nbytes >= sources for r in large)
            ):
                self.of.update((r, before) for r in large)
                continue
            for r in large:
                self.of[r] = (r,)
                self.maker[r] = o
                self.makes.setdefault(o, []).append(r)
                self.reads[o] = () if op.pinned else before
                if r in stored or not is_fusible(op.primitive):
                    self.solid.add(r)
        self.small = frozenset(small)
        self.pinned = pinned
        self.readers: dict[int, list[int]] = {v: [] for v in self.maker}
        for o, before in self.reads.items():
            for v in before:
                self.readers[v].append(o)
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.through = self._looked_through(boundary)
        self.forced = {v for v in boundary.needed if v in self.maker and is_fusible(graph.ops[self.maker[v]].primitive)}
        early, late = _read_at(graph, live, self.step)
        self.waiting: dict[int, int] = {v: late[v] for v in boundary.needed if v in small}
        """The last step of the descent that reads a small value."""
        for v in boundary.needed:
            for u in self.of.get(v, ()):
                self.first[u] = min(self.first.get(u, early[v]), early[v])
                self.last[u] = max(self.last.get(u, late[v]), late[v])

    def _leaves(self, values: Iterable[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(u for v in values for u in self.of.get(v, ())))

    def _looked_through(self, boundary: Boundary) -> dict[frozenset[int], list[int]]:
        """Ops without a node, by the ops that rerun them."""
        asked: dict[int, set[int]] = {}
        out: dict[frozenset[int], list[int]] = {}
        for o in reversed(boundary.cone):
            op = self.graph.ops[o]
            by = {o} if o in self.makes else set[int]().union(*(asked.get(r, ()) for r in op.results if r in self.of))
            if op.pinned or not by:
                continue
            if o not in self.makes:
                out.setdefault(frozenset(by), []).append(o)
            for v in op.operands:
                if v in self.of and self.of[v] != (v,):
                    asked.setdefault(v, set()).update(by)
        return out

    def single(self, o: int) -> bool:
        """Whether keeping the result of ``o`` and rerunning ``o`` exclude each other."""
        return len(self.makes[o]) == 1


def _read_after(graph: Graph, boundary: Boundary) -> set[int]:
    """Values that the descent reads, also through views."""
    read = set(boundary.needed)
    for o in reversed(boundary.cone):
        op = graph.ops[o]
        if op.primitive in VIEWS and read.intersection(op.results):
            read.update(op.operands[:1])
    return read


def _stored_again(graph: Graph, step: int) -> set[int]:
    """Values that the descent reads as buffers, so that they are stored whenever recomputed."""
    stored: set[int] = set()
    for op in reversed(graph.ops):
        if op.primitive in VIEWS:
            if stored.intersection(op.results):
                stored.update(op.operands[:1])  # none where it is a view of a literal
        elif op.id >= step and not is_fusible(op.primitive) and op.primitive not in REDUCTIONS:
            stored.update(op.operands)
    return stored


def _read_at(graph: Graph, live: Liveness, step: int) -> tuple[list[int], list[int]]:
    """For each value the first step of the descent that reads it and the last that surely needs it.

    Ops that fuse away run in their readers. With several they may be stored after all, right before the first.
    """
    n = len(graph.ops)
    read_by = consumers(graph)
    early, late = [n] * len(graph.values), [-1] * len(graph.values)
    for v in graph.outputs:
        late[v] = n
    for op in reversed(graph.ops[step:]):
        low = high = op.id
        if not live.kernels.is_root[op.id] and not op.pinned:
            low = min((early[r] for r in op.results), default=op.id)
            once = all(len(read_by[r]) <= 1 for r in op.results)
            high = max((late[r] for r in op.results), default=op.id) if once else low - 1
        for v in op.operands:
            early[v], late[v] = min(early[v], low), max(late[v], high)
    return early, late


@dataclass(frozen=True, slots=True)
class Sometimes:
    """A buffer of the plain program needed during ``[start, stop)``, unless one of ``stored`` is kept and read instead
    of made from it again."""

    value: int
    start: int
    stop: int
    stored: frozenset[int]


def made_from(nodes: Nodes, live: Liveness) -> list[dict[int, frozenset[int]]]:
    """For each value the buffers that a reader reads for it, and the values between that become buffers when kept."""
    graph, kernels = nodes.graph, live.kernels
    may = {*nodes.maker, *nodes.small}
    out: list[dict[int, frozenset[int]]] = [{} for _ in graph.values]
    for v in graph.inputs:
        out[v] = {v: frozenset()}
    for op in graph.ops:
        before: dict[int, frozenset[int]] = {}
        for v in op.operands:
            for u, stored in out[v].items():
                # Read without any of them on one way, it is read.
                known = before.get(u)
                before[u] = stored if known is None else (known | stored if known and stored else frozenset())
        for r in op.results:
            if kernels.home[r] >= 0:
                out[r] = {kernels.home[r]: frozenset()}
            else:
                out[r] = {u: stored | {r} for u, stored in before.items()} if r in may else before
    return out


def forward_ends(nodes: Nodes, live: Liveness) -> dict[int, int]:
    """For each node that is a buffer of the plain program its last reader before the boundary, whatever is kept."""
    home, kernels = live.kernels.home, live.kernels
    sources = made_from(nodes, live)
    ends = {v: o for v, o in nodes.maker.items() if home[v] == v}
    for op in nodes.graph.ops[: nodes.step]:
        if kernels.is_root[op.id]:
            ends.update((b, op.id) for b in kernels.reads[op.id] if b in ends and not _unless(sources, op.operands, b))
    return ends


def _unless(sources: list[dict[int, frozenset[int]]], operands: Iterable[int], buffer: int) -> frozenset[int]:
    """Values of which one must be kept for an op with ``operands`` not to read ``buffer``; empty: it reads it."""
    ways = [sources[v][buffer] for v in operands if buffer in sources[v]]
    return frozenset[int]().union(*ways) if all(ways) else frozenset()


def others(nodes: Nodes, live: Liveness, sometimes: list[Sometimes] | None = None) -> list[int]:
    """Bytes at each step that no decision here changes, and what the forward part itself reads.

    ``sometimes`` receives buffers read only while other values are not kept; they are not counted.
    """
    graph, kernels, owner, step = nodes.graph, live.kernels, live.owner, nodes.step
    n = len(graph.ops)
    start: dict[int, int] = {}
    stop: dict[int, int] = {}
    outside = {*graph.inputs, *(kernels.home[v] for v in graph.outputs)}
    decided = {*nodes.of, *nodes.small}
    sources = made_from(nodes, live) if sometimes is not None else None
    through: dict[int, list[tuple[int, frozenset[int]]]] = {}
    for op in graph.ops:
        if not kernels.is_root[op.id]:
            continue
        for r in op.results:
            if kernels.home[r] == r and r not in outside and graph.values[r].space != "host":
                # What takes over the memory of an operand, or may once that dies earlier, counts from the next step on.
                takes_over = owner[r] != r or (
                    (is_fusible(op.primitive) or op.primitive in IN_PLACE)
                    and any(graph.values[b].nbytes == graph.values[r].nbytes for b in kernels.reads[op.id])
                )
                start[r], stop[r] = op.id + takes_over, op.id + 1
        for b in kernels.reads[op.id]:
            if b in start and (op.id < step or b not in decided):
                stored = _unless(sources, op.operands, b) if sources is not None else None
                if stored:
                    through.setdefault(b, []).append((op.id + 1, stored))
                else:
                    stop[b] = op.id + 1
    made: dict[int, int] = {r: op.id for op in graph.ops[:step] for r in op.results}
    for v, last in nodes.waiting.items():
        stop[v] = max(stop.get(v, 0), min(last, n - 1) + 1)
        start.setdefault(v, made[v] + 1)
    if sometimes is not None:
        for b, reads in through.items():
            for end, stored in reads:
                if not stored & nodes.small:  # those are kept
                    sometimes.append(Sometimes(b, max(start[b], stop[b]), end, stored))
    delta = [0] * (n + 1)
    for b, s in start.items():
        if stop[b] > s:
            delta[s] += graph.values[b].nbytes
            delta[stop[b]] -= graph.values[b].nbytes
    inner = [0] * n
    for op in graph.ops:
        if (op.bodies or op.workspace) and kernels.is_root[op.id]:
            inner[op.id] = inner_temp(op, kernels.by)
    return [int(a + b) for a, b in zip(np.cumsum(delta)[:n], inner, strict=True)]
