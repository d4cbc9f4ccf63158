"""`rewrite`: in planned programs each loop makes what it stacks into when it begins."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxtensile
from jaxtensile.ir.plan import Program
from jaxtensile.program.emit import emit
from jaxtensile.program.trace import trace_jaxpr
from programs import same

H200 = "nvidia-h200"
STEPS, ROWS, WIDTH = 12, 64, 512
X = jax.random.normal(jax.random.key(0), (STEPS, ROWS, WIDTH))
W = jax.random.normal(jax.random.key(1), (WIDTH,))


def several(w, x):
    """Two carries, stacks of three types, constants, and slices of two arrays."""

    def step(carry, slices):
        c, n = carry
        u, i = slices
        c = jnp.tanh(c * w + u)
        return (c, n + i), (c, c > 0, c.astype(jnp.bfloat16))

    return lax.scan(step, (x[0], jnp.int32(0)), (jnp.sin(x), jnp.arange(STEPS)))


def backwards(w, x):
    return lax.scan(lambda c, u: (c * w + u, c - u), jnp.zeros_like(x[0]), jnp.cos(x), reverse=True)


def unrolled(w, x):
    return lax.scan(lambda c, u: (c * w, c + u), x[0], jnp.exp(x), unroll=5)


def without_slices(w, x):
    return lax.scan(lambda c, _: (jnp.tanh(c * w), c), x.sum(0), None, length=STEPS)


def gradients(w, x):
    def loss(w):
        h = x
        for _ in range(3):
            h = h + backwards(w, h)[1] * unrolled(w, h)[1]
        return (h**2).mean()

    return jax.value_and_grad(loss)(w)


def rewritten(fun, *args, apart=True):
    """The function after a round through a schedule that changes nothing."""
    closed, shape = jax.jit(fun).trace(*args).jaxpr, jax.eval_shape(fun, *args)
    traced = trace_jaxpr(closed)
    evaluate = emit(traced, Program.unchanged(traced.graph), apart=apart)
    return lambda *a: jax.tree.unflatten(jax.tree.structure(shape), evaluate(jax.tree.leaves(a)))


def loops(fun, *args):
    """For each loop of a program the number of results that it stacks."""
    traced = trace_jaxpr(jax.jit(fun).trace(*args).jaxpr)
    return [len(op.results) - op.carried[1] for op in traced.graph.ops if op.primitive == "scan"]


@pytest.mark.parametrize("fun", [several, backwards, unrolled, without_slices, gradients])
def test_the_values_stay(fun):
    assert any(loops(fun, W, X)) and not any(loops(rewritten(fun, W, X), W, X))
    same(jax.jit(rewritten(fun, W, X))(W, X), jax.jit(fun)(W, X))


def test_a_loop_that_may_begin_with_the_program_stays_as_it_is():
    fun = functools.partial(lax.scan, lambda c, u: (c + u, c))
    assert loops(rewritten(fun, X[0], X), X[0], X) == [1]


@pytest.mark.parametrize("what", ["small", "keys", "effects", "not asked"])
def test_what_else_stays_as_it_is(what):
    def fun(w, x):
        def step(c, u):
            if what == "effects":
                jax.debug.callback(lambda _: None, c.sum())
            keys = jax.random.split(jax.random.key(0), 1 << 17)
            return c * w + u, keys if what == "keys" else c

        return lax.scan(step, x[0], jnp.sin(x[:, :1] if what == "small" else x))

    x = X[:, :1] if what == "small" else X
    assert loops(rewritten(fun, W, x, apart=what != "not asked"), W, x) == [1]


def test_constants_stay_where_kernels_can_make_them():
    """Behind a barrier a mask and its fill would be buffers as long as the loop."""

    def fun(w, x):
        first, u = x[0], jnp.sin(x)
        fill = jnp.full(x.shape[1:], -1e9)
        mask = jnp.tri(ROWS, WIDTH, dtype=bool)
        return lax.scan(lambda c, v: (jnp.where(mask, c * w + v, fill),) * 2, first, u)

    assert loops(fun, W, X) == [1]
    eqns = jax.jit(rewritten(fun, W, X)).trace(W, X).jaxpr.eqns
    (barrier,) = (e for e in eqns if e.primitive.name == "optimization_barrier")
    assert [v.aval.shape for v in barrier.invars] == [X.shape, ()]
    same(jax.jit(rewritten(fun, W, X))(W, X), jax.jit(fun)(W, X))


def layers(count):
    """A step of recurrent layers, with abstract arguments."""

    def loss(weights, h):
        for w in weights:
            step = lambda c, u, w=w: (w * c + u,) * 2  # noqa: E731
            h = h + jnp.tanh(lax.scan(step, jnp.zeros_like(h[0]), jnp.sin(h * 2) * w)[1])
        return (h**2).mean()

    def step(weights, h):
        value, grads = jax.value_and_grad(loss)(weights, h)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=np.float32)
    return step, ([f32((1024,))] * count, f32((200, 64, 1024)))


@pytest.mark.cuda_aot
def test_plans_get_below_what_checkpoints_reach():
    """XLA makes the stacks of all loops at once, also of those that run again."""
    step, args = layers(6)
    plain = jaxtensile.estimate(step, *args, target=H200, exact=True)
    report = jaxtensile.jit(step, budget=int(0.65 * plain.device), target=H200).plan(*args)
    assert report.compiled.exact and report.compiled.device <= 0.65 * plain.device
