"""The pipeline: from a function, its arguments and a budget to a function that fits and its report.

    trace → Graph → costs → (does it fit as it is?) → possible at all? → solve → check
          → rewrite → compile → XLA's number; on a miss feed it back and solve again.

If the user's own checkpoints recompute more than the budget needs, the program without them is tried first. Only a
measured number flows back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from jaxtensile import _compat
from jaxtensile.clock import Watch, nothing
from jaxtensile.collecting import seldom
from jaxtensile.errors import VerifyError
from jaxtensile.ir.plan import Prepare
from jaxtensile.planner.build_report import unplanned, without_plan
from jaxtensile.planner.by_rules import fitted
from jaxtensile.planner.page import Page, opened, undone_of
from jaxtensile.planner.plan_cache import Entry, Plans
from jaxtensile.planner.recall import replayed
from jaxtensile.program.trace import traced_within, with_rules_of
from jaxtensile.program.upperbound import all_values
from jaxtensile.rewrites.rows.batched import batched
from jaxtensile.search.request import Fitted, Request
from jaxtensile.units import Bytes
from jaxtensile.xla.compilers import compiler_of


@seldom()
def fit(
    request: Request,
    prepare: Prepare | None = None,
    watch: Watch = nothing,
    *,
    baseline: bool = False,
    plans: Plans | None = None,
    aim: Bytes | None = None,
) -> Fitted:
    """Fit one request.

    ``prepare``: the solver; None: the request's own. ``baseline``: compile the plain program even if it surely does not
    fit. ``plans``: plans of earlier processes; this one is kept there too. ``aim``: model bytes assumed to fit; the
    first plan that does is taken, as somebody waits for it.

    A part that fails by a fault of ours is left out. If all fails, the result is the program as written, or
    ``PlanningError``.
    """
    with request.faults.telling(request.name, _compat.function_source(request.jaxpr)), _as_compiled(request):
        return request.faults.without(
            lambda: _fit(request, prepare, watch, baseline, plans, aim), lambda error: without_plan(request, error)
        )


def _fit(
    request: Request, prepare: Prepare | None, watch: Watch, baseline: bool, plans: Plans | None, aim: Bytes | None
) -> Fitted:
    if all_values(request.jaxpr) is None:
        note = "its sizes are symbolic, or of a type that does not say them: it is passed on as it is"
        told = unplanned(request, (note,))
        return Fitted(jitted=request.make(None, request.options), evaluate=None, options=request.options, report=told)
    try:
        undivided = None
        if request.sizes is not None and not baseline and aim is None:
            undivided = opened(replace(request, sizes=None), watch, prepare)
            if _fits_as_it_is(undivided):
                return undivided.unchanged()
        return fitted(request, watch, prepare, baseline, plans, aim, undivided)
    finally:
        batched.cache_clear()  # equations, whose constants may be arrays on a device


@contextmanager
def _as_compiled(request: Request) -> Iterator[None]:
    """In here programs are traced as for the request's device."""
    with traced_within(request.within), with_rules_of(compiler_of(request.device).planned):
        yield


def _fits_as_it_is(page: Page) -> bool:
    """Whether a program that XLA divides among devices fits, and has no checkpoints to undo: then nobody needs to know
    its sizes on one device. ``page``: without them."""
    request = page.request
    if page.program.predicted.device > request.shards * request.budget:
        return False  # not even in equal parts
    return undone_of(request, page.program.traced) is None and page.compiles.own().device <= request.budget


@seldom()
def follow(request: Request, entry: Entry | None, watch: Watch = nothing, *, baseline: bool = False) -> Fitted:
    """The program that another process planned for the same request.

    ``entry``: its plan; None: the user's function as it is. Nothing is decided here. Raises ``Unlike`` or
    ``VerifyError`` if the plan does not match this request, ``BudgetError`` if it is larger here.
    """
    with _as_compiled(request):
        return _follow(request, entry, watch, baseline)


def _follow(request: Request, entry: Entry | None, watch: Watch, baseline: bool) -> Fitted:
    if entry is None:
        request = request if baseline else replace(request, sizes=None)  # as where it was found to fit
        page = opened(request, watch)
        page.within(page.compiles.own())
        return page.unchanged()
    page = opened(request, watch, baseline=baseline)
    variant, plan, program = replayed(page, entry.recipe)
    made = page.compiles.again(variant, plan, entry.choice, only=True)
    if made is None:
        raise VerifyError(f"XLA refuses to compile the plan of {request.name} here")
    page.within(made.compiled)
    return page.planned(made, program.bound, 1)


__all__ = ["fit", "follow"]
