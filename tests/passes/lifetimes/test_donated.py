"""Donations that save nothing, as the argument is still read: the model's bytes beside the compiler's."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxtensile

H200 = "nvidia-h200"
P, STACK = jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((6, 512, 512), jnp.float32)


def around(u):
    return jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) - 2 * u


def replaced(stack, x):
    """Each slice is read, and another one stacked: the old stack is there until the loop ends."""
    return lax.scan(lambda c, s: (c + s, jnp.tanh(s)), x, stack)


def carried(stack, x):
    """The same, replaced where it is."""

    def body(c, i):
        c, stack = c
        new = jnp.tanh(lax.dynamic_index_in_dim(stack, i, 0, keepdims=False))
        return (c + new, lax.dynamic_update_index_in_dim(stack, new, i, 0)), None

    return lax.scan(body, (x, stack), jnp.arange(6))[0]


CASES = {
    "elementwise": (1, lambda p, w: p * 2, P, P),
    "a product of it": (1, lambda p, w: p @ w, P, P),
    "a product of what is computed from it": (1, lambda p, w: jnp.tanh(p @ w) @ w, P, P),
    "moved": (1, lambda p, w: jnp.roll(p, 3, 0) * 2, P, P),
    "turned": (1, lambda p, w: p.T * 2, P, P),
    "what needs the result reads it": (1, lambda p, w: (q := p @ w, (p * q.sum()).sum(0)), P, P),
    "gradient descent": (1, lambda p, x: (p - 0.1 * (x.T @ jnp.tanh(x @ p)), (p * p).sum()), P, P),
    "two that take each other's place": (2, lambda p, q: (q * 2, p * 3), P, P),
    "one that reads what the other is written over": (2, lambda p, q: (p * 2 + jnp.sin(q), q * 3), P, P),
    "two that are multiplied": (2, lambda p, q, w: (p @ w, q @ w), P, P, P),
    "the last two of a wave": (2, lambda u, v: (2 * u - v + 0.1 * around(u), u), P, P),
    "a leapfrog": (2, lambda q, v: (q + 0.1 * (n := v - 0.1 * jnp.sin(q)), n), P, P),
    "a loop that starts with it": (1, lambda p, w: lax.fori_loop(0, 5, lambda i, c: jnp.tanh(c * 2), p), P, P),
    "a loop that reads it": (1, lambda p, x: lax.fori_loop(0, 5, lambda i, c: jnp.tanh(c @ p), x), P, P),
    "slices that are replaced": (1, replaced, STACK, P),
    "slices that are replaced where they are": (1, carried, STACK, P),
}


def bytes_of(name, target):
    count, fun, *args = CASES[name]
    jitted = jax.jit(fun, donate_argnums=range(count))
    exact, static = (jaxtensile.estimate(jitted, *args, target=target, exact=e) for e in (True, False))
    assert static.alias == exact.alias
    return exact.device, static.device


@pytest.mark.parametrize("name", [name for name in CASES if name != "the last two of a wave"])
def test_on_a_cpu(name):
    exact, static = bytes_of(name, "cpu")
    assert static == pytest.approx(exact, rel=0.01)


@pytest.mark.cuda_aot
@pytest.mark.parametrize(
    "name",
    [
        "two that take each other's place",
        "one that reads what the other is written over",
        "the last two of a wave",
        "slices that are replaced",
        "moved",
    ],
)
def test_on_a_gpu(name):
    exact, static = bytes_of(name, H200)
    assert static == pytest.approx(exact, rel=0.01)


def test_a_donation_saves_nothing_or_all():
    """What the figures are, so that no two wrong ones agree."""
    one = 512 * 512 * 4
    assert bytes_of("elementwise", "cpu") == (one, one)
    assert bytes_of("a product of it", "cpu") == (3 * one, 3 * one)


@pytest.mark.parametrize(
    "name, told", [("a product of it", "1.00MiB"), ("elementwise", ""), ("two that are multiplied", "2.00MiB")]
)
def test_reports_say_where_a_donation_saves_nothing(name, told):
    count, fun, *args = CASES[name]
    options = {"donate_argnums": range(count)}
    estimate = jaxtensile.estimate(jax.jit(fun, **options), *args, target="cpu")
    plan = jaxtensile.jit(fun, budget="1GiB", **options).plan(*args)
    for notes in (estimate.notes, plan.notes):
        said = [note for note in notes if "saves nothing" in note]
        assert len(said) == bool(told)
        assert all(told in note and "test_donated.py" in note for note in said)
