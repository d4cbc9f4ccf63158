"""A contest of plans for the shortest step, decided by the kernels that XLA made of them.

Work in parts is a rival where it may be much shorter, or nothing else fits. The model's seconds err most where XLA
fuses a recomputed value into other kernels than the model thinks, and for copies to the host, which hide behind work or
delay it; the price of products is sure. So the plan that is the shortest by the model has two more rivals: without
copies to the host, if it has some, and with products spared first. That took 2 to 3 % of a step less for GPT-2, BERT
and ViT in 60 to 70 % of their bytes (H100, by ``xla/kernel_time``).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

from jaxtensile.devices.profiles import WEIGHTS
from jaxtensile.ir.plan import Plan
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.planner.page import Page
from jaxtensile.planner.rounds import REPAID
from jaxtensile.planner.series import closest
from jaxtensile.search import variants
from jaxtensile.search.candidates import Candidates
from jaxtensile.search.made import Made
from jaxtensile.search.request import Request
from jaxtensile.search.variant import Variant, charge_of, program_key
from jaxtensile.switches import on
from jaxtensile.units import Seconds

Found: TypeAlias = tuple[Variant, Plan]

SHORTER: Final = 0.02
"""Share of the step that work in parts has to save, because it rounds sums differently. A guess."""
CERTAIN: Final = 2.0
"""Times what work in parts adds: recomputation that adds more is not compiled first. A guess."""
PRODUCTS: Final = "the plan that spares products first"
COPIES: Final = "the plan without copies to the host"
WORTH: Final = 0.02
"""Share of a step: a plan that adds less has no rival, whose compile it would not pay. A guess."""
MOST: Final = 2
"""After more compiled plans there is none, so that a call takes no more compiles than it would. A guess."""


def contest(page: Page, candidates: Candidates, first: Found | None, *, hopeless: bool) -> tuple[Made | None, int]:
    """The quickest plan that fits, of ``candidates``, of work in parts and of rivals, else the smallest; and the number
    compiled.

    ``candidates`` work without parts, ``first`` is the cheapest of them. ``hopeless``: they are far too large, and none
    is compiled.
    """
    best, count = _with_and_without_parts(page, candidates, first, hopeless)
    best, more = _or_a_rival(page, best, count)
    return best, count + more


def _with_and_without_parts(
    page: Page, candidates: Candidates, first: Found | None, hopeless: bool
) -> tuple[Made | None, int]:
    """The quickest of both kinds, and the number compiled.

    The model decides what is worth a compile. Compiled kernels, if known, decide which step is shorter; else the model,
    and what it finds longer is compiled only if the other misses.
    """
    rounds, anew = page.rounds, candidates.anew()
    fits = first if first is not None and first[1].predicted.device <= page.goal and not hopeless else None
    rival = _in_parts(page, anew, fits) if fits is not None else None
    if fits is not None and rival is not None and (not page.compiles.kernels_known or _is_beyond_doubt(fits, rival[1])):
        parts, count = closest(rounds, *rival)
        if parts is not None and parts.fits and _saved(fits, _as_found(parts)) > _worth(anew):
            return parts, count
        beat = charge_of(*_as_found(parts)) + _worth(anew) if parts is not None and parts.fits else math.inf
        best, more = closest(rounds, candidates, first, beat=beat)
        return _quicker(anew, best, parts), count + more
    best, count = (None, 0) if hopeless else closest(rounds, candidates, first, beat=math.inf if rival is None else 0.0)
    lifted = rival is None
    if rounds.doubted:
        return best, count
    if rival is None:
        fits = _as_found(best) if best is not None and best.fits else None
        rival = _in_parts(page, anew, fits, compiled=True, missed=best if fits is None else None)
    if rival is None:
        return best, count
    parts, more = closest(rounds, *rival)
    quicker, count = _quicker(anew, best, parts), count + more
    if quicker is None or quicker is not best or lifted or not quicker.fits:
        return quicker, count
    quicker, more = rounds.lifted(candidates, quicker, None, 1)
    return quicker, count + more


def _is_beyond_doubt(fits: Found, rival: Found) -> bool:
    """Whether work in parts adds so much less that compiled kernels need not be asked."""
    return CERTAIN * charge_of(*rival) <= charge_of(*fits)


def _worth(candidates: Candidates) -> Seconds:
    return max(SHORTER * sum(candidates.written.whole.charge), REPAID)


def _saved(before: Found, now: Found) -> Seconds:
    return charge_of(*before) - charge_of(*now)


def _as_found(made: Made) -> Found:
    return made.variant, made.plan


def _in_parts(
    page: Page, candidates: Candidates, fits: Found | None, *, compiled: bool = False, missed: Made | None = None
) -> tuple[Candidates, Found] | None:
    """Work in parts, if the model finds it shorter than ``fits``, or if nothing fits; else None.

    ``compiled``: ``fits`` is a compiled plan. ``missed``: a compiled plan, if none fits.
    """
    worth = _worth(candidates)
    if not page.request.decides_on_parts or (fits is not None and charge_of(*fits) < worth):
        return None
    ours = candidates.with_parts()
    found = page.cheapest(ours)
    if not found[0].works_in_parts and compiled and fits is not None and fits[1].predicted.device < page.goal:
        # Recomputation that the model takes to fit may have missed: compared are plans for as many bytes as did fit.
        found = page.rounds.cheapest(ours.anew(), fits[1].predicted.device)
    if not found[0].works_in_parts and missed is not None and missed.compiled.memory is not None:
        # The model takes recomputation to fit that does not: parts are asked for by what it missed.
        over = max(missed.compiled.device - page.request.budget, 0)
        found = page.rounds.cheapest(ours.anew(), max(min(page.goal, missed.plan.predicted.device) - over, 1))
    # Compiled kernels have the last word: then anything shorter is worth a compile.
    least = 0.0 if page.compiles.kernels_known else worth
    if not found[0].works_in_parts or (fits is not None and _saved(fits, found) <= least):
        return None
    return ours, found


def _quicker(candidates: Candidates, best: Made | None, parts: Made | None) -> Made | None:
    """``parts`` if it is enough shorter than ``best``, or the only one that fits."""
    fits = best if best is not None and best.fits else None
    if parts is None or not parts.fits or not parts.variant.works_in_parts:
        return fits or parts or best
    if fits is None:
        return parts
    before, now = fits.compiled.time, parts.compiled.time
    if before is not None and now is not None:
        return parts if now.seconds <= (1 - SHORTER) * before.seconds else fits
    return parts if _saved(_as_found(fits), _as_found(parts)) > _worth(candidates) else fits


def _or_a_rival(page: Page, best: Made | None, count: int) -> tuple[Made | None, int]:
    """The quickest of ``best`` and plans for as many bytes that the model finds longer; and the number compiled.

    Only where kernels are known and the step is to be short; not for work in parts, whose kernels were compared.
    """
    if best is None or not _is_open(page, best, count):
        return best, 0
    compiled = 0
    for name, weight in ((COPIES, page.request.device.traffic_weight), (PRODUCTS, WEIGHTS["flops"])):
        hosted = best.plan.offload_bytes > page.request.state_bytes
        if name == COPIES and not hosted:
            continue
        with page.request.faults.of(name):
            request = replace(page.request, device=replace(page.request.device, traffic_weight=weight))
            make = partial(_rival, page, best, request, hosted and name != COPIES)
            rival = page.request.faults.spared(name, make, lambda: None)
            if rival is None:
                continue
            made, compiled = page.compiles.planned(*rival), compiled + 1
        before, now = best.compiled.time, made and made.compiled.time
        if made is None or not made.fits or made.misplaced or before is None or now is None:
            continue
        if now.seconds < before.seconds:
            best = made
    return best, compiled


def _is_open(page: Page, best: Made, count: int) -> bool:
    """Whether ``best`` is worth a rival."""
    if page.request.device.traffic_weight < 1 or page.aim is not None or not on("contest"):
        return False
    if (
        not best.fits
        or best.evaluate is None
        or best.compiled.time is None
        or best.variant.works_in_parts
        or count > MOST
    ):
        return False
    return best.variant.seconds + best.plan.overhead > max(WORTH * sum(page.costs().seconds), REPAID)


def _rival(page: Page, best: Made, request: Request, host: bool) -> tuple[Variant, Plan] | None:
    """The plan of ``request``, with or without copies, for the bytes by the model that fitted; None for ``best``."""
    aim, undone = min(best.plan.predicted.device, page.request.budget), best.variant.undone
    with page.clock("solve"):
        traced = page.program.traced
        costs = op_costs(traced.graph, request.device)
        start = variants.written(request, traced, costs, page.prepare)
        others: list[Variant] = []
        if undone is not None:
            start, others = variants.undone(request, undone, costs, page.prepare), [start]
        candidates = Candidates(start, others)
        if not host:
            candidates.forget_host()
        variant, plan = candidates.cheapest(aim)
        plan = variant.finished(plan, aim)
    fits = plan.predicted.device <= aim and not (plan.changes_nothing and variant.as_it_is)
    same = program_key(variant, plan) == program_key(best.variant, best.plan)
    return (variant, plan) if fits and not same else None
