"""Into how many parts products are split: the formula beside what XLA does."""

import jax
import jax.numpy as jnp
import pytest

import jaxtensile
from jaxtensile.devices.profiles import profile
from jaxtensile.passes.lowering.split_products import split_of
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.switches import off
from jaxtensile.xla.compilers import compiler_of

TARGETS = "nvidia-h200", "nvidia-a100-40gb", "nvidia-l4", "nvidia-rtx-3060"
PARTS = {  # rows, columns, sum: as in what XLA compiles for TARGETS, 16-bit, jax 0.10.2 and 0.12
    (256, 256, 8192): (32, 16, 16, 8),
    (128, 2048, 2048): (8, 4, 4, 2),
    (2048, 2048, 2048): (1, 1, 1, 1),
    (512, 512, 8192): (8, 8, 4, 2),
    (256, 256, 65536): (32, 32, 16, 8),
    (1024, 1024, 8192): (2, 2, 1, 1),
    (64, 64, 65536): (128, 64, 64, 64),
    (768, 3072, 8192): (1, 1, 1, 1),
    (768, 768, 8192): (4, 4, 2, 1),
}


def product(rows, columns, summed, dtype=jnp.bfloat16, groups=()):
    a = jax.ShapeDtypeStruct((*groups, rows, summed), dtype)
    return (lambda a, b: a @ b), a, jax.ShapeDtypeStruct((*groups, summed, columns), dtype)


def split(target, fun, *args):
    graph = trace_jaxpr(jax.make_jaxpr(fun)(*args)).graph
    (op,) = (op for op in graph.ops if op.primitive == "dot_general")
    compiler = compiler_of(profile(target))
    return split_of(graph, op, compiler.processors, compiler.weights)


@pytest.mark.parametrize("sizes", PARTS)
def test_the_parts_are_xlas(sizes):
    found = [split(target, *product(*sizes)) for target in TARGETS]
    assert tuple(s.parts if s else 1 for s in found) == PARTS[sizes]


def test_what_is_split_and_padded():
    found = split("nvidia-h200", *product(384, 128, 5000, groups=(4,)))
    assert (found.summed, found.partial) == (5000, found.parts * 4 * 384 * 128 * 4)
    assert found.padded % found.parts == 0 and 0 <= found.padded - 5000 < 8 * found.parts
    assert split("nvidia-v100-16gb", *product(256, 256, 8192)) is None
    assert split("cpu", *product(256, 256, 8192)) is None and split("tpu-v5e", *product(256, 256, 8192)) is None
    assert split("nvidia-h200", *product(256, 256, 8192, jnp.int32)) is None
    with off("split_products"):
        assert split("nvidia-h200", *product(256, 256, 8192)) is None


@pytest.mark.cuda_aot
@pytest.mark.parametrize("sizes", [(256, 192, 10000), (192, 64, 16384)], ids=("uneven", "even"))
def test_parts_take_memory(sizes):
    fun, *args = product(*sizes, jnp.float32)
    exact, static = (jaxtensile.estimate(fun, *args, target="nvidia-a100-40gb", exact=e) for e in (True, False))
    assert static.temp == pytest.approx(exact.temp, abs=4096) and static.temp > 4 * 4 * sizes[0] * sizes[1]
