"""What no iteration changes is made in front of its loop: where XLA:CPU does so, and with the same values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxtensile
from jaxtensile.program.hoist_invariants import hoist_invariants
from jaxtensile.program.trace import trace_jaxpr

X = jax.random.normal(jax.random.key(0), (256, 64))
W = jax.random.normal(jax.random.key(1), (64, 64)) / 8
STEPS = 3


def given(w, x):
    """A loop that reads what it is given."""
    return lax.scan(lambda c, _: (c + (jnp.tanh(x @ w) * c).sum(0), None), jnp.ones(64), None, length=STEPS)[0]


def backwards(w, x):
    """A loop from the last to the first that stacks."""

    def step(c, y):
        h = jnp.sin(jnp.tanh(x @ w)) * 2
        return c + (h * c).mean(0), h.sum(0) + y

    return lax.scan(step, jnp.ones(64), jnp.arange(float(STEPS)), reverse=True)


def of_loops(w, x):
    """Invariants of an inner loop, of the outer one and of both."""

    def outer(c, y):
        h = jnp.tanh(x @ w)  # of both
        k = jnp.cos(x * c)  # of the inner one
        inner = lax.scan(lambda d, _: (d + (h + k + jnp.sin(h @ w)).mean(0) * d, None), c, None, length=2)[0]
        return inner * 0.1 + y, inner

    return lax.scan(outer, jnp.ones(64), jnp.arange(float(STEPS)))


def while_it_is_small(w, x):
    """A loop of unknown length, whose condition reads values of its own."""
    limit = jnp.abs(x).max() * 100

    def step(carry):
        i, c = carry
        return i + 1, c + (jnp.tanh(x @ w) * c).sum(0) * 0.01 + i

    return lax.while_loop(lambda carry: (carry[0] < STEPS) & (carry[1].max() < limit), step, (0, jnp.zeros(64)))


def never(w, x):
    """A loop that does not run: nothing of what moves is seen."""
    return lax.while_loop(
        lambda c: c[0] > 0, lambda c: (c[0] - 1, c[1] + (jnp.log(-jnp.abs(x @ w)) * c[1]).sum()), (0, 1.0)
    )


def each_its_own(w, x):
    """A batch of loops that end at different times, some at once; one carry is a key."""

    def one(steps, key):
        def step(carry):
            i, c, key = carry
            return i + 1, c + (jnp.tanh(x @ w) * c).sum(0) * 0.01 + i, jax.random.fold_in(key, i)

        return lax.while_loop(lambda carry: carry[0] < steps, step, (0, jnp.ones(64), key))

    i, c, keys = jax.vmap(one)(jnp.arange(4), jax.random.split(jax.random.key(0), 4))
    return i, c, jax.random.key_data(keys)


def power(w, x):
    """Hessian-vector products: the network is the same in every one."""

    def loss(w):
        h = x
        for _ in range(4):
            h = jnp.tanh(h @ w)
        return (h**2).mean()

    def step(v, _):
        v = jax.jvp(jax.grad(loss), (w,), (v,))[1]
        return v / jnp.sqrt((v**2).sum()), None

    return lax.scan(step, jnp.ones_like(w), None, length=STEPS)[0]


def keys(w, x):
    """Random bits of a key that no iteration changes, and of one that each does."""

    def step(key, _):
        key, mine = jax.random.split(key)
        h = jnp.tanh(x @ w) * jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
        return key, (h * jax.random.normal(mine, x.shape)).sum(0)

    return lax.scan(step, jax.random.key(1), None, length=STEPS)[1]


PROGRAMS = (given, backwards, of_loops, while_it_is_small, each_its_own, never, power, keys)
NOT_BY_XLA = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}


def hoisted(fun, *args):
    closed = jax.jit(fun).trace(*args).jaxpr
    moved = hoist_invariants(trace_jaxpr(closed), closed)
    return moved, moved is not closed


def evaluated(closed):
    return lambda *flat: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *flat)


def temporaries(fun, *args, **options):
    return jax.jit(fun).lower(*args).compile(compiler_options=options).memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("fun", PROGRAMS, ids=lambda fun: fun.__name__)
def test_every_iteration_sees_the_same_values(fun):
    moved, changed = hoisted(fun, W, X)
    assert changed
    for ours, theirs in zip(jax.jit(evaluated(moved))(W, X), jax.tree.leaves(jax.jit(fun)(W, X)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fun", [fun for fun in PROGRAMS if fun is not keys], ids=lambda fun: fun.__name__)
def test_it_is_what_xla_does(fun):
    """With its pass off, the program that we write needs what the program as it is needs with its pass on. XLA moves
    the counters inside of random bits as well, which are no equations."""
    moved, _ = hoisted(fun, W, X)
    needs = temporaries(fun, W, X)
    assert temporaries(evaluated(moved), W, X, **NOT_BY_XLA) == pytest.approx(needs, rel=0.03, abs=1024)
    assert needs > temporaries(fun, W, X, **NOT_BY_XLA) or fun is not power


def test_what_has_effects_or_is_little_stays():
    def told(w, x):
        def step(c, _):
            jax.debug.callback(lambda h: None, (x @ w).sum())
            return c + 1, None

        return lax.scan(step, 0.0, None, length=STEPS)[0]

    def little(w, x):
        return lax.scan(lambda c, _: (jnp.tanh(c @ w) + w[0].sum(), None), x, None, length=STEPS)[0]

    def views(w, x):
        return lax.scan(lambda c, _: (c + jnp.broadcast_to(x.T[0], (64, 256)).T, None), x, None, length=STEPS)[0]

    moved, _ = hoisted(told, W, X)
    (loop,) = [e for e in moved.jaxpr.eqns if e.primitive.name == "scan"]
    assert "callback" in str(loop.params["jaxpr"])
    assert not hoisted(little, W, X)[1] and not hoisted(views, W, X)[1]


def test_estimates_and_plans_know_it():
    """The estimate counts what lives during the loop, and a plan makes it in every iteration where it has to."""
    needs = jaxtensile.estimate(power, W, X, exact=True)
    assert needs.low <= needs.device <= needs.high
    found = jaxtensile.estimate(power, W, X)
    assert found.low <= needs.device <= found.high
    planned = jaxtensile.jit(power, budget=needs.device - int(0.6 * needs.use.temp))
    report = planned.plan(W, X)
    assert report.compiled.device <= report.budget and any("every iteration" in note for note in report.notes)
    np.testing.assert_allclose(planned(W, X), jax.jit(power)(W, X), rtol=1e-5, atol=1e-7)
