"""Chains: the dynamic programme against trying everything, on links alone and on whole programs."""

from contextlib import suppress
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphs import network, solid_chain, train_steps
from jaxtensile.devices.profiles import profile
from jaxtensile.errors import SolverError
from jaxtensile.ir.plan import Costs, Problem
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.passes.solvers.chain import END, NOTHING, WHOLE, Link, cheapest, solve
from oracles import every_schedule, least_charge, one_boundary
from solver_checks import check_plan

small = st.integers(0, 9)


@st.composite
def links(draw):
    charge = draw(st.integers(1, 9))
    return Link(
        inner=draw(small),
        end=draw(small),
        charge=charge,
        saved=draw(st.integers(0, charge)),
        room=draw(st.integers(5, 40)),
        forward=draw(st.integers(0, 40)),
    )


def charge_of_choice(chain, choice, room, top):
    """The charge by walking down the chain; None where the bytes are over the room somewhere."""
    kept = [{WHOLE: k.inner + k.end, END: k.end, NOTHING: 0}[c] for k, c in zip(chain, choice, strict=True)]
    if (
        sum(kept) > room
        or sum(kept[:-1]) > top
        or any(sum(kept[: max(i - 1, 0)]) > k.forward for i, k in enumerate(chain))
    ):
        return None
    there = set()  # links whose inner part and end have been computed again
    for i in reversed(range(len(chain))):
        if choice[i] != WHOLE:
            for j in range(i, -1, -1):  # link i, and whatever its beginning needs
                if j < i and choice[j] != NOTHING:
                    break
                there.add(j)
        held = sum(k.inner + k.end if j in there else kept[j] for j, k in enumerate(chain[: i + 1]))
        if held > chain[i].room:
            return None
    return sum({WHOLE: 0, END: k.charge - k.saved, NOTHING: k.charge}[c] for k, c in zip(chain, choice, strict=True))


@given(st.lists(links(), min_size=1, max_size=6), st.integers(0, 60), st.integers(0, 60))
@settings(max_examples=300)
def test_the_choice_is_the_best_of_all(chain, room, top):
    charges = [charge_of_choice(chain, c, room, top) for c in product((WHOLE, END, NOTHING), repeat=len(chain))]
    best = min((c for c in charges if c is not None), default=None)
    found = cheapest(chain, room, top)
    assert (found is None) == (best is None)
    if found is not None:
        assert charge_of_choice(chain, found, room, top) == best


@st.composite
def chains(draw):
    n = draw(st.integers(2, 8))
    sizes, work = (draw(st.lists(st.integers(1, 40), min_size=n, max_size=n)) for _ in range(2))
    return solid_chain(sizes, work), work


@given(chains(), st.floats(0.05, 1))
@settings(max_examples=40)
def test_chains_are_cut_as_well_as_by_every_schedule(chain, share):
    graph, work = chain
    live = live_ranges(graph)
    costs = tuple(float(w) for w in work) + (1.0,) * (len(graph.ops) - len(work))
    problem = Problem(
        graph=graph, costs=Costs(seconds=costs, charge=costs), budget=live.device - int((1 - share) * live.temp)
    )
    boundary = one_boundary(graph, problem.budget)
    assume(boundary is not None and boundary.needed)
    least = least_charge(every_schedule(graph, boundary, costs), problem.budget)
    assume(least is not None)
    plan = solve(problem)
    assert plan.predicted.device <= problem.budget
    assert plan.overhead == pytest.approx(least)


@given(train_steps(pinned=True), st.floats(0, 1.1))
@settings(max_examples=20)
def test_plans_of_train_steps(graph, share):
    budget = int(share * live_ranges(graph).device)
    problem = Problem(graph=graph, costs=op_costs(graph, profile("nvidia-h200")), budget=budget)
    with suppress(SolverError):  # few of these are chains
        check_plan(graph, budget, solve(problem))


@pytest.mark.parametrize("gated", [pytest.param(True, id="gated"), pytest.param(False, id="tanh")])
def test_most_of_the_bytes_of_a_network(gated):
    graph, *_ = network(12, gated)
    live = live_ranges(graph)
    budget = live.device - int(0.4 * live.temp)
    problem = Problem(graph=graph, costs=op_costs(graph, profile("nvidia-h200")), budget=budget)
    plan = solve(problem)
    check_plan(graph, budget, plan)
    assert plan.predicted.device <= budget
