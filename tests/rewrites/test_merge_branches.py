"""A branch and its backward branch: found, joined, the same values in every branch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxtensile
from jaxtensile.program.trace import jaxpr_flops, trace_jaxpr
from jaxtensile.rewrites.merge_branches import find_cond_pairs, merge_branches

W = 0.5 * jax.random.normal(jax.random.key(0), (8, 8))
X = jax.random.normal(jax.random.key(1), (64, 8))


def deep(w, x):
    for i in range(6):
        x = jnp.tanh(jnp.sin(x * (i + 1)) @ w)
    return x


def looped(w, x):
    return lax.scan(lambda h, _: (jnp.tanh(jnp.sin(h @ w)), None), x, length=12)[0]


def two_ways(w, x, i):
    return (lax.cond(i > 0, lambda: deep(w, x), lambda: x * w[0]) ** 2).sum()


def three_ways(w, x, i):
    """One after another, the second on what the first made; one of the branches is empty."""
    x = lax.switch(i, [deep, looped, lambda w, x: x], w, x)
    return (lax.switch(i, [looped, lambda w, x: x + 1, deep], w, x) ** 2).sum()


def with_keys(w, x, i):
    def noisy(x):
        kept = jax.random.bernoulli(jax.random.fold_in(KEY, i), 0.7, x.shape)
        return jnp.where(kept, deep(w, x), 0.0)

    return (lax.cond(i > 0, noisy, lambda x: jnp.cos(deep(w, x)), x) ** 2).sum()


KEY = jax.random.key(5)
PROGRAMS = (two_ways, three_ways, with_keys)


def opened(fun, x=X):
    grad = jax.value_and_grad(fun, argnums=(0, 1))
    closed = jax.jit(grad).trace(W, x, 1).jaxpr
    return grad, closed, trace_jaxpr(closed)


@pytest.mark.parametrize("fun", PROGRAMS, ids=lambda f: f.__name__)
def test_joined_branches_give_the_same_values(fun):
    grad, closed, traced = opened(fun)
    pairs = find_cond_pairs(traced.graph, 1)
    assert pairs
    changed = merge_branches(traced, closed, pairs)
    assert not find_cond_pairs(trace_jaxpr(changed).graph, 1), "nothing is handed on any more"
    assert jaxpr_flops(closed) < jaxpr_flops(changed) < 1.6 * jaxpr_flops(closed)
    run = jax.jit(lambda *xs: jax.core.eval_jaxpr(changed.jaxpr, changed.consts, *xs))
    for i in range(4):
        old = jax.tree.leaves(jax.jit(grad)(W, X, i))
        for a, b in zip(run(W, X, jnp.asarray(i)), old, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6 * max(1.0, float(np.abs(b).max())))


def test_small_residuals_are_handed_on():
    _, _, traced = opened(two_ways)
    passed = sum(
        traced.graph.values[traced.graph.ops[p.forward].results[r]].nbytes
        for p in find_cond_pairs(traced.graph, 1)
        for r, _ in p.links
    )
    assert find_cond_pairs(traced.graph, passed) and not find_cond_pairs(traced.graph, passed + 1)


def test_what_something_else_reads_is_handed_on():
    """The loss reads the branch's result, and so does the gradient of what follows."""

    def fun(w, x, i):
        y = lax.cond(i > 0, lambda: deep(w, x), lambda: x)
        return (y**3).sum()

    _, closed, traced = opened(fun)
    (pair,) = find_cond_pairs(traced.graph, 1)
    front = traced.graph.ops[pair.forward]
    assert 0 not in {r for r, _ in pair.links}, "the first result is the branch's own"
    changed = trace_jaxpr(merge_branches(traced, closed, (pair,))).graph
    forward = next(op for op in changed.ops if op.primitive == "cond")
    assert len(forward.results) == len(front.results) - len(pair.links)


def test_branches_on_other_predicates_are_no_pair():
    def fun(w, x, i):
        _, vjp = jax.vjp(lambda x: lax.cond(i > 0, lambda: deep(w, x), lambda: x), x)
        return vjp(x)

    closed = jax.jit(fun).trace(W, X, 1).jaxpr
    traced = trace_jaxpr(closed)
    assert find_cond_pairs(traced.graph, 1)

    def crossed(w, x, i, j):
        a, b = lax.cond(i > 0, lambda: (deep(w, x), jnp.sin(x)), lambda: (x, x))
        return a + lax.cond(j > 0, lambda: b * 2, lambda: b)

    assert not find_cond_pairs(trace_jaxpr(jax.jit(crossed).trace(W, X, 1, 2).jaxpr).graph, 1)


def test_a_branch_with_effects_stays_as_it_is():
    def fun(w, x, i):
        def loud():
            jax.debug.print("here")
            return deep(w, x)

        return (lax.cond(i > 0, loud, lambda: x) ** 2).sum()

    assert not find_cond_pairs(opened(fun)[2].graph, 1)


@pytest.mark.parametrize("fun", [two_ways, three_ways], ids=lambda f: f.__name__)
def test_below_what_a_branch_hands_on(fun):
    """The budget is a third of it: reached by planning the joined branch."""
    x = jnp.tile(X, (32, 1))
    grad = jax.grad(fun, argnums=(0, 1))
    plain = jaxtensile.jit(grad, budget="1GiB").plan(W, x, 1).compiled
    step = jaxtensile.jit(grad, budget=plain.device - plain.temp * 55 // 100)
    report = step.plan(W, x, 1)
    assert report.compiled.device <= report.budget and any("compute again in their" in n for n in report.notes)
    for i in range(3):
        for a, b in zip(step(W, x, i), jax.jit(grad)(W, x, i), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 * max(1.0, float(jnp.abs(b).max())))
