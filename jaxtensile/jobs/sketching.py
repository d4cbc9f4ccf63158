"""Plans by the model alone, for a ladder: what each needs, and how long a step takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from jaxtensile import _compat
from jaxtensile.ir.plan import MemoryUse, Prepare
from jaxtensile.planner.build_report import without_plan
from jaxtensile.planner.collecting import seldom
from jaxtensile.planner.page import opened
from jaxtensile.search.request import Request
from jaxtensile.search.variant import step_time
from jaxtensile.units import TIB, Bytes, Seconds

LOWEST: Final = 0.343
"""Share of the bytes of the program as it is that the smallest sketch is to need. A guess: 0.7 from each of four to the
next."""


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """A plan by the model alone: what it needs, and how long a step takes."""

    use: MemoryUse
    seconds: Seconds
    aim: Bytes
    """Asked for so many bytes, the model finds it again."""


@seldom()
def sketches(request: Request, count: int, solver: Prepare | None = None) -> tuple[Sketch, ...]:
    """Up to ``count`` plans, the largest of them the program with nothing recomputed; nothing is compiled. Asked for
    the ``aim`` of one of them, ``solver`` knows it.

    Ascending in bytes, each shorter than those below it. The request's budget plays no part, and nothing is tried that
    is only worth its time once nothing else fits: smaller plans may be found by ``fit``. Where all planning fails by a
    fault of ours, it is the program as written, compiled.
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
            found.append(Sketch(use=use, seconds=seconds, aim=max(aim, use.device)))
        if plan.predicted.device > aim:
            break
    return tuple(reversed(found))
