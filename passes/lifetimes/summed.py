"""Values that XLA:CPU stores because a library reduces them, and does not compute them.

Sums and maxima of 4,096 elements or more are given to a library, together with what they are computed from: elementwise
ops, broadcasts and views that nobody else reads (``LibraryRewriter`` in
``xla/backends/cpu/transforms/library_rewriter.cc``; its ops in ``xla/backends/cpu/ynn_support.cc``; measured: jax
0.10.2 and 0.12). Anything else that it reads is a buffer, although a kernel of XLA's own would compute it, and kernels
that read it too do: a normalized array that a layer's scale is multiplied with, and that the scale's gradient sums up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from jaxtensile.ir.ir import Graph, Op, producers

_LEAST: Final = 4096
"""Elements of a library's operand or result at least (``IsInstructionPreferredByYnn``)."""
_SUMMED: Final = frozenset({"float32", "float64"})
_COMPARED: Final = _SUMMED | {"bfloat16", "float16"}
_REDUCED: Final = {"reduce_sum": _SUMMED, "reduce_max": _COMPARED, "reduce_min": _COMPARED}
"""Reductions of the library, and their types."""
_TYPES: Final = frozenset("float64 float32 bfloat16 int8 uint8".split())
_COMPUTED: Final = frozenset(
    """abs ceil convert_element_type cos erf exp expm1 floor log log1p logistic neg round rsqrt sign sin sqrt tanh tan
    add add_any div max min mul pow sub square integer_pow""".split()
)
"""Elementwise ops of the library."""
_ANY: Final = frozenset({"broadcast_in_dim", "iota"})
"""Its other ops, beside views."""


class Library(NamedTuple):
    """``reads``: values that the library reads and does not compute. ``again``: those of them that kernels make once
    more. ``inside``: ops that it computes on the way."""

    reads: frozenset[int]
    again: frozenset[int]
    inside: frozenset[int]


NO_LIBRARY: Final = Library(frozenset(), frozenset(), frozenset())


def reduced_by_library(
    graph: Graph, read_by: Sequence[Sequence[int]], view: Callable[[Op], bool], wanted: set[int]
) -> Library:
    """What the library does of a program; readers come first, as in XLA.

    It goes on with what reads a result alone, too, and multiplies then. That is left out: what it saves in a softmax,
    kernels that write over their operands save as well.

    ``view``: whether an op gives the same bytes another shape. ``wanted``: values with readers outside of the graph.
    """
    reductions = [op.id for op in graph.ops if _is_reduced(graph, op)]
    made = producers(graph) if reductions else []
    reads, done = set[int](), set[int]()
    for last in reversed(reductions):
        if last in done:
            continue
        inside: set[int] = {last}
        near: set[int] = {*graph.ops[last].operands}
        while near:
            alone = (made[v] for v in near if made[v] >= 0 and v not in wanted and inside.issuperset(read_by[v]))
            found = next((o for o in alone if o not in done and _is_able(graph, graph.ops[o], view)), -1)
            if found < 0:
                break
            inside.add(found)
            near = {v for v in (*near, *graph.ops[found].operands) if made[v] not in inside}
        done |= inside - {last}
        for v in near:
            while (o := made[v]) >= 0 and view(graph.ops[o]) and graph.ops[o].operands:
                v = graph.ops[o].operands[0]
            reads.add(v)
    again = (v for v in reads if made[v] >= 0 and _is_read_from_one(graph, graph.ops[made[v]], made))
    return Library(frozenset(reads), frozenset(again), frozenset(done))


def _is_able(graph: Graph, op: Op, view: Callable[[Op], bool]) -> bool:
    return len(op.results) == 1 and (view(op) or _is_computed(graph, op) or _is_reduced(graph, op))


def _is_read_from_one(graph: Graph, op: Op, made: Sequence[int]) -> bool:
    """Whether an op reads one array of its result's rank at most: kernels that can make its result do so, although it
    is stored for others (``InstructionFusion::ComputeGloballyUnfusible``). ``made``: ``producers``."""
    rank = len(graph.values[op.results[0]].shape)
    spread = (made[v] >= 0 and graph.ops[made[v]].primitive in _ANY for v in op.operands)
    return sum(len(graph.values[v].shape) >= rank and not s for v, s in zip(op.operands, spread, strict=True)) <= 1


def _is_reduced(graph: Graph, op: Op) -> bool:
    types = _REDUCED.get(op.primitive)
    if types is None or len(op.operands) != 1:
        return False
    operand = graph.values[op.operands[0]]
    return operand.dtype in types and math.prod(operand.shape) >= _LEAST


def _is_computed(graph: Graph, op: Op) -> bool:
    if op.primitive in _ANY:
        return True
    values = [graph.values[v] for v in (*op.operands, *op.results)]
    return (
        op.primitive in _COMPUTED
        and all(value.dtype in _TYPES for value in values)
        and any(math.prod(value.shape) >= _LEAST for value in values)
    )
