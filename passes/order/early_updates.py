"""Move ops right behind their operands, so that no large value waits for them.

A training step as written runs its updates after all gradients. If each update runs behind its own gradient, no
gradient waits for the others. The same holds for metrics of large values, like logits. Updates that read each other's
results, such as a global norm, stay.

Invariant: a permutation in which each op follows the makers of its operands; products, loops and pinned ops keep their
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, Literal

from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from jaxtensile.ir.ir import Graph, consumers, producers
from jaxtensile.passes.order.schedule import BARRIER
from jaxtensile.units import KIB, Bytes

SMALL: Final = 64 * KIB
"""Bytes: ops that share only values up to this size need not stay together, such as a learning rate, a norm or a step
count. A guess."""


def early_updates(graph: Graph, least: Bytes = 1) -> list[int] | None:
    """The op ids in an order in which no large value waits needlessly; None to keep the order.

    ``least``: bytes that another order must free early, in all.
    """
    order = _Order(graph)
    freed = sum(order.place(group) for group in order.in_turn())
    found = sorted(range(len(graph.ops)), key=order.key)
    return found if freed >= least and _is_order(graph, found) else None


class _Order:
    """Groups of ops at the ends of the computation, and the op that each can follow."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made, self.read_by = producers(graph), consumers(graph)
        self.outputs = frozenset(graph.outputs)
        fixed = self.outputs.union(graph.inputs)
        self.size = [0 if v.id in fixed else v.nbytes for v in graph.values]
        """Bytes of each value; 0 for inputs and outputs."""
        self.group = self._groups(_ends(graph))
        """The first op of each op's group; -1 without a group."""
        self.passed = [0, *accumulate(group < 0 for group in self.group)]
        """Ops before each that are in no group: a move must pass some."""
        self.members: dict[int, list[int]] = {}
        for o, group in enumerate(self.group):
            if group >= 0:
                self.members.setdefault(group, []).append(o)
        self.reads = {g: self._read(g) for g in self.members}
        self.behind: dict[int, int] = {}
        """Moved groups, and the op that each follows."""

    def _groups(self, ends: Sequence[bool]) -> list[int]:
        """Group the ops that share large values or wait for each other."""
        small: list[tuple[int, int]] = []
        large: list[tuple[int, int]] = []
        for op in self.graph.ops:
            for v in op.operands if ends[op.id] else ():
                source = self.made[v]
                if source >= 0 and ends[source]:
                    (large if self.graph.values[v].nbytes > SMALL else small).append((source, op.id))
        sharing = _components(len(ends), large, "weak")
        waiting = _components(len(ends), [(sharing[a], sharing[b]) for a, b in small], "strong")
        first: dict[int, int] = {}
        return [first.setdefault(waiting[sharing[o]], o) if end else -1 for o, end in enumerate(ends)]

    def _read(self, group: int) -> set[int]:
        """Values that a group reads and does not make."""
        read = {v for o in self.members[group] for v in self.graph.ops[o].operands}
        return {v for v in read if self.made[v] >= 0 and self.group[self.made[v]] != group}

    def in_turn(self) -> list[int]:
        """The groups, each behind those it reads."""
        sources = {g: {self.group[self.made[v]] for v in reads} - {-1} for g, reads in self.reads.items()}
        readers: dict[int, list[int]] = {}
        for g, before in sources.items():
            for h in before:
                readers.setdefault(h, []).append(g)
        left = {g: len(before) for g, before in sources.items()}
        found = [g for g, count in left.items() if not count]
        for g in found:  # grows
            for h in readers.get(g, ()):
                left[h] -= 1
                if not left[h]:
                    found.append(h)
        return found

    def place(self, group: int) -> Bytes:
        """Move a group behind its operands if it takes no more bytes than it frees; the freed bytes."""
        members, ops = self.members[group], self.graph.ops
        ready = max((self._there(self.made[v]) for v in self.reads[group]), default=-1)
        if any(r in self.outputs for o in members for r in ops[o].results):
            # What takes over the memory of an argument waits for all others that read it: XLA would copy it for them.
            read = {v for o in members for v in ops[o].operands if v in self.graph.donated}
            ready = max([ready, *(self._there(o) for v in read for o in self.read_by[v] if self.group[o] != group)])
        freed = self._frees(group)
        # What is small is made early for the sake of the large that waits for it, such as a count of steps.
        if self.passed[ready + 1] >= self.passed[members[-1]] or freed <= -SMALL:
            return 0
        self.behind[group] = ready
        return max(freed, 0)

    def _there(self, o: int) -> int:
        """The op after which the results of op ``o`` exist."""
        group = self.group[o]
        return self.behind.get(group, o)

    def _frees(self, group: int) -> Bytes:
        """Bytes that running a group frees, net. Inputs and outputs do not count."""
        graph, inside = self.graph, set(self.members[group])
        made = {r for o in inside for r in graph.ops[o].results}
        read = {v for o in inside for v in graph.ops[o].operands} - made
        gone = sum(self.size[v] for v in read if inside.issuperset(self.read_by[v]))
        return gone - sum(self.size[r] for r in made if not inside.issuperset(self.read_by[r]))

    def key(self, o: int) -> tuple[int, int]:
        """The sort key of op ``o``."""
        behind = self.behind.get(self.group[o])
        return (o, -1) if behind is None else (behind, o)


def _components(n: int, pairs: Sequence[tuple[int, int]], connection: Literal["weak", "strong"]) -> list[int]:
    """A component number for each of ``n`` nodes."""
    if not pairs:
        return list(range(n))
    rows, columns = zip(*pairs, strict=True)
    edges = coo_array(([True] * len(pairs), (rows, columns)), shape=(n, n))
    return connected_components(edges, connection=connection)[1].tolist()


def _ends(graph: Graph) -> list[bool]:
    """For each op whether it and all its dependents are free of products, loops, barriers and pinned ops."""
    needed = [False] * len(graph.values)
    found = [False] * len(graph.ops)
    for op in reversed(graph.ops):
        heavy = bool(op.flops or op.bodies or op.pinned or op.primitive == BARRIER)
        found[op.id] = not heavy and not any(needed[v] for v in op.results)
        if not found[op.id]:
            for v in op.operands:
                needed[v] = True
    return found


def _is_order(graph: Graph, order: Sequence[int]) -> bool:
    """Whether each op follows the makers of its operands."""
    place = {o: k for k, o in enumerate(order)}
    made = producers(graph)
    return all(made[v] < 0 or place[made[v]] < place[op.id] for op in graph.ops for v in op.operands)
