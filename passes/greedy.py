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
from jaxtensile.passes.stages import find_turn, mountain_at
from jaxtensile.plan import Action, Keep, MemoryUse, Plan, Problem, Program, Remat
from jaxtensile.units import Bytes

_MOUNTAINS = 8
_REPAIRS = 4
_EASIER = (1 / 8, 1 / 4, 1 / 2)
"""When a budget is missed: shares of the plain program's temporaries that are aimed at instead."""


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
    return prepare(problem)(problem.budget)


def prepare(problem: Problem) -> Callable[[Bytes], Plan]:
    """``solve`` for several budgets of one problem: what does not depend on the budget is done once."""
    program = Program.unchanged(problem.graph)
    live = live_ranges(program.graph)
    menus: dict[int, Menu] = {}
    unchanged = _Trial(frozenset(), program, live, 0.0)

    def search(budget: Bytes) -> _Trial:
        best = unchanged
        for mountain in range(_MOUNTAINS):
            if best.device <= budget:
                break
            trial = _one_mountain(problem, budget, best, menus if mountain == 0 else {})
            if trial is None or trial.device >= best.device:
                break
            best = trial
        return best

    def at(budget: Bytes) -> Plan:
        best = search(budget)
        for share in _EASIER:
            easier = live.device - int((1 - share) * live.temp)
            if budget < best.device and budget < easier:
                # Which turn comes first depends on the budget, and an easier one may lead lower.
                best = min(best, search(easier), key=lambda t: t.device)
        return _as_plan(problem, best.program, best.live)

    return at


def _one_mountain(problem: Problem, budget: Bytes, start: _Trial, menus: dict[int, Menu]) -> _Trial | None:
    """The best plan around one turn of the program that ``start`` is; ``menus``: known ones by turn."""
    program, live, graph = start.program, start.live, start.program.graph
    turn = find_turn(graph, live, max(budget - (live.device - live.temp), 0))
    if turn is None:
        return None
    charge = [problem.costs.charge[o] if o >= 0 else 0.0 for o in program.origin]
    menu = menus.get(turn)
    if menu is None:
        mountain = mountain_at(graph, turn)
        if not mountain.needed:
            return None
        menu = menus[turn] = Menu(graph, mountain, charge)
    known: dict[frozenset[int], _Trial] = {}

    def measure(kept: frozenset[int]) -> _Trial:
        trial = known.get(kept)
        if trial is None:
            planned = emit(program, live.kernels, menu.mountain, kept, menu.waists)
            again = recomputed_ops(graph, menu.mountain, kept)
            trial = _Trial(kept, planned, live_ranges(planned.graph), sum(charge[o] for o in again))
            known[kept] = trial
        return trial

    # What the turn needs beside the kept values; the rest of the budget is for keeping.
    first = measure(menu.least(menu.spans[0]))
    barrier = next((i for i, o in enumerate(first.program.origin) if o < 0), len(first.program.origin))
    base = first.device - first.live.temp + max(first.live.profile[:barrier], default=0) - menu.size(first.kept)
    best: _Trial | None = None
    for span in menu.spans:
        found = _with_span(budget, base, menu, span, measure)
        if best is None or _better(found, best, budget):
            best = found
    return best


def _with_span(
    budget: Bytes, base: Bytes, menu: Menu, span: int, measure: Callable[[frozenset[int]], _Trial]
) -> _Trial:
    """The cheapest trial that fits with segments of at most ``span`` stages; the smallest if none does."""
    capacity = budget - base
    for _ in range(_REPAIRS):
        kept = menu.choose(span, capacity)
        if kept is None:
            break
        trial = measure(kept)
        if trial.device <= budget:
            return trial
        capacity = min(capacity, menu.size(kept)) - (trial.device - budget)
    return measure(menu.least(span))


def _better(a: _Trial, b: _Trial, budget: Bytes) -> bool:
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
