"""`passes.expanded`: what XLA writes out as other ops, or hands to a library."""

import jax
import jax.numpy as jnp
import pytest

from jaxtensile.devices.profiles import profile
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.lowering.expanded import expanded
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.xla.compilers import compiler_of

GPU = 132


def graph(f, *shapes, dtype=jnp.float32):
    return trace_jaxpr(jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))).graph


def read(g, primitive="dot_general"):
    """The shapes that the ops of that name read, and who made those."""
    made = {r: op.primitive for op in g.ops for r in op.results}
    return [[(g.values[v].shape, made.get(v)) for v in op.operands] for op in g.ops if op.primitive == primitive]


def test_programs_without_such_ops_stay_as_they_are():
    g = graph(lambda a, b: jnp.tanh(a @ b), (4, 4), (4, 4))
    assert expanded(g, GPU).graph is g and expanded(g).graph is g


def by_groups(summed, batch, rows, groups):
    numbers = jax.lax.RaggedDotDimensionNumbers((summed, batch), rows, groups)
    return lambda a, b, sizes: jax.lax.ragged_dot_general(a, b, sizes, numbers)


NONE, B, M, K, N, G = ((), ()), 2, 24, 4, 5, 3
ROWS, MATRICES = (by_groups(((1,), (1,)), NONE, [0], [0]), (M, K), (G, K, N)), (by_groups(((0,), (0,)), NONE, [0], []),)
GROUPED = {
    "rows": (*ROWS, (G,), ["transpose", "given"]),
    "rows by matrices on their side": (
        by_groups(((1,), (2,)), NONE, [0], [0]), (M, K), (G, N, K), (G,), ["transpose", "transpose"],
    ),
    "rows by matrices behind one another": (
        by_groups(((1,), (0,)), NONE, [0], [2]), (M, K), (K, N, G), (G,), ["transpose", "transpose"],
    ),
    "rows in a batch": (
        by_groups(((2,), (2,)), ((0,), (0,)), [1], [1]), (B, M, K), (B, G, K, N), (B, G), ["transpose", "given"],
    ),
    "a matrix for each group": (*MATRICES, (M, K), (M, N), (G,), ["spread", "spread"]),
    "groups of a batch": (by_groups(((1,), (1,)), ((0,), (0,)), [0], []), (M, K, N), (M, K, N), (G,), None),
}  # fmt: skip


def grouped(fun, *shapes):
    *arrays, sizes = shapes
    args = [*(jax.ShapeDtypeStruct(s, jnp.float32) for s in arrays), jax.ShapeDtypeStruct(sizes, jnp.int32)]
    return trace_jaxpr(jax.make_jaxpr(fun)(*args)).graph, args


@pytest.mark.parametrize("name", GROUPED)
def test_a_product_by_groups_reads_a_copy_of_the_rows_for_each(name):
    fun, *shapes, makers = GROUPED[name]
    g, _ = grouped(fun, *shapes)
    found = expanded(g, GPU).graph
    assert expanded(g, GPU, groups=False).graph is g
    if makers is None:
        assert found is g
        return
    assert [[maker or "given" for _, maker in pair] for pair in read(found)] == [makers]
    spread = [found.values[op.results[0]].shape for op in found.ops if op.primitive == "spread"]
    assert spread == [(G, *shape) for shape in shapes[: len(spread)]]


def test_rows_are_spread_once_for_all_that_read_them():
    sizes = jnp.full(G, M // G, jnp.int32)
    g = graph(jax.value_and_grad(lambda w, x: jax.lax.ragged_dot(x, w, sizes).sum()), (G, K, N), (M, K))
    found = expanded(g).graph
    assert sum(op.primitive == "spread" for op in found.ops) == 2 and len(read(found)) == 2


@pytest.mark.parametrize("name", GROUPED)
def test_what_a_product_by_groups_needs_by_itself_is_what_a_cpu_allocates(name):
    fun, *shapes, _ = GROUPED[name]
    g, args = grouped(fun, *(tuple(64 * n if n == M else 8 * n if n > G else n for n in s) for s in shapes))
    (op,) = compiler_of(profile("cpu")).with_workspaces(g).ops
    assert compiler_of(profile("tpu-v5e")).with_workspaces(g) is g
    allocated = jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert op.workspace == pytest.approx(allocated, rel=0.01, abs=100)  # of the sizes


@pytest.mark.parametrize("loop", [False, True])
def test_a_decomposition_writes_over_a_copy_of_what_it_reads(loop):
    def fun(x):
        return jax.lax.scan(lambda c, _: (jnp.linalg.cholesky(c), None), x, None, 3)[0]

    g = graph(fun if loop else jnp.linalg.cholesky, (64, 64))
    found = expanded(g).graph
    (inner,) = next(op.bodies for op in found.ops if op.bodies) if loop else (found,)
    assert read(inner, "cholesky") == [[((64, 64), "transpose")]]
    assert loop or live_ranges(found).temp == 64 * 64 * 4  # what it is written over, and the result is the other


@pytest.mark.parametrize(("rows", "copied"), [(50_000, True), (51_200, False), (60, False)])
def test_a_product_that_does_not_split_evenly_reads_padded_copies(rows, copied):
    g = graph(lambda a, b: a.T @ b, (rows, 128), (rows, 64))
    made = [maker for _, maker in read(expanded(g, GPU).graph)[0]]
    assert made == (["pad"] * 2 if copied else ["transpose", None])
    assert expanded(g).graph is g  # not on a CPU


def test_a_cpu_multiplies_and_convolves_by_rows():
    g = graph(lambda x, w: jnp.einsum("bsd,bsf->df", x, w), (2, 8, 4), (2, 8, 6))
    assert [maker for _, maker in read(expanded(g).graph)[0]].count("transpose") == 1
    assert expanded(g, GPU).graph is g
    twice = graph(lambda x, w: (jnp.einsum("bsd,bsf->df", x, w), jnp.einsum("bsd,bsf->df", x, w + 1)), *[(2, 8, 4)] * 2)
    assert sum(op.primitive == "transpose" for op in expanded(twice).graph.ops) < 4  # one copy of what both read
    swapped = graph(lambda q, k: jnp.einsum("bqd,bkd->bqk", q, k), (2, 8, 4), (2, 8, 4))
    assert expanded(swapped).graph is swapped
