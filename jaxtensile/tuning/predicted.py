"""A step by the model alone: bytes and seconds as it is and planned, before anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtensile.collecting import seldom
from jaxtensile.ir.plan import Plan
from jaxtensile.planner.contest import SHORTER
from jaxtensile.planner.page import opened
from jaxtensile.rewrites.rows.batched import batched
from jaxtensile.search.request import Request
from jaxtensile.search.variant import Variant, step_time
from jaxtensile.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """``plain``, ``plain_seconds``: device bytes and seconds of a step as written. ``planned``, ``seconds``: of the
    plan for ``budget`` bytes. ``parts``: into how many parts it divides its rows."""

    plain: Bytes
    plain_seconds: Seconds
    planned: Bytes
    seconds: Seconds
    parts: int
    budget: Bytes

    @property
    def fits(self) -> bool:
        """Whether the plan is within its budget."""
        return self.planned <= self.budget


@seldom()
def predicted(request: Request, *, parts: bool = True) -> Prediction:
    """The quickest plan within the request's budget, else the smallest. Nothing is compiled.

    ``parts``: as ``chunk`` of the request says; False: work in parts, bodies of loops and the last resorts are left
    out, which takes a tenth of the time.
    """
    try:
        return _predicted(request, parts)
    finally:
        batched.cache_clear()  # as after ``pipeline.fit``


def _predicted(request: Request, parts: bool) -> Prediction:
    page = opened(request)
    start, _ = page.lightest()
    written, costs = page.written(), page.costs()
    candidates = page.candidates(start, [written] if start is not written else [])
    best = candidates.cheapest(request.budget) if parts else candidates.readily(request.budget)
    plain = sum(costs.seconds)
    if parts and page.request.decides_on_parts and not _is_quick(best, request.budget, plain):
        best = _better(best, candidates.with_parts().cheapest(request.budget), request.budget)
    variant, plan = best
    return Prediction(
        plain=page.program.plain.device,
        plain_seconds=plain,
        planned=plan.predicted.device,
        seconds=step_time(variant, plan).at(),
        parts=variant.parts,
        budget=request.budget,
    )


def _is_quick(found: tuple[Variant, Plan], budget: Bytes, plain: Seconds) -> bool:
    """Whether a plan fits, and parts could not save enough to be taken."""
    return found[1].predicted.device <= budget and (1 - SHORTER) * step_time(*found).at() <= plain


def _better(whole: tuple[Variant, Plan], parts: tuple[Variant, Plan], budget: Bytes) -> tuple[Variant, Plan]:
    """``whole``, or a plan in parts: where only that fits, or its step is much shorter; else the smaller one."""
    needs = [found[1].predicted.device for found in (whole, parts)]
    if min(needs) > budget or (needs[0] <= budget) != (needs[1] <= budget):
        return min(whole, parts, key=lambda found: found[1].predicted.device)
    shorter = step_time(*parts).at() <= (1 - SHORTER) * step_time(*whole).at()
    return parts if shorter else whole


__all__ = ["Prediction", "predicted"]
