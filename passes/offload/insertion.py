"""How do copies to the host enter a schedule, and what is made again of what comes back?

Both ends of a copy are tied to a step by a barrier with a value of that step: the copy out is
done before ``done`` runs, the copy in does not begin before ``begin``. Without them XLA:GPU
cancels the pair against each other or keeps the device buffer for as long as it likes.

What fuses into its readers has no buffer of its own and is computed in each of them. Such a value that was written
down before the copy left, and is read after it is back, would be computed from the buffer that left. So it is written
down once more where it is read, from what came back: a batch norm's centred input in the backward pass, a mask.

Invariant: every op reads versions of the values that it read before; XLA computes nothing twice that it did not.
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
"""Ops before a kernel within which a value that it reads counts as just made: a tie to an older one holds nothing. A
guess of about a layer."""
_SOME = KIB
"""Bytes: a tie of fewer might be a scalar that XLA computes elsewhere and earlier. A guess."""


@dataclass(frozen=True, slots=True)
class Copy:
    """``value`` is on the host between two uses of its buffer.

    ``after``: the op that uses it last; the copy out is done before ``done`` and the copy in begins
    at ``begin``, in time for ``until``, the next op that uses it. ``hidden``: nobody waits for it.
    """

    value: int
    nbytes: Bytes
    after: int
    done: int
    begin: int
    until: int
    hidden: bool


def tie(graph: Graph, kernels: Kernels, made: Sequence[int], op: Op) -> int | None:
    """The operand of ``op`` that was made last, if it is a buffer of its own and recent: what a barrier can hold a copy
    to ``op`` by."""
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
    """Which values of a program could be made again from another copy of the buffer that they are computed from."""

    def __init__(self, program: Program, kernels: Kernels) -> None:
        self._program, self._kernels = program, kernels
        self.made = producers(program.graph)

    def through(self, v: int) -> int | None:
        """The operand that ``v`` is a version of behind a barrier that was inserted; None where it is none."""
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
        """Whether all ``wanted`` can be made from another copy of ``value``, whose buffer they are computed from."""
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
    """``program`` with its copies: each tied by one barrier to an op that needs its end or allows its beginning."""
    return _Insertion(program, copies).run()


class _Insertion(Schedule):
    """Scratch of one insertion: the new schedule, and what stands for every value by now."""

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
        """For each buffer that came back: the value that was copied."""
        self.times: dict[int, int] = {}
        """How often it has come back."""
        self.seen: dict[int, tuple[int, ...]] = {}
        """How often the buffers that a value is computed from had come back when it was last written down."""
        self.postponed: set[int] = set()
        """Ops that fuse into their readers and wait for these, since what they read is away."""

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
        """A barrier over host copies and what ``op`` reads; ``op`` and everybody later reads behind it."""
        held = tie(self.program.graph, self.kernels, self.made, op)
        assert held is not None, "anchors have a tie"
        operands = [self.on_host[v] for v in values] + [self._current(held)]
        results = self.put_barrier(operands)
        self.on_host.update(zip(values, results, strict=False))
        self.now[held] = results[-1]
        self.seen[held] = self._times(held)

    def _written(self, op: Op, results: Sequence[int]) -> None:
        """Append ``op``, on what stands for its operands by now."""
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
        """What stands for ``v``, written down again where it would be computed from a buffer that has left."""
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
        """What stands for ``v``; None where that has to be written down."""
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
