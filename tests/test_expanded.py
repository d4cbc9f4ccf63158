"""`passes.expanded`: what XLA writes out as other ops, or hands to a library."""

import jax
import jax.numpy as jnp
import pytest

from jaxtensile.passes.expanded import expanded
from jaxtensile.passes.liveness import live_ranges
from jaxtensile.trace import trace_jaxpr

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


def test_a_product_by_groups_copies_the_rows_for_each_and_both_where_the_result_has_groups():
    sizes = jnp.full(3, 8, jnp.int32)
    g = graph(lambda x, w: jax.lax.ragged_dot(x, w, sizes), (24, 4), (3, 4, 5))
    assert read(expanded(g).graph) == [[((3, 24, 4), "select_n"), ((3, 4, 5), None)]]
    g = graph(jax.grad(lambda w, x: jax.lax.ragged_dot(x, w, sizes).sum()), (3, 4, 5), (24, 4))
    assert [[shape for shape, _ in pair] for pair in read(expanded(g).graph)][-1] == [(3, 24, 4), (3, 24, 5)]


@pytest.mark.parametrize("loop", [False, True])
def test_a_decomposition_writes_over_a_copy_of_what_it_reads(loop):
    def fun(x):
        return jax.lax.scan(lambda c, _: (jnp.linalg.cholesky(c), None), x, None, 3)[0]

    g = graph(fun if loop else jnp.linalg.cholesky, (64, 64))
    found = expanded(g).graph
    (inner,) = next(op.bodies for op in found.ops if op.bodies) if loop else (found,)
    assert read(inner, "cholesky") == [[((64, 64), "transpose")]]
    assert loop or live_ranges(found).temp == 64 * 64 * 4  # what it is written over, and the result is the other


@pytest.mark.parametrize(("rows", "copied"), [(50_000, True), (51_200, False), (1000, False)])
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
