"""The program as it is, or with its loops rewritten: which of them, planned, is the cheapest that fits?

Straight-line planning decides on whole stacks; what a loop stacks at all is decided first, by the
rungs of a ladder from "everything as it is" to "everything dropped", and between the two rungs that
enclose the budget by finer steps. Rewritten programs are traced only when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jaxtensile.device import DeviceProfile
from jaxtensile.loops import rewrite_loops
from jaxtensile.passes.cost import op_costs
from jaxtensile.passes.loops import Ladder, LoopPlan, Way
from jaxtensile.plan import Plan, Problem
from jaxtensile.trace import Traced, trace_jaxpr
from jaxtensile.units import Bytes, Seconds

Prepare = Callable[[Problem], Callable[[Bytes], Plan]]
"""A solver: what does not depend on the budget is done once, then one plan per budget."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The program with its loops rewritten in one way, and what that costs."""

    traced: Traced
    problem: Problem
    solve: Callable[[Bytes], Plan]
    loops: tuple[LoopPlan, ...]
    charge: Seconds
    seconds: Seconds


class Variants:
    """All ways to rewrite the loops of one traced program, and the solver for each."""

    def __init__(
        self,
        traced: Traced,
        jaxpr: Any,
        donated: tuple[bool, ...],
        device: DeviceProfile,
        problem: Problem,
        prepare: Prepare,
    ) -> None:
        self.traced = traced
        self._jaxpr, self._donated, self._device = jaxpr, donated, device
        self._problem, self._prepare = problem, prepare
        self._ladder = Ladder(problem.graph, lambda body: op_costs(body, device).charge)
        self._known: dict[Way, Variant] = {}
        self._rungs = sorted(self._ladder.rungs, key=lambda way: self._price(way)[0])

    def solve(self, budget: Bytes) -> tuple[Variant, Plan]:
        """The cheapest variant and plan that fit; the smallest when none does."""
        best: tuple[Variant, Plan] | None = None
        above: Way | None = None  # the rung over the cheapest that fits
        for i, way in enumerate(self._rungs):
            if best is not None and best[1].predicted.device <= budget and charge_of(*best) <= self._price(way)[0]:
                break
            found = self._solved(way, budget)
            if best is None or _rank(found, budget) < _rank(best, budget):
                best, above = found, self._rungs[i - 1] if i else None
        assert best is not None, "there is always the program as it is"
        if above is not None and best[1].predicted.device <= budget:
            for way in self._ladder.between(above, best[0].loops):
                if self._price(way)[0] < charge_of(*best):
                    found = self._solved(way, budget)
                    if _rank(found, budget) < _rank(best, budget):
                        best = found
        return best

    def without_host(self) -> Variants:
        """The same, planned by recomputation alone."""
        problem = replace(self._problem, link=None, host_budget=0)
        return Variants(self.traced, self._jaxpr, self._donated, self._device, problem, self._prepare)

    def _solved(self, way: Way, budget: Bytes) -> tuple[Variant, Plan]:
        variant = self._known.get(way)
        if variant is None:
            variant = self._known[way] = self._rewritten(way)
        return variant, variant.solve(max(budget, 0))

    def _rewritten(self, way: Way) -> Variant:
        charge, seconds = self._price(way)
        traced, problem = self.traced, self._problem
        if way:
            jaxpr = rewrite_loops(traced, self._jaxpr, way)
            traced = trace_jaxpr(jaxpr, self._donated, keep_unused=_keeps_unused(self.traced))
            problem = replace(problem, graph=traced.graph, costs=op_costs(traced.graph, self._device))
        solve = self._prepare(problem)
        return Variant(traced=traced, problem=problem, solve=solve, loops=way, charge=charge, seconds=seconds)

    def _price(self, way: Way) -> tuple[Seconds, Seconds]:
        """Charge and seconds of what the loops run again."""
        charge = seconds = 0.0
        for plan in way:
            front = self._problem.graph.ops[plan.pair.forward]
            body = op_costs(front.bodies[0], self._device)
            charge += front.trip_count * sum(body.charge[o] for o in plan.again)
            seconds += front.trip_count * sum(body.seconds[o] for o in plan.again)
        return charge, seconds


def charge_of(variant: Variant, plan: Plan) -> Seconds:
    """What recomputing and waiting costs, loops included."""
    clones = plan.program.clones()
    return variant.charge + plan.wait + sum(variant.problem.costs.charge[plan.program.origin[op.id]] for op in clones)


def _rank(found: tuple[Variant, Plan], budget: Bytes) -> tuple[bool, float]:
    device = found[1].predicted.device
    return (device > budget, device if device > budget else charge_of(*found))


def _keeps_unused(traced: Traced) -> bool:
    return set(traced.arguments) <= set(traced.graph.inputs)
