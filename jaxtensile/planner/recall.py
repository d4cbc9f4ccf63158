"""Known plans: of earlier processes, and those that errors named. Each is compiled anew.

An error names the bytes of the smallest program found. A budget of exactly those bytes gets that program, without a
search.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Final

from jaxtensile.errors import VerifyError
from jaxtensile.ir.ir import Graph
from jaxtensile.ir.plan import Plan
from jaxtensile.passes.verify.check import check
from jaxtensile.planner.page import Page
from jaxtensile.planner.plan_cache import Entry, Plans, key_of
from jaxtensile.search.made import Made
from jaxtensile.search.modelled import Modelled
from jaxtensile.search.recipe import Recipe, Unlike, replay
from jaxtensile.search.request import Fitted, Request
from jaxtensile.search.variant import Variant
from jaxtensile.units import Bytes

MOST: Final = 256
"""Programs remembered, the last asked for. A bound on memory alone."""
_FOUND: OrderedDict[str, tuple[Bytes, Entry]] = OrderedDict()
_LOCK = threading.Lock()


def remember(page: Page, made: Made) -> None:
    """Remember a program that an error names, and keep it for later processes, by the bytes that it needs."""
    needs, entry = made.compiled.device, page.entry(made)
    with _LOCK:
        _FOUND[_key(page.request, page.program.traced.graph)] = needs, entry
        while len(_FOUND) > MOST:
            _FOUND.popitem(last=False)
    page.keep(made, needs)


def remembered(request: Request, graph: Graph) -> tuple[Bytes, Entry] | None:
    """The smallest known program of a request at any budget, and its bytes. None across several devices: their
    processes must find the same."""
    if request.shards > 1:
        return None
    key = _key(request, graph)
    with _LOCK:
        if key in _FOUND:
            _FOUND.move_to_end(key)
        return _FOUND.get(key)


def forget() -> None:
    """Forget all programs."""
    with _LOCK:
        _FOUND.clear()


def _key(request: Request, graph: Graph) -> str:
    return key_of(replace(request, budget=0), graph)


def recalled(page: Page, plans: Plans | None) -> Fitted | None:
    """A plan made before for the same question, or named by an error for this budget; None if none fits here."""
    smallest = remembered(page.request, page.program.traced.graph)
    if smallest is not None and smallest[0] == page.request.budget:
        fitted = again(page, smallest[1])
        if fitted is not None:
            return fitted
    if plans is None:
        return None
    with page.clock("recall"):
        found = plans.find(key_of(page.request, page.program.traced.graph, page.aim))
    notes, page.plans = page.notes, plans
    if found is None:
        return None
    page.notes = (*notes, f"the plan of an earlier process, from {plans.folder}")
    fitted = again(page, found, plans)
    if fitted is None:
        page.notes = notes
    return fitted


def named_by_an_error(page: Page) -> Fitted | None:
    """The program that an error named, if the search for a larger budget found none as small."""
    found = remembered(page.request, page.program.traced.graph)
    if found is None or found[0] > page.request.budget:
        return None
    return again(page, found[1])


def again(page: Page, entry: Entry, plans: Plans | None = None) -> Fitted | None:
    """The program of an entry, from ``plans`` if given; None if it does not fit here."""
    with page.clock("recall"):
        try:
            variant, plan, program = replayed(page, entry.recipe)
        except (Unlike, VerifyError) as error:
            return plans.pass_over(entry.key, str(error)) if plans is not None else None
    made = page.compiles.again(variant, plan, entry.choice)
    if made is None or made.misplaced or not made.fits:
        return None
    page.plans = None  # it is there
    return page.fitted(made, program.bound, 1)


def replayed(page: Page, recipe: Recipe) -> tuple[Variant, Plan, Modelled]:
    """The variant and checked plan of a recipe, and the program it starts from.

    Raises ``Unlike`` or ``VerifyError`` if the recipe does not match this request.
    """
    start, program = page.lightest() if recipe.undone else (page.written(), page.program)
    variant, plan = replay(recipe, start)
    check(variant.problem.graph, plan.program)
    return variant, plan, program
