"""Rows of values from other arguments than the batch: whatever a loss is made of, no part needs all of it."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.rewrites.rows.chunk import in_chunks
from jaxtensile.rewrites.rows.region import find_region
from programs import FAST

BATCH, LENGTH, WIDTH, VOCABULARY = 8, 12, 4, 1200


def normal(number, *size):
    return jnp.asarray(np.random.default_rng(number).normal(size=size), jnp.float32)


def whole(number, high, *size):
    return jnp.asarray(np.random.default_rng(number).integers(0, high, size), jnp.int32)


WEIGHTS = {"embed": normal(0, VOCABULARY, WIDTH), "up": normal(1, WIDTH, WIDTH), "head": normal(2, WIDTH, VOCABULARY)}
TOKENS, LABELS = whole(3, VOCABULARY, BATCH, LENGTH), whole(4, VOCABULARY, BATCH, LENGTH)
EACH, TEACHER = jnp.abs(normal(5, BATCH, LENGTH)), normal(6, BATCH, LENGTH, VOCABULARY)


def logits(w, tokens):
    return (jnp.tanh(w["embed"][tokens] @ w["up"]) @ w["head"]).astype(jnp.float32)


def scored(w, tokens, labels):
    return jnp.take_along_axis(jax.nn.log_softmax(logits(w, tokens)), labels[..., None], -1)[..., 0]


def by_log_softmax(w, tokens, labels):
    return -scored(w, tokens, labels).mean()


def by_logsumexp(w, tokens, labels):
    x = logits(w, tokens)
    return (jax.nn.logsumexp(x, -1) - jnp.take_along_axis(x, labels[..., None], -1)[..., 0]).mean()


def by_one_hot(w, tokens, labels):
    return -(jax.nn.log_softmax(logits(w, tokens)) * jax.nn.one_hot(labels, VOCABULARY)).sum(-1).mean()


def by_product(w, tokens, labels):
    hot = jax.nn.one_hot(labels, VOCABULARY)
    return -jnp.einsum("btv,btv->bt", jax.nn.log_softmax(logits(w, tokens)), hot).mean()


def masked(w, tokens, labels):
    mask = (labels > 5).astype(jnp.float32)
    return -(scored(w, tokens, labels) * mask).sum() / mask.sum()


def weighted(w, tokens, labels, each):
    return -(scored(w, tokens, labels) * each).sum() / each.sum()


def smoothed(w, tokens, labels):
    smooth = 0.9 * jax.nn.one_hot(labels, VOCABULARY) + 0.1 / VOCABULARY
    return -(jax.nn.log_softmax(logits(w, tokens)) * smooth).sum(-1).mean()


def distilled(w, tokens, teacher):
    return -(jax.nn.softmax(teacher) * jax.nn.log_softmax(logits(w, tokens))).sum(-1).mean()


def clipped(w, tokens, labels, each):
    """A policy's gain, whose advantages are normed over all of the batch."""
    gain = (each - each.mean()) / (each.std() + 1e-6)
    ratio = jnp.exp(0.1 * scored(w, tokens, labels) - 0.1 * each)
    return -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()


def focused(w, tokens, labels):
    found = scored(w, tokens, labels)
    return -((1 - jnp.exp(found)) ** 2 * found).mean()


LOSSES = {
    by_log_softmax: (LABELS,),
    by_logsumexp: (LABELS,),
    by_one_hot: (LABELS,),
    by_product: (LABELS,),
    masked: (LABELS,),
    weighted: (LABELS, EACH),
    smoothed: (LABELS,),
    distilled: (TEACHER,),
    clipped: (LABELS, EACH),
    focused: (LABELS,),
}


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_no_part_of_a_loss_needs_the_logits_of_all_tokens(loss):
    """Labels scattered into zeros that are summed up, smoothed labels and a teacher's softmax were made whole."""
    args = (WEIGHTS, TOKENS, *LOSSES[loss])
    closed = jax.make_jaxpr(jax.value_and_grad(loss))(*args)
    traced = trace_jaxpr(closed)
    own = find_region(traced, 1)
    assert own is not None and own.seed.rows == BATCH
    made = in_chunks(traced, closed, own, BATCH)
    assert live_ranges(trace_jaxpr(made).graph).temp < 1.5 / BATCH * live_ranges(traced.graph).temp
    expected, flat = jax.jit(jax.value_and_grad(loss), compiler_options=FAST)(*args), jax.tree.leaves(args)
    for a, b in zip(
        jax.jit(jax.extend.core.jaxpr_as_fun(made), compiler_options=FAST)(*flat),
        jax.tree.leaves(expected),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_what_others_read_is_not_made_again():
    """The scattered labels are a result as well: so they are there, and their sums may be read from them."""

    def both(w, tokens, labels):
        value, grads = jax.value_and_grad(by_log_softmax)(w, tokens, labels)
        zeros = jnp.zeros((BATCH, LENGTH, VOCABULARY))
        hot = zeros.at[jnp.arange(BATCH)[:, None], jnp.arange(LENGTH), labels].add(1.0)
        return value, grads, hot, hot.sum(-1)

    args = (WEIGHTS, TOKENS, LABELS)
    closed = jax.make_jaxpr(both)(*args)
    traced = trace_jaxpr(closed)
    own = find_region(traced, 1)
    assert own is not None
    made = in_chunks(traced, closed, own, BATCH)
    flat = jax.tree.leaves(args)
    for a, b in zip(
        jax.jit(jax.extend.core.jaxpr_as_fun(made), compiler_options=FAST)(*flat),
        jax.tree.leaves(jax.jit(both, compiler_options=FAST)(*args)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
