"""A contest of plans for the shortest step, decided by the kernels that XLA made of them.

Work in parts is a rival where it may be much shorter, or nothing else fits. The model's seconds err most where XLA
fuses a recomputed value into other kernels than the model thinks, and for copies to the host, which hide behind work or
delay it; the price of products is sure. So the plan that is the shortest by the model has two more rivals: without
copies to the host, if it has some, and with products spared first. That took 2 to 3 % of a step less for GPT-2, BERT
and ViT in 60 to 70 % of their bytes (H100, by ``xla/kernel_time``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from jaxtensile.devices.profiles import WEIGHTS
from jaxtensile.ir.plan import Plan
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.planner.page import Page
from jaxtensile.search import variants
from jaxtensile.search.candidates import Candidates
from jaxtensile.search.made import Made
from jaxtensile.search.request import Request
from jaxtensile.search.variant import Variant, charge_of, program_key
from jaxtensile.switches import on
from jaxtensile.units import Seconds

SHORTER: Final = 0.02
"""Share of the step that work in parts has to save, because it rounds sums differently. A guess."""
PRODUCTS: Final = "the plan that spares products first"
COPIES: Final = "the plan without copies to the host"
WORTH: Final = 0.02
"""Share of a step: a plan that adds less has no rival, whose compile it would not pay. A guess."""
MOST: Final = 2
"""After more compiled plans there is none, so that a call takes no more compiles than it would. A guess."""


def contest(page: Page, without: Candidates, best: Made | None, count: int) -> tuple[Made | None, int]:
    """The quickest of ``best``, which works without parts, and its rivals for as many bytes; and the number compiled.

    ``without``: fresh candidates without parts. ``count``: how many were compiled for ``best``.
    """
    best, compiled = _or_in_parts(page, without, best)
    best, more = _or_a_rival(page, best, count + compiled)
    return best, compiled + more


def _or_in_parts(page: Page, without: Candidates, best: Made | None) -> tuple[Made | None, int]:
    """``best``, which works without parts, or a plan in parts; and the number of plans compiled for it.

    The model decides what is worth a compile. Compiled kernels, if known, decide which step is shorter.
    """
    request = page.request
    if not request.decides_on_parts:
        return best, 0
    worth = SHORTER * sum(without.written.whole.charge)
    fits = best if best is not None and best.fits else None
    if fits is not None and charge_of(fits.variant, fits.plan) < worth:
        return best, 0
    candidates = without.with_parts()
    first = page.cheapest(candidates)
    if first[0].parts == 1 or (fits is not None and not _shorter(fits, charge_of(*first), worth)):
        return best, 0
    made, count = page.rounds.all(candidates, first)
    if made is None or not made.fits or made.variant.parts == 1:
        return fits or made or best, count
    if fits is None:
        return made, count
    before, now = fits.compiled.time, made.compiled.time
    if before is not None and now is not None:
        return (made if now.seconds <= (1 - SHORTER) * before.seconds else fits), count
    return (made if _shorter(fits, charge_of(made.variant, made.plan), worth) else fits), count


def _shorter(best: Made, charge: Seconds, worth: Seconds) -> bool:
    """Whether a plan of this charge beats ``best``: by more than ``worth`` on the model's word alone, by anything if
    compiled kernels are compared too."""
    least = 0.0 if best.compiled.time is not None else worth
    return charge_of(best.variant, best.plan) - charge > least


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
    if not best.fits or best.evaluate is None or best.compiled.time is None or best.variant.parts > 1 or count > MOST:
        return False
    return best.variant.seconds + best.plan.overhead > WORTH * sum(page.costs().seconds)


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
