"""The page: from a function, its arguments and a budget to a function that fits and its report.

    trace → Graph → costs → (does it fit as it is?) → possible at all? → solve → check
          → rewrite → compile → XLA's number; on a miss feed it back and solve again.

Facts flow down; the only thing that flows back is a measured number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from jaxtensile.compile import Compiled, Options, compile_program, planned_options
from jaxtensile.device import DeviceProfile
from jaxtensile.errors import BudgetError, Culprit
from jaxtensile.passes.check import check
from jaxtensile.passes.cost import op_costs, unknown_primitives
from jaxtensile.passes.greedy import solve as greedy
from jaxtensile.passes.liveness import live_ranges
from jaxtensile.passes.lowerbound import Bound, lower_bound
from jaxtensile.plan import Keep, MemoryUse, Plan, Problem, Remat, Solver
from jaxtensile.report import Decision, Report
from jaxtensile.rewrite import rewrite
from jaxtensile.trace import Traced, trace_jaxpr
from jaxtensile.units import Bytes, format_bytes

Evaluate = Callable[[list[Any]], list[Any]]
"""Flat arguments → flat outputs, on tracers."""
Make = Callable[[Evaluate | None, Options], Any]
"""A jit object that runs ``evaluate`` (None: the user's function as it is) under compiler options."""
Watch = Callable[[str], None]

ROUNDS = 4
"""Compiles of planned programs at most."""
SURELY_OVER = 1.25
"""The plain program is compiled unless the model puts it over the budget by this factor."""
SURELY_OVER_WITH_LOOPS = 2.0
MARGIN = 0.002
"""Share of the budget left free after a miss, so that the next round does not miss by a hair."""


def nothing(_: str) -> None:
    """The default ``watch``."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What ``fit`` works on: one call of one function for one device."""

    name: str
    jaxpr: Any
    donated: tuple[bool, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    budget: Bytes
    device: DeviceProfile
    shards: int
    make: Make
    options: Options
    keep_unused: bool = False


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The jit object that fits, what it evaluates (None: the user's function), and the report."""

    jitted: Any
    evaluate: Evaluate | None
    options: Options
    report: Report


def fit(job: Job, solver: Solver = greedy, watch: Watch = nothing, *, baseline: bool = False) -> Fitted:
    """Fit one job. ``baseline``: compile the plain program even when it surely does not fit."""
    clock = _Clock(watch)
    with clock("graph"):
        traced = trace_jaxpr(job.jaxpr, job.donated, keep_unused=job.keep_unused)
        graph = traced.graph
        live = live_ranges(graph)
        bound = lower_bound(graph)
    predicted = MemoryUse(argument=live.argument, output=live.output, temp=live.temp, alias=live.alias)
    plain = None
    loops = any(op.bodies for op in graph.ops)
    over = SURELY_OVER_WITH_LOOPS if loops else SURELY_OVER
    if baseline or job.shards > 1 or predicted.device <= over * job.budget:
        with clock("compile plain"):
            plain = compile_program(lambda o: job.make(None, o), job.args, job.kwargs, job.options)
        if plain.device <= job.budget:
            return Fitted(
                jitted=plain.jitted,
                evaluate=None,
                options=plain.options,
                report=_report(job, traced, None, predicted, plain, plain, bound, 0, clock),
            )
    with clock("costs"):
        costs = op_costs(graph, job.device)
    problem = Problem(graph=graph, costs=costs, budget=job.budget)
    _require_possible(job, traced, problem, bound, solver)
    return _rounds(job, traced, problem, predicted, plain, bound, solver, clock)


def _rounds(
    job: Job,
    traced: Traced,
    problem: Problem,
    predicted: MemoryUse,
    plain: Compiled | None,
    bound: Bound,
    solver: Solver,
    clock: _Clock,
) -> Fitted:
    """Plan, compile, and on a miss plan again for what XLA added."""
    choices = planned_options(job.device.platform, job.options)
    scale = 1.0
    if job.shards > 1 and plain is not None and plain.memory is not None:
        scale = predicted.device / max(plain.device, 1)
    aim = int(job.budget * scale)
    best: tuple[Compiled, Plan, Evaluate] | None = None
    rounds = 0
    while rounds < ROUNDS:
        with clock("solve"):
            plan = solver(replace(problem, budget=max(aim, 0)))
        with clock("check"):
            check(problem.graph, plan.program)
        if plan.changes_nothing:
            break
        evaluate = rewrite(traced, plan.program)
        options = choices[min(rounds, len(choices) - 1)] if len(choices) > 1 else choices[0]
        rounds += 1
        with clock("compile planned"):
            made = compile_program(lambda o, e=evaluate: job.make(e, o), job.args, job.kwargs, options)
        if best is None or made.device < best[0].device:
            best = (made, plan, evaluate)
        if made.device <= job.budget:
            break
        if len(choices) > 1 and rounds < len(choices):
            continue
        error = made.device * scale - plan.predicted.device
        target = job.budget * scale * (1 - MARGIN) - max(error, 0)
        if plan.predicted.device > aim or target >= aim:
            break
        aim = int(target)
    if best is None or best[0].device > job.budget:
        raise _cannot(job, traced, problem, bound, best[0] if best else None, best[1] if best else None)
    made, plan, evaluate = best
    return Fitted(
        jitted=made.jitted,
        evaluate=evaluate,
        options=made.options,
        report=_report(job, traced, plan, predicted, plain, made, bound, rounds, clock, problem),
    )


def _require_possible(job: Job, traced: Traced, problem: Problem, bound: Bound, solver: Solver) -> None:
    """Before any search: no plan can need less than what single ops need at once."""
    if job.shards == 1 and bound.nbytes > job.budget:
        raise _cannot(job, traced, problem, bound, None, solver(replace(problem, budget=0)))


def _cannot(
    job: Job, traced: Traced, problem: Problem, bound: Bound, compiled: Compiled | None, plan: Plan | None
) -> BudgetError:
    """Value, bound, way out: the smallest budget we can reach and the ops that force it."""
    reachable = [c.device for c in (compiled,) if c is not None and c.memory is not None]
    if not reachable:
        reachable = [int(plan.predicted.device * 1.05) if plan is not None else bound.nbytes]
    needs = max(min(reachable), bound.nbytes)
    culprits = tuple(
        Culprit(primitive=traced.graph.ops[o].primitive, source=traced.source(o), nbytes=size) for o, size in bound.ops
    )
    fixed = sum(problem.graph.values[v].nbytes for v in problem.graph.inputs)
    because = f": {culprits[0]}" if culprits else ""
    if job.budget < fixed:
        because = f": the arguments alone are {format_bytes(fixed)}"
    return BudgetError(
        f"budget {format_bytes(job.budget)} is below the smallest reachable {format_bytes(needs)} of {job.name}{because}; "
        "raise the budget, shrink the batch, donate the arguments that are updated, or shard the program",
        needs=needs,
        has=job.budget,
        culprits=culprits,
    )


def _report(
    job: Job,
    traced: Traced,
    plan: Plan | None,
    predicted: MemoryUse,
    plain: Compiled | None,
    made: Compiled,
    bound: Bound,
    rounds: int,
    clock: _Clock,
    problem: Problem | None = None,
) -> Report:
    assert made.memory is not None
    step = sum(problem.costs.seconds) if problem is not None else 0.0
    notes = [*(plain.notes if plain is not None else ()), *made.notes]
    if plain is not None and plain.refusal:
        notes.append(f"the plain program does not compile for this device: {plain.refusal}")
    if job.shards > 1:
        notes.append(f"arguments are sharded over {job.shards} devices; bytes are per device")
    return Report(
        name=job.name,
        target=job.device.name,
        budget=job.budget,
        baseline=plain.memory if plain is not None and plain.memory is not None else predicted,
        predicted=plan.predicted if plan is not None else predicted,
        compiled=made.memory,
        lower_bound=bound.nbytes,
        actions=plan.actions if plan is not None else (),
        decisions=_decisions(traced, plan) if plan is not None else (),
        flops=traced.graph.flops,
        recompute_flops=plan.recompute_flops if plan is not None else 0.0,
        overhead=plan.overhead if plan is not None else 0.0,
        overhead_ratio=plan.overhead / step if plan is not None and step else 0.0,
        stages=sum(o < 0 for o in plan.program.origin) if plan is not None else 0,
        rounds=rounds,
        unknown_primitives=unknown_primitives(traced.graph),
        solver=plan.solver if plan is not None else "none",
        notes=tuple(dict.fromkeys(notes)),
        seconds=clock.seconds,
    )


def _decisions(traced: Traced, plan: Plan) -> tuple[Decision, ...]:
    made = {r: op.id for op in traced.graph.ops for r in op.results}
    out: list[Decision] = []
    for action in plan.actions:
        if not isinstance(action, Keep | Remat) or action.value not in made:
            continue
        value, op = traced.graph.values[action.value], made[action.value]
        out.append(
            Decision(
                kind="keep" if isinstance(action, Keep) else "recompute",
                primitive=traced.graph.ops[op].primitive,
                dtype=value.dtype,
                shape=value.shape,
                nbytes=value.nbytes,
                source=traced.source(op),
            )
        )
    return tuple(out)


class _Clock:
    """Wall seconds per pipeline step, summed over rounds; tells ``watch`` what begins."""

    def __init__(self, watch: Watch) -> None:
        self.seconds: dict[str, float] = {}
        self.watch = watch

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.watch(name)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


