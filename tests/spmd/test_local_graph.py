"""The graph of one device, to be read: gathers, sums, what a ``shard_map`` does."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtensile.devices.backends import CPU, CUDA
from jaxtensile.ir.text import format_graph
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.spmd.local_graph import local_graph, whole
from jaxtensile.spmd.local_shapes import Shapes
from jaxtensile.spmd.shardy import Reshard, Sum

W, X = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)


def traced(fun, *args):
    return trace_jaxpr(jax.jit(fun).trace(*args).jaxpr)


def text(local):
    return [line.strip() for line in format_graph(local.graph).splitlines()]


def gradient(w, x):
    y = x @ w
    return y.T @ x, y @ w


def fsdp():
    """Weights and rows over four devices: %0 is w, %1 x, %2 y, %3 its transpose, %4 the gradient."""
    program = traced(gradient, W, X)
    assert [op.primitive for op in program.graph.ops] == ["dot_general", "transpose", "dot_general", "dot_general"]
    rows, columns, gathered = (4, 1), (1, 4), Reshard((64, 64), (4, 1), (1, 1), ("0", "3"))
    return program, Shapes(
        {0: rows, 1: rows, 2: rows, 3: columns, 4: rows, 5: rows},
        reshards=((gathered, (0, 3)),),
        sums={2: Sum((64, 64), (1, 1), "batch")},
    )


def test_a_weight_is_gathered_once_and_a_gradient_is_added_up():
    assert text(local_graph(*fsdp(), CPU)) == [
        "graph(%0:f32[16,64], %1:f32[8,64])",
        "%6:f32[64,64] = all_gather(%0)",
        "%2:f32[8,64] = dot_general(%1, %6) flops=65536.0",
        "%3:f32[64,8] = transpose(%2)",
        "%7:f32[64,64] = dot_general(%3, %1) flops=65536.0",
        "%8:f32[64,64] = all_reduce(%7)",
        "%4:f32[16,64] = slice(%8)",
        "%5:f32[8,64] = dot_general(%2, %6) flops=65536.0",
        "return %4, %5 at %4, %5",
    ]


def test_some_compilers_scatter_sums():
    lines = text(local_graph(*fsdp(), CUDA))
    assert "%4:f32[16,64] = all_reduce(%7)" in lines and not any("slice" in line for line in lines)


def test_every_op_says_the_line_that_it_is_for():
    program, shapes = fsdp()
    local = local_graph(program, shapes, CPU)
    assert local.origin == (0, 0, 1, 2, 2, 2, 3)
    assert [local.source(i) for i in (0, 1)] == [program.source(0)] * 2
    assert whole(program).graph is program.graph


def test_a_result_is_as_the_caller_gets_it():
    program = traced(lambda x: jnp.sin(x), X)
    local = local_graph(program, Shapes({0: (4, 1), 1: (4, 1)}, outputs=((1, 1),)), CPU)
    assert text(local)[1:] == ["%1:f32[8,64] = sin(%0)", "%2:f32[32,64] = all_gather(%1)", "return %2 at %2"]


def test_what_a_shard_map_does_stands_where_its_call_is():
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    mapped = jax.shard_map(lambda x, s: lax.psum(jnp.sin(x) + s, "x"), mesh=mesh, in_specs=(P("x"), P()), out_specs=P())
    program = traced(lambda x: jnp.cos(mapped(x, 2.0)), X)
    (call,) = [op.id for op in program.graph.ops if op.primitive == "shard_map"]
    body = trace_jaxpr(jax.extend.core.ClosedJaxpr(program.equations[call].eqn.params["jaxpr"], ()))
    whole_ = {v.id: (1, 1) for v in program.graph.values if len(v.shape) == 2}
    local = local_graph(program, Shapes(whole_, {(call, 0): Shapes({}, program=body)}), CPU)
    assert [op.primitive for op in local.graph.ops] == [*(op.primitive for op in body.graph.ops), "cos"]
    assert "test_local_graph" in local.source(0) and local.graph.outputs == program.graph.outputs
