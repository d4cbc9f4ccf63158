"""Where to cut the forward part and what each segment keeps, for a given number of bytes.

A segment runs between two narrow cut points and keeps all that crosses its ends. Minimum cuts at a ladder of prices
give its options (bytes kept, charge for the rest). A dynamic programme over cut points and bytes picks the cuts and an
option per segment at the least total charge: a shortest path and a multiple-choice knapsack in one.

    f[j][b] = min over segments (i, j) and their options o of f[i][b - bytes(o)] + charge(o)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd
from typing import NamedTuple

import numpy as np

from jaxtensile.ir.ir import Graph
from jaxtensile.passes.recompute.clones import Recomputation
from jaxtensile.passes.recompute.mincut import Network, ResidualCut, ladders, price_ladder, solved
from jaxtensile.passes.recompute.stages import Boundary, cut_points
from jaxtensile.switches import on

_PRICES = 20
"""Prices of a byte at which a segment's cuts are solved. At half ViT at 0.5 does 0.26 % of a step more."""
_SPARING = 3
"""Every so manieth price is also solved with products that may not run again. A guess."""
_SPANS = (1, 2, 4, 8)
"""Longest segments tried, in stages, beside the whole climb. At 2 to 16 DLRM at 0.5 does 30 % of a step more."""
_OFFSETS = 2
"""Segmentations per span, from different first cut points. At half and double no plan changes by more than 0.01 %."""
_STEPS, _DEAR = 3, 0.002
"""Steps tried between two neighbouring answers, behind ops that charge at least this share of the whole. A guess. At
half and double no plan changes with the first."""
_UNITS = 16384
"""Resolution: bytes are rounded to this share of those to distribute. At half and double no plan changes by more than
0.01 %."""
_FINE = 512
"""Most units a stage. At a quarter a MoE charges 0.04 % of a step more."""


@dataclass(frozen=True, slots=True)
class _Option:
    """What one segment keeps, in bytes, and the charge for the rest.

    ``entry``: bytes it reads across its lower end, which earlier segments keep. ``exit``: whether it keeps all that is
    made in it and crosses its upper end.
    """

    kept: frozenset[int]
    nbytes: int
    charge: float
    entry: int
    exit: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """What to keep, and per segment, in order, its first and last cut and the option taken."""

    kept: frozenset[int]
    parts: tuple[tuple[int, int, frozenset[int]], ...]


class Needs:
    """Bytes that segments need while recomputed, beside all that is kept for earlier segments.

    Learned from measured schedules. If only other options of a segment were measured, the least is assumed.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], dict[frozenset[int], int]] = {}

    def of(self, i: int, j: int, kept: frozenset[int]) -> int:
        known = self._known.get((i, j))
        if not known or not on("segment_needs"):
            return 0
        return known[kept] if kept in known else min(known.values())

    def learn(self, menu: Menu, choice: Choice, clones: Sequence[tuple[int, int]], profile: Sequence[int]) -> None:
        """Learn from a schedule with ``profile`` bytes at its steps. ``clones``: step and op of each."""
        cuts = menu.cuts
        count = len(cuts) + 1
        held, peak = [set[int]() for _ in range(count)], [0] * count
        for v in choice.kept:
            held[bisect_right(cuts, menu.made(v))].add(v)
        for (step, o), (end, _) in pairwise([*clones, (len(profile), -1)]):
            k = bisect_right(cuts, o)
            peak[k] = max(peak[k], max(profile[step:end]))
        before = [0, *accumulate(menu.size(values) for values in held)]
        chosen = {(i, j): kept for i, j, kept in choice.parts}
        for i, j in menu.segments():
            top = max(peak[i:j])
            kept = chosen.get((i, j)) or frozenset[int]().union(*held[i:j])
            if top:
                self._known.setdefault((i, j), {})[kept] = top - before[i]


class _Segmentation(NamedTuple):
    """The forward part in segments between ``bounds``: cut 0, its begin, to the last, its end.

    ``at``: the segment of each op. ``across``: by op, the values that it reads from earlier segments. ``cut``: its cut
    problem by charge. ``sparing``: the same without recomputing products."""

    bounds: list[int]
    at: list[int]
    across: Mapping[int, Sequence[int]]
    cut: ResidualCut
    sparing: ResidualCut


class Menu:
    """All segments of one boundary with their options."""

    def __init__(self, graph: Graph, boundary: Boundary, charge: Sequence[float]) -> None:
        self._graph, self.boundary, self._charge = graph, boundary, charge
        self.cut_points, narrow = cut_points(graph, boundary)
        self.cuts = tuple(narrow)
        self.again = Recomputation(graph, boundary)
        self._made = self.again.made
        self._segmented: dict[int, list[_Segmentation]] = {}
        self._least: dict[int, frozenset[int]] = {}
        self._prices = price_ladder(graph, boundary.cone, charge, _PRICES)
        # Matrix products that may not run again: what the knapsack needs to fill the last bytes with
        # small, cheap values, where a product would be the better bargain per byte only.
        self._sparing = [c + (1.0 if op.flops else 0.0) for c, op in zip(charge, graph.ops, strict=True)]
        self._dear = _DEAR * sum(charge)
        self._network = Network(graph, boundary)
        count = len(self.cuts) + 1
        self.spans = [s for s in _SPANS if s < count] + [count]
        """Longest segments worth trying, in stages; the last is the whole climb."""

    @cached_property
    def _options(self) -> dict[tuple[int, int], dict[frozenset[int], _Option]]:
        """Options of all segments. Lazy: some boundaries need only ``least``."""
        found: dict[tuple[int, int], dict[frozenset[int], _Option]] = {}
        segmentations = [s for span in self.spans for s in self._segmentations(span)]
        asked = [(s.sparing, self._prices[::_SPARING]) for s in segmentations]
        answers = ladders([*asked, *((s.cut, self._prices) for s in segmentations)])
        both = zip(segmentations, answers, answers[len(segmentations) :], strict=False)
        for segmentation, sparing, others in both:
            for i, j, option in self._options_of(segmentation, list(dict.fromkeys((*sparing, *others)))):
                known = found.setdefault((i, j), {})
                if option.kept not in known or option.charge < known[option.kept].charge:
                    known[option.kept] = option
        return found

    def _segmentations(self, span: int) -> list[_Segmentation]:
        """Segmentations into segments of ``span`` stages, from several first cut points."""
        if span not in self._segmented:
            count = len(self.cuts) + 1
            found = self._segmented[span] = list[_Segmentation]()
            dear = self._sparing if on("sparing_cuts") else self._charge
            for offset in range(0, span, max(span // _OFFSETS, 1)) if span < count and on("segment_offsets") else (0,):
                bounds = sorted({0, *range(offset, count, span), count})
                inner = [self.cuts[b - 1] for b in bounds[1:-1]]
                cut, sparing = (ResidualCut(self._network, c, inner) for c in (self._charge, dear))
                at = self._segment_of(inner)
                found.append(_Segmentation(bounds, at, self._across(at), cut, sparing))
        return self._segmented[span]

    @cached_property
    def _by_end(self) -> list[list[tuple[int, list[_Option]]]]:
        """By last cut: the segments' first cuts and undominated options."""
        found: list[list[tuple[int, list[_Option]]]] = [[] for _ in range(len(self.cuts) + 2)]
        for (i, j), options in sorted(self._options.items()):
            found[j].append((i, _undominated(list(options.values()))))
        return found

    @cached_property
    def _grain(self) -> int:
        """Bytes of which all that options keep and enter are multiples: in these units nothing is rounded."""
        return gcd(*(n for options in self._options.values() for o in options.values() for n in (o.nbytes, o.entry)))

    def _options_of(
        self, segmentation: _Segmentation, answers: Sequence[frozenset[int]]
    ) -> Iterator[tuple[int, int, _Option]]:
        """Options of the segments by the ``answers`` of its cuts: first cut, last cut, option."""
        bounds, at, across, cut, _ = segmentation
        made, charges = self._made, self._charge
        crossing: dict[int, set[int]] = {}
        for u in cut.crossing:
            crossing.setdefault(bounds[at[made[u]] + 1], set()).add(u)
        rerun = {kept: self.again.ops(kept) for kept in answers}
        for a, b in pairwise(sorted(answers, key=self.size)):
            for kept in self._between(a, b, rerun[a] - rerun[b], at, len(bounds) - 1):
                kept, again = self._completed(kept, across)
                rerun.setdefault(kept, again)
        for kept, again in rerun.items():
            held: list[set[int]] = [set() for _ in bounds[1:]]
            read: list[set[int]] = [set() for _ in held]
            charge = [0.0] * len(held)
            for v in kept:
                held[at[made[v]]].add(v)
            for o in again:
                charge[at[o]] += charges[o]
            for o in again.intersection(across):
                read[at[o]].update(kept.intersection(across[o]))
            for i, j, values, cost, entering in zip(bounds, bounds[1:], held, charge, read, strict=False):
                entry = self.size(entering)
                ends = crossing.get(j, set())
                yield i, j, _Option(frozenset(values), self.size(values), cost, entry, ends <= values)

    def _between(
        self, less: frozenset[int], more: frozenset[int], spared: set[int], at: Sequence[int], count: int
    ) -> Iterator[frozenset[int]]:
        """Mixtures of two answers that differ in several dear ops of a segment: one below a step, the other above
        it. ``at``: the segment of each op, of ``count``."""
        dear: list[list[int]] = [[] for _ in range(count)]
        for o in sorted(spared):
            if self._charge[o] >= self._dear:
                dear[at[o]].append(o)
        for k in range(1, min(max(map(len, dear)), _STEPS + 1)) if on("dear_steps") else ():
            # Segments with fewer dear ops repeat their last step.
            steps = [ops[min(k, len(ops) - 1)] if len(ops) > 1 else 0 for ops in dear]
            for low, high in ((less, more), (more, less)):
                yield frozenset(
                    v
                    for source, below in ((low, True), (high, False))
                    for v in source
                    if (self._made[v] < steps[at[self._made[v]]]) == below
                )

    def size(self, kept: frozenset[int] | set[int]) -> int:
        """Bytes of the kept values."""
        return sum(self._graph.values[v].nbytes for v in kept)

    def least(self, span: int) -> frozenset[int]:
        """The kept set of fewest bytes with segments of ``span`` stages."""
        if span not in self._least:
            cuts = [(cut, s.across) for s in self._segmentations(span) for cut in (s.cut, s.sparing)]
            answers = solved([(cut, self._prices[-1]) for cut, _ in cuts])
            completed = (self._completed(kept, across)[0] for kept, (_, across) in zip(answers, cuts, strict=True))
            self._least[span] = min(completed, key=self.size)
        return self._least[span]

    def _segment_of(self, inner: Sequence[int]) -> list[int]:
        """The segment of each op."""
        ends = [*inner, len(self._graph.ops)]
        return [k for k, (start, end) in enumerate(pairwise([0, *ends])) for _ in range(start, end)]

    def _across(self, at: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """By op, the values that it reads from earlier segments."""
        each = ((o, [u for u, p in reads if at[p] != at[o]]) for o, reads in self.again.reads.items())
        return {o: values for o, values in each if values}

    def _completed(self, kept: frozenset[int], across: Mapping[int, Sequence[int]]) -> tuple[frozenset[int], set[int]]:
        """``kept`` and every value that a recomputed op reads ``across`` a cut; and the ops to rerun for them."""
        while True:
            again = self.again.ops(kept)
            missing = {u for o in again.intersection(across) for u in across[o] if u not in kept}
            if not missing:
                return kept, again
            kept = kept | missing

    def segments(self) -> Iterable[tuple[int, int]]:
        """First and last cut of every segment with options; cut 0 is the begin of the forward part."""
        return self._options

    def made(self, v: int) -> int:
        """The op that makes ``v``."""
        return self._made[v]

    def choose(self, span: int, capacity: int, room: int | None = None, needs: Needs | None = None) -> Choice | None:
        """What to keep within ``capacity`` bytes at the least charge; None if nothing fits.

        ``room``: bytes for what is kept before a segment and what it ``needs`` when recomputed. The descent frees what
        late segments keep before it comes to early ones.
        """
        needs = needs or Needs()
        count = len(self.cuts) + 1
        unit = max(capacity // min(_UNITS, _FINE * count), self._grain, 1)
        width = capacity // unit + 1
        if capacity < 0:
            return None
        # Two states at each cut: whether what crosses it is kept (1) or may have to be on top (0).
        best = np.full((count + 1, 2, width), np.inf)
        best[0, 1] = 0.0
        reached = {(0, 1)}
        back: list[list[tuple[int, int, int, _Option]]] = [[] for _ in range(count + 1)]
        pick = np.zeros((count + 1, 2, width), np.int32)
        for j in range(1, count + 1):
            for i, options in self._by_end[j]:
                for option in options if j - i <= span else ():
                    for state in (0, 1):
                        if (i, state) not in reached:
                            continue
                        above = 0 if state else -(-option.entry // unit)
                        shift = above - (-option.nbytes // unit)
                        reach = width - shift
                        if room is not None and option.charge > 0:
                            reach = min(reach, (room - needs.of(i, j, option.kept)) // unit + 1 - above)
                        if reach <= 0:
                            continue
                        offer = best[i, state, :reach] + option.charge
                        end = int(option.exit)
                        here = best[j, end, shift : shift + reach]
                        better = offer < here
                        if better.any():
                            np.copyto(here, offer, where=better)
                            np.copyto(pick[j, end, shift : shift + reach], len(back[j]), where=better)
                            back[j].append((i, state, shift, option))
                            reached.add((j, end))
        if not np.isfinite(best[count].min()):
            return None
        g, left = divmod(int(best[count].argmin()), width)
        parts: list[tuple[int, int, frozenset[int]]] = []
        j = count
        while j > 0:
            i, state, shift, option = back[j][int(pick[j, g, left])]
            parts.append((i, j, option.kept))
            left -= shift
            j, g = i, state
        parts.reverse()
        kept = frozenset[int]().union(*(values for _, _, values in parts))
        across = self._across(self._segment_of([self.cuts[i - 1] for i, _, _ in parts[1:]]))
        return Choice(self._completed(kept, across)[0], tuple(parts))


def _undominated(options: list[_Option]) -> list[_Option]:
    """Options by ascending bytes, each cheaper to recompute than all smaller ones that are as good at their ends."""
    out: list[_Option] = []
    for option in sorted(options, key=lambda o: (o.nbytes, o.charge, o.entry)):
        if not any(o.charge <= option.charge and o.entry <= option.entry and o.exit >= option.exit for o in out):
            out.append(option)
    return out
