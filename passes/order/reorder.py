"""The order in which XLA runs a program's kernels.

XLA makes three schedules and takes the one that needs least memory (``xla/hlo/transforms/memory_scheduler.cc``):

* List schedule: of the ready kernels the one that frees most bytes; of equals the one that became ready last.
* Depth-first: the operand first whose history has most other readers, then most bytes.
* Post-order of the results.

First it joins kernels (``xla/service/gpu/transforms/multi_output_fusion.cc``). The first elementwise reader of an array
of numbers writes it. A small result of a large buffer comes out of another kernel that reads the buffer. Rows spread
alike over the same groups come out of one kernel, unless one waits for another.

Invariant: each order has every op once, after its operands.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count

from jaxtensile.ir.fuser import H200, Fuser
from jaxtensile.ir.ir import Graph, Op, Same
from jaxtensile.passes.lifetimes.fusion import REDUCTIONS, SPREAD, STORED, Kernels, fuse, is_fusible
from jaxtensile.passes.lifetimes.liveness import Liveness, inner_temp, live_ranges
from jaxtensile.passes.order.schedule import BARRIER
from jaxtensile.switches import on
from jaxtensile.units import Bytes

BROADCAST, COPY, CONVOLUTION = "broadcast_in_dim", STORED, "conv_general_dilated"
POINTER = 8
"""Bytes of an entry in a table of results, as in XLA: a 64-bit address. It breaks ties between kernels."""
_MOST_EXTRA = 1 << 40
"""Most readers counted: sums over operands grow like powers of two, to thousands of digits in long programs."""
LITTLE = 0.01
"""Largest share of a buffer's bytes that makes a kernel a by-product of another reader: the label's logit of a row, or
its sum. A guess."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A graph in another order.

    ``origin[i]``: the op of the given graph that op ``i`` is. ``live``: the buffers in this order.
    """

    graph: Graph
    origin: tuple[int, ...]
    live: Liveness


def as_scheduled(graph: Graph, *, by: Fuser = H200) -> tuple[Scheduled, ...]:
    """The first order of XLA's three that needs least, and the order of the trace.

    XLA:CPU has one order only: that in which kernels could run side by side.

    XLA counts results from when they are written, also those that take over an argument. The order of the trace writes
    results as soon as possible, or in place if that needs less. If it needs more than XLA's orders, these are not known
    well enough to promise less.
    """
    graph = _with_bodies_scheduled(graph, by)
    nodes = _Nodes(graph, fuse(graph, by=by, written=True))

    def ordered(schedules: Sequence[Callable[[_Nodes], list[int]]]) -> list[Scheduled]:
        return [_in_order(graph, nodes.with_fused(schedule(nodes)), nodes.kernels) for schedule in schedules]

    if not by.twice:
        return tuple(ordered((_breadth_first,)))
    traced = ordered((_as_traced, _results_early) if on("results_early") else (_as_traced,))
    best = min(traced, key=lambda s: s.live.temp)
    return (min(ordered(SCHEDULES), key=_bytes_as_xla_counts), best) if on("xla_orders") else (best,)


def _with_bodies_scheduled(graph: Graph, by: Fuser) -> Graph:
    """``graph`` with each body in the order, of those that ``as_scheduled`` finds, that needs most."""
    known: dict[Same[Graph], Graph] = {}

    def scheduled(op: Op, body: Graph) -> Graph:
        if Same(body) not in known:
            known[Same(body)] = max(
                (s.graph for s in as_scheduled(body, by=by)),
                key=lambda b: inner_temp(replace(op, bodies=(b,), workspace=0), by),
            )
        return known[Same(body)]

    if not on("bodies_scheduled") or not any(op.bodies for op in graph.ops):
        return graph
    ops = (replace(op, bodies=tuple(scheduled(op, b) for b in op.bodies)) if op.bodies else op for op in graph.ops)
    return replace(graph, ops=tuple(ops))


def _bytes_as_xla_counts(scheduled: Scheduled) -> Bytes:
    graph, live = scheduled.graph, scheduled.live
    home, given = live.kernels.home, set(graph.inputs)
    results = {home[v] for v in graph.outputs} - given
    written = [sum(graph.values[r].nbytes for r in op.results if r in results) for op in graph.ops]
    return max(map(sum, zip(live.profile, accumulate(written), strict=True)), default=0)


def _in_order(graph: Graph, order: Sequence[int], kernels: Kernels) -> Scheduled:
    ops = (graph.ops[i] for i in order)
    new = replace(graph, ops=tuple(op.on(k, op.operands, op.results) for k, op in enumerate(ops)))
    return Scheduled(new, tuple(order), live_ranges(new, kernels.in_order(order), together=True))


class _Nodes:
    """Kernels by their root op, with what each reads and makes."""

    def __init__(self, graph: Graph, kernels: Kernels) -> None:
        self.graph, self.kernels = graph, kernels
        home, n = kernels.home, len(graph.ops)
        maker = [-1] * len(graph.values)
        for op in graph.ops:
            for r in op.results:
                if home[r] == r:
                    maker[r] = op.id
        self.maker = maker
        self.wanted = {home[v] for v in graph.outputs}
        self.parts: dict[int, list[int]] = {}
        """Other kernels joined to the kernel of an op."""
        inside = self._made_together()
        self.roots: list[int] = [op.id for op in graph.ops if kernels.is_root[op.id] and op.id not in inside]
        self.reads: list[tuple[int, ...]] = [()] * n
        self.makes: list[tuple[int, ...]] = [()] * n
        for i in self.roots:
            all_of_it = (i, *self.parts.get(i, ()))
            own = {r for o in all_of_it for r in graph.ops[o].results if home[r] == r}
            read = dict.fromkeys(b for o in all_of_it for b in kernels.reads[o] if maker[b] >= 0)
            self.makes[i] = tuple(sorted(own))
            self.reads[i] = tuple(b for b in read if b not in own)
        behind = self._behind()
        self.operands: list[tuple[int, ...]] = [
            tuple(dict.fromkeys((*(maker[b] for b in r), *behind.get(i, ())))) for i, r in enumerate(self.reads)
        ]
        self.readers: list[list[int]] = [[] for _ in range(n)]
        for i in self.roots:
            for o in self.operands[i]:
                self.readers[o].append(i)

    def _behind(self) -> dict[int, list[int]]:
        """The barriers behind which each kernel reads; it cannot move before them."""
        of: dict[int, list[int]] = {}
        found: dict[int, list[int]] = {}
        into = {o: i for i, joined in self.parts.items() for o in joined}
        for op in self.graph.ops:
            if not (barriers := [b for v in op.operands for b in of.get(v, ())]) and op.primitive != BARRIER:
                continue
            if op.primitive == BARRIER:
                of.update((r, [op.id]) for r in op.results)
            elif not self.kernels.is_root[op.id]:
                of.update((r, list(dict.fromkeys(barriers))) for r in op.results)
            if self.kernels.is_root[op.id] and on("barriers_in_order"):
                found.setdefault(into.get(op.id, op.id), []).extend(barriers)
        return found

    def _made_together(self) -> set[int]:
        """Join arrays of numbers to their first reader if it is elementwise, else their copies to them; the joined
        kernels."""
        graph, kernels, maker = self.graph, self.kernels, self.maker
        numbers: dict[int, list[int]] = {}
        for op in graph.ops:
            if not kernels.is_root[op.id]:
                continue
            if op.primitive == BROADCAST and not kernels.reads[op.id]:
                numbers[op.id] = []
            for b in kernels.reads[op.id]:
                if maker[b] in numbers:
                    numbers[maker[b]].append(op.id)
        inside = set[int]()
        for made, readers in numbers.items():
            first = graph.ops[readers[0]] if readers else graph.ops[made]
            alike = (
                first.results and graph.values[first.results[0]].shape == graph.values[graph.ops[made].results[0]].shape
            )
            if first.id != made and alike and is_fusible(first.primitive):
                into, joined = first.id, [made]
            else:
                into, joined = made, [o for o in readers if graph.ops[o].primitive == COPY]
            if joined and not on("numbers_with_readers"):
                joined = []
            if joined:
                self.parts.setdefault(into, []).extend(joined)
                inside.update(joined)
            for r in (r for o in joined for r in graph.ops[o].results):
                maker[r] = into
        return inside | self._spread_together()

    def _spread_together(self) -> set[int]:
        """Join kernels that spread rows to the first that does so alike; the joined kernels."""
        graph, kernels, maker = self.graph, self.kernels, self.maker
        alike: dict[tuple[tuple[int, ...], int], list[int]] = {}
        inside = set[int]()

        def waits(i: int, first: int) -> bool:
            seen, left = {i}, [i]
            while left:
                top = left.pop()
                for o in (top, *self.parts.get(top, ())):
                    for m in {maker[b] for b in kernels.reads[o]} - seen:
                        if m == first:
                            return True
                        if m >= 0:
                            seen.add(m)
                            left.append(m)
            return False

        for op in graph.ops:
            if op.primitive != SPREAD or not kernels.is_root[op.id]:
                continue
            r, sizes = op.results[0], op.operands[1]
            firsts = alike.setdefault((graph.values[r].shape, sizes), [])
            into = next((i for i in firsts if not waits(op.id, i) and not waits(i, op.id)), None)
            if into is None or not on("spread_together"):
                firsts.append(op.id)
            else:
                self.parts.setdefault(into, []).append(op.id)
                inside.add(op.id)
                maker[r] = into
        return inside

    def users(self, i: int) -> int:
        """Instructions that read a kernel's result; with several results, those that take one out."""
        return self.parts_made(i) or len(self.readers[i]) + (not self.wanted.isdisjoint(self.makes[i]))

    def parts_made(self, i: int) -> int:
        """Results of a kernel that has a table of them, 0 for a single one. A convolution's workspace is one."""
        made = len(self.makes[i]) + (self.graph.ops[i].primitive == CONVOLUTION)
        return made if made > 1 else 0

    def size(self, value: int) -> Bytes:
        return self.graph.values[value].nbytes

    def results(self) -> list[int]:
        """Kernels of the program's outputs, then unread ones, in order."""
        home = self.kernels.home
        out = [self.maker[home[v]] for v in self.graph.outputs if home[v] >= 0 and self.maker[home[v]] >= 0]
        return list(dict.fromkeys([*out, *(i for i in self.roots if not self.readers[i])]))

    def with_fused(self, roots: Sequence[int]) -> list[int]:
        """All ops: fused ones and views right before their first reader."""
        graph, out, done = self.graph, list[int](), [False] * len(self.graph.ops)
        made = [-1] * len(graph.values)
        for op in graph.ops:
            for r in op.results:
                made[r] = op.id
        is_root = self.kernels.is_root

        def place(i: int) -> None:
            stack = [i]
            while stack:
                top = stack[-1]
                if done[top]:
                    stack.pop()
                    continue
                left = [m for v in graph.ops[top].operands if (m := made[v]) >= 0 and not done[m]]
                if left:
                    stack.extend(left)
                else:
                    done[top] = True
                    out.append(stack.pop())

        for i in roots:
            place(i)
            for o in self.parts.get(i, ()):
                if not done[o]:
                    place(o)
        for op in graph.ops:
            if not done[op.id] and not is_root[op.id]:
                place(op.id)
        return out


def _as_traced(nodes: _Nodes) -> list[int]:
    return nodes.roots


def _results_early(nodes: _Nodes) -> list[int]:
    """The order of the trace, with kernels that only make results right after the last kernel they read."""
    last = {i: max(nodes.operands[i], default=-1) for i in nodes.roots if nodes.makes[i] and not nodes.readers[i]}
    return sorted(nodes.roots, key=lambda i: (last.get(i, i), i))


def _breadth_first(nodes: _Nodes) -> list[int]:
    """Kernels in the order in which their operands become ready (``BFScheduler``)."""
    kernels, given = nodes.kernels, dict[int, list[int]]()
    waits: dict[int, int] = {}
    for i in nodes.roots:
        read = {b for o in (i, *nodes.parts.get(i, ())) for b in kernels.reads[o] if nodes.maker[b] < 0}
        waits[i] = len(nodes.operands[i]) + len(read)
        for b in read:
            given.setdefault(b, []).append(i)
    out = [i for i in nodes.roots if not waits[i]]

    def ready(users: Sequence[int]) -> None:
        for o in users:
            waits[o] -= 1
            if not waits[o]:
                out.append(o)

    for v in nodes.graph.inputs:
        ready(given.get(v, ()))
    for i in out:  # which grows meanwhile
        ready(nodes.readers[i])
    return out


def _list_schedule(nodes: _Nodes) -> list[int]:
    """Of the ready kernels the one that frees most bytes, net of those it makes; then the one with most readers."""
    uses = {r: 0 for i in nodes.roots for r in nodes.makes[i]}
    users: dict[int, list[int]] = {r: [] for r in uses}
    for i in nodes.roots:
        for b in nodes.reads[i]:
            uses[b] += 1
            users[b].append(i)
    waits = {i: len(nodes.operands[i]) for i in nodes.roots}
    made = {i: sum(map(nodes.size, nodes.makes[i])) + POINTER * nodes.parts_made(i) for i in nodes.roots}
    newest = count()

    def priority(i: int) -> tuple[int, int]:
        freed = sum(nodes.size(b) for b in nodes.reads[i] if uses[b] == 1)
        return -(freed - made[i]), -nodes.users(i)

    queue: list[tuple[tuple[int, int], int, int]] = []
    known: dict[int, tuple[int, int]] = {}

    def ready(i: int) -> None:
        now = priority(i)
        if known.get(i) != now:
            known[i] = now
            heapq.heappush(queue, (now, -next(newest), i))

    for i in nodes.roots:
        if not waits[i]:
            ready(i)
    done: set[int] = set()
    out: list[int] = []
    while queue:
        was, _, i = heapq.heappop(queue)
        if i in done or known[i] != was:
            continue
        done.add(i)
        out.append(i)
        for b in nodes.reads[i]:
            uses[b] -= 1
        for o in nodes.readers[i]:
            waits[o] -= 1
            if not waits[o]:
                ready(o)
        for b in nodes.reads[i]:
            if uses[b] == 1:
                for o in users[b]:
                    if o not in done and not waits[o]:
                        ready(o)
    return out


def _depth_first(nodes: _Nodes) -> list[int]:
    """Post-order from the results, first the operand whose history has most other readers, then most bytes."""
    extra = [0] * len(nodes.graph.ops)
    total: list[Bytes] = [0] * len(nodes.graph.ops)
    most = sum(nodes.size(r) for i in nodes.roots for r in nodes.makes[i])
    for i in nodes.roots:
        extra[i] = max(len(nodes.readers[i]) - 1, 0) + sum(extra[o] for o in nodes.operands[i])
        total[i] = min(sum(map(nodes.size, nodes.makes[i])) + sum(total[o] for o in nodes.operands[i]), most)
        extra[i] = min(extra[i], _MOST_EXTRA)
    return _visited(nodes, lambda ops: sorted(ops, key=lambda o: (-extra[o], -total[o])))


def _post_order(nodes: _Nodes) -> list[int]:
    """Post-order from the results, operands as written."""
    return _visited(nodes, list)


def _visited(nodes: _Nodes, order: Callable[[Sequence[int]], list[int]]) -> list[int]:
    seen: set[int] = set()
    out: list[int] = []
    stack = [(i, False) for i in reversed(order(nodes.results()))]
    while stack:
        i, ready = stack.pop()
        if ready:
            out.append(i)
        elif i not in seen:
            seen.add(i)
            stack.append((i, True))
            stack.extend((o, False) for o in reversed(order(nodes.operands[i])) if o not in seen)
    return _with_siblings(nodes, out)


def _with_siblings(nodes: _Nodes, order: list[int]) -> list[int]:
    """The same order, with by-products right after their last operand."""
    place = {i: k for k, i in enumerate(order)}
    when: dict[int, int] = {}
    for i in order:
        when[i] = place[i]
        name = nodes.graph.ops[i].primitive
        if is_fusible(name) or name in REDUCTIONS:
            read = max((nodes.size(b) for b in nodes.reads[i]), default=0)
            if read and sum(map(nodes.size, nodes.makes[i])) <= LITTLE * read and on("by_products"):
                when[i] = max(when[o] for o in nodes.operands[i])
    return sorted(order, key=lambda i: (when[i], place[i]))


SCHEDULES = (_list_schedule, _depth_first, _post_order)
"""XLA's three."""
