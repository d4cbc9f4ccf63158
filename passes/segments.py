"""Where to cut the climb and what each segment keeps, for a given number of bytes.

A segment runs from one narrow waist to another and keeps everything that crosses its ends.
Minimum cuts at a ladder of prices give it options (bytes kept, charge to recompute the rest);
a dynamic programme over waists and bytes then picks the cuts and one option per segment with
the least total charge: a shortest path and a multiple-choice knapsack in one.

    f[j][b] = min over segments (i, j) and their options o of f[i][b - bytes(o)] + charge(o)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxtensile.ir import Graph
from jaxtensile.passes.emit import recomputed_ops
from jaxtensile.passes.mincut import ResidualCut, price_ladder
from jaxtensile.passes.stages import Mountain, waists

_PRICES = 20
_SPANS = (1, 2, 4, 8)
_OFFSETS = 2
"""Segmentations tried per span: starts at different waists."""
_UNITS = 16384
"""Resolution of the programme: bytes are rounded to this share of what there is to distribute."""


@dataclass(frozen=True, slots=True)
class _Option:
    """What one segment keeps, in bytes, and what recomputing the rest is charged."""

    kept: frozenset[int]
    nbytes: int
    charge: float


class Menu:
    """All segments of one mountain with their options."""

    def __init__(self, graph: Graph, mountain: Mountain, charge: Sequence[float]) -> None:
        self._graph, self.mountain, self._charge = graph, mountain, charge
        self.waists, narrow = waists(graph, mountain)
        self._cuts = tuple(narrow)
        self._made: dict[int, int] = {r: o for o in mountain.cone for r in graph.ops[o].results}
        self._options: dict[tuple[int, int], dict[frozenset[int], _Option]] = {}
        self._least: dict[int, frozenset[int]] = {}
        self._prices = price_ladder(graph, mountain.cone, charge, _PRICES)
        # Matrix products that may not run again: what the knapsack needs to fill the last bytes with
        # small, cheap values, where a product would be the better bargain per byte only.
        self._sparing = [c + (1.0 if op.flops else 0.0) for c, op in zip(charge, graph.ops, strict=True)]
        count = len(self._cuts) + 1
        self.spans = [s for s in _SPANS if s < count] + [count]
        """Longest segments worth trying, in stages; the last is the whole climb."""
        for span in self.spans:
            for offset in range(0, span, max(span // _OFFSETS, 1)) if span < count else (0,):
                self._segmentation(span, offset)

    def _segmentation(self, span: int, offset: int) -> None:
        """Options of the segments that begin at every ``span``-th waist from ``offset`` on."""
        count = len(self._cuts) + 1
        bounds = sorted({0, *range(offset, count, span), count})
        inner = [self._cuts[b - 1] for b in bounds[1:-1]]
        cut = ResidualCut(self._graph, self.mountain, self._charge, inner)
        sparing = ResidualCut(self._graph, self.mountain, self._sparing, inner)
        answers = list(
            dict.fromkeys((*(sparing.keep(p) for p in self._prices[::3]), *(cut.keep(p) for p in self._prices)))
        )
        least = min((self.completed(kept, inner) for kept in answers), key=self.size)
        if span not in self._least or self.size(least) < self.size(self._least[span]):
            self._least[span] = least
        for kept in answers:
            again = recomputed_ops(self._graph, self.mountain, kept)
            held: list[set[int]] = [set() for _ in bounds[1:]]
            charge = [0.0] * len(held)
            for v in kept:
                held[bisect_right(inner, self._made[v])].add(v)
            for o in again:
                charge[bisect_right(inner, o)] += self._charge[o]
            for i, j, values, cost in zip(bounds, bounds[1:], held, charge, strict=False):
                option = _Option(frozenset(values), self.size(values), cost)
                known = self._options.setdefault((i, j), {})
                if option.kept not in known or cost < known[option.kept].charge:
                    known[option.kept] = option

    def size(self, kept: frozenset[int] | set[int]) -> int:
        """Bytes of the kept values."""
        return sum(self._graph.values[v].nbytes for v in kept)

    def least(self, span: int) -> frozenset[int]:
        """The fewest bytes that can be kept with segments of ``span`` stages."""
        return self._least[span]

    def completed(self, kept: frozenset[int], inner: Sequence[int]) -> frozenset[int]:
        """``kept`` and every value that a recomputed op reads across a cut."""
        graph, made, always = self._graph, self._made, self.mountain.always
        while True:
            missing = {
                u
                for o in recomputed_ops(graph, self.mountain, kept)
                for u in graph.ops[o].operands
                if u in made
                and u not in kept
                and u not in always
                and bisect_right(inner, made[u]) != bisect_right(inner, o)
            }
            if not missing:
                return kept
            kept = kept | missing

    def choose(self, span: int, capacity: int) -> frozenset[int] | None:
        """What to keep within ``capacity`` bytes at the least charge; None when nothing fits."""
        count = len(self._cuts) + 1
        unit = max(capacity // _UNITS, 1)
        width = capacity // unit + 1
        if capacity < 0:
            return None
        best = np.full((count + 1, width), np.inf)
        best[0] = 0.0
        back: list[list[tuple[int, _Option]]] = [[] for _ in range(count + 1)]
        pick = np.zeros((count + 1, width), np.int32)
        menu = {
            (i, j): _undominated(list(options.values())) for (i, j), options in self._options.items() if j - i <= span
        }
        by_end: list[list[tuple[int, list[_Option]]]] = [[] for _ in range(count + 1)]
        for (i, j), options in sorted(menu.items()):
            by_end[j].append((i, options))
        for j in range(1, count + 1):
            for i, options in by_end[j]:
                for option in options:
                    shift = -(-option.nbytes // unit)
                    if shift >= width:
                        continue
                    offer = best[i, : width - shift] + option.charge
                    here = best[j, shift:]
                    better = offer < here
                    if better.any():
                        here[better] = offer[better]
                        pick[j, shift:][better] = len(back[j])
                        back[j].append((i, option))
        if not np.isfinite(best[count, -1]):
            return None
        kept, inner, j, room = set[int](), list[int](), count, width - 1
        while j > 0:
            i, option = back[j][int(pick[j, room])]
            kept |= option.kept
            room -= -(-option.nbytes // unit)
            j = i
            if i > 0:
                inner.append(self._cuts[i - 1])
        return self.completed(frozenset(kept), sorted(inner))


def _undominated(options: list[_Option]) -> list[_Option]:
    """Options by ascending bytes, each cheaper to recompute than all smaller ones."""
    out: list[_Option] = []
    for option in sorted(options, key=lambda o: (o.nbytes, o.charge)):
        if not out or option.charge < out[-1].charge:
            out.append(option)
    return out
