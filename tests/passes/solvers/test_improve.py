"""Improve: plans of small programs that fit and are about as cheap as the least there are, by no clock."""

import time
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphs import graphs, network, solid_chain
from jaxtensile.devices.profiles import profile
from jaxtensile.ir.plan import Costs, Problem
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.passes.solvers import by_name as solvers
from jaxtensile.passes.solvers import exact, greedy, improve, milp
from jaxtensile.passes.verify.check import check
from oracles import every_schedule, least_charge, one_boundary
from solver_checks import chains

DEVICE = profile("nvidia-h200")


@pytest.fixture(autouse=True)
def every_gain_pays(monkeypatch):
    """Steps of these small programs take too little time for a better plan to be worth seconds of search."""
    monkeypatch.setattr(solvers, "PAYS", 0.0)


def problem_of(graph, share):
    """Its budget: the arguments and a share of the temporaries."""
    live = live_ranges(graph)
    return Problem(graph=graph, costs=op_costs(graph, DEVICE), budget=live.device - int((1 - share) * live.temp))


def improved(problem, budget):
    return improve.improve(problem, budget, improve.allowance(problem))[0]


def price(problem, plan):
    return plan.program.again(problem.costs.charge) / sum(problem.costs.charge)


def test_a_programme_that_highs_wrongly_calls_infeasible_has_its_answer():
    """Its presolve says so with six steps looked at; without it there is the cheapest schedule of all, as it should
    be."""
    work = [4, 10, 5, 9, 28, 10, 15]
    graph = solid_chain([10, 10, 5, 9, 28, 10, 15], work, top=4)
    costs = tuple(map(float, work)) + (1.0,) * (len(graph.ops) - len(work))
    problem = replace(problem_of(graph, 0.5), costs=Costs(seconds=costs, charge=costs), budget=186)
    found = improved(problem, problem.budget)
    least = least_charge(every_schedule(graph, one_boundary(graph, 186), costs), 186)
    assert found.program.again(costs) == least == 51.0


@given(chains(), st.floats(0.3, 1))
@settings(max_examples=40, derandomize=True)
def test_close_to_the_cheapest_of_all_schedules(chain, share):
    graph, work = chain
    costs = tuple(float(w) for w in work) + (1.0,) * (len(graph.ops) - len(work))
    problem = replace(problem_of(graph, share), costs=Costs(seconds=costs, charge=costs))
    boundary = one_boundary(graph, problem.budget)
    assume(boundary is not None and boundary.needed)
    least = least_charge(every_schedule(graph, boundary, costs), problem.budget)
    assume(least is not None)
    found = improved(problem, problem.budget)
    assert found is not None and found.predicted.device <= problem.budget
    check(graph, found.program)
    assert price(problem, found) <= least / sum(costs) + 0.02


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("layers", [6, 12])
def test_what_is_finished_fits_and_is_no_dearer(layers, share):
    problem = problem_of(network(layers, gated=True)[0], share)
    first = greedy.prepare(problem)(problem.budget)
    found = solvers.finished(solvers.named("auto"), problem, problem.budget, first)
    check(problem.graph, found.program)
    assert (found.predicted.device <= problem.budget) >= (first.predicted.device <= problem.budget)
    if first.predicted.device <= problem.budget:
        assert price(problem, found) <= price(problem, first)
    best = exact.prepare(problem, 20.0)(problem.budget)
    if best.predicted.device <= problem.budget:
        assert price(problem, found) <= price(problem, best) + 0.02


@given(graphs(most_ops=16))
@settings(max_examples=40, derandomize=True)
def test_every_answer_is_a_program_of_the_same_values(graph):
    problem = problem_of(graph, 0.5)
    found = improved(problem, problem.budget)
    if found is not None:
        check(graph, found.program)
        assert found.predicted == live_ranges(found.program.graph).use()


def test_equal_programs_get_equal_plans_whatever_the_clock_says(monkeypatch):
    problem = problem_of(network(8, gated=True)[0], 0.5)
    first = improved(problem, problem.budget)
    real, now = time.monotonic, 0.0

    def slow():
        nonlocal now
        now += 1000.0
        return real() + now

    monkeypatch.setattr(time, "monotonic", slow)
    second = improved(problem, problem.budget)
    assert first is not None and second is not None
    assert first.program.graph.ops == second.program.graph.ops


def test_nothing_to_decide():
    problem = problem_of(network(4, gated=False)[0], 0.5)
    plain = live_ranges(problem.graph)
    assert improved(problem, plain.device) is None
    assert improved(problem, plain.device - plain.temp - 1) is None


def test_plans_that_are_good_enough_and_those_of_other_solvers_are_left():
    problem = problem_of(network(8, gated=True)[0], 0.5)
    plan = greedy.prepare(problem)(problem.budget)
    assert solvers.finished(solvers.named("greedy"), problem, problem.budget, plan) is plan
    auto = solvers.named("auto")
    assert solvers.finished(auto, problem, 1 << 50, greedy.prepare(problem)(1 << 50)).changes_nothing


def test_a_program_has_one_allowance_for_all_its_plans(monkeypatch):
    """A budget that XLA's allocation misses is asked for again, a little lower each time."""
    problem = problem_of(network(12, gated=True)[0], 0.7)
    auto, solved = solvers.named("auto"), []
    solve = milp.Model.solve

    def counted(model, *args, nodes=None, **options):
        solved.append(model.width if nodes else 0)
        return solve(model, *args, nodes=nodes, **options)

    monkeypatch.setattr(milp.Model, "solve", counted)
    for percent in range(12):
        budget = problem.budget * (100 - percent) // 100
        found = solvers.finished(auto, problem, budget, greedy.prepare(problem)(budget))
        check(problem.graph, found.program)
    whole = improve.allowance(problem)
    assert 0.5 * whole < sum(solved) <= whole
