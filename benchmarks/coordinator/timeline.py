"""What did each job do when, from its admission to its steps?

    python -m benchmarks.coordinator.first_step --jobs 6 --timeline

A line for each prediction, compile, step and word of the coordinator, when it has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from jaxtensile.errors import BudgetError
from jaxtensile.jobs.ladder import Ladder
from jaxtensile.jobs.stepping import Stepping
from jaxtensile.jobs.tenancy import Tenancy
from jaxtensile.runtime.client.client import Client
from jaxtensile.units import format_bytes

LINES: list[tuple[float, float, str]] = []
"""Begin and end, by the clock that all processes of a machine share, and what it was."""


def record() -> list[tuple[float, float, str]]:
    """``LINES``, to which every job of this process adds from now on."""
    _timed(Ladder, "sketch", lambda ladder, *_: f"predicts {_plans(ladder)}")
    _timed(Ladder, "_compile", _compiled)
    _timed(Stepping, "step", lambda steps, *_: f"step {steps.steps} of {format_bytes(steps._on.budget)}")
    _timed(Client, "heard", lambda _, __, reply: f"hears {type(reply).__name__} {getattr(reply, 'rung', '')}")
    _timed(Client, "renew", lambda _, said, admit, rung, *__: f"says {said}: rung {rung} of {_levels(admit.ladder)}")
    _timed(Tenancy, "put", lambda tenancy, *_: f"is on {format_bytes(tenancy.budget)}")
    return LINES


def merged(lines: dict[str, list[tuple[float, float, str]]]) -> str:
    """What all jobs did, in the order in which it ended: seconds since the first began."""
    zero = min(began for of_job in lines.values() for began, _, _ in of_job)
    found = sorted((end, began, job, what) for job, of_job in lines.items() for began, end, what in of_job)
    return "\n".join(f"{began - zero:7.1f} {end - zero:7.1f}  {job}  {what}" for end, began, job, what in found)


def _levels(places: Any) -> str:
    return ", ".join(format_bytes(p.level) for p in places)


def _plans(ladder: Ladder) -> str:
    return ", ".join(format_bytes(p.level) + ("*" if p.fitted else "") for p in ladder.places())


def _compiled(ladder: Ladder, found: Any, budget: int, *_: object) -> str:
    if isinstance(found, BaseException) and not isinstance(found, BudgetError):
        what = "broken off"
    else:
        needs = found.needs if isinstance(found, BudgetError) else found.report.compiled.device
        what = f"{format_bytes(needs or 0)} of {_plans(ladder)}"
    return f"compiles for {format_bytes(budget)}: {what} ({threading.current_thread().name})"


def _timed(owner: type, name: str, told: Callable[..., str]) -> None:
    call = getattr(owner, name)

    def timed(self: Any, *args: Any, **more: Any) -> Any:
        began, found = time.monotonic(), None
        try:
            found = call(self, *args, **more)
            return found
        except BaseException as error:
            found = error
            raise
        finally:
            LINES.append((began, time.monotonic(), told(self, found, *args)))

    setattr(owner, name, timed)
