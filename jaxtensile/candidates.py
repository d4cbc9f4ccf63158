"""Which way to rewrite a program has the cheapest plan?

All are compared by what they cost over the program as written. Products are made slice by slice, and the
bodies of loops and branches planned as programs of their own, once nothing else fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

from jaxtensile.bodies import Body, Key, bodies_of
from jaxtensile.passes.check import check
from jaxtensile.passes.cost import op_costs
from jaxtensile.passes.liveness import live_ranges
from jaxtensile.passes.solvers import named
from jaxtensile.plan import Costs, MemoryUse, Plan
from jaxtensile.trace import Traced
from jaxtensile.units import Bytes
from jaxtensile.variants import Inside, Variant, charge_of, sliced, with_loops, written

LARGE = 1 / 16
"""Products that are read in slices are worth slicing, and bodies planning, from this share of the temporaries on."""
_INSIDE = (0.75, 0.5, 0.25, 0.0)
"""Shares of its temporaries that a body is planned for."""


class _Bodies:
    """The bodies of ``start`` that need much memory of their own, and plans for them."""

    def __init__(self, start: Variant) -> None:
        self.start = start
        live = live_ranges(start.looped.graph)
        smallest = LARGE * live.temp
        self.large: list[tuple[Key, Body, Traced, MemoryUse]] = []
        for op in start.looped.graph.ops if start.job.shards == 1 else ():
            for k, body in enumerate(bodies_of(start.looped, op.id) if op.bodies and not op.pinned else ()):
                inner = body.traced()
                use = live_ranges(inner.graph).use()
                if use.temp >= max(smallest, 1):
                    self.large.append(((op.id, k), body, inner, use))
        self._candidates = cache(self._of)

    def _of(self, i: int) -> Candidates:
        _, body, inner, _ = self.large[i]
        job = replace(
            self.start.job,
            jaxpr=body.closed,
            donated=body.donated,
            keep_unused=True,
            host_budget=0,
            place=None,
            state=(),
        )
        costs = op_costs(inner.graph, job.device)
        # The default solver: others may take a minute for each share, or want a program of one kind.
        return Candidates(written(job, inner, costs, named("auto")), costs)

    def at(self, share: float) -> Variant:
        """``start`` with each large body planned for ``share`` of its temporaries, or as far as that goes."""
        start, found = self.start, list[Inside]()
        for i, (key, body, _, use) in enumerate(self.large):
            variant, plan = self._candidates(i).cheapest(use.device - int((1 - share) * use.temp))
            if variant.as_it_is and plan.changes_nothing:
                continue
            check(variant.problem.graph, plan.program)
            found.append(Inside(key=key, trips=body.trips, variant=variant, plan=plan))
        made = replace(
            start,
            inside=tuple(found),
            charge=start.charge + sum(i.charge for i in found),
            seconds=start.seconds + sum(i.seconds for i in found),
            finer=list,
        )
        made.__dict__["looped"] = start.looped  # the same, and known
        return made

    def between(self, low: float, high: float) -> list[Variant]:
        """Three steps between two shares."""
        return [self.at(low + part * (high - low)) for part in (0.25, 0.5, 0.75)]

    def rungs(self) -> Iterator[Variant]:
        """The same for less and less memory, each with steps to the one before as ``finer``."""
        for high, low in zip((1.0, *_INSIDE), _INSIDE, strict=False) if self.large else ():
            yield replace(self.at(low), finer=cache(partial(self.between, low, high)))


class Candidates:
    """The variants of one program, cheapest first; once nothing else fits, large products are made slice by slice,
    and bodies of loops and branches are planned.

    ``costs``: of the program as written; ``others``: variants that are taken as they are.
    """

    def __init__(self, start: Variant, costs: Costs, others: Sequence[Variant] = ()) -> None:
        self.variants = _ordered([*with_loops(start), *others])
        self._start, self._costs, self._others = start, costs, others
        self._slicing_tried = False
        self._rungs: Iterator[Variant] | None = None
        """Plans for bodies that have not been asked for yet."""

    def cheapest(self, budget: Bytes) -> tuple[Variant, Plan]:
        """The cheapest variant and plan that fit; the smallest when none does."""
        best = cheapest(self.variants, budget)
        if best[1].predicted.device > budget and not self._slicing_tried:
            self._slicing_tried = True
            start = sliced(self._start, self._costs, int(LARGE * live_ranges(self._start.base.graph).temp))
            if start is not None:
                more = with_loops(start)
                second = cheapest(more, budget)
                if second[1].predicted.device < best[1].predicted.device:
                    self.variants = _ordered([*self.variants, *more])
                    best = second
        if best[1].predicted.device > budget:
            self._rungs = self._rungs or _Bodies(best[0]).rungs()
            for variant in self._rungs:
                self.variants = _ordered([*self.variants, variant])
                found = cheapest([variant], budget)
                if found[1].predicted.device < best[1].predicted.device:
                    best = found
                if best[1].predicted.device <= budget:
                    break
        return best

    def smallest(self) -> tuple[Variant, Plan]:
        """The smallest plan that is found when nothing fits; the same one whatever was asked before."""
        return Candidates(self._start, self._costs, self._others).cheapest(0)

    def forget_host(self) -> None:
        """From now on plan by recomputation alone."""
        self.variants = without_host(self.variants)
        self._start = replace(self._start, host=False)
        self._others = without_host([*self._others])


def _ordered(variants: list[Variant]) -> list[Variant]:
    return sorted(variants, key=lambda v: v.charge)


def without_host(variants: list[Variant]) -> list[Variant]:
    """The same variants, to be planned by recomputation alone; none that stacks in host memory."""
    return [replace(v, host=False, finer=cache(lambda v=v: without_host(v.finer()))) for v in variants if not v.aside]


def cheapest(variants: list[Variant], budget: Bytes) -> tuple[Variant, Plan]:
    """The cheapest variant and plan that fit; the smallest when none does. ``variants``: cheapest first.

    Of those that recompute more and more in the same loops, the dearer ones are taken to need less. With stacks
    on the host they need not: the dearest stacks most, and what it cannot stack there stays on the device.
    """
    best: tuple[Variant, Plan] | None = None

    @cache
    def solved(variant: Variant) -> Plan:
        return variant.solve(max(budget, 0))

    def fits(variant: Variant) -> bool:
        return solved(variant).predicted.device <= budget

    def consider(variant: Variant) -> None:
        nonlocal best
        if best is not None and best[1].predicted.device <= budget and charge_of(*best) <= variant.charge:
            return
        found = variant, solved(variant)
        if best is None or _rank(found, budget) < _rank(best, budget):
            best = found

    for chain in _chains(variants):
        first = 0
        if not chain[0].aside:
            first = bisect_left(chain, True, key=fits) if fits(chain[-1]) else len(chain) - 1
        for variant in chain[first:]:
            consider(variant)
    assert best is not None, "there is always the program as it is"
    if best[1].predicted.device <= budget:
        for variant in best[0].finer():
            consider(variant)
    return best


def _chains(variants: list[Variant]) -> list[list[Variant]]:
    """Variants that differ in their loops alone, with and without stacks on the host."""
    chains: dict[tuple[int, bool, bool], list[Variant]] = {}
    for variant in variants:
        chains.setdefault((id(variant.base), variant.aside > 0, bool(variant.inside)), []).append(variant)
    return list(chains.values())


def _rank(found: tuple[Variant, Plan], budget: Bytes) -> tuple[bool, float]:
    device = found[1].predicted.device
    return (device > budget, device if device > budget else charge_of(*found))
