"""`passes.prologue`: what products compute themselves, by rule and as XLA compiles it."""

import jax
import jax.numpy as jnp
import pytest

import jaxtensile
from jaxtensile.ir.ir import consumers
from jaxtensile.passes.lifetimes.fusion import VIEWS
from jaxtensile.passes.lifetimes.prologue import PRODUCT, prologues
from jaxtensile.program.trace import trace_jaxpr

ROWS, WIDTH, LAYERS = 16384, 1024, 6


def found(f, *shapes, dtype=jnp.float32):
    """The primitives of what products compute of their operands."""
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    graph = trace_jaxpr(jax.make_jaxpr(f)(*args)).graph
    views = [op.primitive in VIEWS for op in graph.ops]
    inside = prologues(graph, views, consumers(graph)).inside
    read = {v for op in graph.ops if op.primitive == PRODUCT for v in op.operands}
    return [op.primitive for op in graph.ops if inside[op.results[0]] and op.results[0] in read]


@pytest.mark.parametrize(
    ("step", "inside"),
    {
        "a number beside it": (lambda x, b: x * 2.5, ["mul"]),
        "one array": (lambda x, b: jnp.sin(x), ["sin"]),
        "a broadcast input": (lambda x, b: x + b, ["add"]),
        "and then another one": (lambda x, b: jnp.sqrt(jnp.abs(x) + 1.0), ["sqrt"]),
        "reshaped": (lambda x, b: jnp.maximum(x.reshape(2, -1), 0.0).reshape(x.shape), ["reshape"]),
        "the same array twice": (lambda x, b: x * x, []),
        "two arrays": (lambda x, b: x * jnp.cos(x), []),
        "a broadcast that is computed": (lambda x, b: x + jnp.cos(b), []),
        "both bounds, which are one op": (lambda x, b: jnp.minimum(jnp.maximum(x, 0.0), 6.0), []),
        "a type that is read narrower": (lambda x, b: x.astype(jnp.bfloat16), []),
        "not a step but a sum": (lambda x, b: jnp.cumsum(x, 0), []),
    }.values(),
)
def test_cheap_steps_of_one_array_are_inside(step, inside):
    assert found(lambda x, b: step(jnp.tanh(x) * x, b) @ jnp.ones((8, 8)).astype(step(x, b).dtype), (4, 8), (8,)) in (
        inside,
        [*inside, "broadcast_in_dim"],
        ["broadcast_in_dim", *inside],
    )


def test_a_number_that_is_computed_counts_as_one_of_programs_as_they_were_written():
    """Scores are divided by the root of a width that is an array of one element."""
    args = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    graph = trace_jaxpr(
        jax.make_jaxpr(lambda a, b: (jnp.cumsum(a).reshape(a.shape) / jnp.sqrt(b[0, 0])) @ b)(*args)
    ).graph
    views = [op.primitive in VIEWS for op in graph.ops]
    (quotient,) = (op.results[0] for op in graph.ops if op.primitive == "div")
    assert not prologues(graph, views, consumers(graph)).inside[quotient]
    assert prologues(graph, views, consumers(graph), numbers=True).inside[quotient]


def test_products_of_types_that_only_the_library_multiplies_read_buffers():
    with jax.enable_x64(True):
        args = [jax.ShapeDtypeStruct((64, 64), jnp.float64)] * 2
        graph = trace_jaxpr(jax.make_jaxpr(lambda a, b: jnp.sin(a) @ b)(*args)).graph
    found = prologues(graph, [False] * len(graph.ops), consumers(graph))
    assert not any(found.silent)


def layers(step, dtype):
    def loss(weights, x):
        for w, b in weights:
            x = step(x @ w.astype(dtype) + b.astype(dtype))
        return (x.astype(jnp.float32) ** 2).sum()

    weights = [
        (jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((WIDTH,), jnp.float32))
    ] * LAYERS
    return jax.jit(jax.grad(loss)), weights, jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)


@pytest.mark.cuda_aot
@pytest.mark.parametrize(
    ("step", "arrays"),
    [(jax.nn.relu, 7), (lambda x: jnp.sqrt(jnp.abs(x) + 1.0), 7), (jnp.square, 11), (jax.nn.silu, 11)],
    ids=("relu", "a chain", "square", "silu"),
)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=("f32", "bf16"))
def test_xla_keeps_as_many_arrays_of_a_network(step, arrays, dtype):
    """Its activations in all, of which a step that products compute makes one a layer less."""
    args = layers(step, dtype)
    unit = ROWS * WIDTH * jnp.dtype(dtype).itemsize
    static = jaxtensile.estimate(*args, target="nvidia-h200").temp / unit
    exact = jaxtensile.estimate(*args, target="nvidia-h200", exact=True).temp / unit
    assert abs(exact - arrays) < 0.5
    assert abs(static - exact) < 0.5
