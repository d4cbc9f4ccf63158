"""Barriers that keep XLA in the order of the trace.

XLA may postpone any op that no other waits for, with all its operands. In a backward body these are the products added
to weight gradients. A barrier where few bytes cross ends such work. It covers the buffers made before and read behind
it; all later readers read behind it.

Invariant: nothing runs twice, except what fuses into its readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import accumulate

from jaxtensile.ir.ir import ValueId, producers
from jaxtensile.ir.plan import Program
from jaxtensile.passes.lifetimes.fusion import Kernels
from jaxtensile.passes.lifetimes.liveness import Liveness, live_ranges
from jaxtensile.passes.order.schedule import Schedule
from jaxtensile.units import Bytes

RISE = 1 / 16
"""Share of the temporaries by which the bytes must rise behind a valley that is cut. A guess: an ODE solver's loop
needs 520 MB, not 571."""


def in_order(program: Program) -> Program:
    """The program with a barrier in every valley behind its peak; unchanged if there is none.

    A valley that only one buffer crosses gets no barrier: nothing can be postponed.
    """
    live = live_ranges(program.graph)
    return with_barriers(program, live.kernels, dict.fromkeys(valleys(live)))


def with_barriers(program: Program, kernels: Kernels, before: Mapping[int, frozenset[int] | None]) -> Program:
    """The program with barriers; unchanged if no barrier covers more than one buffer.

    ``before``: op → the buffers that the barrier before it covers; None for all that cross.
    """
    order = _Order(program, kernels, before)
    ordered = order.run()
    return ordered if order.barriers else program


def valleys(live: Liveness) -> list[int]:
    """Steps that fewer bytes cross than the steps around: the last one before the peak, as what is postponed over the
    peak raises it, and all behind it."""
    n, rise = len(live.profile), max(int(RISE * live.temp), 1)
    delta = [0] * (n + 2)
    for r in live.ranges:
        if r.stop > r.start + 1:
            delta[r.start + 1] += r.nbytes
            delta[r.stop] -= r.nbytes
    crossing = list(accumulate(delta))
    peak = max(range(n), key=live.profile.__getitem__, default=0)
    found: list[int] = []
    low: tuple[Bytes, int] | None = None
    high: Bytes = 0
    for s in range(1, n):
        if low is None:
            high = max(high, live.profile[s - 1])
            if crossing[s] + rise <= high:
                low = crossing[s], s
        elif crossing[s] < low[0]:
            low = crossing[s], s
        if low is not None and live.profile[s] >= low[0] + rise:
            if low[0] > 0:
                found = [*found, low[1]] if low[1] > peak else [low[1]]
            low, high = None, live.profile[s]
    return found


class _Order(Schedule):
    """Scratch; an op that fuses is put where it is read, once between two cuts."""

    def __init__(self, program: Program, kernels: Kernels, before: Mapping[int, frozenset[int] | None]) -> None:
        graph = program.graph
        super().__init__(graph.values, program.version_of)
        self.program, self.graph, self.kernels = program, graph, kernels
        self.before = before
        self.made = producers(graph)
        self.barriers = self.era = 0
        self.era_of: dict[int, int] = {}
        """For each op that fuses: when it was put last."""
        self.last = self._last_reads()
        self.open: dict[int, None] = {}
        """Kernel results that may be read again."""

    def _last_reads(self) -> dict[int, int]:
        """The last kernel that reads each kernel result, also through ops that fuse."""
        last: dict[int, int] = {}
        sources: dict[int, tuple[int, ...]] = {}
        for op in self.graph.ops:
            read = tuple(dict.fromkeys(s for v in op.operands for s in sources.get(v, ())))
            if self.fuses(op.id):
                sources.update((r, read) for r in op.results)
            else:
                last.update((s, op.id) for s in read)
                sources.update((r, (r,)) for r in op.results)
        last.update((s, len(self.graph.ops)) for v in self.graph.outputs for s in sources.get(v, ()))
        return last

    def run(self) -> Program:
        graph = self.graph
        for op in graph.ops:
            if op.id in self.before:
                self.cut(op.id, self.before[op.id])
            if self.fuses(op.id):
                continue
            self.demand(op.operands)
            self.put(op, [self.now.get(v, v) for v in op.operands], op.results, self.program.origin[op.id])
            if not op.pinned:
                self.open.update((r, None) for r in op.results if self.may_cross(r))
        self.demand(graph.outputs)
        outputs = tuple(ValueId(self.now.get(v, v)) for v in graph.outputs)
        new = replace(graph, values=tuple(self.values), ops=tuple(self.ops), outputs=outputs)
        return Program(new, tuple(self.origin), tuple(self.version_of))

    def fuses(self, o: int) -> bool:
        return not self.kernels.is_root[o] and not self.graph.ops[o].pinned

    def may_cross(self, v: int) -> bool:
        value, home = self.graph.values[v], self.kernels.home[v]
        return home >= 0 and self.made[home] >= 0 and value.nbytes > 0 and value.space != "host"

    def cut(self, step: int, over: frozenset[int] | None) -> None:
        """Put a barrier over values made before ``step`` and read from there on, each buffer once per shape."""
        self.open = {v: None for v in self.open if self.last.get(v, -1) >= step}
        same = {v: (self.kernels.home[v], self.version_of[v]) for v in self.open}
        if over is not None:
            same = {v: key for v, key in same.items() if key[0] in over}
        buffers = {key: self.now.get(v, v) for v, key in same.items()}
        if len(buffers) > 1:
            self.barriers += 1
            behind = dict(zip(buffers, self.put_barrier(list(buffers.values())), strict=True))
            self.now.update((v, behind[key]) for v, key in same.items())
            self.era += 1

    def demand(self, wanted: Iterable[int]) -> None:
        """Put the fusing ops that ``wanted`` is computed from, behind the last cut."""
        todo = [(o, False) for o in self.absent(wanted)]
        while todo:
            o, ready = todo.pop()
            if self.era_of.get(o) == self.era:
                continue
            op = self.graph.ops[o]
            if not ready:
                todo.append((o, True))
                todo.extend((p, False) for p in self.absent(op.operands))
                continue
            first = o not in self.era_of
            self.era_of[o] = self.era
            results = list(op.results) if first else [self.version(r) for r in op.results]
            self.put(op, [self.now.get(v, v) for v in op.operands], results, self.program.origin[o])
            self.now.update(zip(op.results, results, strict=True))

    def absent(self, values: Iterable[int]) -> list[int]:
        made = [self.made[v] for v in values]
        return [o for o in made if o >= 0 and self.fuses(o) and self.era_of.get(o) != self.era]
