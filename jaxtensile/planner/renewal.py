"""A new plan for a request whose rates are known better than when it was fitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jaxtensile import _compat
from jaxtensile.clock import Watch, nothing
from jaxtensile.collecting import seldom
from jaxtensile.faults import raised
from jaxtensile.ir.plan import Plan, Program
from jaxtensile.planner.page import Page, opened
from jaxtensile.planner.series import closest
from jaxtensile.program.emit import emit
from jaxtensile.search.request import Fitted, Request
from jaxtensile.search.variant import Variant, program_key, step_time
from jaxtensile.units import Seconds


@seldom()
def renew(request: Request, at_most: Seconds, unlike: int, watch: Watch = nothing) -> Fitted | None:
    """The plan under better-known rates; None if there is no better one.

    Better: a key other than ``unlike`` and at most ``at_most`` predicted seconds per step. Other plans are not
    compiled, and the user's function is not run.
    """
    with request.faults.telling(request.name, _compat.function_source(request.jaxpr)):
        return request.faults.without(lambda: _renew(request, at_most, unlike, watch), raised)


def _renew(request: Request, at_most: Seconds, unlike: int, watch: Watch) -> Fitted | None:
    page = opened(request, watch)
    as_it_is = emit(page.program.traced, Program.unchanged(page.program.traced.graph))
    make = request.make
    page.compiles.request = replace(page.request, make=lambda evaluate, options: make(evaluate or as_it_is, options))

    def worth(variant: Variant, plan: Plan) -> bool:
        return program_key(variant, plan) != unlike and step_time(variant, plan).at() <= at_most

    return _renewed(page, worth)


def _renewed(page: Page, worth: Callable[[Variant, Plan], bool]) -> Fitted | None:
    """The cheapest plan that is worth it and fits, with or without the user's checkpoints, or None."""
    written = page.written()
    start, program = page.lightest()
    others = [written] if start is not written else []
    rounds = page.rounds
    rounds.worth = worth
    best, count = closest(rounds, page.candidates(start, others), None)
    if best is None or not best.fits:
        return None
    return page.planned(best, program.bound, count)
