"""What does XLA:CPU make of products of 16-bit numbers?

Its libraries multiply in f32: each operand is written once more in f32, for all products that read it, and
the result is f32 and rounded by what reads it.

Invariant: inputs and outputs are the same values, and every op of the original is there once, in its order.
"""

from __future__ import annotations

from dataclasses import replace

from jaxtensile.ir import Graph, Op, OpId, Value, ValueId
from jaxtensile.passes.fusion import HALVES, PRODUCTS
from jaxtensile.passes.lowered import Lowered

_CONVERT = "convert_element_type"


def widened(graph: Graph) -> Lowered:
    """The graph with f32 copies of what its products read and write; the same one where none is of 16 bits."""
    if not _has_narrow(graph):
        return Lowered(graph, tuple(range(len(graph.ops))))
    values, ops, origin = list(graph.values), list[Op](), list[int]()
    wide = dict[int, ValueId]()

    def value(like: int) -> ValueId:
        old = values[like]
        values.append(Value(id=ValueId(len(values)), nbytes=2 * old.nbytes, shape=old.shape, dtype="float32"))
        return values[-1].id

    def put(op: Op, operands: tuple[ValueId, ...], results: tuple[ValueId, ...], of: int) -> None:
        ops.append(op.on(len(ops), operands, results))
        origin.append(of)

    def convert(source: ValueId, result: ValueId, of: int) -> None:
        put(Op(id=OpId(0), primitive=_CONVERT, operands=(), results=()), (source,), (result,), of)

    def read(v: ValueId, of: int) -> ValueId:
        if graph.values[v].dtype not in HALVES:
            return v
        if v not in wide:
            wide[v] = value(v)
            convert(v, wide[v], of)
        return wide[v]

    for op in graph.ops:
        if op.bodies:
            op = replace(op, bodies=tuple(widened(body).graph for body in op.bodies))
        if not _is_narrow(graph, op):
            put(op, op.operands, op.results, op.id)
            continue
        operands = tuple(read(v, op.id) for v in op.operands)
        narrow = graph.values[op.results[0]].dtype in HALVES
        result = value(op.results[0]) if narrow else op.results[0]
        put(op, operands, (result,), op.id)
        if narrow:
            convert(result, op.results[0], op.id)
    return Lowered(replace(graph, values=tuple(values), ops=tuple(ops)), tuple(origin))


def _is_narrow(graph: Graph, op: Op) -> bool:
    return op.primitive in PRODUCTS and any(graph.values[v].dtype in HALVES for v in op.operands)


def _has_narrow(graph: Graph) -> bool:
    return any(_is_narrow(graph, op) or any(map(_has_narrow, op.bodies)) for op in graph.ops)
