"""What came of one plan: the program, as XLA compiled it."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtensile.ir.plan import Plan
from jaxtensile.search.request import Evaluate
from jaxtensile.search.variant import Variant
from jaxtensile.xla.compile import Compiled

BY_XLA = -1
"""The way in which the user's own function is compiled and XLA recomputes by itself: a mark, as ways are counted from
0."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """One planned and compiled program; ``evaluate`` is None where it is the user's function itself.

    ``choice``: in which of the ways that there are for its platform.
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
        """Whether the compiler dropped every copy of a plan with copies, or holds more on the host than is allowed:
        what is left is no plan."""
        memory, request = self.compiled.memory, self.variant.request
        there = request.state_bytes
        if self.plan.offload_bytes <= there or memory is None:
            return False
        return not there < memory.host <= there + request.host_budget
