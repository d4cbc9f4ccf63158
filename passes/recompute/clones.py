"""The schedule of a decision: clones behind one barrier per stage.

After the boundary, the first reader of a value dropped in a stage opens that stage with one barrier. It covers all kept
values that the stage recomputes from, and the *frontier*: buffers made since the previous stage that later ops still
read. Later readers take the versions behind it, as XLA drops barrier operands whose result is unused. So XLA cannot
merge clones with originals, start them early, or postpone the previous stage's work (above all weight gradients) past
them.

* Clones first read later get a barrier of their own, over buffers made meanwhile; else XLA may start them long before.
* Ops on constants alone read nothing that a barrier could hold. If their result is stored, a barrier stands behind the
  constants.
* Ops that fuse away are emitted where they are read, once per stage, at no cost. A stage of such ops alone has no
  barrier, unless it has kept values to store.
* Values without readers are never emitted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

from jaxtensile.ir.ir import Graph, ValueId
from jaxtensile.ir.plan import Program
from jaxtensile.passes.lifetimes.fusion import Kernels, is_fusible
from jaxtensile.passes.order.schedule import Schedule
from jaxtensile.passes.recompute.stages import Boundary, idle_window
from jaxtensile.switches import on
from jaxtensile.units import MIB


class Recomputation:
    """Ops to rerun around one boundary, for many kept sets."""

    def __init__(self, graph: Graph, boundary: Boundary) -> None:
        self.made: dict[int, int] = {r: o for o in boundary.cone for r in graph.ops[o].results}
        """For each value of the forward part the op that makes it."""
        self._needed = [(v, self.made[v]) for v in boundary.needed]
        self.reads = {
            o: [(u, self.made[u]) for u in graph.ops[o].operands if u in self.made and u not in boundary.always]
            for o in boundary.cone
        }
        """For each op of the forward part the values that it reads of it, and the ops that make them; none of what is
        always there."""

    def ops(self, kept: frozenset[int]) -> set[int]:
        """Ops to rerun when exactly ``kept`` survives the boundary."""
        todo = [o for v, o in self._needed if v not in kept]
        again = set(todo)
        while todo:
            for u, o in self.reads[todo.pop()]:
                if u not in kept and o not in again:
                    again.add(o)
                    todo.append(o)
        return again

    def beside(self, again: set[int], kept: frozenset[int], v: int) -> set[int]:
        """Ops to rerun beside ``again`` (those for ``kept``) when ``v`` is dropped too."""
        more: set[int] = set()
        todo = [self.made[v]]
        while todo:
            o = todo.pop()
            if o not in more and o not in again:
                more.add(o)
                todo.extend(m for u, m in self.reads[o] if u not in kept)
        return more


def recomputed_ops(graph: Graph, boundary: Boundary, kept: frozenset[int]) -> set[int]:
    """Ops to rerun when exactly ``kept`` survives the boundary."""
    return Recomputation(graph, boundary).ops(kept)


def with_clones(
    program: Program, kernels: Kernels, boundary: Boundary, kept: frozenset[int], cuts: Sequence[int]
) -> Program:
    """The schedule in which exactly ``kept``, and what is always there, crosses the boundary."""
    again = recomputed_ops(program.graph, boundary, kept)
    return with_clones_listed(program, kernels, boundary, kept, again, cuts)[0]


def with_clones_listed(
    program: Program, kernels: Kernels, boundary: Boundary, kept: frozenset[int], again: set[int], cuts: Sequence[int]
) -> tuple[Program, list[tuple[int, int]]]:
    """``with_clones``, with each clone's place in the new schedule and the op of ``program`` that it repeats.

    ``again``: the ops to rerun for ``kept``.
    """
    if not again:
        return program, []
    emission = _Emission(program, kernels, boundary, kept, again, cuts)
    return emission.run(), emission.clones


class _Emission(Schedule):
    """Scratch of one emission: the schedule so far and the current version of every value."""

    def __init__(
        self,
        program: Program,
        kernels: Kernels,
        boundary: Boundary,
        kept: frozenset[int],
        again: set[int],
        cuts: Sequence[int],
    ) -> None:
        graph = program.graph
        super().__init__(graph.values, program.version_of)
        self.program, self.graph, self.kernels = program, graph, kernels
        self.made: dict[int, int] = {r: op.id for op in graph.ops for r in op.results}
        self.inputs: set[int] = set(graph.inputs)
        self.again = again
        self.dropped: set[int] = {
            r for o in again for r in graph.ops[o].results if r not in kept and r not in boundary.always
        }
        self.step = boundary.step
        roots = kernels.is_root
        lazily = on("fused_at_readers")
        self.lazy = [lazily and o >= boundary.step and not roots[o] and not op.pinned for o, op in enumerate(graph.ops)]
        """Whether an op of the descent fuses away, and so is emitted where it is read."""
        late = ((op.id, op) for op in graph.ops[boundary.step :])
        self.absentees: dict[int, int] = {
            **{r: o for o, op in late if self.lazy[o] for r in op.results},
            **{v: self.made[v] for v in self.dropped},
        }
        """Values that may have to be made where they are read, and their ops."""
        self.stage = _stage_of(graph, again, self.dropped, cuts)
        self.members: dict[int, list[int]] = {}
        for o in sorted(again):
            self.members.setdefault(self.stage[o], []).append(o)
        self.forced = _forced(graph, boundary, kept, sorted(self.members), cuts)
        self.frontier = _Frontier(graph, kernels, min(boundary.step, max(again) + 1))
        self.behind: dict[int, dict[int, int]] = {}
        self.done: set[int] = set()
        self.clones: list[tuple[int, int]] = []
        self.constants = _stored_constants(graph, kernels, again, self.made)
        self.lazy_era: dict[int, int] = {}

    def run(self) -> Program:
        graph, origin, now, absentees = self.graph, self.program.origin, self.now, self.absentees.keys()
        self.ops.extend(graph.ops[: self.step])
        self.origin.extend(origin[: self.step])
        for op in graph.ops[self.step :]:
            if not self.lazy[op.id]:
                if not absentees.isdisjoint(op.operands):
                    self.demand(op.operands, op.id)
                self.put(op, [now.get(v, v) for v in op.operands], op.results, origin[op.id])
        self.demand(graph.outputs, len(graph.ops))
        outputs = tuple(ValueId(self.now.get(v, v)) for v in graph.outputs)
        new_graph = replace(graph, values=tuple(self.values), ops=tuple(self.ops), outputs=outputs)
        return Program(new_graph, tuple(self.origin), tuple(self.version_of))

    def demand(self, wanted: Iterable[int], reader: int) -> None:
        """Make the current versions of ``wanted`` exist."""
        todo = self.missing(wanted)
        if not todo:
            return
        closed = sorted({self.stage[o] for o in todo if o in self.again} - self.behind.keys(), reverse=True)
        if closed:
            for k in closed:
                self.open_stage(k, reader)
            todo = self.missing(wanted)
        self.hold_back([o for o in todo if o in self.again], reader)
        now, dropped, origin = self.now, self.dropped, self.program.origin
        for o in todo:
            op = self.graph.ops[o]
            results: Sequence[int]
            if o in self.again:
                self.done.add(o)
                self.clones.append((len(self.ops), o))
                behind = self.behind[self.stage[o]]
                operands = [now[u] if u in dropped else behind[u] for u in op.operands]
                results = [self.version(r) for r in op.results]
                for r, f in zip(op.results, results, strict=True):
                    if r in dropped:
                        now[r] = f
                self.put(op, operands, results, origin[o])
                if o in self.constants and on("tied_constants"):
                    self.hold_constants(op.results, self.stage[o])
            else:
                first = o not in self.lazy_era
                self.lazy_era[o] = len(self.behind)
                operands = [now.get(u, u) for u in op.operands]
                results = op.results if first else [self.version(r) for r in op.results]
                for r, f in zip(op.results, results, strict=True):
                    now[r] = f
                self.put(op, operands, results, origin[o])

    def missing(self, wanted: Iterable[int]) -> list[int]:
        """Ops to repeat so that ``wanted`` exist in this era, operands first."""
        absent = self.absent(wanted)
        if not absent:
            return absent
        order: list[int] = []
        seen: set[int] = set()
        stack = [(o, False) for o in reversed(absent)]
        while stack:
            o, ready = stack.pop()
            if ready:
                order.append(o)
                continue
            if o in seen:
                continue
            seen.add(o)
            absent = self.absent(self.graph.ops[o].operands)
            if not absent:
                order.append(o)
                continue
            stack.append((o, True))
            stack.extend((p, False) for p in reversed(absent) if p not in seen)
        return order

    def absent(self, values: Iterable[int]) -> list[int]:
        out: list[int] = []
        era = len(self.behind)
        for v in values:
            o = self.absentees.get(v)
            if o is None:
                continue
            if v in self.dropped:
                if o not in self.done:
                    out.append(o)
            elif self.lazy_era.get(o) != era:
                out.append(o)
        return out

    def open_stage(self, k: int, reader: int) -> None:
        """Put the barrier of stage ``k``; everything it recomputes from is read behind it."""
        read: dict[int, None] = dict.fromkeys(
            u for o in self.members[k] for u in self.graph.ops[o].operands if u not in self.dropped
        )
        forced: dict[int, None] = dict.fromkeys(self.forced.get(k, ()))
        if not any(self.kernels.is_root[o] for o in self.members[k]) and on("bare_stages"):
            # All of it fuses into readers as it does in the program as it is: a barrier would cost them their places.
            made = self.barrier({v: self.now.get(v, v) for v in forced}, []) if forced else {}
            self.behind[k] = {v: self.now.get(v, v) for v in read} | made
            return
        read.update(forced)
        self.behind[k] = self.barrier({v: self.now.get(v, v) for v in read}, self.frontier.since_last(reader))

    def hold_back(self, clones: list[int], reader: int) -> None:
        """Keep ``clones`` of stages opened earlier from starting before ``reader`` wants them."""
        if not any(self.kernels.is_root[o] for o in clones) or not on("late_clones"):
            return
        ties = self.frontier.since_last(reader)
        if not ties:
            return
        made = {r for o in clones for r in self.graph.ops[o].results}
        read: dict[int, int] = {}
        for o in clones:
            behind = self.behind[self.stage[o]]
            read.update(
                (u, self.now[u] if u in self.dropped else behind[u])
                for u in self.graph.ops[o].operands
                if u not in made
            )
        fresh = self.barrier(read, ties)
        for k in {self.stage[o] for o in clones}:
            self.behind[k].update((v, f) for v, f in fresh.items() if v in self.behind[k])

    def hold_constants(self, made: Iterable[int], k: int) -> None:
        """Tie a clone made of constants to a value of stage ``k``, or XLA merges it with the original."""
        behind = self.behind[k]
        late = next((u for u in behind if u not in self.inputs), next(iter(behind), None))
        held = {r: self.now[r] for r in made if r in self.dropped}
        if late is not None and held:
            behind[late] = self.barrier(held | {late: behind[late]}, [])[late]

    def barrier(self, read: dict[int, int], ties: list[int]) -> dict[int, int]:
        """Put a barrier over ``read`` (value → version) and ``ties``; return their versions behind it."""
        operands = read | {v: self.now.get(v, v) for v in ties if v not in read}
        behind: dict[int, int] = dict(zip(operands, self.put_barrier(list(operands.values())), strict=True))
        self.now.update((v, b) for v, b in behind.items() if v not in self.inputs)
        return behind


class _Frontier:
    """Buffers that the descent has made and still needs.

    Fusible values count only if they wait long for their first reader, or are smaller than what dies once they are
    made. XLA fuses others anyway and keeps their sources, such as a whole gradient of which a part is added later.
    """

    def __init__(self, graph: Graph, kernels: Kernels, start: int) -> None:
        self.seen = start
        self.graph = graph
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        made: dict[int, int] = {}
        fusible: set[int] = set()
        for op in graph.ops[start:]:
            if not kernels.is_root[op.id]:
                continue
            for b in kernels.reads[op.id]:
                first.setdefault(b, op.id)
                last[b] = op.id
            if op.primitive != "optimization_barrier" and not op.pinned:
                for r in op.results:
                    if kernels.home[r] == r and graph.values[r].nbytes > 0 and graph.values[r].shape:
                        made[r] = op.id
                        if is_fusible(op.primitive):
                            fusible.add(r)
        window = idle_window(graph)
        free = {b: kernels.reads[made[b]] for b in fusible if first.get(b, made[b]) - made[b] <= window}
        self.sources = {b: [s for s in sources if s in made] for b, sources in free.items()}
        final = {kernels.home[v] for v in graph.outputs}
        self.made = sorted((o, b) for b, o in made.items())
        self.last = {b: (len(graph.ops) if b in final else last.get(b, -1)) for b in made}

    def since_last(self, reader: int) -> list[int]:
        """Buffers made since the previous call and used at or after ``reader``."""
        if not on("frontier"):
            return []
        low, high = bisect_left(self.made, (self.seen, -1)), bisect_left(self.made, (reader, -1))
        self.seen = max(reader, self.seen)
        return [b for _, b in self.made[low:high] if self.last[b] >= reader and self._worth(b, reader)]

    def _worth(self, b: int, reader: int) -> bool:
        """Whether ``b`` is not fusible, or better stored at ``reader``."""
        if b not in self.sources or not on("frontier_stored"):
            return True
        size = self.graph.values
        return size[b].nbytes < sum(size[s].nbytes for s in self.sources[b] if self.last[s] < reader)


def _stage_of(graph: Graph, again: set[int], dropped: set[int], cuts: Sequence[int]) -> dict[int, int]:
    """Stage number of each recomputed op; stages joined by a dropped value are one."""
    made: dict[int, int] = {r: o for o in again for r in graph.ops[o].results}
    joined = [False] * (len(cuts) + 1)
    for o in again:
        k = bisect_right(cuts, o)
        for u in graph.ops[o].operands:
            if u in dropped:
                for s in range(bisect_right(cuts, made[u]) + 1, k + 1):
                    joined[s] = True
    number: list[int] = []
    stage = 0
    for s, with_previous in enumerate(joined):
        stage = stage if with_previous else s
        number.append(stage)
    return {o: number[bisect_right(cuts, o)] for o in again}


def _stored_constants(graph: Graph, kernels: Kernels, again: set[int], made: dict[int, int]) -> set[int]:
    """Ops without operands that rerun for a buffer of constants alone, such as a mask for a loop."""
    bare: dict[int, frozenset[int]] = {}  # op that depends on constants alone → those of them that read nothing
    out: set[int] = set()
    for o in sorted(again):
        op = graph.ops[o]
        sources = [bare.get(made.get(u, -1)) for u in op.operands]
        if any(s is None for s in sources):
            continue
        bare[o] = frozenset([o]) if not sources else frozenset[int]().union(*(s for s in sources if s is not None))
        if sources and kernels.is_root[o] and any(graph.values[r].nbytes >= MIB for r in op.results):
            out |= bare[o]
    return out


def _forced(
    graph: Graph, boundary: Boundary, kept: frozenset[int], stages: list[int], cuts: Sequence[int]
) -> dict[int, list[int]]:
    """Kept fusible values by stage: without a barrier XLA stores their sources instead."""
    made: dict[int, int] = {r: o for o in boundary.cone for r in graph.ops[o].results}
    out: dict[int, list[int]] = {}
    for v in boundary.needed:
        if v in kept and is_fusible(graph.ops[made[v]].primitive) and on("forced_stores"):
            k = stages[max(bisect_right(stages, bisect_right(cuts, made[v])) - 1, 0)]
            out.setdefault(k, []).append(v)
    return out
