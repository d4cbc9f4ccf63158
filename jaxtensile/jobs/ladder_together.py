"""The ladder of a step that several processes run: all agree on its plans before the first step.

The plans are compiled at once and never change, so that a rung is the same plan in every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from jaxtensile.clock import Watch, nothing
from jaxtensile.errors import BudgetError
from jaxtensile.ir.plan import Prepare
from jaxtensile.jobs.ladder import RUNGS, Ladder, Position, place_of
from jaxtensile.planner.plan_cache import PlanCache
from jaxtensile.runtime.protocol.messages import Rung
from jaxtensile.search.request import Fitted, Request
from jaxtensile.spmd.processes import one_plan
from jaxtensile.spmd.processes.agreement import Agreed
from jaxtensile.units import Bytes, format_bytes

_BETWEEN: Final = 1
"""Plans between the smallest and the largest: each takes all processes a compile. A guess."""


class TogetherLadder(Ladder):
    """The plans of one signature. ``devices``: of all processes."""

    def __init__(
        self, request: Request, devices: Sequence[Any], plans: PlanCache | None = None, *, most: float | None = None
    ) -> None:
        self._devices = tuple(devices)
        self._agreed: dict[str, Agreed] = {}
        super().__init__(request, plans, most=most)
        self._sketches = RUNGS

    def share(self, rung: Rung) -> Bytes:
        """All of it: such a job has one step, whose temporaries are charged for good."""
        return rung.level

    def fitted(self, budget: Bytes, watch: Watch = nothing) -> Fitted:
        """The fastest plan within ``budget``. Raises ``BudgetError``: nothing is compiled later."""
        if (found := self.runs(budget)) is not None and found.fitted is not None:
            return found.fitted
        raise BudgetError(
            f"budget {format_bytes(budget)} is below the smallest plan of {self.name} in all its processes, "
            f"{format_bytes(self.smallest)}: raise it, shrink the batch, or use more devices",
            needs=self.smallest,
            has=budget,
        )

    def _predicted(self, count: int, solver: Prepare | None = None) -> list[Position]:
        """The plans, compiled: the fastest, the smallest, and some between."""
        found = [place_of(self._fit())]
        self._tightest = found[0].temp
        top = found[0]
        try:
            found.append(place_of(self._fit(top.persistent + 1)))
        except BudgetError as error:
            if error.needs is None or error.needs >= top.level:
                return found
            found.append(place_of(self._fit(error.needs)))
        low = found[-1]
        for k in range(1, _BETWEEN + 1):
            place = place_of(self._fit(low.level + k * (top.level - low.level) // (_BETWEEN + 1)))
            if all(place.level != other.level for other in found):
                found.append(place)
        return self._quick(sorted(found, key=lambda p: p.level))

    def _fit(self, budget: Bytes | None = None) -> Fitted:
        """The plan for so many bytes; None: for all that the least of the processes has."""
        request = self.request if budget is None else replace(self.request, budget=budget)
        return one_plan.fit(request, self._devices, budget=("a job", budget), known=self._agreed)


__all__ = ["TogetherLadder"]
