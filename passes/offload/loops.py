"""Residuals that a pair of scans recomputes per iteration instead of stacking.

A differentiated loop is two scans: the forward one stacks residuals as ``ys``, the backward one reads them as ``xs``. A
kept residual costs its bytes times the trip count; a recomputed one costs its ops once per iteration. A minimum cut on
the forward body chooses. Loop constants, slices of arrays that outlive the loop, and values stacked anyway are free; a
carry must be stacked.

A kept residual may wait in host memory: its slice leaves at the end of a forward iteration and returns at the start of
the backward one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from jaxtensile.ir.ir import Graph, Op, OpId, ValueId, consumers, is_fixed, producers
from jaxtensile.ir.plan import Link
from jaxtensile.passes.lifetimes.fusion import VIEWS
from jaxtensile.passes.offload.offload import SMALLEST
from jaxtensile.passes.recompute.clones import Recomputation
from jaxtensile.passes.recompute.mincut import Network, ResidualCut, price_ladder
from jaxtensile.passes.recompute.stages import Boundary
from jaxtensile.units import KIB, Bytes, Seconds

SLICE: Bytes = 64 * KIB
"""Bytes: smaller slices never wait on the host. Starting a copy takes some 10 us (``profiles._LATENCY``), in which 32
GiB/s carry five times as much."""


@dataclass(frozen=True, slots=True)
class ScanPair:
    """Op ids of a forward and a backward scan.

    ``links``: (position among ys, position among xs) of each stack that nothing else reads.
    """

    forward: int
    backward: int
    links: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """What a pair stacks and recomputes.

    ``dropped``: ys positions no longer stacked. ``stacked``: forward-body values stacked instead. ``again``:
    forward-body ops to run in each backward iteration. ``hosted``: values of ``stacked`` in host memory, ``aside``
    bytes in all. ``wait``: seconds that all copies add.
    """

    pair: ScanPair
    dropped: tuple[int, ...]
    stacked: tuple[int, ...]
    again: tuple[int, ...]
    hosted: tuple[int, ...] = ()
    aside: Bytes = 0
    wait: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class InnerPlan:
    """Plans for the loops within one iteration of a pair.

    ``inner``: for the bodies of those loops, applied first. ``loops``: for the loops themselves.
    """

    pair: ScanPair
    inner: tuple[InnerPlan, ...]
    loops: tuple[LoopPlan, ...]


def copying(trips: int, one_way: Seconds, forward: Seconds) -> Seconds:
    """Seconds that copies add to a pair of loops; ``one_way``: copies of one iteration, ``forward``: its work.

    A slice leaves while its iteration runs on. XLA starts the copy in when the backward iteration begins, which needs
    it at once.
    """
    return trips * (max(one_way - forward, 0.0) + one_way)


def find_pairs(graph: Graph) -> tuple[ScanPair, ...]:
    """Pairs of scans of equal length, linked by stacks that nothing else reads."""
    read_by = consumers(graph)
    made = producers(graph)
    final = set(graph.outputs)
    found: list[ScanPair] = []
    for back in graph.ops:
        if back.primitive != "scan" or is_fixed(back):
            continue
        first_x = sum(back.carried)
        links: dict[int, list[tuple[int, int]]] = {}
        for x, v in enumerate(back.slots[first_x:]):
            o = made[v] if v >= 0 else -1
            if o < 0 or v in final or len(read_by[v]) != 1 or back.slots.count(v) != 1:
                continue
            front = graph.ops[o]
            y = front.results.index(ValueId(v)) - front.carried[1]
            if front.primitive == "scan" and not is_fixed(front) and front.trip_count == back.trip_count and y >= 0:
                links.setdefault(o, []).append((y, x))
        found.extend(ScanPair(o, back.id, tuple(ls)) for o, ls in links.items())
    return tuple(found)


class PairCut:
    """The minimum cut on a pair's forward body.

    ``charge``: seconds of each op of the forward body, per iteration.
    """

    def __init__(self, graph: Graph, pair: ScanPair, charge: Sequence[float]) -> None:
        self.pair = pair
        front = graph.ops[pair.forward]
        body = front.bodies[0]
        consts, carries = front.carried
        xs = body.inputs[consts + carries : len(front.slots)]
        self._outs = body.output_slots[carries:]
        linked = {self._outs[y] for y, _ in pair.links}
        # Stacks that something else keeps alive are free to read in the backward body.
        mine = {y for y, _ in pair.links}
        free = {v for y, v in enumerate(self._outs) if y not in mine and v is not None}
        there = _there(graph, pair.backward)
        costly: set[int] = {*body.inputs[consts : consts + carries]}
        costly |= {v for v, outer in zip(xs, front.slots[consts + carries :], strict=True) if not there(outer)}
        given: set[int] = {v for v in body.inputs if v not in costly}
        wrapped, self._shift = _with_sources(body, costly)
        always = frozenset(given | free)
        needed = tuple(sorted(v for v in linked if v is not None and v not in always))
        self.all = frozenset(needed)
        """What the unchanged pair stacks."""
        trips = self._trips = front.trip_count
        self._boundary = Boundary(len(wrapped.ops), needed, always, _cone(wrapped, needed, always))
        self._graph = replace(wrapped, values=tuple(replace(v, nbytes=v.nbytes * trips) for v in wrapped.values))
        self._costs = costs = [0.0] * self._shift + [c * trips for c in charge]
        self._cut = ResidualCut(Network(self._graph, self._boundary), costs, ()) if needed else None
        self._again = Recomputation(self._graph, self._boundary)
        slices = set(xs)
        self._able: dict[int, Bytes] = {
            v.id: v.nbytes
            for v in wrapped.values
            if v.nbytes >= SLICE and v.nbytes * trips >= SMALLEST
            if v.space != "host" and "key" not in v.dtype and v.id not in slices
        }
        if front.reverse:
            self._able = {}  # XLA:GPU may write such a stack in the wrong order, see ``rewrites.loops.loops``

    def keep(self, price: float) -> frozenset[int]:
        """Values to stack when a byte costs ``price`` seconds."""
        return self._cut.keep(price) if self._cut is not None else self.all

    @property
    def trips(self) -> int:
        return self._trips

    def stacks(self, kept: frozenset[int]) -> Bytes:
        """Bytes of the stacks of ``kept``."""
        return sum(self._graph.values[v].nbytes for v in kept)

    def work(self, kept: frozenset[int]) -> Seconds:
        """Seconds of recomputation if exactly ``kept`` is stacked."""
        return sum(self._costs[o] for o in self._again.ops(kept))

    def worth_keeping(self, kept: frozenset[int]) -> Iterator[int]:
        """Values beside ``kept`` that are made again, and can be stacked instead."""
        reads = self._again.reads
        for o in sorted(self._again.ops(kept)):
            if not self._graph.ops[o].pinned and (self._costs[o] or reads[o]):
                yield from (v for v in self._graph.ops[o].results if v not in kept)

    def read(self, kept: frozenset[int]) -> frozenset[int]:
        """``kept`` without what neither the backward body nor recomputation reads."""
        reads = {u for o in self._again.ops(kept) for u, _ in self._again.reads[o]}
        return kept & (self.all | reads)

    def nbytes(self, value: int) -> Bytes:
        """Bytes of one slice."""
        return self._able[value]

    def hosted(self, kept: frozenset[int], share: float) -> frozenset[int]:
        """Values of ``kept`` to put on the host: about ``share`` of the eligible bytes, large slices first."""
        able = sorted((v for v in kept if v in self._able), key=lambda v: (-self._able[v], v))
        room = share * sum(self._able[v] for v in able)
        out: list[int] = []
        for v in able:
            if self._able[v] <= room:
                room -= self._able[v]
                out.append(v)
        return frozenset(out)

    def wait(self, hosted: frozenset[int], link: Link, forward: Seconds) -> Seconds:
        """Seconds that copying ``hosted`` adds; ``forward``: seconds of one forward iteration."""
        one_way = sum(link.latency + self._able[v] / link.bandwidth for v in hosted)
        return copying(self._trips, one_way, forward)

    def plan(self, kept: frozenset[int], hosted: frozenset[int] = frozenset(), wait: Seconds = 0.0) -> LoopPlan | None:
        """The plan that stacks exactly ``kept``, ``hosted`` of it on the host; None if the pair already does."""
        again = self._again.ops(kept)
        outs, shift = self._outs, self._shift
        dropped = tuple(sorted(y for y, _ in self.pair.links if outs[y] in self.all - (kept - hosted)))
        if not dropped:
            return None
        linked = {outs[y] for y, _ in self.pair.links} - hosted
        stacked = tuple(sorted(v for v in kept if v not in linked))
        return LoopPlan(
            pair=self.pair,
            dropped=dropped,
            stacked=stacked,
            again=tuple(sorted(o - shift for o in again if o >= shift)),
            hosted=tuple(sorted(hosted)),
            aside=self._trips * sum(self._able[v] for v in hosted),
            wait=wait,
        )


def repeated(front: Op) -> Graph:
    """The forward body as the backward loop repeats it: residuals need no buffer and may fuse."""
    body = front.bodies[0]
    carried = body.output_slots[: front.carried[1]]
    return replace(body, outputs=tuple(v for v in carried if v is not None), output_slots=carried)


def _there(graph: Graph, step: int) -> Callable[[int], bool]:
    """A test whether every plan has a value at ``step``: inputs, outputs, values read from then on, and their views."""
    stays: set[int] = {*graph.inputs, *graph.outputs, *(v for op in graph.ops[step:] for v in op.operands)}
    source: dict[int, int] = {
        op.results[0]: op.operands[0] for op in graph.ops if op.primitive in VIEWS and op.operands
    }

    def seen(v: int) -> int:
        while v in source:
            v = source[v]
        return v

    whole = {seen(v) for v in stays}
    return lambda v: seen(v) in whole


def _with_sources(body: Graph, sources: set[int]) -> tuple[Graph, int]:
    """The body with a pinned op in front that makes ``sources``, and the shift of op ids."""
    source = Op(
        id=OpId(0),
        primitive="carry_in",
        operands=(),
        results=tuple(ValueId(v) for v in sorted(sources)),
        pinned=True,
    )
    ops = (source, *(replace(op, id=OpId(op.id + 1)) for op in body.ops))
    return replace(body, ops=ops, inputs=tuple(v for v in body.inputs if v not in sources)), 1


def _cone(graph: Graph, needed: Sequence[int], always: frozenset[int]) -> tuple[int, ...]:
    made: dict[int, int] = {r: op.id for op in graph.ops for r in op.results}
    cone: set[int] = set()
    todo = [made[v] for v in needed if v in made]
    while todo:
        o = todo.pop()
        if o in cone:
            continue
        cone.add(o)
        if not graph.ops[o].pinned:
            todo.extend(made[u] for u in graph.ops[o].operands if u in made and u not in always)
    return tuple(sorted(cone))


def _linked(cuts: Sequence[PairCut]) -> list[list[PairCut]]:
    """Pairs grouped by shared loops."""
    groups: list[list[PairCut]] = []
    for cut in cuts:
        ends = {cut.pair.forward, cut.pair.backward}
        near = [g for g in groups if any(ends & {c.pair.forward, c.pair.backward} for c in g)]
        groups = [g for g in groups if g not in near]
        groups.append([*(c for g in near for c in g), cut])
    return groups


_FAR = 1.5
"""Largest factor between a divisor and the wanted number of inner iterations; else a rest is a pair of its own. At 1.5
bytes are 8 % above their least at most."""


def _inner(trips: int, wanted: float) -> int | None:
    """Inner iterations near ``wanted``, if possible a divisor of ``trips``; None if no inner loop fits."""
    divisors = [d for d in range(2, trips // 2 + 1) if trips % d == 0]
    best = min(divisors, key=lambda d: abs(math.log(d / wanted)), default=trips)
    if max(best / wanted, wanted / best) > _FAR:
        best = round(wanted)
    return best if 1 < best <= trips // 2 else None


_PRICES = 10
"""Rungs, one per price of a byte: half of ``segments._PRICES``, as steps in between are tried too (``_SHARES``). A
guess."""
_SHARES = (1.0, 0.75, 0.5, 0.25)
"""Shares of the room above a rung that steps fill: all of it need not fit beside what an iteration needs. A guess."""
_AWAY = (0.25, 0.5, 0.75)
"""Shares of the kept bytes that wait on the host, beside none and all: quarters. A guess."""

LoopChoice = tuple[LoopPlan, ...]
"""One way to rewrite the loops of a program: the pairs that change."""


class LoopLadder:
    """Ways to rewrite the loops of ``graph``.

    ``charges``: of the ops of a ``repeated`` body. ``seconds``: of a body as written. ``rungs``: from nothing to
    everything dropped, one minimum cut per pair and price. ``link``: enables ``away``.
    """

    def __init__(
        self,
        graph: Graph,
        charges: Callable[[Graph], Sequence[float]],
        link: Link | None = None,
        seconds: Callable[[Graph], Sequence[Seconds]] | None = None,
    ) -> None:
        pairs = find_pairs(graph)
        bodies = {p.forward: repeated(graph.ops[p.forward]) for p in pairs}
        charge = {o: charges(body) for o, body in bodies.items()}
        prices = {o: price_ladder(body, range(len(body.ops)), charge[o], _PRICES) for o, body in bodies.items()}
        self._cuts = [PairCut(graph, p, charge[p.forward]) for p in pairs]
        self._link = link
        if link is not None and seconds is not None:
            self._seconds = {o: sum(seconds(graph.ops[o].bodies[0])) for o in bodies}
        self._kept: dict[LoopChoice, list[frozenset[int]]] = {(): [cut.all for cut in self._cuts]}
        for i in range(_PRICES):
            at = (prices[c.pair.forward] for c in self._cuts)
            self._add([c.keep(p[min(i, len(p) - 1)]) for c, p in zip(self._cuts, at, strict=True)])
        self.rungs: tuple[LoopChoice, ...] = tuple(self._kept)

    def nests(self, smallest: Bytes) -> tuple[dict[int, int], ...]:
        """Ways to nest the loops that stack at least ``smallest`` bytes: op → iterations of its inner loop.

        N trips, k of them inner, take N / k * c + k * r bytes. c: fewest bytes per iteration. r: the inner pair's. If
        that stacks as much as now, the best k is sqrt(N * c / r); if as little as possible, sqrt(N).
        """
        ways: list[dict[int, int]] = [{}, {}]
        dearest = dict(zip(self._cuts, self._kept[self.rungs[-1]], strict=True))
        for cuts in _linked(self._cuts):
            trips = cuts[0].trips
            least, most = sum(c.stacks(dearest[c]) for c in cuts), sum(c.stacks(c.all) for c in cuts)
            if most < smallest or not least:
                continue
            for way, wanted in zip(ways, (math.sqrt(trips * least / most), math.sqrt(trips)), strict=True):
                if k := _inner(trips, wanted):
                    way.update((o, k) for c in cuts for o in (c.pair.forward, c.pair.backward))
        return tuple(way for i, way in enumerate(ways) if way and way not in ways[:i])

    def _add(self, kept: list[frozenset[int]]) -> LoopChoice:
        plans = (cut.plan(k) for cut, k in zip(self._cuts, kept, strict=True))
        way = tuple(p for p in plans if p is not None)
        self._kept.setdefault(way, kept)
        return way

    def away(self, rung: LoopChoice, share: float = 1.0) -> LoopChoice:
        """``rung`` with about ``share`` of the eligible kept bytes in host memory."""
        if self._link is None:
            return rung
        plans: list[LoopPlan | None] = []
        for cut, kept in zip(self._cuts, self._kept[rung], strict=True):
            hosted = cut.hosted(kept, share)
            plans.append(cut.plan(kept, hosted, cut.wait(hosted, self._link, self._seconds[cut.pair.forward])))
        return tuple(p for p in plans if p is not None)

    def aways(self, rung: LoopChoice) -> list[LoopChoice]:
        """Variants of ``rung`` with growing shares of its kept bytes in host memory, but not all."""
        ways = dict.fromkeys(self.away(rung, share) for share in _AWAY)
        return [way for way in ways if way not in (rung, self.away(rung))]

    def between(self, less: LoopChoice, room: Bytes) -> list[LoopChoice]:
        """Ways that stack up to ``room`` bytes more than ``less``, most first.

        Minimum cuts give what is best at a price of a byte; values of equal price come in together, and none of them
        where not all have room.
        """
        ways = (self._filled(less, int(share * room)) for share in _SHARES)
        return [way for way in dict.fromkeys(ways) if way != less]

    def _filled(self, less: LoopChoice, room: Bytes) -> LoopChoice:
        """``less``, and of what it recomputes the values that save most per byte, as far as there is ``room``."""
        kept = [*self._kept[less]]
        work = [cut.work(k) for cut, k in zip(self._cuts, kept, strict=True)]

        def saved(i: int, v: int) -> Seconds:
            return work[i] - self._cuts[i].work(kept[i] | {v})

        heap = [
            (-saved(i, v) / max(cut.stacks(frozenset((v,))), 1), i, v)
            for i, cut in enumerate(self._cuts)
            for v in cut.worth_keeping(kept[i])
        ]
        heapify(heap)
        while heap:
            _, i, v = heappop(heap)
            cut, before = self._cuts[i], kept[i]
            nbytes = cut.stacks(frozenset((v,)))
            rate = saved(i, v) / max(nbytes, 1)
            if rate <= 0:
                continue
            if heap and rate < -heap[0][0]:  # what was kept since then has saved some of it
                heappush(heap, (-rate, i, v))
                continue
            now = cut.read(before | {v})
            more = cut.stacks(now) - cut.stacks(before)
            if more <= room:
                kept[i], work[i], room = now, cut.work(now), room - more
        return self._add(kept)
