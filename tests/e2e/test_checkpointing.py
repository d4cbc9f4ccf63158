"""How often do plans of chains run a step again? Griewank's optimum says how often they must.

With s checkpoints, l steps can be reversed when no step is advanced more than r times if and only if
l <= C(s + r, s), and then the least number of advances is r l - C(s + r, r - 1) for the smallest such r
(Griewank, Optimization Methods and Software 1992; Griewank and Walther, ACM TOMS 2000, algorithm 799).
"""

from functools import cache
from math import comb, inf, isqrt

import jax
import jax.numpy as jnp
import pytest

from jaxtensile.devices.profiles import profile
from jaxtensile.ir.plan import Problem
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.offload.loops import LoopLadder
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.passes.solvers.by_name import named
from jaxtensile.passes.verify.check import check
from jaxtensile.program.trace import trace_jaxpr

DEVICE = profile("nvidia-h200")
X, W = jnp.zeros((256, 256)), jnp.zeros((256, 256))
BUFFER = X.nbytes


def least_advances(steps, checkpoints):
    """Griewank's optimum."""
    repeats = 1
    while comb(checkpoints + repeats, checkpoints) < steps:
        repeats += 1
    return repeats * steps - comb(checkpoints + repeats, repeats - 1)


@cache
def fewest(steps, checkpoints):
    """The same by trying every place for the next checkpoint; the first state takes one."""
    if steps == 1:
        return 0
    if checkpoints == 1:
        return steps * (steps - 1) // 2
    return min((i + fewest(steps - i, checkpoints - 1) + fewest(i, checkpoints) for i in range(1, steps)), default=inf)


def test_the_formula_is_the_optimum():
    for steps in range(1, 25):
        for checkpoints in range(1, 8):
            assert least_advances(steps, checkpoints) == fewest(steps, checkpoints)


def chain(steps):
    """The gradient of so many equal steps, with a product each."""

    def loss(x):
        for _ in range(steps):
            x = jnp.tanh(x @ W)
        return x.sum()

    return trace_jaxpr(jax.jit(jax.grad(loss)).trace(X).jaxpr).graph


@pytest.mark.parametrize(("solver", "slack"), [("greedy", 1), ("chain", 2)])
@pytest.mark.parametrize("steps", [21, 28])
def test_a_chain_runs_no_step_more_often_than_it_must(solver, slack, steps):
    """A step needs its result to be reversed, so that l steps are l + 1 states, of which the last gradient takes the
    place of one: s checkpoints are s + 1 buffers. Copying a state on takes one more while it is done.

    Down to where Griewank's optimum begins to advance a step three times, but for ``slack`` checkpoints.
    """
    graph = chain(steps)
    solve = named(solver)(Problem(graph=graph, costs=op_costs(graph, DEVICE), budget=0))
    live = live_ranges(graph)
    base = live.device - live.temp
    tight = next(s for s in range(1, steps) if comb(s + 2, 2) >= steps + 1) + slack
    assert tight < steps // 2 + 1
    for checkpoints in range(tight + 1, steps + 2, 3):
        plan = solve(base + (checkpoints + 1) * BUFFER + BUFFER // 2)
        check(graph, plan.program)
        assert plan.predicted.device <= base + (checkpoints + 1) * BUFFER + BUFFER // 2
        again = sum(op.primitive == "dot_general" for op in plan.program.clones())
        assert again == max(least_advances(steps + 1, min(checkpoints, steps + 1)) - steps, 0), checkpoints


@pytest.mark.parametrize("steps", [36, 64, 100, 1024, 10_000])
def test_a_loop_becomes_the_loop_of_loops_that_holds_fewest_states(steps):
    """n outer and k inner states of N = n k steps: no pair of them is smaller, and within a factor of the root of two
    of the fewest checkpoints with which any schedule advances every step at most twice."""

    def loss(x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ W), None), x, length=steps)[0].sum()

    graph = trace_jaxpr(jax.jit(jax.grad(loss)).trace(X).jaxpr).graph
    ladder = LoopLadder(graph, lambda body: op_costs(body, DEVICE).charge)
    found = [set(inner.values()) for inner in ladder.nests(1)]
    assert found and all(len(k) == 1 for k in found)
    held = min(steps // k + k for (k,) in found)
    assert held == min(steps // k + k for k in range(1, steps + 1) if not steps % k) == 2 * isqrt(steps)
    fewest_at_all = next(s for s in range(1, steps) if comb(s + 2, 2) >= steps)
    assert held <= 2**0.5 * (fewest_at_all + 2)
