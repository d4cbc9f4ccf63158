"""In which ways may a program be rewritten before it is planned, and which of them has the cheapest plan?

The ways: as it is, without the user's checkpoints, and each with more and more of what its loops stack
recomputed instead. All are compared by what they cost over the program as written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxtensile.job import Job
from jaxtensile.loops import rewrite_loops
from jaxtensile.passes.cost import op_costs
from jaxtensile.passes.loops import LoopPlan, ladder
from jaxtensile.plan import Costs, Plan, Problem
from jaxtensile.trace import Traced, trace_jaxpr
from jaxtensile.undo import Undone
from jaxtensile.units import Bytes, Seconds

Prepare = Callable[[Problem], Callable[[Bytes], Plan]]
"""A solver: what does not depend on the budget is done once, then one plan per budget."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The program rewritten in one way, and what that costs over the program as written.

    ``base``: the program before its loops were rewritten; ``undone``: set where it has no checkpoints.
    """

    traced: Traced
    base: Traced
    problem: Problem
    solve: Callable[[Bytes], Plan]
    loops: tuple[LoopPlan, ...]
    charge: Seconds
    seconds: Seconds
    undone: Undone | None = None


def written(job: Job, traced: Traced, costs: Costs, prepare: Prepare) -> Variant:
    """The program as the user wrote it."""
    problem = _problem(job, traced, costs)
    return Variant(
        traced=traced, base=traced, problem=problem, solve=prepare(problem), loops=(), charge=0.0, seconds=0.0
    )


def undone(job: Job, program: Undone, costs: Costs, prepare: Prepare) -> Variant:
    """The program without its checkpoints; ``costs`` are those of the program as written."""
    problem = _problem(job, program.traced, op_costs(program.traced.graph, job.device))
    return Variant(
        traced=program.traced,
        base=program.traced,
        problem=problem,
        solve=prepare(problem),
        loops=(),
        charge=sum(problem.costs.charge) - sum(costs.charge),
        seconds=sum(problem.costs.seconds) - sum(costs.seconds),
        undone=program,
    )


def _problem(job: Job, traced: Traced, costs: Costs) -> Problem:
    return Problem(graph=traced.graph, costs=costs, budget=job.budget, link=job.link, host_budget=job.host_budget)


def with_loops(job: Job, start: Variant, prepare: Prepare) -> list[Variant]:
    """``start`` as it is, and with more and more of what its loops stack recomputed instead; cheapest first."""
    graph = start.problem.graph
    out = [start]
    for way in ladder(graph, lambda body: op_costs(body, job.device).charge):
        if not way:
            continue
        jaxpr = rewrite_loops(start.traced, job.jaxpr, way)
        changed = trace_jaxpr(jaxpr, job.donated, keep_unused=job.keep_unused)
        charge, seconds = start.charge, start.seconds
        for plan in way:
            front = graph.ops[plan.pair.forward]
            body = op_costs(front.bodies[0], job.device)
            charge += front.trip_count * sum(body.charge[o] for o in plan.again)
            seconds += front.trip_count * sum(body.seconds[o] for o in plan.again)
        problem = _problem(job, changed, op_costs(changed.graph, job.device))
        again = replace(start, traced=changed, problem=problem, solve=prepare(problem), loops=way)
        out.append(replace(again, charge=charge, seconds=seconds))
    return sorted(out, key=lambda v: v.charge)


def without_host(variants: list[Variant], prepare: Prepare) -> list[Variant]:
    """The same variants, to be planned by recomputation alone."""
    problems = [replace(v.problem, link=None, host_budget=0) for v in variants]
    return [replace(v, problem=p, solve=prepare(p)) for v, p in zip(variants, problems, strict=True)]


def cheapest(variants: list[Variant], budget: Bytes) -> tuple[Variant, Plan]:
    """The cheapest variant and plan that fit; the smallest when none does. ``variants``: cheapest first."""
    best: tuple[Variant, Plan] | None = None
    for variant in variants:
        if best is not None and best[1].predicted.device <= budget and _charge(*best) <= variant.charge:
            break
        found = variant, variant.solve(max(budget, 0))
        if best is None or _rank(found, budget) < _rank(best, budget):
            best = found
    assert best is not None, "there is always the program as it is"
    return best


def _charge(variant: Variant, plan: Plan) -> Seconds:
    clones = plan.program.clones()
    return variant.charge + plan.wait + sum(variant.problem.costs.charge[plan.program.origin[op.id]] for op in clones)


def _rank(found: tuple[Variant, Plan], budget: Bytes) -> tuple[bool, float]:
    device = found[1].predicted.device
    return (device > budget, device if device > budget else _charge(*found))
