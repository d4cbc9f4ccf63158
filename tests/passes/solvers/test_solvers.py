"""Solvers by name: each keeps the budget and the values; ``exact`` is no dearer than greedy and knows its gap."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxtensile
from graphs import network, train_steps
from jaxtensile.cli import main as cli
from jaxtensile.devices.profiles import profile
from jaxtensile.ir.plan import Problem
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.passes.solvers import by_name as solvers
from jaxtensile.passes.solvers import exact, greedy
from jaxtensile.passes.solvers.by_name import NAMES, named
from programs import FAST, chain_args, squeezed, step
from solver_checks import check_plan

DEVICE = profile("nvidia-h200")
ARGS = chain_args(layers=16, width=16, rows=256)


def problem_of(graph, share):
    """Bytes for a share of the temporaries, and the budget."""
    live = live_ranges(graph)
    budget = live.device - int((1 - share) * live.temp)
    return Problem(graph=graph, costs=op_costs(graph, DEVICE), budget=budget), budget


def price(problem, plan):
    return plan.program.again(problem.costs.charge)


@pytest.fixture(autouse=True)
def a_second_for_exact(monkeypatch):
    monkeypatch.setattr(solvers, "ALLOWANCE", 2.0)


@pytest.mark.parametrize("name", NAMES)
def test_the_budget_and_the_values_are_kept(name):
    found = squeezed(step, *ARGS, shares=(0.7, 0.8, 0.9), solver=name, compiler_options=FAST)
    assert found is not None
    planned, report = found
    assert report.compiled.exact and report.compiled.device <= report.budget
    assert report.solver in {"auto": ("greedy", "milp"), "exact": ("greedy", "exact")}.get(name, (name,))
    ours, theirs = planned(*ARGS), jax.jit(step)(*ARGS)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_report_says_who_planned_and_how_far_from_the_least():
    found = [squeezed(step, *ARGS, shares=(s,), solver="exact", compiler_options=FAST) for s in (0.95, 0.75, 0.65)]
    reports = [report for _, report in filter(None, found) if report.gap is not None]
    assert reports, "one of them is within reach of one boundary"
    for report in reports:
        assert 0.0 <= report.gap <= 1.0
        assert report.to_dict()["gap"] == report.gap
        assert f"by {report.solver}: " in str(report)
    _, report = squeezed(step, *ARGS, solver="greedy", compiler_options=FAST)
    assert report.gap is None
    assert str(report).count("by greedy") == 1


@given(train_steps(pinned=True), st.floats(0.05, 1.0))
@settings(max_examples=8)
def test_exact_is_never_worse_than_greedy(graph, share):
    problem, budget = problem_of(graph, share)
    base, found = greedy.prepare(problem)(budget), named("exact")(problem)(budget)
    check_plan(graph, budget, found)
    if base.predicted.device <= budget:
        assert found.predicted.device <= budget
        assert price(problem, found) <= price(problem, base)
        if found.gap is not None:
            assert found.bound is not None and 0.0 <= found.gap <= 1.0
            assert price(problem, found) * (1 - found.gap) == pytest.approx(found.bound, rel=1e-4, abs=1e-12)
    else:
        assert found.predicted.device <= base.predicted.device


def test_what_exact_has_proven_holds_for_greedys_plan_too():
    """Of equal plans greedy's is taken, with the bound; one below it has several boundaries, and proves nothing."""
    graph, *_ = network(8, True, batch=16384, width=1024)
    problem, budget = problem_of(graph, 0.5)
    base = greedy.prepare(problem)(budget)
    cost = price(problem, base)
    for bound, gap in ((cost, 0.0), (cost / 2, 0.5), (2 * cost, None), (None, None)):
        found = solvers._better(problem, budget, base, replace(base, solver="exact", bound=bound))
        assert (found.solver, found.gap) == ("greedy", gap)
    assert solvers._better(problem, budget, base, replace(base, wait=-cost / 2, solver="exact")).solver == "exact"


def test_exact_takes_its_allowance_for_all_plans_together(monkeypatch):
    given = []
    real = exact.prepare

    def watched(problem, seconds):
        given.append(seconds)
        return real(problem, seconds)

    monkeypatch.setattr(exact, "prepare", watched)
    monkeypatch.setattr(solvers, "ALLOWANCE", 4.0)
    graph, *_ = network(12, True, batch=16384, width=1024)
    problem, budget = problem_of(graph, 0.5)
    at = named("exact")(problem)
    base = greedy.prepare(problem)(budget)
    for _ in range(3):
        plan = at(budget)
        assert plan.predicted.device <= budget and price(problem, plan) <= price(problem, base)
    assert given[0] == 2.0 and given == sorted(given, reverse=True)
    live = live_ranges(graph)
    assert at(live.device - live.temp - 1).solver == "greedy" and len(given) == 3, "nothing can fit: not tried"


def crossed(weights, x):
    """Every layer reads the first one's result: no single value cuts this program."""
    first = jnp.tanh(x @ weights[0])
    y = first
    for w in weights[1:]:
        y = jnp.tanh(y @ w) * first
    return (y * y).sum()


def test_what_is_no_chain_is_told():
    fun, args = jax.grad(crossed), chain_args(layers=12, width=16, rows=256)
    plain = jaxtensile.jit(fun, budget="1TiB").plan(*args).compiled
    planned = jaxtensile.jit(fun, budget=int(plain.device - 0.3 * plain.temp), solver="chain")
    with pytest.raises(jaxtensile.SolverError, match=r"no chain: use solver='auto'"):
        planned.plan(*args)
    assert issubclass(jaxtensile.SolverError, ValueError)
    assert jaxtensile.jit(fun, budget="1TiB", solver="chain").plan(*args).unchanged, "it fits: nobody asks"


def test_a_chain_that_does_not_fit_names_the_other_solvers():
    plain = jaxtensile.jit(step, budget="1TiB").plan(*ARGS).compiled
    budget = plain.device - plain.temp + 16
    with pytest.raises(jaxtensile.BudgetError, match="or plan with solver='auto'"):
        jaxtensile.jit(step, budget=budget, solver="chain").plan(*ARGS)
    with pytest.raises(jaxtensile.BudgetError) as told:
        jaxtensile.jit(step, budget=plain.device - plain.temp - 1).plan(*ARGS)
    assert "solver" not in str(told.value)


def test_an_unknown_solver_is_told_the_names():
    for wrong in ("clairvoyant", "", None, 3):
        with pytest.raises(jaxtensile.SolverError) as told:
            jaxtensile.jit(step, solver=wrong)
        assert all(repr(name) in str(told.value) for name in NAMES) and repr(wrong) in str(told.value)


@pytest.mark.parametrize("name", ["exact", "chain"])
def test_solvers_that_only_recompute_take_no_host_memory(name):
    with pytest.raises(jaxtensile.SolverError, match="host_budget='1GiB'"):
        jaxtensile.jit(step, solver=name, host_budget="1GiB")
    jaxtensile.jit(step, solver=name, host_budget=0)


def test_a_decorator_keeps_its_solver():
    plain = jaxtensile.jit(step, budget="1TiB").plan(*ARGS).compiled

    @jaxtensile.jit(budget=int(plain.device - 0.3 * plain.temp), solver="chain", compiler_options=FAST)
    def decorated(weights, x):
        return step(weights, x)

    assert decorated.plan(*ARGS).solver == "chain"


def test_the_command_line_takes_a_solver(tmp_path, capsys):
    path = tmp_path / "work.py"
    path.write_text(
        "import jax, jaxtensile\n"
        "def small():\n"
        "    return jaxtensile.Workload(fun=lambda x: x * 2, args=(jax.ShapeDtypeStruct((8,), 'float32'),))\n"
    )
    assert cli.main(["plan", f"{path}:small", "--budget", "1MiB", "--solver", "exact"]) == 0
    assert cli.main(["plan", f"{path}:small", "--budget", "1MiB", "--solver", "none"]) == 2
    assert "unknown solver 'none'" in capsys.readouterr().err
