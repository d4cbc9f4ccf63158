"""Products that are read in slices are made in slices: the same values, and the whole is never there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtensile.program.trace import jaxpr_flops, trace_jaxpr
from jaxtensile.rewrites.split import EACH, sliced_products, split_products


def pairs(vs):
    """DLRM's interactions: every pair of vectors; its gradient is two products, read vector by vector."""
    v = jnp.stack(vs, axis=1)
    return (jnp.tril(jnp.einsum("bid,bjd->bij", v, v)) ** 3).sum()


def batch_dim(a, b):
    c = jnp.einsum("bij,bjk->bik", a, b)
    return c[:2].sum() + (c[2:] ** 2).sum()


def free_dims(a, b):
    c = -(a[0] @ b[0] + b[0].T @ a[0].T) * 2.0
    left, right = jnp.split(c, 2, axis=1)
    return jnp.sin(left).sum() + jnp.cos(right).sum(), c[1:3].sum() + c[:, 3:4].astype(jnp.bfloat16).sum()


def converted(a, b):
    c = (a[0] @ b[0]).astype(jnp.bfloat16)
    return c[:4] * 2, c[4:].sum()


VECTORS = [jnp.sin(jnp.arange(40.0).reshape(8, 5) * k) for k in range(1, 4)]
SQUARES = jnp.sin(jnp.arange(288.0).reshape(4, 8, 9)), jnp.cos(jnp.arange(288.0).reshape(4, 9, 8))
CASES = {
    "pairs": (jax.grad(pairs), (VECTORS,), 3),
    "batch": (batch_dim, SQUARES, 1),
    "free": (free_dims, SQUARES, 5),
    "convert": (converted, SQUARES, 2),
}


def split(fun, args, pieces=EACH):
    closed = jax.jit(fun).trace(*args).jaxpr
    traced = trace_jaxpr(closed)
    chosen = sliced_products(traced, 64)
    return closed, traced, chosen, split_products(traced, closed, chosen, pieces)


@pytest.mark.parametrize("pieces", [EACH, 2])
@pytest.mark.parametrize("name", CASES)
def test_the_same_values_from_slices(name, pieces):
    fun, args, count = CASES[name]
    closed, traced, chosen, new = split(fun, args, pieces)
    assert len(chosen) == count
    flat = trace_jaxpr(new)
    shapes = {traced.graph.values[v].shape for v in chosen}
    made = {flat.graph.values[op.results[0]].shape for op in flat.graph.ops if op.primitive == "dot_general"}
    assert made.isdisjoint(shapes)
    # No option may fuse the two differently: the values are computed op by op.
    with jax.disable_jit():
        leaves = jax.tree.leaves(args)
        for a, b in zip(
            jax.core.eval_jaxpr(new.jaxpr, new.consts, *leaves),
            jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *leaves),
            strict=True,
        ):
            assert a.dtype == b.dtype and a.shape == b.shape
            np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=2e-6, atol=2e-6)


def test_a_piece_is_several_slices():
    """Five vectors, in two pieces: the gradient is made of products of three of them and of two."""
    vectors = [jnp.sin(jnp.arange(40.0).reshape(8, 5) * k) for k in range(1, 6)]
    closed, _, _, new = split(jax.grad(pairs), (vectors,), 2)
    made = [e.outvars[0].aval.shape for e in new.eqns if e.primitive.name == "dot_general"]
    assert sorted(shape for shape in made if shape != (8, 5, 5)) == [(8, 2, 5)] * 2 + [(8, 3, 5)] * 2
    assert jaxpr_flops(new) == jaxpr_flops(closed)


def test_the_same_flops():
    closed, _, _, new = split(*CASES["pairs"][:2])
    assert jaxpr_flops(new) == jaxpr_flops(closed)


@pytest.mark.parametrize(
    "fun",
    [
        lambda a, b: (lambda c: (c[:4], c))(a[0] @ b[0]),  # an output itself
        lambda a, b: (lambda c: (c[:4], jnp.cumsum(c)))(a[0] @ b[0]),  # also read whole
        lambda a, b: (a[0] @ b[0])[::2],  # strided
        lambda a, b: (a[0] @ b[0])[1:4, 1:4],  # in two dimensions at once
        lambda a, b: jnp.cumsum(a[0])[:4],  # no product
    ],
)
def test_what_is_read_whole_stays(fun):
    closed = jax.jit(fun).trace(*SQUARES).jaxpr
    assert sliced_products(trace_jaxpr(closed), 16) == frozenset()


def test_small_products_stay():
    closed = jax.jit(batch_dim).trace(*SQUARES).jaxpr
    assert sliced_products(trace_jaxpr(closed), 1 << 20) == frozenset()
