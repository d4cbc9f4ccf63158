"""What kernels write over: the model's bytes beside the compiler's."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxtensile
from jaxtensile.devices.profiles import profile
from jaxtensile.passes.lifetimes.fusion import fuse
from jaxtensile.passes.lifetimes.in_place import is_in_a_tuple
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.xla.compilers import compiler_of

X, W = jax.ShapeDtypeStruct((8, 128, 256), jnp.float32), jax.ShapeDtypeStruct((256, 256), jnp.float32)
ROWS = jax.ShapeDtypeStruct((1024, 256), jnp.float32)


def two(x):
    a = jnp.sort(x, -1)
    return a * 2, a + 1


def read_later(x, w):
    y = jnp.tanh(x @ w)
    return y, jnp.cos(y @ w) @ w


def moment(p, m, x):
    g = jax.grad(lambda p: (jnp.tanh(x @ p) ** 2).sum())(p)
    m = 0.9 * m + 0.1 * g
    return p - 0.1 * m, m


CASES = {
    "a result over what it is made of": (lambda x: jnp.sort(x, -1) * 2, X),
    "and of an argument": (lambda x: jnp.sort(x, -1) + x, X),
    "of a smaller type": (lambda x: jnp.sort(x, -1).astype(jnp.bfloat16) * 2, X),
    "one of two": (two, X),
    "of a product of matrices": (lambda x, w: jnp.tanh(x @ w), ROWS, W),
    "of rows that are transposed": (lambda x, w: jnp.tanh((x @ w).transpose(0, 2, 1)), X, W),
    "read again after it is written": (read_later, ROWS, W),
    "after a loop": (lambda x, w: lax.scan(lambda c, _: (jnp.sin(c @ w), None), x, None, length=5)[0] * 2, ROWS, W),
    "weights and their moments": (moment, *[jax.ShapeDtypeStruct((256, 4096), jnp.float32)] * 2, ROWS),
}
FLATTENED = {
    "of a product of an array of rows": (lambda x, w: jnp.tanh(x @ w), X, W),
    "and beside another": (lambda x, w: jax.nn.gelu(jax.nn.gelu(x @ w) @ w) @ w + x, X, W),
}


@pytest.mark.parametrize("name", [*CASES, *FLATTENED])
def test_on_a_cpu(name):
    fun, *args = (CASES | FLATTENED)[name]
    exact, static = (jaxtensile.estimate(fun, *args, target="cpu", exact=e) for e in (True, False))
    assert static.device == pytest.approx(exact.device, rel=0.02)


@pytest.mark.cuda_aot
@pytest.mark.parametrize("name", ["of rows that are transposed", "read again after it is written", *FLATTENED])
def test_on_a_gpu(name):
    fun, *args = (CASES | FLATTENED)[name]
    exact, static = (jaxtensile.estimate(fun, *args, target="nvidia-h200", exact=e) for e in (True, False))
    assert static.device == pytest.approx(exact.device, rel=0.02)


@pytest.mark.parametrize(
    "target, called",
    [
        ("nvidia-a100-40gb", {"conv_general_dilated"}),
        ("nvidia-v100-16gb", {"conv_general_dilated", "dot_general"}),
        ("tpu-v5e", set()),
        ("cpu", set()),
    ],
)
def test_nothing_is_written_over_what_a_gpus_libraries_make(target, called):
    images, filters = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 64, 32, 32), (64, 64, 3, 3)))
    convolved = trace_jaxpr(jax.make_jaxpr(lambda x, w: jnp.tanh(lax.conv(x, w, (1, 1), "SAME")))(images, filters))
    multiplied = trace_jaxpr(jax.make_jaxpr(lambda x, w: jnp.tanh(jnp.tanh(x @ w)) @ w)(ROWS, W))
    for name, graph in (("conv_general_dilated", convolved.graph), ("dot_general", multiplied.graph)):
        kernels = fuse(graph, by=compiler_of(profile(target)).fuser)
        assert any(is_in_a_tuple(op, kernels) for op in graph.ops if op.primitive == name) == (name in called)
        assert not any(is_in_a_tuple(op, kernels) for op in graph.ops if op.primitive != name)
