"""One plan as XLA compiled it."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtensile.ir.plan import Plan
from jaxtensile.search.request import Evaluate
from jaxtensile.search.variant import Variant
from jaxtensile.xla.compile import Compiled

BY_XLA = -1
"""``choice`` of the user's own function with XLA's own recomputation; other ways count from 0."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """One planned and compiled program.

    ``evaluate``: None for the user's function itself. ``choice``: index of its way to compile, among its platform's.
    """

    compiled: Compiled
    variant: Variant
    plan: Plan
    evaluate: Evaluate | None
    choice: int = 0

    @property
    def fits(self) -> bool:
        """Whether it is within the budget."""
        return self.compiled.device <= self.variant.request.budget

    @property
    def misplaced(self) -> bool:
        """Whether the compiler dropped every copy of a plan with copies, or holds more on the host than allowed."""
        memory, request = self.compiled.memory, self.variant.request
        there = request.state_bytes
        if self.plan.offload_bytes <= there or memory is None:
            return False
        return not there < memory.host <= there + request.host_budget
