"""16-bit numbers on devices without instructions for them: XLA computes in f32.

Operands are converted; the f32 result is rounded by its readers. XLA:CPU has no 16-bit products: each operand is
written once more in f32, for all products that read it. XLA:GPU has no bf16 arithmetic before compute capability 9.0,
and no products before 8.0 (``xla/service/gpu/gpu_float_support.cc``). It does not round values that are only widened
again (``xla_allow_excess_precision``), so sums along a residual stream are f32.

Invariant: inputs and outputs are the same values; every original op appears once, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxtensile.ir.ir import Graph, Op, OpId, Value, ValueId
from jaxtensile.passes.lifetimes.fusion import DRAWS, ELEMENTWISE, HALVES, PRODUCTS
from jaxtensile.passes.lowering.lowered import Lowered
from jaxtensile.switches import on

_CONVERT = "convert_element_type"
_MOVES = frozenset({_CONVERT, "select_n", "real", "imag", "complex", "conj"}) | DRAWS
ARITHMETIC = ELEMENTWISE - _MOVES


@dataclass(frozen=True, slots=True)
class Wide:
    """Ops and types computed in f32. ``rounds``: whether each result is rounded all the same."""

    ops: frozenset[str]
    types: frozenset[str] = frozenset({"bfloat16"})
    rounds: bool = False


ON_CPU = Wide(PRODUCTS, HALVES, rounds=True)
BEFORE_8 = Wide(PRODUCTS | ARITHMETIC)
BEFORE_9 = Wide(ARITHMETIC)


def widened(graph: Graph, wide: Wide = ON_CPU) -> Lowered:
    """The graph with its f32 values; the same graph if there are none."""
    if not _any_wide(graph, wide) or not on("widened_halves"):
        return Lowered(graph, tuple(range(len(graph.ops))))
    values, ops, origin = list(graph.values), list[Op](), list[int]()
    copies = dict[int, ValueId]()

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
        if graph.values[v].dtype not in wide.types:
            return v
        if v not in copies:
            copies[v] = value(v)
            convert(v, copies[v], of)
        return copies[v]

    for op in graph.ops:
        if op.bodies:
            op = replace(op, bodies=tuple(widened(body, wide).graph for body in op.bodies))
        source = op.operands[0] if op.operands else -1
        if op.primitive == _CONVERT and source in copies and not wide.rounds:
            put(op, (copies[source],), op.results, op.id)
            continue
        if not _is_wide(graph, op, wide):
            put(op, op.operands, op.results, op.id)
            continue
        operands = tuple(read(v, op.id) for v in op.operands)
        narrow = len(op.results) == 1 and graph.values[op.results[0]].dtype in wide.types
        result = value(op.results[0]) if narrow else op.results[0]
        put(op, operands, (result,) if narrow else op.results, op.id)
        if narrow:
            convert(result, op.results[0], op.id)
            if not wide.rounds:
                copies[op.results[0]] = result
    return Lowered(replace(graph, values=tuple(values), ops=tuple(ops)), tuple(origin))


def _is_wide(graph: Graph, op: Op, wide: Wide) -> bool:
    return op.primitive in wide.ops and any(graph.values[v].dtype in wide.types for v in op.operands)


def _any_wide(graph: Graph, wide: Wide) -> bool:
    return any(_is_wide(graph, op, wide) or any(_any_wide(body, wide) for body in op.bodies) for op in graph.ops)
