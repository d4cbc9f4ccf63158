"""Into how many parts XLA:GPU splits a product along its summed dimension.

A product with a small result and a long sum keeps few processors busy. XLA computes the sum in parts, one product each,
and adds the parts up in a kernel of its own: the parts take memory meanwhile. The number of parts is that with the
least cost by a formula with fitted weights (``splitk_rewriter.cc`` in XLA; H200, A100, L4 and RTX 3060, jax 0.10.2 and
0.12).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from jaxtensile.ir.ir import Graph, Op
from jaxtensile.passes.lifetimes.prologue import FLOATS, PRODUCT
from jaxtensile.switches import on
from jaxtensile.units import Bytes

_TILE: Final = 128
"""Rows and columns of a result that a processor computes at a time."""
_PARTS: Final = tuple(1 << p for p in range(12))
"""Numbers of parts that are tried."""
_ALIGNED: Final = 16
"""Bytes: parts are padded to multiples of this."""
_ACCUMULATED: Final = 4
"""Bytes of an element of a part, in f32."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a cost without unit in which a FLOP of a tile costs 100: of a byte of the product, of a byte of the
    parts when they are added up, and of that kernel."""

    memory: float
    partial: float
    launch: float


HOPPER: Final = Weights(0.194136, 193.1384, 4.36e7)
"""Of compute capability 9; those below are of 10 and of less than 9."""
BLACKWELL: Final = Weights(0.0848863, 189.711, 1.21563e8)
OLDER: Final = Weights(0.0666955, 467.815, 5.65307e7)


@dataclass(frozen=True, slots=True)
class Split:
    """``parts`` of a product, of ``partial`` bytes together. ``summed``: elements of the summed dimension; ``padded``:
    of its padded copies."""

    parts: int
    partial: Bytes
    summed: int
    padded: int


def split_of(graph: Graph, op: Op, processors: int, weights: Weights | None) -> Split | None:
    """How ``op`` is split; None if it is not, or is no product of floats."""
    if op.primitive != PRODUCT or not processors or weights is None or not op.flops or not on("split_products"):
        return None
    a, b = (graph.values[v] for v in (op.operands * 2)[:2])  # one where both are the same
    made = graph.values[op.results[0]]
    if a.dtype not in FLOATS or b.dtype not in FLOATS or not a.nbytes or not b.nbytes or not made.nbytes:
        return None
    size_a, size_b, size = (math.prod(v.shape) for v in (a, b, made))
    k = round(op.flops / (2 * size))
    groups = max(round(size_a * size_b / (size * k * k)), 1)
    m, n = round(size_a / (groups * k)), round(size_b / (groups * k))
    read, out = a.nbytes + b.nbytes, made.nbytes // size
    parts = min(_PARTS, key=lambda s: _cost(groups, m, n, k, s, read, out, processors, weights))
    if parts == 1:
        return None
    step = parts * _ALIGNED // min(_ALIGNED, a.nbytes // size_a, b.nbytes // size_b)
    return Split(parts, parts * size * _ACCUMULATED, k, k + -k % step)


def _cost(
    groups: int, m: int, n: int, k: int, parts: int, read: Bytes, out: Bytes, processors: int, weights: Weights
) -> float:
    """The cost of ``groups`` products of m x k by k x n in ``parts``. ``read``: bytes of both operands. ``out``: of an
    element of the result."""
    rows, columns = min(m, _TILE), min(n, _TILE)
    tiles = groups * parts * -(-m // _TILE) * -(-n // _TILE)
    at_once = processors * _TILE * _TILE / (rows * columns)
    compute = 2 * rows * columns * -(-k // parts) * max(1.0, tiles / at_once) * 100
    partial = groups * parts * m * n * _ACCUMULATED
    written = partial if parts > 1 else groups * m * n * out
    product = max(compute, (read + written) * weights.memory)
    if parts == 1:
        return product
    return product + weights.launch + (partial + groups * m * n * out) * weights.partial
