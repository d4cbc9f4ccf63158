"""What XLA:CPU's library sums up and does not compute is stored: the model's bytes beside the compiler's."""

import jax
import jax.numpy as jnp
import pytest

import jaxtensile
from jaxtensile import switches

X = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
POINTS = jax.ShapeDtypeStruct((512, 16), jnp.float32)
ROW = jax.ShapeDtypeStruct((1024,), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)


def normal(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def blocks(scales, w, x):
    for scale in scales:
        x = x + jnp.tanh(normal(x) * scale @ w)
    return jnp.sum(x**2)


def pairs(x, y):
    return jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1)).sum()


def masked(x, y):
    kept = jnp.where(x > y, x * y, 0.0)
    return kept.sum(), kept.max()


def both(x, y):
    total = x + y
    return jnp.sin(total * 2), (total * total).sum(-1), jnp.tanh(total)


def softmax(x, y):
    return jax.nn.softmax(x * y) @ y.T


CASES = {
    "a layer with a scale": (jax.value_and_grad(blocks), [ROW], SQUARE, X),
    "all in one sum": (pairs, POINTS, POINTS),
    "its gradient": (jax.grad(pairs), POINTS, POINTS),
    "an op that the library has not": (masked, X, X),
    "a sum of two, with other readers": (both, X, X),
    "from a maximum to a sum": (softmax, X, X),
    "too little for the library": (lambda x: jnp.sum(jnp.where(x > 0, x * 2, x)), ROW),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_library_reads_is_stored(name):
    fun, *args = CASES[name]
    known = jaxtensile.estimate(fun, *args, exact=True).device
    found = jaxtensile.estimate(fun, *args).device
    assert abs(found - known) <= 0.02 * known + 4096


def test_layers_with_scales_need_more_than_without_the_rule():
    """Each keeps a normalized array for its scale's gradient, beside the scaled one for its product."""
    fun, args = jax.value_and_grad(blocks), ([ROW] * 6, SQUARE, X)
    known = jaxtensile.estimate(fun, *args, exact=True).device
    with switches.off("library_sums"):
        before = jaxtensile.estimate(fun, *args).device
    now = jaxtensile.estimate(fun, *args).device
    assert before < 0.8 * known and 0.9 * known < now <= known
