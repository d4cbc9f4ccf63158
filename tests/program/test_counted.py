"""Counted indices become batch dimensions: the same elements, and rows that work can be done for."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtensile
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.program.counted import counted
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.rewrites.rows.chunk import in_chunks
from jaxtensile.rewrites.rows.region import find_region
from programs import FAST

ROWS, WIDTH, WORDS = 8, 3, 5
X = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, WORDS)), jnp.float32)
CUBE = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, WIDTH, WORDS)), jnp.float32)
Y = jnp.asarray([0, 4, 2, -1, 7, -9, 3, 1], jnp.int32)
"""Some from behind, some out of bounds."""
EACH = jnp.arange(ROWS, dtype=jnp.float32)


def made(fun, *args):
    closed = jax.make_jaxpr(fun)(*args)
    return closed, counted(trace_jaxpr(closed), closed)


def ops(closed):
    return [e for e in closed.jaxpr.eqns if e.primitive.name == "gather" or e.primitive.name.startswith("scatter")]


CHANGED = {
    "labels": (lambda x, y: x[jnp.arange(ROWS), y], X, Y),
    "filled": (lambda x, y: x.at[jnp.arange(ROWS), y].get(mode="fill", fill_value=7.0), X, Y),
    "clipped": (lambda x, y: x.at[jnp.arange(ROWS), y].get(mode="clip"), X, Y),
    "by the last": (lambda x, y: x.T[y, jnp.arange(ROWS)], X, Y),
    "short": (lambda x, y: x[jnp.arange(ROWS, dtype="int8"), y], X, Y),
    "numpy's": (lambda x, y: x[np.arange(ROWS), y], X, Y),
    "of a cube": (lambda x, y: x[jnp.arange(ROWS), :, y], CUBE, Y),
    "two counts": (lambda x, y: x[jnp.arange(ROWS)[:, None], jnp.arange(WIDTH), y[:, None]], CUBE, Y),
    "vmapped": (jax.vmap(lambda x, y: x[jnp.arange(WIDTH), y[:WIDTH]], (0, None)), CUBE, Y),
    "gradient": (jax.grad(lambda x, y: (x[jnp.arange(ROWS), y] ** 2).sum()), X, Y),
    "set": (lambda x, y: x.at[jnp.arange(ROWS), y].set(EACH), X, Y),
    "added": (lambda x, y: x.at[jnp.arange(ROWS), y].add(EACH, mode="drop"), X, Y),
    "multiplied": (lambda x, y: x.at[jnp.arange(ROWS), y].mul(EACH), X, Y),
    "least": (lambda x, y: x.at[jnp.arange(ROWS), y].min(EACH), X, Y),
    "largest": (lambda x, y: x.at[jnp.arange(ROWS), y].max(EACH), X, Y),
}
LEFT = {
    "half": (lambda x, y: x[jnp.arange(ROWS // 2), y[: ROWS // 2]], X, Y),
    "from behind": (lambda x, y: x[jnp.arange(ROWS)[::-1], y], X, Y),
    "by twos": (lambda x, y: x[2 * jnp.arange(ROWS) % ROWS, y], X, Y),
    "from one": (lambda x, y: x[1 + jnp.arange(ROWS), y], X, Y),
    "alone": (lambda x, y: x[jnp.arange(ROWS)], X, Y),
    "labels alone": (lambda x, y: jnp.take_along_axis(x, y[:, None], 1), X, Y),
}


@pytest.mark.parametrize("name", CHANGED)
def test_the_same_elements_by_a_batch_dimension(name):
    fun, *args = CHANGED[name]
    closed, new = made(fun, *args)
    assert any(e.params["dimension_numbers"].operand_batching_dims for e in ops(new))
    for a, b in zip(
        jax.jit(jax.extend.core.jaxpr_as_fun(new), compiler_options=FAST)(*args),
        jax.jit(jax.extend.core.jaxpr_as_fun(closed), compiler_options=FAST)(*args),
        strict=True,
    ):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", LEFT)
def test_what_does_not_count_is_left(name):
    fun, *args = LEFT[name]
    closed, new = made(fun, *args)
    assert new is closed


def q_learning(weights, x, y):
    def values(x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    best = jax.lax.stop_gradient(values(-x).max(-1))
    return ((values(x)[jnp.arange(x.shape[0]), y] - best) ** 2).mean()


LEARNING = [jnp.eye(WORDS) / 2] * 3, jnp.tile(X, (512, 1)), jnp.tile(Y, 512) % WORDS


def test_losses_by_counted_indices_can_be_done_in_parts():
    """No row went on behind the gather, and parts needed more than the whole."""
    args = LEARNING
    closed, new = made(jax.value_and_grad(q_learning), *args)
    traced = trace_jaxpr(new)
    own = find_region(traced, 1)
    assert own is not None and own.seed.rows == 512 * ROWS
    parts = in_chunks(traced, new, own, 16)
    assert live_ranges(trace_jaxpr(parts).graph).temp < live_ranges(traced.graph).temp / 4
    for a, b in zip(
        jax.jit(jax.extend.core.jaxpr_as_fun(parts), compiler_options=FAST)(*jax.tree.leaves(args)),
        jax.jit(jax.extend.core.jaxpr_as_fun(closed), compiler_options=FAST)(*jax.tree.leaves(args)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_planned_step_has_the_values_of_jit():
    step = jax.value_and_grad(q_learning)
    plain = jax.jit(step, compiler_options=FAST)
    use = plain.lower(*LEARNING).compile().memory_analysis()
    budget = use.argument_size_in_bytes + use.output_size_in_bytes + use.temp_size_in_bytes // 4
    planned = jaxtensile.jit(step, budget=budget, compiler_options=FAST)
    report = planned.plan(*LEARNING)
    assert report.compiled.device <= budget and "parts" in report.notes[0]
    for a, b in zip(jax.tree.leaves(planned(*LEARNING)), jax.tree.leaves(plain(*LEARNING)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
