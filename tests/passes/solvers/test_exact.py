"""Exact: as cheap as the cheapest of all schedules around the boundary, and honest where it cannot tell."""

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from graphs import Builder, graphs, network, solid_chain, train_steps
from jax_lines import SOAK
from jaxtensile.devices.profiles import profile
from jaxtensile.ir.plan import Costs, Problem
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.recompute.clones import recomputed_ops
from jaxtensile.passes.recompute.nodes import Nodes
from jaxtensile.passes.recompute.stages import boundary_at
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.passes.solvers import greedy
from jaxtensile.passes.solvers.exact import prepare, solve
from jaxtensile.passes.solvers.milp import Model
from oracles import every_schedule, least_charge, one_boundary
from solver_checks import FEW, chains, check_plan

DEVICE = profile("nvidia-h200")
"""Values before the boundary that may be kept, at most: every subset of them is laid out."""


def problem_of(graph, budget):
    return Problem(graph=graph, costs=op_costs(graph, DEVICE), budget=budget)


def charge_of(problem, plan):
    return sum(problem.costs.charge[plan.program.origin[op.id]] for op in plan.program.clones())


def against_all(problem, exactly):
    """Compare with every schedule around the boundary; ``exactly``: everything has a price in the model."""
    graph, budget = problem.graph, problem.budget
    boundary = one_boundary(graph, budget)
    assume(boundary is not None and boundary.needed)
    free = [r for o in boundary.cone for r in graph.ops[o].results if r not in boundary.always]
    assume(len(free) <= FEW)
    least = least_charge(every_schedule(graph, boundary, problem.costs.charge), budget)
    assume(least is not None)
    plan = solve(problem)
    assert plan.predicted.device <= budget
    charge = charge_of(problem, plan)
    assert plan.gap is not None and plan.bound is not None
    assert plan.bound <= least * 1.005  # but for fused values that only recomputation reads, which are never kept
    assert least * (1 - 1e-6) <= charge <= least * 1.005
    if exactly:
        assert plan.gap == 0.0
    rival = greedy.solve(problem)
    if rival.predicted.device <= budget:
        assert charge_of(problem, rival) >= plan.bound * 0.995


@given(chains(), st.floats(0.05, 1))
@settings(max_examples=40)
def test_chains_of_solid_ops_are_solved_exactly(chain, share):
    graph, work = chain
    live = live_ranges(graph)
    costs = tuple(float(w) for w in work) + (1.0,) * (len(graph.ops) - len(work))
    budget = live.device - int((1 - share) * live.temp)
    assume(live.device > budget)
    against_all(Problem(graph=graph, costs=Costs(seconds=costs, charge=costs), budget=budget), exactly=True)


@given(train_steps(most_layers=4), st.floats(0.3, 1))
@settings(max_examples=40 if SOAK else 12, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
def test_train_steps_against_every_schedule(graph, share):
    live = live_ranges(graph)
    against_all(problem_of(graph, live.device - int((1 - share) * live.temp)), exactly=False)


@given(train_steps(most_layers=5), st.floats(0.3, 1), st.booleans())
@settings(max_examples=40 if SOAK else 12, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
def test_the_bound_holds_for_every_schedule_of_the_class(graph, share, in_seconds):
    live, costs = live_ranges(graph), op_costs(graph, DEVICE)
    budget = live.device - int((1 - share) * live.temp)
    figure = costs.seconds if in_seconds else costs.charge
    boundary = one_boundary(graph, budget)
    assume(live.device > budget and boundary is not None and boundary.needed)
    nodes = Nodes(graph, live, boundary)
    assume(len(nodes.maker) <= FEW)
    least = least_charge(every_schedule(graph, boundary, figure, nodes.small, list(nodes.maker)), budget)
    plan = solve(Problem(graph=graph, costs=Costs(seconds=costs.seconds, charge=figure), budget=budget))
    if least is None:
        assert plan.gap is None
        return
    assert plan.bound is not None and plan.bound <= least
    assert plan.predicted.device <= budget
    if plan.gap == 0.0:
        assert plan.program.again(figure) == pytest.approx(least, rel=2e-5)


def test_where_no_schedule_around_the_turn_fits_the_bound_is_infinite():
    graph = solid_chain([8] * 4, [1] * 4)
    live = live_ranges(graph)
    budget = live.device - live.temp + 1
    assert least_charge(every_schedule(graph, one_boundary(graph, budget), [1.0] * len(graph.ops)), budget) is None
    plan = solve(problem_of(graph, budget))
    assert plan.predicted.device > budget
    assert (plan.gap, plan.bound) == (None, float("inf"))


def test_what_is_looked_through_has_its_price():
    """Two fused ops between a product that runs again and what is read after the boundary."""
    b = Builder()
    x, w = b.input(64, 64), b.input(64, 64)
    z = b.dot(x, w)
    wide = b.op("mul", b.op("neg", z), z)
    y = b.dot(b.op("tanh", wide), w)
    for _ in range(4):
        y = b.dot(y, w)
    graph = b.graph(b.op("add", y, b.op("exp", wide)))
    live = live_ranges(graph)
    boundary = boundary_at(graph, len(graph.ops) - 3)
    nodes = Nodes(graph, live, boundary)
    model = Model(nodes, live, [1.0] * len(graph.ops), live.temp)
    for v in nodes.maker:
        model.forbid(nodes.small | frozenset(set(nodes.maker) - {v}))
    model.forbid(nodes.small | frozenset(nodes.maker))
    found = model.solve(10.0)
    assert found.kept is not None
    assert found.bound == pytest.approx(len(recomputed_ops(graph, boundary, found.kept)), rel=1e-6)


@given(train_steps(pinned=True), st.floats(0, 1.1))
@settings(max_examples=40 if SOAK else 8)
def test_plans_of_train_steps(graph, share):
    budget = int(share * live_ranges(graph).device)
    check_plan(graph, budget, prepare(problem_of(graph, budget), time_limit=5.0)(budget))


@given(graphs(), st.floats(0, 1.1))
@settings(max_examples=60 if SOAK else 12)
def test_plans_of_any_graph(graph, share):
    budget = int(share * live_ranges(graph).device)
    check_plan(graph, budget, prepare(problem_of(graph, budget), time_limit=5.0)(budget))


@pytest.mark.parametrize("gated", [pytest.param(True, id="gated"), pytest.param(False, id="tanh")])
def test_half_of_the_bytes_of_a_network(gated):
    graph, *_ = network(6, gated)
    live = live_ranges(graph)
    problem = problem_of(graph, live.device - int(0.4 * live.temp))
    plan = solve(problem)
    check_plan(graph, problem.budget, plan)
    assert plan.predicted.device <= problem.budget
    assert plan.gap == 0.0
    assert charge_of(problem, greedy.solve(problem)) >= plan.bound


def test_a_program_that_fits_is_proven_to_need_nothing():
    graph, *_ = network(3, gated=True)
    plan = solve(problem_of(graph, live_ranges(graph).device))
    assert plan.changes_nothing
    assert (plan.gap, plan.bound) == (0.0, 0.0)
