"""The program without the user's own ``jax.checkpoint``s, if it has some and may fit."""

from __future__ import annotations

from functools import cache

from jaxtensile.ir.plan import Plan
from jaxtensile.planner.contest import contest
from jaxtensile.planner.page import Page
from jaxtensile.rewrites.undo import Undone
from jaxtensile.search import variants
from jaxtensile.search.candidates import Candidates
from jaxtensile.search.modelled import Modelled
from jaxtensile.search.request import Fitted
from jaxtensile.search.variant import UNDONE, Variant


def without_checkpoints(page: Page) -> Fitted | None:
    """The cheapest program that fits, with or without the user's checkpoints; None if none was found."""
    if page.without is None:
        return None
    with page.request.faults.of(UNDONE):
        return _planned(page, *page.without)


def _planned(page: Page, undone: Undone, lighter: Modelled) -> Fitted | None:
    request = page.request
    costs = page.costs()
    with page.clock("costs"):
        start = page.lighter = variants.undone(request, undone, costs, page.prepare)

    @cache
    def ahead() -> tuple[Candidates, tuple[Variant, Plan]]:
        candidates = page.candidates(start, [page.written()])
        return candidates, page.cheapest(candidates)

    if page.may_fit(lighter):
        meanwhile = ahead if lighter.predicted.device > request.budget else None
        if not undone.barriers and not request.state:
            # Nothing keeps XLA from merging what they recompute: it does so in the user's own function.
            if page.compiles.merged(meanwhile).device <= request.budget:
                return page.unchanged()
        else:
            made = page.compiles.unplanned(start, meanwhile)
            if made.fits:
                return page.planned(made, lighter.bound, 0)
    candidates, first = ahead()
    rounds = page.rounds
    best, count = contest(page, candidates, first, hopeless=rounds.all_hopeless(candidates, first))
    if best is None or not best.fits:
        return None
    return page.fitted(best, lighter.bound, count)
