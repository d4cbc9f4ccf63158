"""The solver keeps its promises: right programs, true predictions, nothing done that is not needed."""

import importlib

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import Builder, graphs, network, train_steps
from jax_lines import SOAK
from jaxtensile.devices.profiles import profile
from jaxtensile.ir.plan import Problem, Remat
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.passes.solvers import greedy
from jaxtensile.passes.solvers.greedy import prepare, solve
from jaxtensile.program.trace import trace_jaxpr
from solver_checks import check_plan

DEVICE = profile("nvidia-h200")
FEWER = settings(max_examples=60 if SOAK else 10)
FEW = settings(max_examples=20 if SOAK else 5)


def problem_of(graph, budget):
    return Problem(graph=graph, costs=op_costs(graph, DEVICE), budget=budget)


@given(train_steps(pinned=True), st.floats(0, 1.1))
@FEWER
def test_plans_of_train_steps(graph, share):
    budget = int(share * live_ranges(graph).device)
    check_plan(graph, budget, solve(problem_of(graph, budget)))


@given(train_steps(), st.lists(st.floats(0, 1.0), min_size=1, max_size=4))
@FEWER
def test_the_smallest_plan_is_the_same_whatever_was_asked_before(graph, shares):
    problem, device = problem_of(graph, 0), live_ranges(graph).device
    asked = prepare(problem)
    for share in shares:
        asked(int(share * device))
    assert asked(0).program == prepare(problem)(0).program


@given(train_steps(), st.floats(0, 1))
@FEWER
def test_what_misses_is_the_smallest_where_that_is_asked_for(graph, share):
    budget = int(share * live_ranges(graph).device)
    at = prepare(problem_of(graph, budget))
    near = at(budget, least=False)
    check_plan(graph, budget, near)
    smallest = at(budget)
    if near.predicted.device <= budget:
        assert smallest == near
    else:
        assert smallest.predicted.device <= min(near.predicted.device, at(0).predicted.device)


@given(train_steps(), st.floats(0.05, 1))
@FEWER
def test_where_a_plan_is_dear_or_misses_it_is_the_best_of_those_for_somewhat_less(graph, share):
    budget, price = int(share * live_ranges(graph).device), op_costs(graph, DEVICE).charge
    known = greedy.Searches(graph, price)
    found, first = known.cheapest(budget, True), known.search(budget)
    others = [known.search(max(budget - int(s * known.unchanged.temp), 0)) for s in greedy._LOWER]
    if first.device <= budget and first.price <= greedy._DEAR * sum(price):
        assert found is first
    elif found.device > budget:
        assert found.device == min(t.device for t in (first, *others))
    else:
        assert found.price <= min(t.price for t in (first, *others[:1]) if t.device <= budget)


@given(train_steps(), st.floats(0.05, 0.9), st.floats(0, 1))
@FEWER
def test_a_search_with_a_price_ends_below_it_or_over_its_budget(graph, share, part):
    budget, price = int(share * live_ranges(graph).device), op_costs(graph, DEVICE).charge
    below = part * greedy.Searches(graph, price).search(budget).price
    known = greedy.Searches(graph, price)
    found = known.search(budget, below)
    assert found.device > budget or found.price < below
    whole = known.search(budget)
    assert whole.price == greedy.Searches(graph, price).search(budget).price, "what was asked with a price is no answer"


@given(graphs(), st.lists(st.floats(0, 1.1), min_size=2, max_size=3))
@FEWER
def test_what_is_found_does_not_depend_on_what_was_asked_before(graph, shares):
    """Else a budget that an error names is met or not as it happens."""
    price, whole = op_costs(graph, DEVICE).charge, live_ranges(graph).device
    known = greedy.Searches(graph, price)
    for budget in (*(int(share * whole) for share in shares), 0):
        for least in (False, True):
            found, alone = known.cheapest(budget, least), greedy.Searches(graph, price).cheapest(budget, least)
            assert (found.device, found.price) == (alone.device, alone.price)


def test_the_least_of_layers_with_eigh():
    """Whitening layers: below 2,021 MB nothing was searched for, and from 2,040 on there is a plan of 1,988."""
    case = importlib.import_module("benchmarks.reports.cases.whitening_eigh").case("big")
    graph = trace_jaxpr(jax.make_jaxpr(case["fun"])(*case["args"]), (True,) * 8 + (False,) * 2).graph
    assert greedy.Searches(graph, op_costs(graph, DEVICE).charge).least.device < 2e9


def test_what_comes_near_a_budget_is_not_looked_for_without_one(monkeypatch):
    graph, *_ = network(64, False)
    known, asked = greedy.Searches(graph, op_costs(graph, DEVICE).charge), list[tuple[int, bool]]()
    search = known._search
    monkeypatch.setattr(known, "_search", lambda b, p, hopeful: (asked.append((b, hopeful)), search(b, p, hopeful))[1])
    known.search(1)
    assert asked == [(1, False), (0, False)]
    asked.clear()
    known.search(2, hopeful=True)
    assert asked == [(2, True)]
    near = known.search(0).device
    asked.clear()
    assert not known._is_hopeless([known.search(0)], near)
    assert asked == []


@given(graphs(), st.floats(0, 1.1))
@FEWER
def test_plans_of_any_graph(graph, share):
    budget = int(share * live_ranges(graph).device)
    check_plan(graph, budget, solve(problem_of(graph, budget)))


@given(train_steps(), st.lists(st.floats(0, 1), min_size=2, max_size=3))
@FEW
def test_a_prepared_problem_gives_the_same_plans(graph, shares):
    whole = live_ranges(graph).device
    at = prepare(problem_of(graph, whole))
    for share in shares:
        budget = int(share * whole)
        assert at(budget) == solve(problem_of(graph, budget)), "whatever was asked before"


@given(train_steps(), st.lists(st.floats(0.01, 1), min_size=2, max_size=4))
@FEW
def test_asked_for_less_a_prepared_problem_never_gives_more(graph, shares):
    # No budget at all is asked apart: its answer remembers nothing (the test above).
    whole = live_ranges(graph).device
    at = prepare(problem_of(graph, whole))
    missed = whole
    for budget in sorted((int(share * whole) for share in shares), reverse=True):
        found = at(budget).predicted.device
        if found > budget:
            assert found <= missed
            missed = found


KINDS = [pytest.param(True, id="gated"), pytest.param(False, id="tanh")]


@pytest.mark.parametrize("gated", KINDS)
def test_half_of_the_bytes_of_a_network(gated):
    graph, step, _ = network(16, gated)
    live = live_ranges(graph)
    budget = live.device - live.temp // 2
    plan = solve(problem_of(graph, budget))
    check_plan(graph, budget, plan)
    assert plan.predicted.device <= budget
    assert plan.recompute_flops <= sum(op.flops for op in graph.ops[:step])
    assert plan.overhead > 0
    assert any(isinstance(a, Remat) for a in plan.actions)


@pytest.mark.parametrize("gated", KINDS)
def test_the_least_of_a_deep_network_is_near_the_square_root(gated):
    """64 layers in about 2 sqrt(64) activations, for at most one more forward pass a round (Chen et al. 2016)."""
    graph, step, activation = network(64, gated)
    assert live_ranges(graph).temp >= 64 * activation
    plan = solve(problem_of(graph, 0))
    check_plan(graph, 0, plan)
    assert plan.predicted.temp <= 24 * activation
    assert plan.recompute_flops <= 3 * sum(op.flops for op in graph.ops[:step])


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_more_bytes_never_cost_more_on_a_network(share):
    graph, *_ = network(24, gated=True)
    live = live_ranges(graph)
    at = prepare(problem_of(graph, 0))
    smaller, larger = (at(live.device - int((1 - s) * live.temp)) for s in (share, share + 0.1))
    assert larger.overhead <= smaller.overhead * 1.05


def test_a_program_without_idle_bytes_is_left_alone():
    b = Builder()
    y = b.input(1000)
    for _ in range(10):
        y = b.op("cumsum", y)
    graph = b.graph(y)
    plan = solve(problem_of(graph, 0))
    assert plan.changes_nothing
    assert plan.predicted.device > 0


def laid_out(monkeypatch, work):
    """Ops that a search for the least of a deep network lays out, and its plan, where it may lay out ``work`` an op."""
    (graph, *_), around, count = network(64, False), greedy._one_boundary, 0

    def counted(*given):
        nonlocal count
        found, laid = around(*given)
        count += laid
        return found, laid

    with monkeypatch.context() as patch:
        patch.setattr(greedy, "_WORK", work)
        patch.setattr(greedy, "_one_boundary", counted)
        plan = prepare(problem_of(graph, 0))(0)
    check_plan(graph, 0, plan)
    return count / len(graph.ops), plan.predicted.device


def test_a_search_ends_once_it_has_laid_out_enough(monkeypatch):
    long, most = laid_out(monkeypatch, 1 << 20), laid_out(monkeypatch, 1)
    assert long[0] > 2 * most[0], "as it is, several boundaries are looked at"
    assert laid_out(monkeypatch, greedy._WORK) == long, "of usual programs none ends early"
    assert long[1] <= most[1]
