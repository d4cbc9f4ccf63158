"""`passes.widened`: products of 16-bit numbers on the CPU, by rule and beside what XLA:CPU allocates."""

import jax
import jax.numpy as jnp
import pytest

import jaxtensile
from jaxtensile.ir.ir import producers
from jaxtensile.passes.lowering.widened import BEFORE_8, BEFORE_9, widened
from jaxtensile.program.trace import trace_jaxpr

HALF = jnp.bfloat16


def graph(f, *shapes, dtype=HALF):
    return trace_jaxpr(jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))).graph


def kinds(low):
    """For each product the types it reads and writes, and what made its operands."""
    made = producers(low)
    return [
        (
            [low.values[v].dtype for v in (*op.operands, *op.results)],
            [low.ops[made[v]].primitive if made[v] >= 0 else "input" for v in op.operands],
        )
        for op in low.ops
        if op.primitive == "dot_general"
    ]


def test_programs_without_16_bits_stay_as_they_are():
    g = graph(lambda a, b: a @ b, (4, 4), (4, 4), dtype=jnp.float32)
    assert widened(g).graph is g


def test_products_of_one_operand_share_its_copy():
    g = graph(lambda a, b: (a @ b) @ b, (4, 4), (4, 4))
    low = widened(g)
    assert kinds(low.graph) == [(["float32"] * 3, ["convert_element_type"] * 2)] * 2
    assert sum(op.primitive == "convert_element_type" for op in low.graph.ops) == 5, "a, b, a @ b, and both results"
    assert low.graph.inputs == g.inputs and low.graph.outputs == g.outputs
    assert [v.id for v in low.graph.values] == list(range(len(low.graph.values)))
    assert set(low.origin) == {0, 1}


def test_bodies_of_loops_are_widened():
    def f(x, w):
        return jax.lax.scan(lambda c, _: (c @ w, None), x, length=3)[0]

    low = widened(graph(f, (4, 4), (4, 4))).graph
    (loop,) = (op for op in low.ops if op.bodies)
    assert kinds(loop.bodies[0])[0][0] == ["float32"] * 3


@pytest.mark.parametrize(
    ("step", "dtype"),
    [(jnp.tanh, jnp.float32), (jnp.tanh, HALF), (jax.nn.gelu, jnp.float32), (jax.nn.silu, HALF), (jax.nn.relu, HALF)],
    ids=("tanh, f32", "tanh, bf16", "gelu, f32", "silu, bf16", "relu, bf16"),
)
def test_a_network_on_the_cpu_needs_what_was_said(step, dtype):
    def loss(weights, x):
        for w in weights:
            x = step(x @ w.astype(dtype))
        return (x.astype(jnp.float32) ** 2).sum()

    weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 6
    args = jax.jit(jax.grad(loss)), weights, jax.ShapeDtypeStruct((8192, 256), dtype)
    static, exact = (jaxtensile.estimate(*args, target="cpu", exact=flag) for flag in (False, True))
    assert static.device == pytest.approx(exact.device, rel=0.1)


def test_what_is_only_widened_again_is_not_rounded_on_a_gpu():
    """The sum along a residual stream is f32 to its next reader; products read it in 16 bits, or in f32 before 8.0."""

    def stream(x, w):
        y = x + x @ w
        return y + y @ w

    g = graph(stream, (4, 4), (4, 4))
    for wide, product in ((BEFORE_9, "bfloat16"), (BEFORE_8, "float32")):
        low = widened(g, wide).graph
        made = producers(low)
        assert [kind for kind, _ in kinds(low)] == [[product] * 3] * 2
        first, second = (op for op in low.ops if op.primitive == "add")
        assert first.results[0] in second.operands
        assert low.values[second.results[0]].dtype == "float32"
        assert low.ops[made[low.outputs[0]]].primitive == "convert_element_type"
