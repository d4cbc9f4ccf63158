"""Nothing that is traced for a plan outlives its trace: not even in cycles, which would hold memory until a garbage
collection, and which ``jax.checking_leaks`` reports."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtensile
from programs import FAST

WIDTH, ROWS, LAYERS = 16, 64, 3


def normal(number, *size):
    return jnp.asarray(np.random.default_rng(number).normal(size=size) / 4, jnp.float32)


X, LABELS = normal(0, ROWS, WIDTH), jnp.arange(ROWS, dtype=jnp.int32) % 512
HEAD, STACKED = normal(1, WIDTH, 512), normal(2, LAYERS, WIDTH, WIDTH)


def checkpointed(stacked, x):
    """Undone, a loop stacks for another what it would make again."""
    body = jax.checkpoint(lambda x, w: (x + jnp.sin(jnp.tanh(x @ w) @ w.T), None))
    return (jax.lax.scan(body, x, stacked)[0] ** 2).sum()


def unrolled(stacked, x):
    for w in stacked:
        x = x + jnp.tanh(jnp.tanh(x @ w) @ w.T)
    return (x**2).sum()


def classified(head, x):
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ head), LABELS[:, None], -1).mean()


@pytest.mark.parametrize(
    ("loss", "weights"),
    ((checkpointed, STACKED), (unrolled, STACKED), (classified, HEAD)),
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_no_tracer_outlives_planning(loss, weights, monkeypatch):
    step = jax.value_and_grad(loss)
    use = jax.jit(step, compiler_options=FAST).lower(weights, X).compile().memory_analysis()
    given = use.argument_size_in_bytes + use.output_size_in_bytes - use.alias_size_in_bytes
    budget = given + use.temp_size_in_bytes // 4
    monkeypatch.setattr("jaxtensile.api.jit.AMPLE", float("inf"))
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    with jax.checking_leaks():
        try:
            report = jaxtensile.jit(step, budget=budget, compiler_options=FAST).plan(weights, X)
        except jaxtensile.BudgetError as error:
            assert error.needs is not None and error.needs > budget
        else:
            assert report.compiled.device <= budget
