"""Better plans for small programs: the integer programme with little work and no proof.

A program of a few layers has few segments, so one product in greedy's plan is some per cent of its step. The
relaxation, in a tenth of the time, finds steps over budget; then one node of the search tree is solved. If schedules
need more than the model sees, that is set aside and the programme solved again. No clock decides: equal programs get
equal plans on every machine.
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
"""Per boundary: most relaxations, most programmes of one node, steps over budget added after each. Guesses."""
_DROPS = 6
"""Schedules that drop more from an answer that does not fit. A guess."""
_TOLERANCE = 5e-3
"""Gap, as a share of a step, at which a programme counts as solved. A guess."""
_ENOUGH = 0.01
"""Share of a step that a fitting schedule may cost above the answer. A guess."""
_TWICE, _LOOSE = 0.15, 0.03
"""A plan dearer than this share of a step is compared with one around two boundaries. Around the first, that may exceed
the budget by the second share of the temporaries. Guesses."""
_TRAFFIC = 0.1
"""Share of an op's seconds beyond its charge, charged too: equally cheap plans take long to tell apart. At 0.1 it takes
half as long as at 0.03."""
_WIDTH = 9
"""Variables per op of all programmes for one program: their time grows as a compile's. At 7 the last of the budgets
with a proven optimum (``benchmarks/optimality``) was not reached."""


def allowance(problem: Problem) -> int:
    """Variables for all plans of one program: a hard budget is asked for repeatedly, each time lower."""
    return _WIDTH * len(problem.graph.ops)


def improve(problem: Problem, budget: Bytes, left: int) -> tuple[Plan | None, int]:
    """A plan that fits ``budget``, and the rest of ``left`` variables. None if none is found or nothing needs
    deciding."""
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
    """Schedules of one problem from ``start`` down to ``budget``. ``left``: variables still allowed."""

    def __init__(self, problem: Problem, start: Trial, budget: Bytes, left: int) -> None:
        self.problem, self.start, self.budget, self.left = problem, start, budget, left

    def down(self, first: Bytes) -> Trial | None:
        """Boundary after boundary to the budget, the first to ``first``; None if one fails."""
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
        """Add steps by relaxations, then solve until a schedule fits."""
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
    """A schedule that fits after cheap values at the peak are dropped; None if none does."""
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
