"""A better plan for a small program than greedy's, in little work: the integer programme, but not its proof.

Greedy decides segment by segment, and a program of a few layers has few segments: one product more or less is some
per cent of its step. Steps that are over budget are found with the relaxation, which takes a tenth of the time; then
one node of the search tree is looked at, and where schedules need more than the model sees, once more with as much
set aside. No clock decides anything: equal programs get equal plans on every machine.
"""

from __future__ import annotations

from dataclasses import replace

from jaxtensile.ir.plan import Costs, Plan, Problem, Program
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.recompute.local_search import make_room
from jaxtensile.passes.solvers.answer import answer
from jaxtensile.passes.solvers.exact import BOUNDARIES, Search, Trial, search_around
from jaxtensile.passes.solvers.milp import INF
from jaxtensile.switches import on
from jaxtensile.units import Bytes

_RELAXED, _SOLVED, _FRESH = 5, 4, 2
"""Relaxations, and programmes of one node, for one boundary at most; steps over budget that count after each.
Guesses."""
_DROPS = 6
"""Schedules in which something is dropped from a programme's answer that does not fit. A guess."""
_TOLERANCE = 5e-3
"""Gap, as a share of a step, at which a programme counts as solved. A guess."""
_ENOUGH = 0.01
"""Share of a step by which a schedule that fits may cost more than the programme's answer. A guess."""
_TWICE, _LOOSE = 0.15, 0.03
"""A plan dearer than this share of a step is compared with one that comes down around two boundaries: around the first
to as much over the budget as the second share of the temporaries. Guesses."""
_TRAFFIC = 0.1
"""Share of an op's seconds beyond its charge that is charged as well: where many plans are as cheap, the programme
takes long to tell them apart. At 0.1 it takes half as long as at 0.03."""
_WIDTH = 9
"""Variables of all programmes together that are solved for one program, per op: their time grows as that of a compile.
At 7 the last of the budgets with a proven optimum (``benchmarks/optimality``) was not reached."""


def allowance(problem: Problem) -> int:
    """Variables that are solved for in all plans of one program together: a budget that is hard to meet is asked for
    again and again, a little lower each time."""
    return _WIDTH * len(problem.graph.ops)


def improve(problem: Problem, budget: Bytes, left: int) -> tuple[Plan | None, int]:
    """A plan that fits ``budget``, or None when none is found or there is nothing to decide; and what it leaves of
    ``left``, the variables that may be solved for."""
    program = Program.unchanged(problem.graph)
    here = Trial(frozenset(), program, live_ranges(program.graph), 0.0)
    if here.device <= budget or budget < here.device - here.live.temp:
        return None, left
    pairs = zip(problem.costs.charge, problem.costs.seconds, strict=True)
    traffic = _TRAFFIC if on("programme_traffic") else 0.0
    guide = Costs(seconds=problem.costs.seconds, charge=tuple(c + traffic * max(s - c, 0.0) for c, s in pairs))
    looked = _Look(replace(problem, costs=guide), here, budget, left)
    found = looked.down(budget)
    if (found is None or found.charge > _TWICE * sum(guide.charge)) and on("programme_twice"):
        # What is left over budget around the first boundary may be cheaper around the next.
        other = looked.down(budget + int(_LOOSE * here.live.temp))
        found = min((f for f in (found, other) if f is not None), key=lambda f: f.charge, default=None)
    plan = answer(problem, found.program, found.live, "milp") if found is not None else None
    return plan, looked.left


class _Look:
    """Schedules of one problem, from ``start`` down to ``budget``; ``left``: variables that may still be solved for."""

    def __init__(self, problem: Problem, start: Trial, budget: Bytes, left: int) -> None:
        self.problem, self.start, self.budget, self.left = problem, start, budget, left

    def down(self, first: Bytes) -> Trial | None:
        """Turn after boundary to the budget, around the first one to ``first``; None where one does not get there."""
        here, aim = self.start, first
        for _ in range(BOUNDARIES):
            search = search_around(self.problem, here, aim, INF)
            if search is None:
                break
            self.around(search)
            if search.best is None:
                break
            here, aim = search.best, self.budget
            if here.device <= self.budget:
                return here
        return None

    def around(self, search: Search) -> None:
        """Which steps count, by relaxations; then kept sets until the schedule of one fits."""
        model = search.model
        model.look_at(max(search.boundary.step - 1, 0))
        for _ in range(_RELAXED) if on("relaxations") else ():
            found = model.solve(nodes=0)
            fresh = [] if found.kept is None else [s for s, _ in search.violated(search.measure(found.kept))]
            fresh = [s for s in fresh if not model.has(s)]
            for step in fresh[:_FRESH]:
                model.look_at(step)
            if not fresh:
                break
        for k in range(_SOLVED):
            if model.width > self.left:
                break
            self.left -= model.width
            found = model.solve(nodes=1, tolerance=_TOLERANCE)
            if found.kept is None:
                break
            trial = search.measure(found.kept)
            fitted = trial if trial.device <= search.budget else _fitted(search, trial)
            if fitted is not None and fitted.charge <= trial.charge + _ENOUGH * sum(search.charge):
                break
            over = search.violated(trial)[:_FRESH]
            fresh = [step for step, _ in over if not model.has(step)]
            for step in fresh:
                model.look_at(step)
            # What the model does not see of one step it may see of the next: set aside only once that was of no help.
            for step, more in over if k or not fresh else ():
                if step not in fresh:
                    model.set_aside(step, more)


def _fitted(search: Search, trial: Trial) -> Trial | None:
    """A schedule that fits, once what is cheap and live where ``trial`` needs most is dropped; None if that is vain."""
    start = search.start.program
    for _ in range(_DROPS) if on("programme_drops") else ():
        short = trial.device - search.budget
        room = make_room(start, search.again, search.charge, trial.kept, trial.at_peak, short)
        if not room:
            break
        trial = search.measure(trial.kept - room)
        if trial.device <= search.budget:
            return trial
    return None
