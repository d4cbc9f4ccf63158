"""`merge`: what a program computes twice and XLA once, and that the values stay."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxtensile
from jaxtensile.ir.plan import Program
from jaxtensile.program import cse as merge
from jaxtensile.program.cse import cse
from jaxtensile.program.emit import emit
from jaxtensile.program.trace import trace_jaxpr
from programs import alike, squeezed

H200 = "nvidia-h200"
X = jax.random.normal(jax.random.key(0), (16, 16)) / 4
W = [jax.random.normal(jax.random.key(i), (16, 16)) / 4 for i in range(4)]


def trace(fun, *args):
    return trace_jaxpr(jax.jit(fun).trace(*args).jaxpr)


def network(w, x):
    for layer in w:
        x = jnp.tanh(x @ layer)
    return x


def loss(w, x):
    return (network(w, x) ** 2).mean()


def apart(w, x):
    """A value and a gradient, each with a network of its own, and the network once more."""
    return loss(w, x), jax.grad(loss)(w, x), network(w, x).max()


def together(w, x):
    value, grads = jax.value_and_grad(loss)(w, x)
    return value, grads


def residual(w, t, x):
    """Of a differential equation: one network, differentiated three times."""
    at = lambda t, x: network(w, jnp.stack([t, x] * 8)).sum()  # noqa: E731
    return jax.grad(at)(t, x) + at(t, x) * jax.grad(at, 1)(t, x) - jax.jacfwd(jax.grad(at, 1), 1)(t, x)


def count(traced, primitive="dot_general"):
    return sum(op.primitive == primitive for op in traced.graph.ops)


def test_a_network_called_again_is_computed_once():
    traced = trace(apart, W, X)
    once = cse(traced)
    assert count(once) == count(trace(together, W, X)) == count(traced) - 2 * len(W)
    assert once.graph.outputs and len(once.outputs) == len(traced.outputs)


@pytest.mark.parametrize("fun", [apart, lambda w, x: residual(w, x[0, 0], x[1, 1])])
def test_the_values_stay(fun):
    once = cse(trace(fun, W, X))
    evaluate = emit(once, Program.unchanged(once.graph))
    for ours, theirs in zip(evaluate(jax.tree.leaves((W, X))), jax.tree.leaves(fun(W, X)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "fun",
    [
        together,
        lambda w, x: (x @ w[0], x @ w[1], x.T @ w[0]),
        lambda w, x: (jnp.sin(x), jnp.sin(x)),
        lambda w, x: (x @ w[0], lax.optimization_barrier(x) @ w[0]),
        lambda w, x: (lax.dot(x, w[0], precision="highest"), lax.dot(x, w[0])),
        lambda w, x: (x @ w[0], (x.astype(jnp.bfloat16) @ w[0].astype(jnp.bfloat16))),
        lambda w, x: ((x * 0.0) @ w[0], (x * -0.0) @ w[0]),
    ],
    ids=["no copies", "other operands", "only cheap ones", "barrier", "precision", "dtype", "the sign of a zero"],
)
def test_what_is_not_twice_stays_as_it_is(fun):
    traced = trace(fun, W, X)
    assert cse(traced) is traced


def test_what_has_effects_runs_as_often_as_before():
    seen: list[int] = []

    def fun(w, x):
        for _ in range(2):
            jax.debug.callback(lambda y: seen.append(1), (x @ w[0]).sum())
        return x

    once = cse(trace(fun, W, X))
    assert count(once) == 1 and count(once, "debug_callback") == 2


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        (np.float32(1), np.float64(1)),
        (np.array(0.0), np.array(-0.0)),
        (np.array(1.0), np.array(1)),
        ((1, 2), [1, 2]),
        ({"a": 0.0}, {"a": -0.0}),
        ((1, (0j,)), (1, (-0j,))),
        (np.zeros(2), np.zeros(2)),
        (jnp.zeros(2), jnp.zeros(2)),
    ],
    ids=repr,
)
def test_what_python_takes_for_equal_need_not_be_the_same_bits(a, b):
    assert merge._exact(a) != merge._exact(b)
    assert merge._exact(a) == merge._exact(a) and hash(merge._exact(a)) is not None


@pytest.mark.parametrize("x", [float("nan"), np.array(2.5), np.float32(3), {"b": 1, "a": (2, [3.0])}, "text", None])
def test_the_same_bits_are_the_same(x):
    assert merge._exact(copy.deepcopy(x)) == merge._exact(x)


def test_checkpoints_stay_apart():
    def fun(w, x):
        return jax.value_and_grad(lambda w: (jax.checkpoint(network)(w, x) ** 2).mean())(w)

    traced = trace(fun, W, X)
    assert cse(traced) is traced, "its recomputation is behind a barrier"


def test_plans_are_of_the_merged_program():
    w = [jax.random.normal(jax.random.key(i), (128, 128)) / 12 for i in range(8)]
    x = jax.random.normal(jax.random.key(9), (2048, 128))
    planned, report = squeezed(apart, w, x)
    products = 2.0 * 2048 * 128 * 128
    assert report.flops == 8 * 3 * products - products, "of the program that XLA computes: no gradient of its input"
    alike(planned(w, x), jax.jit(apart)(w, x))


def physics(w, t, x):
    value, grads = jax.value_and_grad(lambda w: (jax.vmap(lambda t, x: residual(w, t, x))(t, x) ** 2).mean())(w)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, grads), value


@pytest.mark.cuda_aot
def test_static_is_near_xla():
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    args = ([f32(16, 256)] + [f32(256, 256)] * 3, f32(20000), f32(20000))
    static, exact = (jaxtensile.estimate(physics, *args, target=H200, exact=flag) for flag in (False, True))
    # Unmerged it is 50 % too large; XLA of jax 0.12 needs a fifth more than was said, that of 0.10 a fiftieth.
    assert static.device == pytest.approx(exact.device, rel=0.25)
