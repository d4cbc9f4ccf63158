"""Plans by the model alone, for a ladder, with bytes and step times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from jaxtensile import _compat
from jaxtensile.collecting import seldom
from jaxtensile.ir.plan import MemoryUse, Prepare
from jaxtensile.planner.build_report import without_plan
from jaxtensile.planner.page import opened
from jaxtensile.search.request import Request
from jaxtensile.search.variant import step_time
from jaxtensile.units import TIB, Bytes, Seconds

LOWEST: Final = 0.343
"""Bytes of the smallest sketch, as a share of the program as it is. A guess: 0.7 from each of four to the next."""


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """A plan by the model alone: its memory and its step's seconds."""

    use: MemoryUse
    seconds: Seconds
    aim: Bytes
    """Bytes for which the model finds this plan again."""
    copied: Bytes = 0
    """Bytes that a step copies each way."""
    wait: Seconds = 0.0
    """Seconds of the step in which it waits for them."""


@seldom()
def sketches(request: Request, count: int, solver: Prepare | None = None) -> tuple[Sketch, ...]:
    """Up to ``count`` plans, without a compile; the largest is the program with nothing recomputed.

    Ascending in bytes; each is faster than those below it. Given a sketch's ``aim``, ``solver`` knows its plan. The
    request's budget plays no part. Last-resort rewrites are not tried, so ``fit`` may find smaller plans. If all
    planning fails by a fault of ours, the one sketch is the program as written, compiled.
    """
    with request.faults.telling(request.name, _compat.function_source(request.jaxpr)):
        return request.faults.without(lambda: _sketches(request, count, solver), lambda _: (_as_compiled(request),))


def _as_compiled(request: Request) -> Sketch:
    use = without_plan(replace(request, budget=TIB)).report.compiled
    return Sketch(use=use, seconds=0.0, aim=use.device)


def _sketches(request: Request, count: int, solver: Prepare | None) -> tuple[Sketch, ...]:
    page = opened(replace(request, budget=TIB), prepare=solver)
    start, program = page.lightest()
    written = page.written()
    candidates = page.candidates(start, [written] if start is not written else [])
    top = program.predicted.device
    found: list[Sketch] = []

    bottom = max(page.program.bound.nbytes, 1)
    step = max(bottom / top, LOWEST) ** (1 / max(count - 1, 1))
    for k in range(count):
        aim = int(top * step**k)
        with page.clock("solve"):
            variant, plan = candidates.readily(aim)
        use, seconds = plan.predicted, step_time(variant, plan).at()
        if not found or (use.device < found[-1].use.device and seconds > found[-1].seconds):
            wait = plan.wait + sum(loop.wait for loop in variant.loops)
            found.append(
                Sketch(use=use, seconds=seconds, aim=max(aim, use.device), copied=plan.offload_bytes, wait=wait)
            )
        if plan.predicted.device > aim:
            break
    return tuple(reversed(found))
