"""Schedule when each host argument comes in and when its replacement goes out.

All ops that depend on such arguments (the *update*) leave the schedule. They return by groups of leaves updated
together, once their operands exist and no other op reads what they overwrite. Copies in take the latest free link time
before the update may run; copies out follow it. At most ``AHEAD`` groups, or more of ``WINDOW`` bytes together, are on
the device at once. No group comes in while it would raise the peak.

Two barriers hold a group in place:

* Before the copies in, over a buffer just made and the copies out of the group that must have gone. Without it XLA
  brings all groups in at the start.
* Before the update, over the leaves and results of the last readers of overwritten arguments. Without it XLA copies a
  parameter that is still read.

Invariant: the same ops on the same operands, in another order; effects stay in place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import accumulate

from jaxtensile.ir.ir import Graph, ValueId, consumers, producers
from jaxtensile.ir.plan import TO_DEVICE, TO_HOST, Link, Program
from jaxtensile.passes.lifetimes.fusion import fuse
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.offload.offload import Channel
from jaxtensile.passes.offload.state import Moved, descendants
from jaxtensile.passes.order.schedule import Schedule
from jaxtensile.switches import on
from jaxtensile.units import KIB, MIB, Bytes, Seconds

AHEAD, WINDOW = 3, 64 * MIB
"""Most groups, or bytes of groups, on the device: one leaves, one is updated, one comes; small ones fill the time of a
copy (2 ms on 32 GiB/s). A guess."""
LEVEL = 0.95
"""Share of the peak above which no group comes in: XLA's order differs a little. A guess."""
_SMALL = KIB
"""Bytes: smaller results, like a learning rate, are made as soon as an update needs them. A guess."""
_FEW = 8
"""Leaves that an output reads together form one group, unless there are more than this many (a global norm). Adam's
read two or three. A guess above that."""


def stream(graph: Graph, moved: Sequence[Moved], seconds: Sequence[Seconds], link: Link) -> Program:
    """``graph`` with ``moved`` on the host, as a program with ends in another memory space.

    ``seconds``: of every op.
    """
    return _Streaming(graph, moved, seconds, link).run()


@dataclass(slots=True)
class _Group:
    """Leaves that come in together, the outputs made from them, and the ops between.

    ``ready``: the last op outside the update that must run first. ``gone``: the group that must have left first.
    """

    leaves: list[int]
    outputs: list[int]
    ops: list[int]
    ready: int
    nbytes: Bytes
    gone: _Group | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class _Event:
    """Before op ``step`` of the original schedule, ``group`` comes in or is updated."""

    step: int
    time: Seconds
    group: _Group
    update: bool


class _Streaming(Schedule):
    """Scratch of one streaming."""

    def __init__(self, graph: Graph, moved: Sequence[Moved], seconds: Sequence[Seconds], link: Link) -> None:
        self.moved: set[int] = {m.value for m in moved}
        values = [replace(v, space="host") if v.id in self.moved else v for v in graph.values]
        super().__init__(values, range(len(values)))
        self.graph, self.kernels, self.made, self.link = graph, fuse(graph), producers(graph), link
        self.leaving: set[int] = {m.output for m in moved}
        self.on_host: dict[int, int] = {}
        self.done: set[int] = set()
        self.latest: int | None = None
        """The buffer made last."""
        read_by = consumers(graph)
        self.dependent: set[int] = set()
        for v in self.moved:
            self.dependent |= descendants(graph, read_by, v)
        self.update = set(self.dependent)
        self._with_feeders(read_by)
        self.earliest = self._earliest()
        self.last_read = self._last_reads()
        self.clock = [0.0, *accumulate(0.0 if i in self.update else s for i, s in enumerate(seconds))]
        """Start of each op, without the update."""

    def _with_feeders(self, read_by: Sequence[Sequence[int]]) -> None:
        """Add to the update what fuses into it and nowhere else."""
        final = set(self.graph.outputs)
        for op in reversed(self.graph.ops):
            if op.id in self.update or self.kernels.is_root[op.id] or op.pinned or not final.isdisjoint(op.results):
                continue
            readers = [o for r in op.results for o in read_by[r]]
            if readers and self.update.issuperset(readers) and on("feeders"):
                self.update.add(op.id)

    def _earliest(self) -> list[int]:
        """Value → the step from which it can exist; small values as soon as their operands do."""
        graph = self.graph
        step = [-1] * len(graph.values)
        for op in graph.ops:
            small = sum(graph.values[r].nbytes for r in op.results) <= _SMALL and not op.pinned and not op.bodies
            early = small and on("small_early")
            for r in op.results:
                step[r] = max((step[v] for v in op.operands), default=-1) if early else op.id
        return step

    def _last_reads(self) -> dict[int, int]:
        """Input → the last kernel outside the update that reads it."""
        inputs = set(self.graph.inputs)
        last: dict[int, int] = {}
        for op in self.graph.ops:
            if op.id not in self.update and self.kernels.is_root[op.id]:
                last.update((b, op.id) for b in self.kernels.reads[op.id] if b in inputs)
        return last

    def run(self) -> Program:
        graph = self.graph
        groups = self._groups()
        self._lay(self._events(groups, self._most_from(groups)))
        slots = tuple(None if v is None else ValueId(self._final(v)) for v in graph.output_slots)
        outputs = tuple(v for v in slots if v is not None)
        new = replace(graph, values=tuple(self.values), ops=tuple(self.ops), outputs=outputs, output_slots=slots)
        return Program(new, tuple(self.origin), tuple(self.version_of))

    def _lay(self, events: Sequence[_Event]) -> None:
        """Put all ops, with ``events`` in between."""
        graph = self.graph
        k = 0
        for op in graph.ops:
            while k < len(events) and events[k].step <= op.id:
                self._happens(events[k])
                k += 1
            if op.id not in self.update:
                self._run(op.id)
        for event in events[k:]:
            self._happens(event)

    def _most_from(self, groups: Sequence[_Group]) -> list[Bytes]:
        """Most live bytes from each op on, with every update as early as possible and no copies."""
        graph = self.graph
        early = copy(self)
        early.moved, early.leaving, early.done = set[int](), set[int](), set[int]()
        early.values, early.version_of, early.now = list(graph.values), list(self.version_of), {}
        early.ops, early.origin = [], []
        bare = [replace(group, leaves=[]) for group in sorted(groups, key=lambda g: g.ready)]
        early._lay([_Event(group.ready + 1, 0.0, group, True) for group in bare])
        profile = live_ranges(replace(graph, ops=tuple(early.ops), values=tuple(early.values))).profile
        at = [0] * (len(graph.ops) + 1)
        step = 0
        for o, live in zip(early.origin, profile, strict=True):
            step = step if o < 0 or o in self.update else max(step, o)
            at[step] = max(at[step], live)
        return list(accumulate(reversed(at), max))[::-1]

    def _final(self, v: int) -> int:
        return self.on_host[v] if v in self.leaving else self.now.get(v, v)

    def _groups(self) -> list[_Group]:
        """The groups of the update; outputs that share few leaves go together."""
        graph = self.graph
        outputs: list[int] = [o for o in dict.fromkeys(graph.outputs) if self.made[o] in self.update]
        cones = {o: self._cone(o) for o in outputs}
        leaves = {o: sorted({v for c in cones[o] for v in graph.ops[c].operands if v in self.moved}) for o in outputs}
        root: dict[int, int] = {}

        def find(v: int) -> int:
            while root.setdefault(v, v) != v:
                v = root[v]
            return v

        owned = {v for o in outputs if len(leaves[o]) <= _FEW for v in leaves[o]}
        own = {o: leaves[o] if len(leaves[o]) <= _FEW or not owned.issuperset(leaves[o]) else [] for o in outputs}
        for o in outputs:
            for v in own[o]:
                root[find(v)] = find(own[o][0])
        members: dict[tuple[bool, int], list[int]] = {}
        for o in outputs:
            members.setdefault((True, find(own[o][0])) if own[o] else (False, o), []).append(o)
        ready_of: dict[int, int] = {}
        for o in outputs:
            ready = self._ready(cones[o])
            for c in cones[o] & self.dependent:
                ready_of[c] = max(ready_of.get(c, -1), ready)
        groups: list[_Group] = []
        for outs in members.values():
            ops = sorted({c for o in outs for c in cones[o]})
            inside: list[int] = sorted({v for o in outs for v in own[o]})
            # Whoever else reads what this group makes must come soon after it.
            ready = max(ready_of.get(c, -1) for c in ops)
            groups.append(_Group(inside, outs, ops, ready, self._size(inside)))
        return groups

    def _cone(self, o: int) -> set[int]:
        """The ops of the update that make ``o``."""
        seen: set[int] = set()
        todo = [self.made[o]]
        while todo:
            c = todo.pop()
            if c in self.update and c not in seen:
                seen.add(c)
                todo.extend(self.made[v] for v in self.graph.ops[c].operands)
        return seen

    def _read(self, ops: Iterable[int]) -> list[int]:
        """Operands of ``ops`` from outside the update."""
        return [v for c in ops for v in self.graph.ops[c].operands if self.made[v] not in self.update]

    def _ready(self, cone: set[int]) -> int:
        """The last op before ``cone``: it makes an operand, or reads an argument that is overwritten."""
        read = self._read(cone)
        return max((max(self.earliest[v], self.last_read.get(v, -1)) for v in read), default=-1)

    def _events(self, groups: Sequence[_Group], above: Sequence[Bytes]) -> list[_Event]:
        """When each group comes in and is updated, by the clock of the other ops; in order.

        ``above``: see ``_most_from``.
        """
        graph, clock = self.graph, self.clock
        here = [g for g in groups if g.leaves]
        back = Channel()
        begin: dict[int, Seconds] = {}
        for g in sorted(here, key=lambda g: -g.ready):
            length = self._length(g)
            start = back.latest(clock[g.ready + 1], length)
            back.take(start, length)
            low = bisect_left(above, g.nbytes + WINDOW - LEVEL * above[0], key=lambda n: -n)
            begin[id(g)] = max(start, clock[min(low, g.ready + 1)]) if on("below_the_peak") else start
        events: list[_Event] = []
        arriving = leaving = 0.0
        left: list[tuple[_Group, Seconds, int]] = []
        updated: dict[int, tuple[Seconds, int]] = {}
        seen: set[int] = set()
        for g in sorted(here, key=lambda g: (begin[id(g)], g.ready, min(g.leaves))):
            start, step = begin[id(g)], 0
            inside = g.nbytes
            for n, (other, out, updated_at) in enumerate(reversed(left)):
                inside += other.nbytes
                if n + 2 > AHEAD and inside > WINDOW and on("few_at_once"):
                    g.gone, start, step = other, max(start, out), updated_at
                    break
            step = max(step, bisect_left(clock, start))
            events.append(_Event(step, start, g, False))
            arriving = max(arriving, start) + self._length(g)
            at = max(arriving, clock[g.ready + 1])
            step = max(step, g.ready + 1, bisect_left(clock, at))
            events.append(_Event(step, at, g, True))
            leaving = max(leaving, at) + self._length(g)
            left.append((g, leaving, step))
            updated.update((v, (at, step)) for v in g.leaves)
            seen.add(id(g))
        for g in groups:
            if id(g) not in seen:
                # What reads many leaves, and owns none, waits for all of them.
                whose = [updated[v] for c in g.ops for v in graph.ops[c].operands if v in updated]
                at, step = max(whose, default=(0.0, 0))
                events.append(_Event(max(step, g.ready + 1), at, g, True))
        return sorted(events, key=lambda e: (e.step, e.time, e.update))

    def _length(self, group: _Group) -> Seconds:
        return len(group.leaves) * self.link.latency + group.nbytes / self.link.bandwidth

    def _happens(self, event: _Event) -> None:
        group = event.group
        if not event.update:
            away = [o for o in group.gone.outputs if o in self.on_host] if group.gone else []
            ties = [] if self.latest is None else [self.latest]
            self._barrier(group.leaves, ties, away)
            for v in group.leaves:
                self.now[v] = self.put_copy(TO_DEVICE, self.now[v], "device")
            return
        for v in self._read(group.ops):
            if self.made[v] >= 0:
                self._run(self.made[v])
        self._barrier([v for v in group.leaves if v in self.now], self._readers(group), [])
        for c in group.ops:
            self._run(c)

    def _run(self, c: int) -> None:
        """Put op ``c``, and first the ops it still needs."""
        graph = self.graph
        todo = [c]
        while todo:
            o = todo[-1]
            missing = [m for m in map(self.made.__getitem__, graph.ops[o].operands) if m >= 0 and m not in self.done]
            if missing and o not in self.done:
                todo.extend(missing)
                continue
            todo.pop()
            if o in self.done:
                continue
            self.done.add(o)
            op = graph.ops[o]
            self.put(op, [self.now.get(v, v) for v in op.operands], op.results, o)
            for r in op.results:
                if self.kernels.home[r] == r and graph.values[r].nbytes > _SMALL and o not in self.update:
                    self.latest = r
                if r in self.leaving:
                    self.on_host[r] = self.put_copy(TO_HOST, r, "host")

    def _barrier(self, leaves: Sequence[int], ties: Sequence[int], away: Sequence[int]) -> None:
        """Put a barrier over ``leaves``, ``ties`` and the copies out of ``away``."""
        held = dict.fromkeys((*leaves, *ties))
        if not held:
            return
        operands = [*(self.now.get(v, v) for v in held), *(self.on_host[o] for o in away)]
        results = self.put_barrier(operands)
        self.now.update(zip(held, results, strict=False))
        self.on_host.update(zip(away, results[len(held) :], strict=True))

    def _readers(self, group: _Group) -> list[int]:
        """Results of the last readers of arguments that ``group`` overwrites."""
        ties: dict[int, None] = {}
        for p in dict.fromkeys(v for v in self._read(group.ops) if v in self.last_read):
            for r in self.graph.ops[self.last_read[p]].results:
                if self.kernels.home[r] == r:
                    ties[r] = None
        return list(ties)

    def _size(self, values: Iterable[int]) -> Bytes:
        return sum(self.graph.values[v].nbytes for v in values)


def waiting(program: Program, seconds: Sequence[Seconds], link: Link) -> Seconds:
    """Seconds by which copies delay the program, including those after its last op.

    ``seconds``: of every op of the original. Each direction carries one copy at a time; a barrier waits for all its
    operands.
    """
    graph = program.graph
    kernels = fuse(graph)
    ready: dict[int, Seconds] = {}
    wait = clock = out = back = 0.0
    for op, origin in zip(graph.ops, program.origin, strict=True):
        needed = max((ready.get(v, 0.0) for v in op.operands), default=0.0)
        if op.primitive in (TO_HOST, TO_DEVICE):
            length = link.latency + graph.values[op.operands[0]].nbytes / link.bandwidth
            if op.primitive == TO_HOST:
                needed = out = max(out, clock, needed) + length
            else:
                needed = back = max(back, clock, needed) + length
        elif op.primitive != "optimization_barrier" and kernels.is_root[op.id]:
            wait += max(needed - clock, 0.0)
            clock = max(clock, needed) + (seconds[origin] if origin >= 0 else 0.0)
            needed = 0.0
        if needed > clock:
            ready.update((r, needed) for r in op.results)
    return wait + max(out - clock, 0.0)


__all__ = ["stream", "waiting"]
