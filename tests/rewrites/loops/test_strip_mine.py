"""Loops of loops: the same values, and stacks that grow with the square root of the length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtensile
from jaxtensile import _compat
from jaxtensile.devices.profiles import profile
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.offload.loops import LoopLadder, find_pairs
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.program.trace import jaxpr_flops, trace_jaxpr
from jaxtensile.rewrites.loops.loops import rewrite_loops
from jaxtensile.rewrites.loops.strip_mine import strip_mine
from loop_programs import PROGRAMS, arguments, chained
from programs import same

DEVICE = profile("nvidia-h200")
LEVEL_0 = {"xla_backend_optimization_level": 0}


def ladder(graph):
    return LoopLadder(graph, lambda body: op_costs(body, DEVICE).charge)


def run(closed, args):
    evaluate = jax.jit(lambda *xs: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *xs), compiler_options=LEVEL_0)
    return evaluate(*jax.tree.leaves(args))


@pytest.fixture(params=(*PROGRAMS, chained), ids=lambda f: f.__name__)
def program(request):
    return jax.value_and_grad(request.param), arguments()


@pytest.mark.parametrize("k", [2, 3, 5, 6])
def test_every_way_to_rewrite_nested_loops_gives_the_same_values(program, k):
    fun, args = program
    traced = jax.jit(fun).trace(*args)
    flat = trace_jaxpr(traced.jaxpr)
    inner = {o: k for pair in find_pairs(flat.graph) for o in (pair.forward, pair.backward)}
    closed = strip_mine(flat, traced.jaxpr, inner)
    assert jaxpr_flops(closed.jaxpr) == jaxpr_flops(traced.jaxpr.jaxpr)
    nested = trace_jaxpr(closed)
    before, after = find_pairs(flat.graph), find_pairs(nested.graph)
    times = 2 if 12 % k else 1  # the rest is a pair of loops, too
    assert sum(len(p.links) for p in after) == times * sum(len(p.links) for p in before), "stacks pass as they are"
    assert {nested.graph.ops[p.forward].trip_count for p in after} == {12 // k, 12 % k or 12 // k}
    expected = jax.tree.leaves(jax.jit(fun, compiler_options=LEVEL_0)(*args))
    for way in ladder(nested.graph).rungs:
        changed = _compat.without_dead_code(rewrite_loops(nested, closed, way))
        for new, old in zip(run(changed, args), expected, strict=True):
            assert new.dtype == old.dtype and new.shape == old.shape
            # Twelve chained f32 steps: small entries are differences of the large ones and have their rounding.
            np.testing.assert_allclose(new, old, rtol=2e-5, atol=1e-6 * max(1.0, float(np.abs(old).max())))


def test_only_the_named_loops_are_nested():
    traced = jax.jit(jax.grad(chained)).trace(*arguments())
    flat = trace_jaxpr(traced.jaxpr)
    pair = find_pairs(flat.graph)[0]
    closed = strip_mine(flat, traced.jaxpr, {pair.forward: 4})
    trips = [op.trip_count for op in trace_jaxpr(closed).graph.ops if op.primitive == "scan"]
    assert sorted(trips) == [3, *[12] * (len(trips) - 1)]
    for new, old in zip(run(closed, arguments()), jax.tree.leaves(jax.grad(chained)(*arguments())), strict=True):
        np.testing.assert_allclose(new, old, rtol=2e-5, atol=2e-5)


def walk(steps, width=256):
    """The gradient of many steps through an elementwise body with several residuals, and its arguments."""

    def body(x, _):
        y = jnp.sin(x) * jnp.cos(2 * x) + jnp.tanh(x)
        return jnp.sin(y) * 0.9, None

    def loss(x):
        return (jax.lax.scan(body, x, length=steps)[0] ** 2).sum()

    return jax.grad(loss), (jnp.linspace(-1.0, 1.0, width * width).reshape(width, width),)


def test_ways_to_nest_are_near_the_optimum():
    fun, args = walk(360)
    graph = trace_jaxpr(jax.jit(fun).trace(*args).jaxpr).graph
    full = ladder(graph)
    most, least = full.nests(1)
    assert len(set(most.values())) == len(set(least.values())) == 1
    (k,) = set(least.values())
    assert k in (18, 20), "next to the square root of 360"
    (few,) = set(most.values())
    assert few < k and 360 % few == 0, "shorter where each of the inner iterations stacks all its residuals"
    assert full.nests(1 << 40) == ()
    prime = ladder(trace_jaxpr(jax.jit(walk(359)[0]).trace(*args).jaxpr).graph)
    assert set(prime.nests(1)[-1].values()) == {19}, "where nothing divides the number, there is a rest"
    short = ladder(trace_jaxpr(jax.jit(walk(3)[0]).trace(*args).jaxpr).graph)
    assert short.nests(1) == ()


def test_bytes_grow_as_the_square_root_of_the_steps():
    """At twice the FLOPs at most: one forward pass more for the outer loop, one for the inner."""
    size = 256 * 256 * 4
    for steps in (64, 251, 1024):
        fun, args = walk(steps)
        plain = jaxtensile.jit(fun, budget="64GiB", compiler_options=LEVEL_0).plan(*args).compiled
        assert plain.temp > 2 * steps * size
        budget = int((3 * steps**0.5 + 16) * size)
        step = jaxtensile.jit(fun, budget=budget, compiler_options=LEVEL_0)
        report = step.plan(*args)
        assert report.compiled.device <= budget
        assert any("loops of loops" in note for note in report.notes)
        same(step(*args), jax.jit(fun, compiler_options=LEVEL_0)(*args))
        assert live_ranges(trace_jaxpr(jax.jit(fun).trace(*args).jaxpr).graph).device > steps * size
