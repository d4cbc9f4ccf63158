"""Ops that XLA rewrites into others, or hands to a library that takes memory of its own.

* ``ragged_dot`` becomes one product, with a copy of the rows per group, zero in rows of other groups. If the result has
  groups, both operands are copied so. Otherwise a row's copies lie side by side and the matrices one below the other.
  Both are transposed for that; a CPU copies the matrices in any layout. Products of the same rows share the copies,
  which live until the last product (``apart``). TPUs have a native op.
* LAPACK and cuSOLVER decompose by columns and in place. The operand is a transposed copy; results are transposed back,
  NaN where they failed.
* XLA:CPU multiplies row-major matrices and convolves channels-last images; other layouts are copied. Other devices lay
  arrays out so from the start.
* XLA:GPU splits a product with a small result along the summed dimension (``split_products``). The parts take memory,
  and so do padded copies of both operands if the split is uneven.

Invariant: inputs and outputs are the same values; every original op appears once, in order.
"""

from __future__ import annotations

from dataclasses import replace

from jaxtensile.ir.ir import Graph, Op, OpId, Value, ValueId
from jaxtensile.passes.lifetimes.fusion import DECOMPOSITIONS, SPREAD
from jaxtensile.passes.lifetimes.prologue import PRODUCT
from jaxtensile.passes.lowering.lowered import Lowered
from jaxtensile.passes.lowering.split_products import HOPPER, Split, Weights, split_of
from jaxtensile.switches import on

_ADDED_UP = Op(id=OpId(0), primitive="reduce_sum", operands=(), results=())


def expanded(graph: Graph, processors: int = 0, *, groups: bool = True, weights: Weights | None = HOPPER) -> Lowered:
    """The graph with those ops; the same graph if there are none. ``processors``: of a GPU, 0 on a CPU. ``groups``:
    whether products by groups are rewritten. ``weights``: by which a GPU's products are split."""
    groups = groups and on("spread_groups")
    if not _any(graph, processors, groups, weights):
        return Lowered(graph, tuple(range(len(graph.ops))))
    values, ops, origin = list(graph.values), list[Op](), list[int]()
    turned: dict[tuple[ValueId, tuple[int, ...]], ValueId] = {}
    spread: dict[tuple[ValueId, ValueId], ValueId] = {}
    """Copies by operand and group sizes."""

    def put(op: Op, operands: tuple[ValueId, ...], results: tuple[ValueId, ...], of: int) -> None:
        ops.append(op.on(len(ops), operands, results))
        origin.append(of)

    def like(v: ValueId, times: int = 1, split: Split | None = None) -> ValueId:
        old, new = values[v], ValueId(len(values))
        shape = (times, *old.shape) if times > 1 else old.shape
        nbytes = times * old.nbytes if split is None else old.nbytes // split.summed * split.padded
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
            op = replace(
                op, bodies=tuple(expanded(b, processors, groups=groups, weights=weights).graph for b in op.bodies)
            )
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
        elif split := split_of(graph, op, processors, weights):
            read = op.operands
            if split.padded > split.summed and on("padded_splits"):
                copies = {v: move("pad", v, like(v, 1, split), op.id) for v in dict.fromkeys(read)}
                read = tuple(copies[v] for v in read)
            made = values[op.results[0]]
            parts = Value(
                id=ValueId(len(values)), nbytes=split.partial, shape=(split.parts, *made.shape), dtype="float32"
            )
            values.append(parts)
            put(op, read, (parts.id,), op.id)
            put(_ADDED_UP, (parts.id,), op.results, op.id)
        else:
            put(op, op.operands, op.results, op.id)
    return Lowered(replace(graph, values=tuple(values), ops=tuple(ops)), tuple(origin))


def _any(graph: Graph, processors: int, groups: bool, weights: Weights | None) -> bool:
    return any(
        (groups and op.groups)
        or op.primitive in DECOMPOSITIONS
        or (op.across and not op.groups and not processors)
        or split_of(graph, op, processors, weights) is not None
        or any(_any(body, processors, groups, weights) for body in op.bodies)
        for op in graph.ops
    )
