"""What does XLA write out as other ops, or hand to a library that takes memory of its own?

* A product by groups of rows (``ragged_dot``) becomes one product, with a copy of the rows for each group that is zero
  where rows are others'; where the result has groups, both operands are copied so.
* Decompositions are those of LAPACK or cuSOLVER, which read and write by columns and write over what they read: what
  they read is a transposed copy, and what they write is transposed again, NaN where they failed.
* XLA:CPU multiplies matrices by rows, and convolves images whose channels are last: what is otherwise is copied. On
  other devices the arrays are laid out so from the start.
* XLA:GPU splits a product with a small result along what it sums over, so that all of the device is busy, and pads
  what does not split evenly (``xla/service/gpu/transforms/splitk_rewriter.cc``): both operands are copied.

Invariant: inputs and outputs are the same values, and every op of the original is there once, in its order.
"""

from __future__ import annotations

import math
from dataclasses import replace

from jaxtensile.ir import Graph, Op, OpId, Value, ValueId
from jaxtensile.passes.fusion import DECOMPOSITIONS
from jaxtensile.passes.lowered import Lowered
from jaxtensile.passes.prologue import PRODUCT

_GROUPED = "ragged_dot_general"
_TILE = 128 * 64
"""Elements of a result that one processor makes at a time."""
_EVEN = 128
"""What is summed over splits evenly where it is a multiple of this: 16 parts of 8."""
_LONG = 8 * _EVEN
"""What is summed over is not split where it is shorter."""


def expanded(graph: Graph, processors: int = 0) -> Lowered:
    """The graph with those ops; the same one where there are none. ``processors``: of a GPU, 0 on a CPU."""
    if not _any(graph, processors):
        return Lowered(graph, tuple(range(len(graph.ops))))
    values, ops, origin = list(graph.values), list[Op](), list[int]()
    turned: dict[tuple[ValueId, tuple[int, ...]], ValueId] = {}

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

    def move(primitive: str, v: ValueId, new: ValueId, of: int) -> ValueId:
        put(Op(id=OpId(0), primitive=primitive, operands=(), results=()), (v,), (new,), of)
        return new

    for op in graph.ops:
        if op.bodies:
            op = replace(op, bodies=tuple(expanded(body, processors).graph for body in op.bodies))
        if op.primitive == _GROUPED:
            rows, other, sizes = op.operands[:3]
            groups = values[sizes].shape[-1]
            apart = len(values[other].shape) <= len(values[rows].shape)
            spread = [move("select_n", v, like(v, groups), op.id) for v in ((rows, other) if apart else (rows,))]
            put(replace(op, primitive=PRODUCT), (*spread, other)[:2], op.results, op.id)
        elif op.primitive in DECOMPOSITIONS:
            read = move("transpose", op.operands[0], like(op.operands[0]), op.id)
            made = tuple(map(like, op.results))
            put(op, (read, *op.operands[1:]), made, op.id)
            for v, r in zip(made, op.results, strict=True):
                move("transpose", v, r, op.id)
        elif op.across and not processors:
            for key in zip(op.operands, op.across, strict=False):
                if key[1] and key not in turned:
                    turned[key] = move("transpose", key[0], like(key[0]), op.id)
            read = zip(op.operands, op.across, strict=False)
            put(op, tuple(turned.get(key, key[0]) for key in read), op.results, op.id)
        elif _is_uneven(graph, op, processors):
            summed = _summed(graph, op)
            put(op, tuple(move("pad", v, like(v, 1, summed), op.id) for v in op.operands), op.results, op.id)
        else:
            put(op, op.operands, op.results, op.id)
    return Lowered(replace(graph, values=tuple(values), ops=tuple(ops)), tuple(origin))


def _is_uneven(graph: Graph, op: Op, processors: int) -> bool:
    """Whether it is a product that is split, of matrices, and not evenly."""
    if op.primitive != PRODUCT or len(set(op.operands)) != 2:
        return False
    shapes = [graph.values[v].shape for v in (*op.operands, *op.results)]
    if any(len(shape) != 2 or not math.prod(shape) for shape in shapes):
        return False
    summed = _summed(graph, op)
    small = math.prod(shapes[2]) < processors * _TILE
    return small and summed > _LONG and summed % _EVEN > 0


def _summed(graph: Graph, op: Op) -> int:
    """What a product of matrices sums over."""
    a, b, made = (math.prod(graph.values[v].shape) for v in (*op.operands, *op.results))
    return math.isqrt(a * b // made)


def _any(graph: Graph, processors: int) -> bool:
    return any(
        op.primitive == _GROUPED
        or op.primitive in DECOMPOSITIONS
        or (op.across and not processors)
        or _is_uneven(graph, op, processors)
        or any(_any(body, processors) for body in op.bodies)
        for op in graph.ops
    )
