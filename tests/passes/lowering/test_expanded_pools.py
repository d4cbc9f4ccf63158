"""Gradients of max pools on a CPU: what XLA adds for them, and what a network with them needs."""

import jax
import jax.numpy as jnp
import pytest

import jaxtensile
from graphs import Builder
from jaxtensile.passes.lowering.expanded_pools import expanded_pools

PIXELS, POOLED = 4 * 8 * 8 * 2, 4 * 4 * 4 * 2


def pooled(count=1):
    """A graph of ``count`` pools of one operand, each with its gradient."""
    b = Builder()
    x = b.input(4, 8, 8, 2)
    operand = b.op("tanh", x, shape=(4, 8, 8, 2), dtype="float32")
    outs = []
    for _ in range(count):
        pool = b.op("reduce_window_max", operand, shape=(4, 4, 4, 2), dtype="float32")
        outs.append(b.op("select_and_scatter_add", pool, operand, shape=(4, 8, 8, 2), dtype="float32"))
    return b.graph(*outs)


def test_places_are_found_once_the_operand_is_there_and_wait_for_the_gradient():
    graph = pooled()
    found = expanded_pools(graph)
    names = " ".join(op.primitive.replace(" ", "_") for op in found.graph.ops)
    constants = " ".join(["written_copy"] * 5)
    assert names == f"{constants} tanh reduce_window written_copy reduce_window_max written_copy scatter-add"
    sizes = [sum(found.graph.values[v].nbytes for v in op.results) for op in found.graph.ops]
    assert sizes[:5] == [4 * PIXELS] * 5, "an s32 per axis, and zeros"
    assert sizes[6:8] == [5 * 4 * POOLED, 4 * 4 * POOLED], "the maxima and their places; the places together"
    assert found.graph.outputs == graph.outputs and found.origin[-1] == len(graph.ops) - 1


def test_pools_of_one_shape_share_their_constants():
    assert sum(not op.operands for op in expanded_pools(pooled(2)).graph.ops) == 5


def test_without_pools_it_is_the_same_graph():
    b = Builder()
    graph = b.graph(b.op("tanh", b.input()))
    assert expanded_pools(graph).graph is graph


@pytest.mark.parametrize(("window", "stride"), [(2, 2), (3, 2), (3, 1)])
def test_a_network_with_pools_needs_about_what_is_said(window, stride):
    def loss(filters, x):
        for f in filters:
            x = jax.nn.relu(
                jax.lax.conv_general_dilated(x, f, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            )
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, window, window, 1), (1, stride, stride, 1), "SAME")
        return jnp.mean(x**2)

    args = [jax.ShapeDtypeStruct((3, 3, 32, 32), jnp.float32)] * 2, jax.ShapeDtypeStruct((8, 32, 32, 32), jnp.float32)
    static, exact = (jaxtensile.estimate(jax.grad(loss), *args, exact=exact).device for exact in (False, True))
    assert 0.8 * exact <= static <= 1.1 * exact
