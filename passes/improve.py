"""A better plan for a small program than greedy's, in little work: the integer programme, but not its proof.

Greedy decides segment by segment, and a program of a few layers has few segments: one product more or less is some
per cent of its step. Steps that are over budget are found with the relaxation, which takes a tenth of the time; then
one node of the search tree is looked at, and where schedules need more than the model sees, once more with as much
set aside. No clock decides anything: equal programs get equal plans on every machine.
"""

from __future__ import annotations

from dataclasses import replace

from jaxtensile.passes.answer import answer
from jaxtensile.passes.emit import Recomputation
from jaxtensile.passes.exact import MOUNTAINS, Search, Trial, search_around
from jaxtensile.passes.liveness import live_ranges
from jaxtensile.passes.milp import INF
from jaxtensile.passes.polish import make_room
from jaxtensile.plan import Costs, Plan, Problem, Program
from jaxtensile.units import Bytes

_RELAXED, _SOLVED, _FRESH = 5, 4, 2
"""Relaxations, and programmes of one node, for one turn at most; steps over budget that count after each."""
_DROPS = 6
"""Schedules in which something is dropped from a programme's answer that does not fit."""
_TOLERANCE = 5e-3
"""Gap, as a share of a step, at which a programme counts as solved."""
_ENOUGH = 0.01
"""Share of a step by which a schedule that fits may cost more than the programme's answer."""
_TWICE, _LOOSE = 0.15, 0.03
"""A plan dearer than this share of a step is compared with one that comes down around two turns: around the first to as
much over the budget as the second share of the temporaries."""
_TRAFFIC = 0.1
"""Share of an op's seconds beyond its charge that is charged as well: where many plans are as cheap, the programme
takes long to tell them apart."""
_WIDEST = 8000
"""Variables of all programmes for one turn that are solved before no more is."""


def improve(problem: Problem, budget: Bytes) -> Plan | None:
    """A plan for ``budget``, the smallest found when none fits; None when there is nothing to decide."""
    program = Program.unchanged(problem.graph)
    here = Trial(frozenset(), program, live_ranges(program.graph), 0.0)
    if here.device <= budget or budget < here.device - here.live.temp:
        return None
    pairs = zip(problem.costs.charge, problem.costs.seconds, strict=True)
    guide = Costs(seconds=problem.costs.seconds, charge=tuple(c + _TRAFFIC * max(s - c, 0.0) for c, s in pairs))
    problem = replace(problem, costs=guide)
    found = _down(problem, here, budget, budget)
    if found.charge > _TWICE * sum(guide.charge) or found.device > budget:
        # What is left over budget around the first turn may be cheaper around the next.
        other = _down(problem, here, budget, budget + int(_LOOSE * here.live.temp))
        if (other.device > budget, other.charge) < (found.device > budget, found.charge):
            found = other
    return answer(problem, found.program, found.live, "milp")


def _down(problem: Problem, here: Trial, budget: Bytes, first: Bytes) -> Trial:
    """Turn after turn to ``budget``, around the first one to ``first``; as low as that goes."""
    for k in range(MOUNTAINS):
        search = search_around(problem, here, budget if k else first, INF)
        if search is None:
            break
        _look(search)
        found = search.best or search.lowest
        if found is None or found.device >= here.device:
            break
        here = found
        if here.device <= budget:
            break
    return here


def _look(search: Search) -> None:
    """Which steps count, by relaxations; then kept sets until the schedule of one fits."""
    model, slack = search.model, search.model.slack
    model.look_at(max(search.mountain.turn - 1, 0))
    for _ in range(_RELAXED):
        found = model.solve(nodes=0)
        fresh = [] if found.kept is None else [s for s, _ in search.violated(search.measure(found.kept))]
        fresh = [s for s in fresh if not model.has(s)]
        for step in fresh[:_FRESH]:
            model.look_at(step)
        if not fresh:
            break
    again = Recomputation(search.start.program.graph, search.mountain)
    short, missed, wide = False, False, 0
    for _ in range(_SOLVED):
        wide += model.width
        if wide > _WIDEST:
            break
        found = model.solve(nodes=1, tolerance=_TOLERANCE, short=short)
        if found.kept is None and found.bound == INF and not short:
            # Not around this turn alone: as little as it can need, and what is left around the next.
            short = True
            found = model.solve(nodes=1, tolerance=_TOLERANCE, short=True)
        if found.kept is None:
            break
        trial = search.measure(found.kept)
        fitted = trial if trial.device <= search.budget else _fitted(search, again, trial)
        if fitted is not None and fitted.charge <= trial.charge + _ENOUGH * sum(search.charge):
            break
        over = search.violated(trial)[:_FRESH]
        fresh = [step for step, _ in over if not model.has(step)]
        for step in fresh:
            model.look_at(step)
        # What the model does not see of one step it may see of the next: set aside only once that was of no help.
        for step, more in over if missed or not fresh else ():
            if step not in fresh:
                # Doubled at least: what is missing may be little, and as little again for the next answer.
                slack[step] = slack.get(step, 0) + max(more, slack.get(step, 0))
        missed = True


def _fitted(search: Search, again: Recomputation, trial: Trial) -> Trial | None:
    """A schedule that fits, once what is cheap and live where ``trial`` needs most is dropped; None if that is vain."""
    start = search.start.program
    for _ in range(_DROPS):
        there = {v for v, original in enumerate(start.version_of) if original in trial.at_peak}
        room = make_room(start.graph, again, search.charge, trial.kept, there, trial.device - search.budget)
        if not room:
            break
        trial = search.measure(trial.kept - room)
        if trial.device <= search.budget:
            return trial
    return None
