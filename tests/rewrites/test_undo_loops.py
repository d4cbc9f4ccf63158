"""Scans whose checkpointed bodies are computed once: what is stacked for it, what is not, and that the values stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxtensile
from checkpoints import CHECKPOINTS, checkpoints_are
from jaxtensile.program.trace import jaxpr_flops, trace_jaxpr
from jaxtensile.rewrites.undo import undo
from programs import FAST, close

P = jax.checkpoint_policies
X = jax.random.normal(jax.random.key(0), (32, 16)) / 4
W = jax.random.normal(jax.random.key(1), (6, 16, 16)) / 4
SHARED = jax.random.normal(jax.random.key(2), (16, 16)) / 4


@pytest.fixture(autouse=True, params=CHECKPOINTS)
def kind(request):
    with checkpoints_are(request.param):
        yield request.param


def layer(shared, w, x):
    hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
    return x + jnp.sin(hidden @ w.T) @ shared


def gradient(layer):
    def loss(shared, w, x):
        return (lax.scan(lambda x, w: (layer(shared, w, x), None), x, w)[0] ** 2).sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2))


def undone(fun):
    """``fun`` without its checkpoints, and its FLOPs as written."""
    closed = jax.jit(fun).trace(SHARED, W, X).jaxpr
    found = undo(trace_jaxpr(closed), closed)
    return found, jaxpr_flops(closed)


def flops(fun):
    return jaxpr_flops(jax.jit(fun).trace(SHARED, W, X).jaxpr)


def twice(layer):
    return lambda shared, w, x: layer(shared, w, layer(shared, w, x))


def half(shared, w, x):
    return layer(shared.astype("bfloat16"), w.astype("bfloat16"), x.astype("bfloat16")).astype(x.dtype)


def dropped(shared, w, x):
    keep = jax.random.bernoulli(jax.random.fold_in(jax.random.key(3), (w[0, 0] * 1e6).astype(int)), 0.8, x.shape)
    return layer(shared, w, jnp.where(keep, x, 0))


LAYERS = {
    "nothing": (layer, {}),
    "names": (layer, {"policy": P.save_only_these_names("hidden")}),
    "not prevented": (layer, {"prevent_cse": False}),
    "half": (half, {}),
    "dropout": (dropped, {}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_products_are_those_without_checkpoints(name):
    """As many as in the loops that JAX makes without them; no stack holds what every iteration has at hand."""
    one, options = LAYERS[name]
    found, written = undone(gradient(jax.checkpoint(one, **options)))
    assert found is not None and found.traced.graph.flops == flops(gradient(one)) < written
    shapes = {found.traced.graph.values[v].shape for v in found.kept}
    assert shapes and all(shape[:2] == (len(W), len(X)) for shape in shapes)


def test_checkpoints_within_checkpoints():
    found, written = undone(gradient(jax.checkpoint(twice(jax.checkpoint(layer)))))
    assert found is not None and found.traced.graph.flops == flops(gradient(twice(layer))) < written


def test_a_policy_that_saves_the_products_leaves_none_to_spare():
    found, written = undone(gradient(jax.checkpoint(layer, policy=P.dots_saveable)))
    assert written == flops(gradient(layer)) and (found is None or found.traced.graph.flops == written)


def test_what_the_user_keeps_apart_is_made_again():
    def apart(shared, w, x):
        return jnp.sin(lax.optimization_barrier(x @ w)) @ w.T @ shared

    found, written = undone(gradient(jax.checkpoint(apart)))
    product = 2.0 * X.shape[0] * 16 * 16 * len(W)
    left = written if found is None else found.traced.graph.flops
    assert written - left <= 1 * product and left > flops(gradient(apart))


def test_foreign_code_runs_as_often_as_before():
    def foreign(shared, w, x):
        return layer(shared, w, x + jax.pure_callback(np.ones_like, x, lax.stop_gradient(x)))

    def calls(graph):
        return sum((op.primitive == "pure_callback") + sum(map(calls, op.bodies)) for op in graph.ops)

    closed = jax.jit(gradient(jax.checkpoint(foreign))).trace(SHARED, W, X).jaxpr
    traced = trace_jaxpr(closed)
    found = undo(traced, closed)
    assert calls(traced.graph) == 2
    assert found is None or calls(found.traced.graph) == 2


def test_without_checkpoints_nothing_is_found():
    assert undone(gradient(layer))[0] is None


@pytest.mark.parametrize("kind", CHECKPOINTS[-1:], indirect=True)
@pytest.mark.parametrize("name", ["nothing", "names", "dropout"])
def test_a_call_computes_what_jit_computes(name):
    """With room for everything without what was made twice, with little as written; the same values."""
    one, options = LAYERS[name]
    fun = gradient(jax.checkpoint(one, **options))
    expected = jax.jit(fun, compiler_options=FAST)(SHARED, W, X)
    written = jaxtensile.jit(fun, budget="1GiB", undo=False, compiler_options=FAST).plan(SHARED, W, X)
    for budget, free in (("1GiB", True), (written.compiled.device, False)):
        step = jaxtensile.jit(fun, budget=budget, compiler_options=FAST)
        report = step.plan(SHARED, W, X)
        assert report.undone or not free
        if free:
            assert jaxpr_flops(step.trace(SHARED, W, X).jaxpr) == flops(gradient(one))
        jax.tree.map(close, step(SHARED, W, X), expected)
