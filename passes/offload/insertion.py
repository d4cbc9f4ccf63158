"""Insert copies to and from the host into a schedule.

A barrier with a value of a step ties each end of a copy to that step: the copy out ends before ``done`` runs, the copy
in starts no earlier than ``begin``. Without barriers XLA:GPU cancels the pair or keeps the device buffer.

A value that fuses into its readers has no buffer. After the copy returns, its readers would still compute it from the
buffer that left. So it is written down again at the reader, from the returned copy.

Invariant: every op reads versions of its original operands; XLA computes nothing more often than before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from jaxtensile.ir.ir import Graph, Op, ValueId, producers
from jaxtensile.ir.plan import TO_DEVICE, TO_HOST, Program
from jaxtensile.passes.lifetimes.fusion import Kernels, fuse
from jaxtensile.passes.order.schedule import BARRIER, Schedule
from jaxtensile.units import KIB, Bytes

_RECENT = 32
"""Ops before a kernel within which an operand counts as just made; older ties hold nothing. A guess of about a layer.
"""
_SOME = KIB
"""Bytes: a smaller tie might be a scalar that XLA computes elsewhere and earlier. A guess."""


@dataclass(frozen=True, slots=True)
class Copy:
    """``value`` is on the host between two uses of its buffer.

    ``after``: the last op that uses it. ``done``: the copy out ends before this op. ``begin``: the copy in starts here.
    ``until``: the next op that uses it. ``hidden``: no op waits.
    """

    value: int
    nbytes: Bytes
    after: int
    done: int
    begin: int
    until: int
    hidden: bool


def tie(graph: Graph, kernels: Kernels, made: Sequence[int], op: Op) -> int | None:
    """The operand by which a barrier can hold a copy to ``op``: the most recent buffer of its own; None if there is
    none."""
    if not kernels.is_root[op.id] or op.primitive == BARRIER or op.pinned or op.bodies:
        return None
    fresh = [
        v
        for v in op.operands
        if made[v] >= max(op.id - _RECENT, 0)
        and kernels.home[v] == v
        and graph.values[v].space != "host"
        and graph.values[v].nbytes >= _SOME
    ]
    return max(fresh, key=lambda v: (made[v], v), default=None)


class Remade:
    """Values that can be made again from another copy of their buffer."""

    def __init__(self, program: Program, kernels: Kernels) -> None:
        self._program, self._kernels = program, kernels
        self.made = producers(program.graph)

    def through(self, v: int) -> int | None:
        """The operand that ``v`` is a version of behind an inserted barrier; None if there is none."""
        o = self.made[v]
        if o < 0 or self._program.origin[o] >= 0:
            return None
        op = self._program.graph.ops[o]
        return op.operands[op.results.index(ValueId(v))] if op.primitive == BARRIER else None

    def whole(self, v: int) -> int:
        """The oldest version of ``v`` in its buffer."""
        while (before := self.through(v)) is not None and self._kernels.home[before] == self._kernels.home[v]:
            v = before
        return v

    def can_be(self, wanted: Iterable[int], value: int, buffer: int) -> bool:
        """Whether all of ``wanted``, computed from ``buffer``, can be made from a copy of ``value``."""
        graph, home, leaves = self._program.graph, self._kernels.home, self._kernels.leaves
        original = self._program.version_of
        todo, seen = [*wanted], set[int]()
        while todo:
            v = todo.pop()
            if v in seen or (home[v] == buffer and original[v] == original[value]):
                continue
            seen.add(v)
            if buffer not in (home[v], *leaves[v]):
                continue  # has nothing to do with the buffer
            before = self.through(v)
            if before is not None:
                todo.append(before)
                continue
            o = self.made[v]
            if o < 0 or self._kernels.is_root[o] or graph.ops[o].pinned:
                return False
            todo.extend(graph.ops[o].operands)
        return True


def insert(program: Program, copies: Sequence[Copy]) -> Program:
    """``program`` with its copies, each tied by a barrier."""
    return _Insertion(program, copies).run()


class _Insertion(Schedule):
    """Scratch of one insertion."""

    def __init__(self, program: Program, copies: Sequence[Copy]) -> None:
        super().__init__(program.graph.values, program.version_of)
        self.program = program
        self.kernels = fuse(program.graph)
        self.remade = Remade(program, self.kernels)
        self.made = self.remade.made
        self.on_host: dict[int, int] = {}
        self.leaving = _by(copies, lambda c: c.after)
        self.done = _by(copies, lambda c: c.done)
        self.begin = _by(copies, lambda c: c.begin)
        self.away: set[int] = set()
        """Buffers that have left and are not back."""
        self.back: dict[int, int] = {}
        """For each returned buffer: the copied value."""
        self.times: dict[int, int] = {}
        """Returns of each buffer so far."""
        self.seen: dict[int, tuple[int, ...]] = {}
        """For each value: the returns of its source buffers when it was last written down."""
        self.postponed: set[int] = set()
        """Fusing ops that wait for their readers, because an operand is away."""

    def run(self) -> Program:
        graph = self.program.graph
        for op in graph.ops:
            if op.id in self.done:
                self._tied(op, [c.value for c in self.done[op.id]])
            if op.id in self.begin:
                returning = [c.value for c in self.begin[op.id]]
                self._tied(op, returning)
                for v in returning:
                    self._returned(v)
            if self.away and not self.kernels.is_root[op.id] and not op.pinned and self._reads_away(op):
                self.postponed.add(op.id)
                continue
            self._written(op, op.results)
            for copy in self.leaving.get(op.id, ()):
                self.on_host[copy.value] = self.put_copy(TO_HOST, self._current(copy.value), "host")
                self.away.add(self.kernels.home[copy.value])
        outputs = tuple(ValueId(self._current(v)) for v in graph.outputs)
        new = replace(graph, values=tuple(self.values), ops=tuple(self.ops), outputs=outputs)
        return Program(new, tuple(self.origin), tuple(self.version_of))

    def _returned(self, v: int) -> None:
        home = self.kernels.home[v]
        self.now[v] = self.put_copy(TO_DEVICE, self.on_host[v], "device")
        self.away.discard(home)
        self.back[home] = v
        self.times[home] = self.times.get(home, 0) + 1
        self.seen[v] = self._times(v)

    def _tied(self, op: Op, values: Sequence[int]) -> None:
        """Put a barrier over host copies and an operand of ``op``; later readers read behind it."""
        held = tie(self.program.graph, self.kernels, self.made, op)
        assert held is not None, "anchors have a tie"
        operands = [self.on_host[v] for v in values] + [self._current(held)]
        results = self.put_barrier(operands)
        self.on_host.update(zip(values, results, strict=False))
        self.now[held] = results[-1]
        self.seen[held] = self._times(held)

    def _written(self, op: Op, results: Sequence[int]) -> None:
        """Append ``op`` on the current versions of its operands."""
        self.put(op, [self._current(v) for v in op.operands], results, self.program.origin[op.id])
        for v, result in zip(op.results, results, strict=True):
            if v != result:
                self.now[v] = result
            if self.times:
                self.seen[v] = self._times(v)

    def _reads_away(self, op: Op) -> bool:
        return any(not self.away.isdisjoint(self.kernels.leaves[v]) for v in op.results)

    def _times(self, v: int) -> tuple[int, ...]:
        return tuple(self.times[b] for b in self.kernels.leaves[v] if b in self.times)

    def _current(self, v: int) -> int:
        """The current version of ``v``, written down again if its buffer has left."""
        if not self.times:
            return self.now.get(v, v)
        todo = [v]
        while todo:
            u = todo[-1]
            if self._stands(u) is None:
                before = self.remade.through(u)
                op = self.program.graph.ops[self.made[u]]
                first = [w for w in ((before,) if before is not None else op.operands) if self._stands(w) is None]
                todo += first
                if first:
                    continue
                if before is not None:
                    found = self._stands(before)
                    assert found is not None
                    self.now[u], self.seen[u] = found, self._times(u)
                else:
                    fresh = op.id in self.postponed
                    self.postponed.discard(op.id)
                    self._written(op, op.results if fresh else [self.version(r) for r in op.results])
            todo.pop()
        found = self._stands(v)
        assert found is not None
        return found

    def _stands(self, v: int) -> int | None:
        """The current version of ``v``; None if it must be written down."""
        times = self._times(v)
        if not times or self.seen.get(v) == times:
            return self.now.get(v, v)
        home = self.kernels.home[v]
        if home in self.back and self._is(v, self.back[home]):
            return self.now[self.back[home]]
        o = self.made[v]
        if o < 0 or (self.kernels.is_root[o] and self.remade.through(v) is None):
            return self.now.get(v, v)  # the buffer is still there for it
        return None

    def _is(self, v: int, other: int) -> bool:
        return self.program.version_of[v] == self.program.version_of[other]


def _by(copies: Sequence[Copy], key: Callable[[Copy], int]) -> dict[int, list[Copy]]:
    out: dict[int, list[Copy]] = {}
    for copy in copies:
        out.setdefault(key(copy), []).append(copy)
    return out
