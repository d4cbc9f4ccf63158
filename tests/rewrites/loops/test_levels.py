"""Loops in the iterations of loops: at any depth they stack less and recompute it, and every value stays the same."""

from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import msgspec
import pytest
from hypothesis import given, settings
from jax import lax

from differential import same_bits
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.offload.loops import find_pairs
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.rewrites.loops.levels import INNER, inner_ways, rewrite_inner, without_loops_between
from jaxtensile.rewrites.loops.loops import rewrite_loops
from jaxtensile.rewrites.loops.sink_invariants import SINK_INVARIANTS
from jaxtensile.search.candidates import Candidates
from jaxtensile.search.loop_variants import with_loops
from jaxtensile.search.recipe import Unlike, recipe_of, replay
from loop_ladders import ladder
from requests_of import opened, there_and_back

WIDTH = 4
W = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) / 2
X = jax.random.normal(jax.random.key(1), (2, WIDTH))


def scan(inside, n, w, x, i):
    """Carries an integer beside the values, reads slices and a constant, and stacks something that is used."""

    def body(carry, row):
        y, k = carry
        y = inside(w, jnp.sin(y) + row, i + k)
        return (y, k + 1), jnp.cos(y).sum()

    (y, _), s = lax.scan(body, (x, 0), jnp.linspace(0, 1, n), reverse=n % 2 == 0)
    return y + s.sum()


def fori(inside, n, w, x, i):
    return lax.fori_loop(0, n, lambda k, y: jnp.tanh(inside(w, y, i + k)), x)


def mapped(inside, n, w, x, i):
    """In batches that leave a rest."""
    rows = jnp.concatenate([x, x + 1, x * 2])[: n + 1]
    return x + lax.map(lambda r: inside(w, jnp.exp(-(r**2))[None], i), rows, batch_size=2 if n == 2 else None).mean()


def kept(inside, n, w, x, i):
    """A loop under a checkpoint with a policy."""
    dots = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(lambda w, x: scan(inside, n, w, x, i), policy=dots)(w, x)


def product(w, x, i):
    return jnp.tanh(jnp.sin(x @ w) * (1 + i % 3))


def nest(levels, inside=product):
    """``levels``: (kind of loop, iterations), from the outermost inwards."""
    for kind, n in reversed(levels):
        inside = partial(kind, inside, n)
    return lambda w, x: (inside(w, x, 1) ** 2).sum()


def of(fun):
    closed = jax.make_jaxpr(jax.value_and_grad(fun, argnums=(0, 1)))(W, X)
    return closed, trace_jaxpr(closed)


def temp(closed):
    return live_ranges(trace_jaxpr(closed).graph).use().temp


LEVEL = st.tuples(st.sampled_from((scan, fori, mapped, kept)), st.integers(2, 3))


@settings(max_examples=5)
@given(levels=st.lists(LEVEL, min_size=2, max_size=3))
def test_values_and_gradients_are_the_same(levels):
    closed, traced = of(nest(levels))
    for way in inner_ways(traced, ladder, 0)[-1:]:
        inner = rewrite_inner(traced, closed, way)
        flat = trace_jaxpr(inner)
        same_bits(rewrite_loops(flat, inner, ladder(flat.graph).rungs[-1]), closed, (W, X))


@pytest.mark.parametrize("depth", [2, 3])
def test_bytes_fall_at_each_depth(depth):
    levels = [(scan, 2), (fori, 3), (scan, 3)][-depth:]
    closed, traced = of(nest(levels))
    found = inner_ways(traced, ladder, 0)
    assert max(sum(1 for _ in deep(plan)) for way in found for plan in way) == depth - 1
    same_bits(rewrite_inner(traced, closed, found[-1]), closed, (W, X))
    bytes_of = [temp(rewrite_inner(traced, closed, way)) for way in found]
    assert min(bytes_of) < 0.7 * temp(closed)


def deep(plan):
    """The levels of a plan at which loops change."""
    for inner in plan.inner:
        yield from deep(inner)
    if plan.loops:
        yield plan.loops


def softmin(rows, f, g):
    """A block of a kernel that is constant across the iterations, in a map over blocks."""
    cost = ((rows[:, None] - g[None, :, :WIDTH]) ** 2).sum(-1)
    return jax.nn.logsumexp(f[None, :] - cost, axis=1)


def blocks(block, points=8192, parts=8, iterations=6):
    def loss(x, y):
        rows = x.reshape(parts, -1, WIDTH)

        def iteration(f, _):
            return jnp.tanh(-lax.map(lambda r: block(r, f, y), rows).reshape(-1)), None

        return lax.scan(iteration, jnp.zeros(points), None, length=iterations)[0].mean()

    shape = jax.ShapeDtypeStruct((points, WIDTH), jnp.float32)
    return jax.grad(loss), (shape, shape)


def test_what_a_checkpoint_around_the_inner_body_reaches():
    """Without being told: neither more bytes nor more predicted time, and the way there and back."""
    fun, args = blocks(softmin)
    by_hand, _ = blocks(jax.checkpoint(softmin))
    _, start = opened(fun, *args)
    _, hand = opened(by_hand, *args)
    assert start.plain.device > 8 * hand.plain.device
    variant, plan = Candidates(start).cheapest(int(1.001 * hand.plain.device))
    assert plan.predicted.device <= 1.001 * hand.plain.device
    assert sum(start.whole.seconds) + variant.seconds + plan.overhead <= 1.001 * sum(hand.whole.seconds)
    assert variant.has(SINK_INVARIANTS) and variant.has(INNER)
    there_and_back(start, variant, plan)


def test_links_are_not_taken_from_a_file():
    fun, args = blocks(softmin)
    _, start = opened(fun, *args)
    variant = with_loops(start)[-1]
    recipe = recipe_of(variant, variant.solve(1 << 40))
    there_and_back(start, variant, variant.solve(1 << 40))
    ((plan,),) = [taken.sites for taken in variant.taken if taken.rewrite is INNER]
    bent = replace(plan, pair=replace(plan.pair, links=plan.pair.links[:-1]))
    taken = tuple((key, msgspec.to_builtins((bent,)) if key == INNER.key else sites) for key, sites in recipe.taken)
    with pytest.raises(Unlike, match="linked"):
        replay(msgspec.structs.replace(recipe, taken=taken), start)


def test_a_loop_that_only_makes_slices_for_another_is_done_in_it():
    def fun(w, x):
        def iteration(y, _):
            made = lax.map(lambda r: jnp.sin(r * y) @ w, X + jnp.arange(3.0)[:, None, None])
            return lax.scan(lambda c, m: (jnp.tanh(c + m), None), y, made)[0], None

        return lax.scan(iteration, x, None, length=3)[0].sum()

    closed = jax.make_jaxpr(fun)(W, X)
    traced = trace_jaxpr(closed)
    (before,) = (op for op in traced.graph.ops if op.primitive == "scan")
    again = without_loops_between(traced, closed)
    (after,) = (op for op in trace_jaxpr(again).graph.ops if op.primitive == "scan")
    count = [sum(op.primitive == "scan" for op in loop.bodies[0].ops) for loop in (before, after)]
    assert count == [2, 1] and find_pairs(before.bodies[0]) and not find_pairs(after.bodies[0])
    same_bits(again, closed, (W, X))
