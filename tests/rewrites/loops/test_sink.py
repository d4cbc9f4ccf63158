"""What lies between a stack and the loop that reads it: found, done slice by slice, the same values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxtensile
from jaxtensile.passes.offload.loops import find_pairs
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.rewrites.loops.sink import find_chains, sink

STEPS, ROWS, WIDTH = 12, 6, 8
W = 0.5 * jax.random.normal(jax.random.key(0), (WIDTH, WIDTH))
X = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


def cell(w, h):
    return jnp.tanh(jnp.sin(h @ w))


def kept_as(pack, unpack, steps=STEPS):
    """The gradient of a loop with a gradient of its own, which keeps its states in another form."""

    @jax.custom_vjp
    def run(w, x):
        return forward(w, x)[0]

    def forward(w, x):
        h, hs = lax.scan(lambda h, _: (cell(w, h), h), x, length=steps)
        return h, (w, pack(hs))

    def backward(kept, g):
        def body(g, h):
            gw, g = jax.vjp(cell, kept[0], h)[1](g)
            return g, gw

        g, gws = lax.scan(body, g, unpack(kept[1]), reverse=True)
        return gws.sum(0), g

    run.defvjp(forward, backward)
    return jax.grad(lambda w, x: (run(w, x) ** 2).sum(), argnums=(0, 1))


FORMS = {
    "flat": (lambda s: s.reshape(-1, WIDTH), lambda s: s.reshape(STEPS, ROWS, WIDTH)),
    "half": (lambda s: s.astype(jnp.bfloat16), lambda s: s.astype(jnp.float32)),
    "flat and half": (
        lambda s: s.reshape(-1).astype(jnp.bfloat16),
        lambda s: s.astype(jnp.float32).reshape(STEPS, ROWS, WIDTH),
    ),
    "transposed": (lambda s: s.transpose(0, 2, 1), lambda s: s.transpose(0, 2, 1)),
    "negative": (lambda s: -s, lambda s: -s),
    "axes of one": (lambda s: s[:, None], lambda s: s.squeeze(1)),
}
MIXED = {
    "iterations last": (lambda s: s.transpose(1, 2, 0), lambda s: s.transpose(2, 0, 1)),
    "backwards": (lambda s: s[::-1], lambda s: s[::-1]),
    "summed up": (lambda s: jnp.cumsum(s, 0), lambda s: jnp.diff(s, axis=0, prepend=0)),
}


def run(closed):
    return jax.jit(lambda *xs: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *xs))(W, X)


@pytest.mark.parametrize("form", FORMS)
def test_the_loops_become_a_pair_with_the_same_values(form):
    fun = kept_as(*FORMS[form])
    closed = jax.jit(fun).trace(W, X).jaxpr
    traced = trace_jaxpr(closed)
    assert find_chains(traced.graph) and not find_pairs(traced.graph)
    changed = sink(traced, closed)
    (pair,) = find_pairs(trace_jaxpr(changed).graph)
    assert len(pair.links) == 1
    for new, old in zip(run(changed), fun(W, X), strict=True):
        assert new.dtype == old.dtype
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", MIXED)
def test_what_mixes_iterations_stays_where_it_is(form):
    closed = jax.jit(kept_as(*MIXED[form])).trace(W, X).jaxpr
    assert sink(trace_jaxpr(closed), closed) is None


def test_a_square_of_iterations_is_not_taken_for_slices():
    """As many iterations as rows: that a transposition leaves them first, its shape does not say."""

    def fun(w, x):
        _, hs = lax.scan(lambda h, _: (cell(w, h), h), x, length=ROWS)
        return lax.scan(lambda h, y: (h + y, None), x, hs.transpose(1, 0, 2))[0]

    closed = jax.jit(fun).trace(W, X).jaxpr
    assert sink(trace_jaxpr(closed), closed) is None


def test_a_stack_that_something_else_reads_in_that_form_stays():
    def fun(w, x):
        _, hs = lax.scan(lambda h, _: (cell(w, h), h), x, length=STEPS)
        half = hs.astype(jnp.bfloat16)
        return lax.scan(lambda h, y: (h + y, None), x.astype(jnp.bfloat16), half)[0], half

    closed = jax.jit(fun).trace(W, X).jaxpr
    assert sink(trace_jaxpr(closed), closed) is None


@pytest.mark.parametrize("form", ["flat", "half"])
def test_such_loops_are_nested(form):
    """A stack of states becomes a stack of every eighth of them."""
    shape = (64, 512, WIDTH)
    forms = {"flat": (lambda s: s.reshape(-1, WIDTH), lambda s: s.reshape(shape)), "half": FORMS["half"]}
    fun, x = kept_as(*forms[form], steps=64), jnp.ones(shape[1:])
    plain = jaxtensile.jit(fun, budget="1GiB").plan(W, x).compiled
    planned = jaxtensile.jit(fun, budget=plain.device - plain.temp // 2)
    report = planned.plan(W, x)
    assert report.compiled.device <= report.budget
    for new, old in zip(planned(W, x), jax.jit(fun)(W, x), strict=True):
        np.testing.assert_allclose(new, old, rtol=2e-2, atol=1e-3 * float(jnp.abs(old).max()))
