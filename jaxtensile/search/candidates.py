"""The ways to rewrite a program, tried in order until a plan fits.

First, the present variants are compared (``cheapest``). Work is done in parts where that is cheaper than recomputing.
If nothing fits, products are sliced, branches merged with their gradients, loops strip-mined, and bodies of loops and
branches planned as programs of their own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, cached_property

from jaxtensile.ir.ir import is_fixed
from jaxtensile.ir.plan import MemoryUse, Plan, Program
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.order.in_order import in_order
from jaxtensile.passes.order.own_copies import with_own_copies
from jaxtensile.passes.solvers.answer import answer
from jaxtensile.passes.verify.check import check
from jaxtensile.program.bodies import Body, Key, bodies_of
from jaxtensile.program.trace import Traced
from jaxtensile.rewrites.early_updates import EARLY_UPDATES
from jaxtensile.rewrites.loops.in_place_loops import IN_PLACE_LOOPS
from jaxtensile.rewrites.loops.sink import SINK
from jaxtensile.rewrites.rewrite import LARGE
from jaxtensile.search.cheapest import cheapest, ordered, rank, without_host
from jaxtensile.search.loop_variants import with_loops
from jaxtensile.search.parts import Chunks
from jaxtensile.search.registry import last, ways
from jaxtensile.search.variant import BODIES, Inside, Variant, charge_of
from jaxtensile.search.variants import body_alone, with_inside
from jaxtensile.switches import on
from jaxtensile.units import Bytes

WORTH = 0.005
"""Share of the step's work: if a plan adds no more, parts are not tried. A guess."""
FEWER = (4, 2)
"""Divisors of a sufficient number of parts; these fewer parts are planned too. A guess: each is planned in full."""
ABOUT = 1.02
"""If nothing fits, plans within this factor of the smallest count as equal. A guess."""


def _large_bodies(start: Variant, temp: Bytes) -> Iterator[tuple[Key, Body, Traced, MemoryUse]]:
    """Bodies of ``start`` worth planning, given its ``temp`` bytes, and each one's memory."""
    for op in start.looped.graph.ops:
        for k, body in enumerate(bodies_of(start.looped, op.id) if op.bodies and not is_fixed(op) else ()):
            inner = body.traced()
            use = live_ranges(inner.graph).use()
            if use.temp >= max(LARGE * temp, 1):
                yield (op.id, k), body, inner, use


class _Bodies:
    """Memory-hungry bodies of ``start``, and plans for them; ``parts``: whether to work in parts in them."""

    def __init__(self, start: Variant, parts: bool) -> None:
        self.start, self.parts = start, parts
        with start.request.faults.of(start.blamed):
            self.live = live = live_ranges(start.looped.graph)
        alone = start.request.sized and on("bodies")
        self.large = start.request.faults.spared(
            BODIES, lambda: [*_large_bodies(start, live.temp)] if alone else [], list
        )
        self._unasked = cache(self._of)
        self._candidates = self._anew()

    def _of(self, i: int) -> Candidates:
        _, body, inner, _ = self.large[i]
        return Candidates(body_alone(self.start, body, inner), parts=self.parts)

    def anew(self) -> _Bodies:
        """The same bodies, without plans."""
        again = copy(self)
        again._candidates = self._anew()
        return again

    def _anew(self) -> Callable[[int], Candidates]:
        return cache(lambda i: self._unasked(i).anew())

    def _over(self, key: Key, budget: Bytes) -> Bytes:
        """Bytes by which the program exceeds the budget while a body runs."""
        return self.live.device - self.live.temp + self.live.profile[key[0]] - budget

    def may_do(self, budget: Bytes) -> bool:
        """Whether the program exceeds the budget, while each body runs, by no more than the body's temporaries.
        Elsewhere it is not checked."""
        return all(self._over(key, budget) <= use.temp for key, _, _, use in self.large)

    def fitted(self, budget: Bytes) -> Variant | None:
        """``start`` with large bodies planned for the bytes left where they run, as far as possible; None if no body
        needs it."""
        return self.start.request.faults.spared(BODIES, lambda: self._fitted(budget), lambda: None)

    def _fitted(self, budget: Bytes) -> Variant | None:
        start, found = self.start, list[Inside]()
        for i, (key, body, _, use) in enumerate(self.large):
            over = self._over(key, budget)
            if over <= 0:
                continue
            variant, plan = self._candidates(i).cheapest(max(use.device - over, 0))
            if variant.as_it_is and plan.changes_nothing:
                continue
            check(variant.problem.graph, plan.program)
            found.append(Inside(key=key, trips=body.trips, variant=variant, plan=plan))
        if not found:
            return None
        return with_inside(start, found)

    def over(self, budget: Bytes) -> bool:
        """Whether the program exceeds the budget while a large body runs."""
        return any(self._over(key, budget) > 0 for key, *_ in self.large)

    @cached_property
    def held(self) -> Variant | None:
        """``start`` with its large bodies, and those inside them, in trace order; None if they are."""
        return self.start.request.faults.spared(BODIES, self._in_order, lambda: None)

    def _in_order(self) -> Variant | None:
        planned = {i.key: i for i in self.start.inside}
        found = {key: self._held(key, body, inner, planned.get(key)) for key, body, inner, _ in self.large}
        held = {key: i for key, i in found.items() if i is not None}
        return with_inside(self.start, list((planned | held).values())) if held else None

    def _held(self, key: Key, body: Body, traced: Traced, planned: Inside | None) -> Inside | None:
        """A body kept in order; None if it already is or has no other order."""
        if planned is None:
            alone = body_alone(self.start, body, traced)
            variant = _Bodies(alone, self.parts).held or alone
            program = Program.unchanged(variant.traced.graph)
        else:
            variant, program = planned.variant, planned.plan.program
            deeper = _Bodies(variant, self.parts).held if not planned.held else None
            again = deeper.solve(planned.plan.predicted.device) if deeper is not None else planned.plan
            if deeper is not None and again.predicted.device <= planned.plan.predicted.device:
                variant, program = deeper, again.program
        before = planned.variant if planned is not None else None
        ordered = program if planned is not None and planned.held else with_own_copies(in_order(program))
        if ordered is program and (variant is before or variant.as_it_is):
            return None
        check(variant.problem.graph, ordered)
        plan = answer(variant.problem, ordered, live_ranges(ordered.graph), "in order")
        return Inside(key=key, trips=body.trips, variant=variant, plan=plan, held=True)


class _Ways:
    """The rewritten programs of one program, each made on first use and shared, with solvers that remember layouts."""

    def __init__(self, written: Variant, base: Variant | None = None, early: bool = True) -> None:
        self.written = written
        self.base = base or _first(ways(written, SINK)) or written
        """The variant with no more bytes than the program as written, and the same work."""
        hosted = written.host and written.request.host_budget > 0
        # With copies to the host XLA orders updates by them, and gradients wait after all.
        self.early = _first(ways(replace(self.base, host=False), EARLY_UPDATES)) if early else None
        self.start = self.base if hosted or self.early is None else self.early
        self.chunks = Chunks(self.start)
        self.loops = cache(with_loops)
        self.bodies = cache(_Bodies)

    @cached_property
    def first(self) -> list[Variant]:
        """Variants tried first."""
        as_it_is = [self.written] if not self.start.as_it_is else []
        beside = self.loops(self.early) if self.early not in (None, self.start) and on("updates_beside") else []
        over = [v for start in ways(self.start, IN_PLACE_LOOPS) for v in self.loops(start)]
        return [*as_it_is, *self.loops(self.start), *beside, *over]

    @cached_property
    def more(self) -> list[Callable[[], list[Variant]]]:
        """Rewrites worth their time only if nothing else fits."""
        return [cache(lambda rewrite=rewrite: ways(self.start, rewrite)) for rewrite in last()]

    @cached_property
    def without_host(self) -> _Ways:
        """The same programs, planned by recomputation alone."""
        written, base = (replace(v, host=False) for v in (self.written, self.base))
        return _Ways(written, written if self.base is self.written else base, self.early is not None)

    @cached_property
    def without_early_updates(self) -> _Ways:
        """The same programs, with updates where they were written."""
        return _Ways(self.written, self.base, early=False)


class Candidates:
    """The variants of one program, cheapest first. If nothing fits, large products are sliced and bodies planned.

    ``start``: the program they are made from. ``others``: variants used as they are. ``parts``: whether to work in
    parts; None: as requested.
    """

    def __init__(
        self,
        start: Variant,
        others: Sequence[Variant] = (),
        known: _Ways | None = None,
        *,
        parts: bool | None = None,
    ) -> None:
        self._others = others
        asked = start.request
        self._in_parts = bool(asked.chunk) and not asked.decides_on_parts if parts is None else parts
        self._begin(known or _Ways(start))

    def _begin(self, known: _Ways) -> None:
        self._ways = known
        self.variants = ordered([*known.first, *self._others])
        self._more = [*known.more]
        self._starts: list[Variant] = []
        """Variants that save inside their bodies: parts, strip-mined loops whose outer loops stack the least, merged
        branches, and loops that make what they read."""
        self._bodies: list[_Bodies] = []
        self._parts: dict[int, _Bodies] = {}
        """Bodies of work in parts, by their number."""
        self._hold = False

    @property
    def written(self) -> Variant:
        """The program as it was written."""
        return self._ways.written

    def cheapest(self, budget: Bytes) -> tuple[Variant, Plan]:
        """The cheapest variant and plan that fit; the smallest if none does."""
        best = self._cheapest(budget)
        return (self.held(best, budget) or best) if self._hold else best

    def hold(self, variant: Variant, more: Bytes, budget: Bytes) -> bool:
        """Whether trace order in bodies may help ``variant``, which needs ``more`` bytes than predicted. If so, all
        variants use it from now on."""
        if not variant.request.device.backend.heeds_barriers or not on("bodies_in_order"):
            return False
        bodies = self._ways.bodies(variant, self._in_parts)
        helps = bodies.over(budget - more) and bodies.held is not None
        self._hold = self._hold or helps
        return helps

    def release(self) -> None:
        """Leave the order in bodies to the compiler again."""
        self._hold = False

    def held(self, found: tuple[Variant, Plan], budget: Bytes) -> tuple[Variant, Plan] | None:
        """The same with bodies in trace order; None if they are, or if it does not fit."""
        variant, plan = found
        held = self._ways.bodies(variant, self._in_parts).held
        if held is None:
            return None
        again = held, held.solve(max(budget, plan.predicted.device))
        return again if again[1].predicted.device <= max(budget, plan.predicted.device) else None

    def _cheapest(self, budget: Bytes) -> tuple[Variant, Plan]:
        best = self._in_chunks(cheapest(self.variants, budget), budget)
        while best[1].predicted.device > budget and self._more:
            for start in self._more.pop(0)():
                more = self._ways.loops(start)
                self._starts += more[-1:] if start.taken[-1].rewrite.in_bodies else []
                second = cheapest(more, budget)
                if rank(second, budget) < rank(best, budget):
                    self.variants = ordered([*self.variants, *more])
                    best = second
        if best[1].predicted.device > budget or (self._bodies and best[0].inside):  # those were planned for other bytes
            if not self._bodies:
                aside = [v for v in self.variants if v.aside]
                hosted = [cheapest(aside, budget)[0]] if aside and not best[0].aside else []
                starts = dict.fromkeys((best[0], *hosted, *self._starts))
                self._bodies = [self._ways.bodies(variant, self._in_parts).anew() for variant in starts]
            for bodies in sorted(self._bodies, key=lambda b: not b.may_do(budget)):
                if best[1].predicted.device <= budget and not bodies.may_do(budget):
                    break  # there is one that fits
                best = self._fitted(bodies, best, budget)
        return best if best[1].predicted.device <= budget or not on("about") else self._about(best)

    def _fitted(self, bodies: _Bodies, best: tuple[Variant, Plan], budget: Bytes) -> tuple[Variant, Plan]:
        """``best``, or the program with planned bodies if that is better."""
        variant = bodies.fitted(budget)
        found = cheapest([variant], budget) if variant is not None else best
        if variant is None or rank(found, budget) >= rank(best, budget):
            return best
        self.variants = ordered([*self.variants, variant])
        return found

    def _in_chunks(self, best: tuple[Variant, Plan], budget: Bytes) -> tuple[Variant, Plan]:
        """``best``, or a cheaper plan in parts: as many as suffice alone, or fewer with more recomputation."""
        request, chunks = self.written.request, self._ways.chunks
        enough = WORTH * sum(self.written.whole.charge)
        if (
            not self._in_parts
            or not request.whole
            or (best[1].predicted.device <= budget and charge_of(*best) <= enough)
        ):
            return best
        parts = chunks.parts

        def plain(k: int) -> Bytes:
            variant = chunks.at(k)
            return variant.plain.device if variant is not None else budget + 1

        found = bisect_left(parts, True, key=lambda k: plain(k) <= budget)
        # Where the most parts are not enough, fewer are less so.
        by_less = FEWER if found < len(parts) and on("fewer_parts") else ()
        fewer = [bisect_right(parts, parts[found] // by) for by in by_less]
        for k in dict.fromkeys([*(parts[j - 1] for j in fewer if j), *(parts[found : found + 1] or parts[-1:])]):
            variant = chunks.at(k)
            if variant is None or (best[1].predicted.device <= budget and charge_of(*best) <= variant.charge):
                continue
            second = self._in(k, variant, budget, least=best[1].predicted.device > budget)
            best = min(best, second, key=lambda found: rank(found, budget))
        return best

    def _in(self, k: int, variant: Variant, budget: Bytes, least: bool) -> tuple[Variant, Plan]:
        """The cheapest plan of ``variant``, which works in ``k`` parts."""
        known = [v for v in self.variants if v.base is variant.base]
        more = known or self._ways.loops(variant)
        if not known:
            self.variants = ordered([*self.variants, *more])
            self._starts += more[-1:]
        found = cheapest(more, budget, least=least)
        if found[1].predicted.device > budget:
            if k not in self._parts:
                self._parts[k] = self._ways.bodies(variant, self._in_parts).anew()
            found = self._fitted(self._parts[k], found, budget)
        return found

    def between(self, fewer: int, more: int) -> list[int]:
        """The numbers of parts between two."""
        return [k for k in self._ways.chunks.parts if fewer < k < more]

    def in_parts(self, k: int, budget: Bytes) -> tuple[Variant, Plan] | None:
        """The cheapest plan in ``k`` parts; None if that is impossible."""
        variant = self._ways.chunks.at(k)
        return self._in(k, variant, budget, least=True) if variant is not None else None

    def readily(self, budget: Bytes) -> tuple[Variant, Plan]:
        """The cheapest present variant that fits, else the smallest; nothing more is tried."""
        return cheapest(self.variants, budget)

    def _about(self, smallest: tuple[Variant, Plan]) -> tuple[Variant, Plan]:
        """The cheapest plan of about as many bytes: compilers rarely reward saving the last ones."""
        about = int(ABOUT * smallest[1].predicted.device)
        found = cheapest(self.variants, about, least=False)
        return found if found[1].predicted.device <= about else smallest

    def smallest(self) -> tuple[Variant, Plan]:
        """The smallest plan if nothing fits, independent of earlier calls."""
        return self.anew().cheapest(0)

    def anew(self) -> Candidates:
        """The same candidates, fresh."""
        return Candidates(self.written, self._others, self._ways, parts=self._in_parts)

    def with_parts(self) -> Candidates:
        """The same candidates and work in parts, fresh."""
        return Candidates(self.written, self._others, self._ways, parts=True)

    @property
    def _shallow(self) -> list[Variant]:
        return [v for v in self.variants if not v.deep]

    def at_hand(self, budget: Bytes) -> bool:
        """Whether a present variant has a plan within ``budget`` that is found without looking for the least."""
        return cheapest(self.variants, budget, least=False)[1].predicted.device <= budget

    def has_shallow(self, budget: Bytes) -> bool:
        """Whether a plan that leaves bodies and loop depth as they are is within ``budget``."""
        return cheapest(self._shallow, budget, least=False)[1].predicted.device <= budget

    def shallow(self) -> tuple[Variant, Plan]:
        """The smallest plan that leaves bodies and loop depth as they are.

        The model knows these programs best. Predicted over the budget, they may still fit, and changed bodies may need
        more.
        """
        plain = self._shallow
        return cheapest(plain, int(ABOUT * cheapest(plain, 0)[1].predicted.device))

    @property
    def early(self) -> bool:
        """Whether updates are moved behind their gradients."""
        return self._ways.early is not None

    def without_early_updates(self) -> list[Candidates]:
        """Fresh candidates with updates where they were written; none if they are."""
        return [Candidates(self.written, self._others, self._ways.without_early_updates)] if self.early else []

    def forget_early_updates(self) -> None:
        """From now on leave updates where they were written."""
        self._begin(self._ways.without_early_updates)

    def forget_host(self) -> None:
        """From now on plan by recomputation alone."""
        if not self.written.request.host_budget:
            return  # as ever
        self.variants = without_host(self.variants)
        self._ways = self._ways.without_host
        self._more = self._ways.more[len(self._ways.more) - len(self._more) :]
        self._others = without_host([*self._others])
        self._starts, self._bodies, self._parts = without_host(self._starts), [], {}


def _first(found: Sequence[Variant]) -> Variant | None:
    return found[0] if found else None
