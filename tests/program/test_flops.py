"""FLOPs of what multiplies matrices: the books' counts, and products that are the same in another way of writing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse

from jaxtensile.program.trace import jaxpr_flops

M, N = 96, 64
SQUARE, TALL = jax.ShapeDtypeStruct((5, N, N), jnp.float32), jax.ShapeDtypeStruct((5, M, N), jnp.float32)


def flops(fun, *args):
    return jaxpr_flops(jax.make_jaxpr(fun)(*args))


@pytest.mark.parametrize(
    "fun, arg, count",
    [
        (lax.linalg.cholesky, SQUARE, N**3 / 3),
        (jnp.linalg.eigh, SQUARE, 9 * N**3),
        (lax.linalg.lu, TALL, M * N**2 - N**3 / 3),
        (lambda x: lax.linalg.qr(x, full_matrices=False), TALL, 4 * M * N**2 - 4 / 3 * N**3),
        (lambda x: lax.linalg.svd(x, full_matrices=False), TALL, 4 * M * N**2 + 22 * N**3),
        (lambda x: lax.linalg.hessenberg(x), SQUARE, 10 / 3 * N**3),
        (lambda x: lax.linalg.schur(x), SQUARE, 25 * N**3),
        (lambda x: lax.linalg.triangular_solve(x, x, left_side=True), SQUARE, N**3),
    ],
)
def test_factorizations(fun, arg, count):
    found = flops(fun, arg)
    products = flops(lambda x: x @ x.mT, arg)  # the symmetric part, and what JAX does around a factorization
    assert 5 * count == pytest.approx(found, abs=1) or 5 * count <= found <= 5 * count + products


def test_every_row_meets_the_matrix_of_every_group():
    """As XLA:GPU does it: six layers of experts, 16 of them, have 16 times the products of their rows in its HLO."""
    x, w = jax.ShapeDtypeStruct((M, N), jnp.float32), jax.ShapeDtypeStruct((4, N, 32), jnp.float32)
    sizes = np.array([10, 20, 30, 36], np.int32)

    def loss(x, w):
        return lax.ragged_dot(x, w, sizes).sum()

    dense = 4 * 2 * M * N * 32
    assert flops(loss, x, w) == dense
    assert flops(jax.value_and_grad(loss, (0, 1)), x, w) == 3 * dense
    batch = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((0,), (0,))), [0], [])  # as XLA does it: no row is another's
    b = jax.ShapeDtypeStruct((M, N, 4), jnp.float32)
    assert flops(lambda x, y: lax.ragged_dot_general(x, y, sizes, batch), b, b) == 2 * M * N * 4 * 4


def test_sparse_products_count_what_is_stored():
    matrix = sparse.BCOO.fromdense(np.eye(N, dtype=np.float32))

    def product(data, x):
        return sparse.BCOO((data, matrix.indices), shape=(N, N)) @ x

    assert flops(product, matrix.data, jnp.ones((N, 8))) == 2 * N * 8


def test_what_calls_other_programs_counts_them():
    def solve(a, b):
        def matvec(x):
            return a @ x

        return lax.custom_linear_solve(matvec, b, lambda _, b: jnp.linalg.inv(a) @ b, symmetric=True)

    a, b = jax.ShapeDtypeStruct((N, N), jnp.float32), jax.ShapeDtypeStruct((N,), jnp.float32)
    assert flops(solve, a, b) >= flops(jnp.linalg.inv, a)
