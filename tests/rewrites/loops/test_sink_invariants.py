"""What a loop alone reads: found, made in the loop, the same values; and a plan that nothing else reaches."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxtensile
from differential import agree, same_bits
from jaxtensile.program.trace import jaxpr_flops, trace_jaxpr
from jaxtensile.rewrites.loops.sink_invariants import find_invariants, sink_invariants

LAYERS, ROWS, WIDTH, TRIPS = 6, 256, 8, 4
WEIGHTS = list(0.5 * jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)))
X = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
LEAST = ROWS * WIDTH * 4


def network(weights, x):
    for w in weights:
        x = x + jnp.tanh(x @ w)
    return x


def gauss_newton(weights, x):
    """Steps along a curvature that a linearised network gives: its residuals are constants of the loop."""
    out, forward = jax.linearize(lambda ws: network(ws, x), weights)
    backward = jax.linear_transpose(forward, weights)
    (gradient,) = backward(out / ROWS)

    def iteration(_, direction):
        (curved,) = backward(forward(direction) / ROWS)
        return jax.tree.map(lambda d, c, g: d - 0.1 * (c + 0.01 * d - g), direction, curved, gradient)

    found = lax.fori_loop(0, TRIPS, iteration, jax.tree.map(jnp.zeros_like, weights))
    return jax.tree.map(lambda w, d: w - d, weights, found), jnp.mean(out**2)


def noisy(weights, x):
    """Keys among what is carried, a constant that is passed on, and several results of a loop that runs backwards."""
    kept = jax.random.bernoulli(jax.random.key(3), 0.8, (ROWS, WIDTH)) * jnp.sin(x @ weights[0])

    def iteration(carry, w):
        key, y = carry
        key, now = jax.random.split(key)
        return (key, jnp.tanh(y @ w) * kept + jax.random.normal(now, x.shape)), (kept, y.sum())

    (key, y), (stack, sums) = lax.scan(iteration, (jax.random.key(4), x), jnp.stack(weights), reverse=True)
    return jax.random.key_data(key), y, stack, sums


def mapped(weights, x):
    """No carry; and what is made of half precision."""
    half = jnp.cos(x @ weights[0]).astype(jnp.bfloat16)
    return lax.map(lambda w: (half @ w.astype(jnp.bfloat16)).sum(), jnp.stack(weights))


def opened(fun, *args):
    closed = jax.jit(fun).trace(*args).jaxpr
    return closed, trace_jaxpr(closed)


def loop(traced):
    (op,) = [op for op in traced.graph.ops if op.primitive == "scan"]
    return op


@pytest.mark.parametrize("fun", [gauss_newton, noisy, mapped], ids=lambda f: f.__name__)
def test_values_are_the_same_and_the_loop_reads_less(fun):
    closed, traced = opened(fun, WEIGHTS, X)
    moved = find_invariants(traced.graph, LEAST // 2)
    assert [*moved] == [loop(traced).id]
    changed = sink_invariants(traced, closed, moved)
    again = trace_jaxpr(changed)
    assert not find_invariants(again.graph, LEAST // 2)
    same_bits(changed, closed, jax.tree.leaves((WEIGHTS, X)))


def test_work_is_done_once_an_iteration():
    closed, traced = opened(gauss_newton, WEIGHTS, X)
    changed = sink_invariants(traced, closed, find_invariants(traced.graph, LEAST))
    forward = 2 * LAYERS * ROWS * WIDTH * WIDTH
    assert jaxpr_flops(changed) == jaxpr_flops(closed) + TRIPS * forward


def test_what_is_there_anyway_stays():
    """It is an argument, or one in another shape, small, a result, read by something later, or part of a stack."""

    def fun(x, w):
        early, late, out = jnp.sin(x), jnp.cos(x), jnp.exp(x)
        stacked = lax.scan(lambda h, _: (jnp.tanh(h @ w), h), x, length=3)[1][0]
        small, shaped = w * 2, x.reshape(1, ROWS, WIDTH)

        def iteration(_, y):
            return jnp.tanh((y + early * late * out * x * stacked + shaped[0]) @ small)

        y = lax.fori_loop(0, TRIPS, iteration, x)
        return y * late, out

    _, traced = opened(fun, X, WEIGHTS[0])
    (own,) = find_invariants(traced.graph, LEAST).values()
    assert [traced.graph.ops[o].primitive for o in own.ops] == ["sin"]
    assert own.given == traced.arguments[:1]


def test_what_acts_stays():
    def fun(x):
        seen = jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(x.shape, x.dtype), jnp.sin(x))
        return lax.fori_loop(0, TRIPS, lambda _, y: jnp.tanh(y * seen), x)

    _, traced = opened(fun, X)
    assert not find_invariants(traced.graph, LEAST)


@pytest.mark.parametrize("cached", [False, True])
def test_a_linearised_network_fits(cached, tmp_path, monkeypatch):
    """Below its residuals, which nothing else gets; and so in another process that finds the plan."""
    monkeypatch.setenv("JAXTENSILE_PLAN_CACHE", str(tmp_path) if cached else "off")
    wide = [jnp.tile(w, (4, 4)) / 4 for w in WEIGHTS]
    x = jax.random.normal(jax.random.key(2), (4096, 4 * WIDTH))
    plain = jax.jit(gauss_newton)
    use = plain.lower(wide, x).compile().memory_analysis()
    budget = use.argument_size_in_bytes + use.output_size_in_bytes + int(0.8 * use.temp_size_in_bytes)
    for _ in range(1 + cached):
        step = jaxtensile.jit(gauss_newton, budget=budget)
        report = step.plan(wide, x)
        assert report.fits and report.compiled.device <= budget
        assert any("loops make in every iteration" in note for note in report.notes)
    same_bits(step.trace(wide, x).jaxpr, plain.trace(wide, x).jaxpr, [*wide, x])
    agree(step(wide, x), plain(wide, x), "float32")


@pytest.mark.parametrize("where", ["carry", "slices", "both"])
def test_a_loop_may_be_given_a_value_twice(where):
    """As a constant, which it then makes itself, and as what it begins with or takes slices of."""

    def program(weights, x):
        made = jnp.tanh(x.T @ x)
        later = made @ made
        carry, slices = (jnp.zeros_like(made) if where == "slices" else made), (None if where == "carry" else made)

        def iteration(carry, row):
            return jnp.sin(carry @ later + made) + (0.0 if row is None else row), carry.sum()

        return lax.scan(iteration, carry, slices, length=WIDTH)

    closed, traced = opened(program, WEIGHTS, X)
    moved = find_invariants(traced.graph, 1)
    assert moved
    same_bits(sink_invariants(traced, closed, moved), closed, jax.tree.leaves((WEIGHTS, X)))
