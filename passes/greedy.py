"""The default solver: find the turn, choose segments and what they keep, lay out, measure.

One mountain at a time: the step over budget with the most idle bytes is the turn. For several
longest segments, ``segments`` picks what to keep for the bytes there are; the schedule is emitted,
its peak predicted, and what it misses by is taken off the bytes. The cheapest that fits wins.
Repeats on what is left over budget, so recomputed stages are planned again (nested
checkpointing) when one round is not enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtensile.ir import OpId, ValueId
from jaxtensile.passes.emit import emit, recomputed_ops
from jaxtensile.passes.liveness import Liveness, live_ranges
from jaxtensile.passes.segments import Menu
from jaxtensile.passes.stages import find_turn, mountain_at, waists
from jaxtensile.plan import Action, Keep, MemoryUse, Plan, Problem, Program, Remat

_MOUNTAINS = 8
_REPAIRS = 4


@dataclass(frozen=True, slots=True)
class _Trial:
    """One kept set, laid out and measured."""

    kept: frozenset[int]
    program: Program
    live: Liveness
    charge: float

    @property
    def device(self) -> int:
        return self.live.device


def solve(problem: Problem) -> Plan:
    """Fit the problem's budget by recomputation; the least found when it cannot be met."""
    program = Program.unchanged(problem.graph)
    live = live_ranges(program.graph)
    for _ in range(_MOUNTAINS):
        if live.device <= problem.budget:
            break
        trial = _one_mountain(problem, program, live)
        if trial is None or trial.device >= live.device:
            break
        program, live = trial.program, trial.live
    return _as_plan(problem, program, live)


def _one_mountain(problem: Problem, program: Program, live: Liveness) -> _Trial | None:
    graph = program.graph
    fixed = live.device - live.temp
    turn = find_turn(graph, live, max(problem.budget - fixed, 0))
    if turn is None:
        return None
    mountain = mountain_at(graph, turn)
    if not mountain.needed:
        return None
    charge = [problem.costs.charge[o] if o >= 0 else 0.0 for o in program.origin]
    all_cuts, narrow = waists(graph, mountain)

    def measure(kept: frozenset[int]) -> _Trial:
        planned = emit(program, live.kernels, mountain, kept, all_cuts)
        again = recomputed_ops(graph, mountain, kept)
        return _Trial(kept, planned, live_ranges(planned.graph), sum(charge[o] for o in again))

    menu = Menu(graph, mountain, charge, narrow)
    best: _Trial | None = None
    for span in menu.spans:
        found = _with_span(problem.budget, menu, span, measure)
        if best is None or _better(found, best, problem.budget):
            best = found
    return best


def _with_span(budget: int, menu: Menu, span: int, measure: Callable[[frozenset[int]], _Trial]) -> _Trial:
    """The cheapest trial that fits with segments of at most ``span`` stages; the smallest if none does."""
    best = measure(menu.least(span))
    if best.device > budget:
        return best
    # What the turn needs beside the kept values; the rest of the budget is for keeping.
    first_barrier = next((i for i, o in enumerate(best.program.origin) if o < 0), len(best.program.origin))
    base = best.device - best.live.temp + max(best.live.profile[:first_barrier], default=0) - menu.size(best.kept)
    capacity = budget - base
    for _ in range(_REPAIRS):
        kept = menu.choose(span, capacity)
        if kept is None:
            break
        trial = measure(kept)
        if trial.device <= budget:
            return trial if trial.charge < best.charge else best
        capacity = min(capacity, menu.size(kept)) - (trial.device - budget)
    return best


def _better(a: _Trial, b: _Trial, budget: int) -> bool:
    if a.device <= budget and b.device <= budget:
        return a.charge < b.charge
    return a.device < b.device


def _as_plan(problem: Problem, program: Program, live: Liveness) -> Plan:
    clones = program.clones()
    return Plan(
        program=program,
        actions=_actions(problem, program),
        predicted=MemoryUse(argument=live.argument, output=live.output, temp=live.temp, alias=live.alias),
        overhead=sum(problem.costs.seconds[program.origin[op.id]] for op in clones),
        recompute_flops=sum(op.flops for op in clones),
        solver="greedy",
    )


def _actions(problem: Problem, program: Program) -> tuple[Action, ...]:
    """What became of every value of the original that was recomputed, or held for a recomputation."""
    values = problem.graph.values
    inputs = set(problem.graph.inputs)
    recipe: dict[int, int] = {}
    held: dict[int, None] = {}
    for op in program.graph.ops:
        origin = program.origin[op.id]
        if origin < 0:
            held.update(dict.fromkeys(program.version_of[v] for v in op.operands))
        elif any(r >= len(values) for r in op.results):
            recipe.update((program.version_of[r], origin) for r in op.results)
    keeps = [Keep(ValueId(v), values[v].nbytes) for v in held if v not in recipe and v not in inputs]
    remats = [Remat(ValueId(v), values[v].nbytes, OpId(o)) for v, o in recipe.items()]
    return (*keeps, *remats)
