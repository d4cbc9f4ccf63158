"""Matrix FLOPs of one equation without a body.

Two per multiply-add of products and convolutions. Factorizations by the usual counts and iterations (Golub and Van
Loan, *Matrix Computations*; LAPACK working note 41).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from jaxtensile.units import Flops


def leaf_flops(eqn: Any) -> Flops:
    """Matrix FLOPs of one equation without its bodies; 0 if it multiplies nothing."""
    rule = _RULES.get(eqn.primitive.name)
    return rule([v.aval.shape for v in eqn.invars], [v.aval.shape for v in eqn.outvars], eqn.params) if rule else 0.0


BY_GROUPS: Final = ("ragged_dot", "ragged_dot_general")
Shapes = list[tuple[int, ...]]
_Rule = Callable[[Shapes, Shapes, Mapping[str, Any]], Flops]


def sums(params: Mapping[str, Any], left: tuple[int, ...]) -> bool:
    """Whether a ``dot_general`` sums anything; XLA turns one that does not into a multiplication."""
    (contract, _), _ = params["dimension_numbers"]
    return math.prod(left[d] for d in contract) != 1


def _dot(read: Shapes, made: Shapes, params: Mapping[str, Any]) -> Flops:
    (contract, _), _ = params["dimension_numbers"]
    return 2.0 * math.prod(made[0]) * math.prod(read[0][d] for d in contract)


def _ragged(read: Shapes, made: Shapes, params: Mapping[str, Any]) -> Flops:
    """As XLA does it on GPUs and CPUs: every row meets the matrix of every group, and is masked."""
    numbers = params["ragged_dot_dimension_numbers"]
    (contract, _), _ = numbers.dot_dimension_numbers
    flops = 2.0 * math.prod(made[0]) * math.prod(read[0][d] for d in contract)
    # Where both are spread, the result has a matrix for every group.
    return flops * read[2][-1] if spread(params, read)[1:] == (1,) else flops


def spread(params: Mapping[str, Any], read: Shapes) -> tuple[int, ...]:
    """How often GPUs and CPUs write each operand of a product by groups: once per group, zero in other groups' rows.
    Empty if the groups are of batches, as for a plain product."""
    numbers = params["ragged_dot_dimension_numbers"]
    (contract, _), (batch, _) = numbers.dot_dimension_numbers
    (rows,), count = numbers.lhs_ragged_dimensions, read[2][-1]
    return () if rows in batch else (count, count if rows in contract else 1)


def _convolution(read: Shapes, made: Shapes, params: Mapping[str, Any]) -> Flops:
    kernel, numbers = read[1], params["dimension_numbers"]
    taps = math.prod(kernel) // max(kernel[numbers.rhs_spec[0]], 1)
    # Taps that fall on the zeros of a dilated input cost nothing (transposed convolutions).
    return 2.0 * math.prod(made[0]) * taps / math.prod(params["lhs_dilation"] or (1,))


def _scaled(read: Shapes, made: Shapes, _: Mapping[str, Any]) -> Flops:
    return 2.0 * math.prod(made[0]) * read[0][-1]


def _attention(products: int) -> _Rule:
    """A rule for cuDNN attention: ``products`` of queries with as many keys."""

    def rule(read: Shapes, made: Shapes, params: Mapping[str, Any]) -> Flops:
        return 2.0 * products * math.prod(read[0]) * (read[1][1] if len(read[1]) == 4 else 1)

    return rule


def _of_matrices(count: Callable[[int, int, int], float]) -> _Rule:
    """A rule from each matrix of the first operand: rows, columns, and the smaller of both."""

    def rule(read: Shapes, _: Shapes, params: Mapping[str, Any]) -> Flops:
        *batch, m, n = read[0]
        return math.prod(batch) * count(m, n, min(m, n))

    return rule


def _of_squares(factor: float) -> _Rule:
    return _of_matrices(lambda m, n, k: factor * m**3)


def _svd(read: Shapes, made: Shapes, params: Mapping[str, Any]) -> Flops:
    *batch, m, n = read[0]
    small, large = min(m, n), max(m, n)
    vectors = 4 * large * small**2 + 22 * small**3 if params.get("compute_uv", True) else 4 * large * small**2
    return math.prod(batch) * float(vectors)


def _triangular(read: Shapes, made: Shapes, params: Mapping[str, Any]) -> Flops:
    return float(math.prod(read[1])) * read[0][-1]


def _reflectors(read: Shapes, made: Shapes, params: Mapping[str, Any]) -> Flops:
    *batch, m, n = read[0]
    k = read[1][-1]
    return math.prod(batch) * (4.0 * m * n * k - 2.0 * (m + n) * k**2 + 4.0 / 3 * k**3)


def _sparse(read: Shapes, made: Shapes, params: Mapping[str, Any]) -> Flops:
    """Each stored number meets a row of the last operand."""
    other = read[-1]
    return 2.0 * math.prod(read[0]) * (math.prod(other[1:]) if len(other) > 1 else 1)


_RULES: Final[dict[str, _Rule]] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(BY_GROUPS, _ragged),
    **dict.fromkeys(("scaled_dot", "scaled_matmul", "scaled_matmul_wrapper"), _scaled),
    **dict.fromkeys(("dot_product_attention_fwd", "dot_product_attention_fwd_wrapper"), _attention(2)),
    **dict.fromkeys(("dot_product_attention_bwd", "dot_product_attention_bwd_wrapper"), _attention(5)),
    "cholesky": _of_squares(1 / 3),
    "cholesky_update": _of_matrices(lambda m, n, k: 4 * m * n),
    "lu": _of_matrices(lambda m, n, k: 2 * m * n * k - (m + n) * k**2 + 2 / 3 * k**3),
    **dict.fromkeys(("geqrf", "geqp3"), _of_matrices(lambda m, n, k: 2 * m * n * k - 2 / 3 * k**3)),
    "qr": _of_matrices(lambda m, n, k: 4 * m * n * k - 4 / 3 * k**3),
    "householder_product": _reflectors,
    "ormqr": lambda read, made, params: 4.0 * math.prod(made[0]) * read[1][-1],
    "eigh": _of_squares(9),
    "eig": _of_squares(25),
    "schur": _of_squares(25),
    "hessenberg": _of_squares(10 / 3),
    "tridiagonal": _of_squares(4 / 3),
    "svd": _svd,
    "triangular_solve": _triangular,
    "tridiagonal_solve": lambda read, made, params: 8.0 * math.prod(made[0]),
    "symmetric_product": lambda read, made, params: float(math.prod(read[0])) * read[0][-2],
    "spsolve": lambda read, made, params: 2.0 * math.prod(read[0]) * math.prod(made[0]),
    **dict.fromkeys(
        """bcoo_dot_general bcoo_dot_general_sampled bcoo_spdot_general bcsr_dot_general coo_matvec coo_matmat coo_spmv
        coo_spmm csr_matvec csr_matmat csr_spmv csr_spmm""".split(),
        _sparse,
    ),
}

__all__ = ["BY_GROUPS", "leaf_flops", "spread"]
