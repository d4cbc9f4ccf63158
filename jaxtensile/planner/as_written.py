"""The program as the user wrote it: unchanged if it fits, else planned, else the error that says what would fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Final

from jaxtensile.ir.plan import Plan
from jaxtensile.passes.recompute.lowerbound import Bound
from jaxtensile.planner.build_report import cannot
from jaxtensile.planner.contest import contest
from jaxtensile.planner.page import Page
from jaxtensile.planner.recall import named_by_an_error, remember
from jaxtensile.planner.smallest import Smallest
from jaxtensile.search.candidates import Candidates
from jaxtensile.search.made import Made
from jaxtensile.search.request import Fitted
from jaxtensile.search.variant import Variant
from jaxtensile.switches import on
from jaxtensile.xla.compile import RECOMPUTES

XLA: Final = "what XLA recomputes"
CHEAP: Final = 0.01
"""Share of a step: cheaper plans are not compared with XLA's own recomputation, which costs another compile. A guess.
"""
SAVES: Final = 0.9
"""Share of the plain program's predicted bytes. A program with its state on the host that needs more is compared with
the plain one. A guess."""
LARGE: Final = 8
"""Times the device's memory up to which the plain program is compiled for an error to name. Beyond, XLA:CPU once ended
the process. The number is a guess."""
TIGHT: Final = 2.0
"""Budgets below this multiple of the lower bound may be hopeless. A guess."""


def as_written(page: Page) -> Fitted:
    """The user's program, as it is or planned. Raises ``BudgetError`` if it cannot fit."""
    fitted = planned_as_written(page, thorough=True)
    assert fitted is not None
    return fitted


def planned_as_written(page: Page, *, thorough: bool = False) -> Fitted | None:
    """The same; if not ``thorough``, None where the first series of rounds finds nothing that fits."""
    request, bound = page.request, page.bound()
    possible = not request.sized or bound.nbytes <= request.budget

    @cache
    def ahead() -> tuple[Candidates, tuple[Variant, Plan] | None]:
        candidates = page.candidates(page.written())
        first = page.cheapest(candidates) if possible and request.shards == 1 else None
        return candidates, first

    fits = _as_it_is(page, bound, ahead)
    if fits is not None:
        return fits
    candidates, first = ahead()
    # The smallest of all is looked for among work in parts too.
    every = candidates.with_parts() if request.decides_on_parts else candidates
    # Below the bound before any search: no plan can need less than what single ops need at once.
    best, count = None, 0
    if possible:
        rounds = page.rounds
        start = page.written()
        lighter, others = page.lighter or start, [start] if page.lighter else []

        def both() -> Candidates:
            found = page.candidates(lighter, others)
            return found.with_parts() if request.decides_on_parts else found

        hopeless = first is not None and on("glance") and rounds.all_hopeless(candidates, first)
        if hopeless and not thorough:
            return None
        if hopeless and (not request.decides_on_parts or rounds.all_hopeless(every, page.cheapest(every.anew()))):
            best, count = Smallest(rounds).glance(both())
        if best is None or not rounds.hopeless(best.variant, best.compiled.device):
            without = hopeless and request.decides_on_parts
            made, more = contest(page, candidates, first, hopeless=without)
            best, count = made or best, count + more
            if (best is None or not best.fits) and thorough:
                best, more = Smallest(rounds).found(both(), best)
                count += more
    if not thorough:
        return page.fitted(best, bound, count) if best is not None and best.fits else None
    best = _or_by_xla(page, best)
    if best is None or not best.fits:
        fitted = named_by_an_error(page)
        if fitted is not None:
            return fitted
        best = _smallest(page, every, best)
        if best is None or not best.fits:
            with page.clock("solve"):
                raise cannot(request, every, bound, best, page.scale)
    return page.fitted(best, bound, count)


def _as_it_is(page: Page, bound: Bound, ahead: Callable[[], object]) -> Fitted | None:
    """The program without a plan, if it fits; ``ahead``: what to do while XLA has its say."""
    request, program = page.request, page.program
    # Where nothing may be found, no program is compiled for the report alone before something is.
    tight = request.whole and request.budget < TIGHT * bound.nbytes and not page.may_fit(program)
    baseline = page.baseline and not tight
    if baseline and request.state:
        page.compiles.own()
    if request.state and page.may_fit(program):
        start = page.written()
        meanwhile = ahead if program.predicted.device > request.budget else None
        made = page.compiles.unplanned(start, meanwhile)
        if made.fits:
            return page.unchanged() if _saves_nothing(page, made) else page.planned(made, bound, 0)
    elif not request.state and (baseline or not request.whole or page.may_fit(program)):
        # By the model it does not fit: plan while XLA has its say.
        plain = page.compiles.own(ahead if program.predicted.device > request.budget else None)
        if plain.device <= request.budget:
            return page.unchanged()
    return None


def _or_by_xla(page: Page, best: Made | None) -> Made | None:
    """``best``, or the plain program with XLA's own recomputation if that fits and costs less."""
    request, plain = page.request, page.compiles.plain
    fits = best is not None and best.fits
    cost = best.variant.seconds + best.plan.overhead if best is not None and fits else math.inf
    needs = plain.device if plain is not None else page.program.plain.device
    if cost <= CHEAP * sum(page.costs().seconds) or needs <= RECOMPUTES * request.device.capacity:
        return best
    if not on("by_xla"):
        return best
    with request.faults.of(XLA):
        made = page.compiles.by_xla(page.written())
    return best if made is None or made.compiled.again.seconds >= cost else made


def _smallest(page: Page, candidates: Candidates, best: Made | None) -> Made | None:
    """The smallest compiled program, for the error to name and to be found again: planned, or the user's own if no
    larger."""
    request, rounds = page.request, page.rounds
    # What no machine holds is not for compilers either: XLA:CPU ends the process for arrays of 2**50 bytes.
    held = page.program.bound.nbytes <= request.device.capacity
    if best is None and request.sized and held:
        best, _ = Smallest(rounds).glance(candidates)
    compiles, start = page.compiles, page.written()
    if best is not None and best.compiled.memory is None:
        best = None
    nearest = compiles.nearest() if request.shards == 1 else None
    if nearest is not None and (best is None or nearest.compiled.device < best.compiled.device):
        best = nearest
    least = LARGE * request.device.capacity if best is None else best.compiled.device
    worth = held and page.program.may_fit(replace(request, budget=least))
    if not request.state and (compiles.plain is not None or worth):
        plain = compiles.own()
        if plain.memory is not None and (best is None or plain.device <= best.compiled.device):
            best = compiles.plainly(start)
    if best is not None and not best.misplaced:
        remember(page, best)
    return best


def _saves_nothing(page: Page, made: Made) -> bool:
    """Whether state on the host saves no bytes: a branch, for example, loads all of it at once."""
    needs, memory = made.compiled.device, made.compiled.memory
    if memory is None or not memory.host:
        return False  # a CPU has one memory
    if needs < SAVES * page.program.plain.device or page.compiles.own().device > needs:
        return False
    page.notes = (*page.notes, "offload_state= has no effect: with its state on the host it needs no fewer bytes")
    return True
