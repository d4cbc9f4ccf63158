"""Ops that XLA rewrites into others, or hands to a library that takes memory of its own.

* ``ragged_dot`` becomes one product, with a copy of the rows per group, zero in rows of other groups. If the result has
  groups, both operands are copied so. Otherwise a row's copies lie side by side and the matrices one below the other.
  Both are transposed for that; a CPU copies the matrices in any layout. Products of the same rows share the copies,
  which live until the last product (``apart``). TPUs have a native op.
* LAPACK and cuSOLVER decompose by columns and in place. The operand is a transposed copy; results are transposed back,
  NaN where they failed.
* XLA:CPU multiplies row-major matrices and convolves channels-last images; other layouts are copied. Other devices lay
  arrays out so from the start.
* XLA:GPU splits a product with a small result along the summed dimension, to keep the device busy. It pads uneven
  splits (``xla/service/gpu/transforms/splitk_rewriter.cc``): both operands are copied.

Invariant: inputs and outputs are the same values; every original op appears once, in order.
"""

from __future__ import annotations

import math
from dataclasses import replace

from jaxtensile.ir.ir import Graph, Op, OpId, Value, ValueId
from jaxtensile.passes.lifetimes.fusion import DECOMPOSITIONS, SPREAD
from jaxtensile.passes.lifetimes.lowered import Lowered
from jaxtensile.passes.lifetimes.prologue import PRODUCT
from jaxtensile.switches import on

_TILE = 128 * 64
"""Elements of a result that one processor makes at a time: tiles of 128 x 64 (``splitk_rewriter.cc``)."""
_EVEN = 128
"""Elements: summed dimensions split evenly at multiples of this, 16 parts of 8 (``splitk_rewriter.cc``)."""
_LONG = 8 * _EVEN
"""Elements: shorter summed dimensions are not split (``splitk_rewriter.cc``)."""


def expanded(graph: Graph, processors: int = 0, *, groups: bool = True) -> Lowered:
    """The graph with those ops; the same graph if there are none. ``processors``: of a GPU, 0 on a CPU. ``groups``:
    whether products by groups are rewritten."""
    groups = groups and on("spread_groups")
    if not _any(graph, processors, groups):
        return Lowered(graph, tuple(range(len(graph.ops))))
    values, ops, origin = list(graph.values), list[Op](), list[int]()
    turned: dict[tuple[ValueId, tuple[int, ...]], ValueId] = {}
    spread: dict[tuple[ValueId, ValueId], ValueId] = {}
    """Copies by operand and group sizes."""

    def put(op: Op, operands: tuple[ValueId, ...], results: tuple[ValueId, ...], of: int) -> None:
        ops.append(op.on(len(ops), operands, results))
        origin.append(of)

    def like(v: ValueId, times: int = 1, padded: int = 1) -> ValueId:
        old, new = values[v], ValueId(len(values))
        shape = (times, *old.shape) if times > 1 else old.shape
        even = padded + -padded % _EVEN if padded > 1 else 1
        nbytes = times * old.nbytes // padded * even
        values.append(Value(id=new, nbytes=nbytes, shape=shape, dtype=old.dtype))
        return new

    def move(primitive: str, v: ValueId, new: ValueId, of: int, *beside: ValueId) -> ValueId:
        put(Op(id=OpId(0), primitive=primitive, operands=(), results=()), (v, *beside), (new,), of)
        return new

    def turn(v: ValueId, order: tuple[int, ...], of: int) -> ValueId:
        """``v`` with its axes in another order, made once for all readers."""
        if (v, order) not in turned:
            turned[v, order] = move("transpose", v, like(v), of)
        return turned[v, order]

    def copied(v: ValueId, sizes: ValueId, times: int, of: int) -> ValueId:
        if (v, sizes) not in spread:
            spread[v, sizes] = move(SPREAD, v, like(v, times), of, sizes)
        return spread[v, sizes]

    for op in graph.ops:
        if op.bodies:
            op = replace(op, bodies=tuple(expanded(b, processors, groups=groups).graph for b in op.bodies))
        if groups and op.groups:
            sizes = op.operands[2]
            a, b = (copied(v, sizes, n, op.id) if n > 1 else v for v, n in zip(op.operands, op.groups, strict=False))
            if op.groups[1] == 1:
                a = turn(a, (1, 0), op.id)
                b = turn(b, op.across[1] if op.across else (), op.id) if op.across or not processors else b
            put(replace(op, primitive=PRODUCT), (a, b), op.results, op.id)
        elif op.primitive in DECOMPOSITIONS and on("decompositions_by_columns"):
            read = move("transpose", op.operands[0], like(op.operands[0]), op.id)
            made = tuple(map(like, op.results))
            put(op, (read, *op.operands[1:]), made, op.id)
            for v, r in zip(made, op.results, strict=True):
                move("transpose", v, r, op.id)
        elif op.across and not op.groups and not processors and on("rows_on_cpu"):
            read = zip(op.operands, op.across, strict=False)
            put(op, tuple(turn(v, order, op.id) if order else v for v, order in read), op.results, op.id)
        elif _is_uneven(graph, op, processors):
            summed = _summed(graph, op)
            put(op, tuple(move("pad", v, like(v, 1, summed), op.id) for v in op.operands), op.results, op.id)
        else:
            put(op, op.operands, op.results, op.id)
    return Lowered(replace(graph, values=tuple(values), ops=tuple(ops)), tuple(origin))


def _is_uneven(graph: Graph, op: Op, processors: int) -> bool:
    """Whether ``op`` is a product of matrices that is split, but not evenly."""
    if op.primitive != PRODUCT or len(set(op.operands)) != 2:
        return False
    shapes = [graph.values[v].shape for v in (*op.operands, *op.results)]
    if any(len(shape) != 2 or not math.prod(shape) for shape in shapes):
        return False
    summed = _summed(graph, op)
    small = math.prod(shapes[2]) < processors * _TILE
    return small and summed > _LONG and summed % _EVEN > 0 and on("padded_splits")


def _summed(graph: Graph, op: Op) -> int:
    """Length of the summed dimension of a product of matrices."""
    a, b, made = (math.prod(graph.values[v].shape) for v in (*op.operands, *op.results))
    return math.isqrt(a * b // made)


def _any(graph: Graph, processors: int, groups: bool) -> bool:
    return any(
        (groups and op.groups)
        or op.primitive in DECOMPOSITIONS
        or (op.across and not op.groups and not processors)
        or _is_uneven(graph, op, processors)
        or any(_any(body, processors, groups) for body in op.bodies)
        for op in graph.ops
    )
