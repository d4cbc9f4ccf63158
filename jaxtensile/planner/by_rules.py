"""A plan by the fusion rules of the target's own compiler, where these are not those of a GPU.

Plans are made by the rules of an H200 (``Compiler.planned``), and XLA's bytes are fed back. A CPU stores other values.
Of 36 first plans for a CPU its own rules were 11 % off on average, those of an H200 21 %, but for twelve the second
were nearer. So its own are tried first, and believed as long as XLA needs about what they said
(docs/decisions/2026-11-30-rules.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

from jaxtensile.clock import Clock, Watch
from jaxtensile.errors import BudgetError
from jaxtensile.ir.fuser import H200, Fuser
from jaxtensile.ir.ir import fused_by
from jaxtensile.ir.plan import Prepare
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.planner.as_written import as_written, planned_as_written
from jaxtensile.planner.build_report import cannot
from jaxtensile.planner.page import CACHE, Page, opened
from jaxtensile.planner.plan_cache import Plans, key_of
from jaxtensile.planner.recall import recalled, remember, remembered
from jaxtensile.planner.trial_compiles import TrialCompiles
from jaxtensile.planner.without_checkpoints import without_checkpoints
from jaxtensile.program.trace import with_rules_of
from jaxtensile.search.made import Made
from jaxtensile.search.modelled import Modelled
from jaxtensile.search.request import Fitted, Request
from jaxtensile.switches import on
from jaxtensile.units import Bytes
from jaxtensile.xla.compilers import compiler_of

Opening: TypeAlias = Callable[[Request], Page]
"""Opens the page of a request."""

DOUBTED: Final = 1.1
"""Times the prediction at which these rules are given up. A guess."""
NEARER: Final = 1.25
"""These rules are kept if an H200's miss the plain program by so much more. A guess."""
ROOMY: Final = 0.9
"""Share of the prediction below which a plan may do too much. A guess."""


def fitted(
    request: Request,
    watch: Watch,
    prepare: Prepare | None,
    baseline: bool,
    plans: Plans | None,
    aim: Bytes | None,
    earlier: Page | None,
) -> Fitted:
    """The program of a request, as it is or planned. Raises ``BudgetError`` if it cannot fit.

    The arguments are those of ``pipeline.fit``. ``earlier``: a page of the same program that comes before.
    """
    # One clock: what was given up took its time, too.
    clock = Clock(watch) if earlier is None else earlier.clock
    page_of = partial(opened, prepare=prepare, baseline=baseline, clock=clock)
    found = _fitted(page_of, request, plans, aim, earlier)
    if found.report.compiled.device <= request.budget:
        return found
    # A trial had fewer bytes than the same program compiled in full, which was never seen.
    return _fitted(page_of, replace(request, in_full=True), plans, aim, None)


def _fitted(page_of: Opening, request: Request, plans: Plans | None, aim: Bytes | None, earlier: Page | None) -> Fitted:
    own, first, held = None, None, None
    rules = _own_rules(request) if aim is None else None
    if rules is not None:
        own, first, sure = _by_own_rules(page_of, request, rules, plans)
        if first is not None and sure:
            return first
        if first is None and _miss(own.compiles, own.program) > 1:
            held = _held_on_to(own, rules)
            if isinstance(held, Fitted):
                return held
        earlier = own
    page = page_of(request)
    page.aim = aim
    if earlier is not None:
        page.follows(earlier)

    def by_the_others() -> Fitted:
        return (
            request.faults.spared(CACHE, lambda: recalled(page, plans), lambda: None)
            or without_checkpoints(page)
            or as_written(page)
        )

    try:
        others = by_the_others()
    except BudgetError as error:
        if first is None:
            if own is None or rules is None:
                raise
            own.compiles.plain = own.compiles.plain or page.compiles.plain
            if held is None and _miss(own.compiles, own.program) > 1:
                held = _held_on_to(own, rules)
                if isinstance(held, Fitted):
                    return held
            if held is not None and held.needs is not None and error.needs is not None:
                raise (held if held.needs < error.needs else error) from None
            named = _named_by(own, rules, error.needs)
            if named is None:
                raise
            raise named from None
        others = first
    if own is None or first is None:
        return others
    best = _quicker(first, others)
    if best is first and own.made is not None:
        own.keep(own.made, request.budget)  # later processes find it before the other
    return best


def _own_rules(request: Request) -> Fuser | None:
    """The rules to try first; None: those of an H200 are about its compiler's, or it is one of several devices."""
    fuser = compiler_of(request.device).fuser
    return fuser if fuser.twice != H200.twice and request.shards == 1 and on("own_rules") else None


def _by_own_rules(
    page_of: Opening, request: Request, rules: Fuser, plans: Plans | None
) -> tuple[Page, Fitted | None, bool]:
    """The page, what was found to fit, and whether to look no further."""
    with with_rules_of(rules):
        page = page_of(request)
        found = request.faults.spared(CACHE, lambda: recalled(page, plans), lambda: None)
        if found is not None:
            return page, found, True
        if request.faults.spared(CACHE, lambda: _ended_with_the_others(page, plans), lambda: False):
            return page, None, False
        if page.program.predicted.device > request.budget and not _at_hand(page):
            return page, None, False
        page.keeps, page.rounds.doubts = _used_up, partial(_doubted, page.compiles, page.program)
        found = without_checkpoints(page)
        if found is None and not page.rounds.doubted:
            found = planned_as_written(page)
        return page, found, page.made is None or _used_up(page.made)


def _held_on_to(own: Page, rules: Fuser) -> Fitted | BudgetError:
    """The program by ``rules`` alone, with the last resorts, or what they say would fit."""
    with with_rules_of(rules):
        own.rounds.trust()
        own.keeps = lambda _: True
        try:
            return without_checkpoints(own) or as_written(own)
        except BudgetError as error:
            return error


def _ended_with_the_others(page: Page, plans: Plans | None) -> bool:
    """Whether an earlier search for the same ended with a plan by the rules of an H200."""
    request, graph = page.request, fused_by(page.program.traced.graph, H200)
    named = remembered(request, graph)
    if named is not None and named[0] == request.budget:
        return True
    return plans is not None and plans.find(key_of(request, graph)) is not None


def _at_hand(page: Page) -> bool:
    """Whether these rules find a plan soon. What needs the last resorts is searched for once, by those of an H200."""
    start, program = page.lightest()
    if page.may_fit(program):
        return True
    return page.rounds.at_hand(page.candidates(start, [page.written()] if page.without else []), page.request.budget)


def _named_by(own: Page, rules: Fuser, needs: Bytes | None) -> BudgetError | None:
    """The error that names the smallest program found by a target's own rules, if it ``needs`` fewer bytes than what
    the others found; it is found again."""
    nearest = own.compiles.nearest()
    if nearest is None or needs is None or nearest.compiled.device >= needs:
        return None
    with with_rules_of(rules), own.clock("solve"):
        remember(own, nearest)
        start = own.lightest()[0]
        return cannot(own.request, own.candidates(start), own.bound(), nearest, own.scale)


def _quicker(first: Fitted, second: Fitted) -> Fitted:
    """Of two that fit, the one that adds less to a step."""
    return second if second.report.unchanged or second.report.overhead < first.report.overhead else first


def _doubted(compiles: TrialCompiles, program: Modelled, made: Made) -> bool:
    """Whether XLA needs so much for a plan that these rules are not those by which it fuses this program."""
    return made.compiled.device > DOUBTED * _miss(compiles, program) * made.plan.predicted.device


def _miss(compiles: TrialCompiles, program: Modelled) -> float:
    """XLA's bytes for the plain program, as a multiple of what these rules say, if those of an H200 miss by more; else
    1."""
    plain = compiles.plain
    if plain is None or plain.memory is None:
        return 1.0
    theirs = live_ranges(fused_by(program.traced.graph, H200), together=True).use().device
    own, other = (plain.device / max(nbytes, 1) for nbytes in (program.predicted.device, theirs))
    return own if 1 < own < other / NEARER else 1.0


def _used_up(made: Made) -> bool:
    """Whether a plan needs about as many bytes as were predicted: with far fewer it does too much."""
    return made.compiled.device >= ROOMY * made.plan.predicted.device
