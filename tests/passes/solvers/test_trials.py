"""What was laid out is not laid out again, and what was let go is the same when it is."""

from dataclasses import replace

import pytest

from graphs import network
from jaxtensile.devices.profiles import profile
from jaxtensile.ir.plan import Problem, Program
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.recompute.stages import find_boundary
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.passes.solvers import trials
from jaxtensile.passes.solvers.greedy import Solver, prepare
from jaxtensile.passes.solvers.trials import Explored, Trial


@pytest.fixture
def laid(monkeypatch):
    """The kept sets that are laid out."""
    seen, lay = [], trials.Around._lay

    def counted(self, kept, again):
        seen.append(kept)
        return lay(self, kept, again)

    monkeypatch.setattr(trials.Around, "_lay", counted)
    return seen


def explored(graph):
    costs = op_costs(graph, profile("nvidia-h200"))
    program = Program.unchanged(graph)
    start = Trial(frozenset(), (program, live_ranges(graph)), 0.0)
    return Explored(costs.charge, start), start


def test_a_kept_set_is_laid_out_once_and_again_when_it_was_let_go(laid):
    graph, *_ = network(12, gated=True)
    known, start = explored(graph)
    around = known.around(start, find_boundary(graph, start.live, 0))
    kept = around.menu.least(around.menu.spans[0])
    trial = around.measure(kept)
    before = trial.program, trial.live
    assert around.measure(kept) is trial and laid == [kept]
    known.let_go(trial)
    assert (trial.program, trial.live) == before and laid == [kept, kept]
    assert trial.device == trial.live.device and [*trial.profile] == trial.live.profile


def test_what_is_to_stay_stays_as_long_as_there_is_room(laid, monkeypatch):
    graph, *_ = network(12, gated=True)
    known, start = explored(graph)
    around = known.around(start, find_boundary(graph, start.live, 0))
    first, second = (around.measure(around.menu.least(span)) for span in around.menu.spans[:2])
    monkeypatch.setattr(known, "_left", len(first.profile))
    for trial in (first, second):
        known.keep(trial)
        known.let_go(trial)
    count = len(laid)
    assert first.program.graph.ops and len(laid) == count
    assert second.program.graph.ops and len(laid) == count + 1


def test_where_nothing_waits_there_is_no_turn():
    graph, *_ = network(12, gated=True)
    known, start = explored(graph)
    assert known.around(start, 0) is None and known.around(start, 0) is None


def test_a_budget_that_was_asked_for_costs_nothing_more_and_gives_the_same(laid):
    graph, *_ = network(24, gated=True)
    at = prepare(Problem(graph=graph, costs=op_costs(graph, profile("nvidia-h200")), budget=0))
    first = at(0)
    count = len(laid)
    assert count
    assert at(0) == first
    assert len(laid) - count <= 2  # but for those that were let go and are answers


def test_a_budget_that_was_asked_for_before_lays_nothing_out(laid):
    graph, *_ = network(12, gated=True)
    live = live_ranges(graph)
    at = prepare(Problem(graph=graph, costs=op_costs(graph, profile("nvidia-h200")), budget=0))
    for share in (0.5, 0.02):
        budget = live.device - int((1 - share) * live.temp)
        plan = at(budget)
        count = len(laid)
        assert at(budget) == plan and len(laid) == count


def test_a_hopeless_budget_takes_no_more_than_the_least_plan(laid):
    """Beside the first boundary, by which it is known."""
    graph, *_ = network(20, gated=True)
    live = live_ranges(graph)
    problem = Problem(graph=graph, costs=op_costs(graph, profile("nvidia-h200")), budget=0)
    at = prepare(problem)
    least = at(0)
    count = len(laid)
    fixed = live.device - live.temp
    for share in (0.1, 0.8):
        budget = fixed + int(share * (least.predicted.device - fixed))
        plan = at(budget)
        assert plan == least
    first = [kept for kept in laid[count:] if kept not in laid[:count]]
    assert len(first) <= 2 * len(laid[:count])
    alone = prepare(problem)(budget)
    assert alone == least


def test_equal_programs_of_one_job_are_searched_once(laid):
    graph, equal = (network(12, gated=True)[0] for _ in range(2))
    assert graph is not equal
    problem = Problem(graph=graph, costs=op_costs(graph, profile("nvidia-h200")), budget=0)
    solver, budget = Solver(), live_ranges(graph).device // 2
    plan, count = solver(problem)(budget), len(laid)
    assert count and solver(replace(problem, graph=equal))(budget).program == plan.program and len(laid) == count
