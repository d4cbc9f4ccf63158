"""Gradients of max pools on a CPU: what XLA adds for them, and what a network with them needs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtensile
from graphs import Builder
from jaxtensile.devices.profiles import profile
from jaxtensile.passes.lowering.expanded_pools import expanded_pools
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.xla.compilers import compiler_of
from programs import FAST

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


@pytest.mark.parametrize("shape", [(32, 32, 32, 16), (64, 16, 16, 32)])
def test_what_a_gradient_needs_by_itself_is_what_a_cpu_allocates(shape):
    def slope(slopes, x):
        pool = lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")  # noqa: E731
        return jax.vjp(pool, x)[1](slopes)[0]

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((shape[0], shape[1] // 2, shape[2] // 2, shape[3]), shape)]
    graph = trace_jaxpr(jax.jit(slope).trace(*args).jaxpr).graph
    (op,) = (op for op in graph.ops if op.primitive == "select_and_scatter_add")
    (there,) = (
        op for op in compiler_of(profile("cpu")).with_workspaces(graph).ops if op.primitive == "select_and_scatter_add"
    )
    allocated = jax.jit(slope, compiler_options=FAST).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert op.workspace == 0 and there.workspace == pytest.approx(allocated, rel=0.15)
    assert compiler_of(profile("nvidia-h200")).with_workspaces(graph) is graph


def test_a_network_with_pools_and_batch_norm_is_worked_on_in_parts_around_them():
    """What a pool's gradient needs is most of all: nothing that recomputes saves it, some rows at a time do."""

    def loss(params, x):
        for f, scale in params:
            x = jax.lax.conv_general_dilated(x, f, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            mean = x.mean((0, 1, 2))
            x = jax.nn.relu(scale * (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean((0, 1, 2)) + 1e-5))
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.mean(x**2)

    keys = jax.random.split(jax.random.key(0), 3)
    params = [(0.1 * jax.random.normal(keys[k], (3, 3, n, 16)), jnp.ones(16)) for k, n in enumerate((3, 16))]
    args = params, jax.random.normal(keys[2], (32, 32, 32, 3))
    plain = jax.jit(jax.grad(loss), compiler_options=FAST)
    use = plain.lower(*args).compile().memory_analysis()
    budget = use.argument_size_in_bytes + use.output_size_in_bytes + int(0.6 * use.temp_size_in_bytes)
    planned = jaxtensile.jit(jax.grad(loss), budget=budget, compiler_options=FAST)
    report = planned.plan(*args)
    assert report.fits and report.overhead_ratio < 0.3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), planned(*args), plain(*args))
