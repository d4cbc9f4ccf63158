"""Values that XLA computes inside the matrix products that read them.

An operand of a product is no buffer if the step to it is cheap: an elementwise op of one array, beside numbers or a
broadcast input. XLA:GPU computes the step anew in every product, which reads the step's operand instead
(``xla/backends/gpu/transforms/gemm_fusion.cc``; ``xla/service/gpu/triton_tiling_propagation.cc`` says which inputs). So
``relu`` networks keep only the arrays before it; ``gelu``, whose last step reads two arrays, keeps both.

Invariant: a value computed inside has a base that is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtensile.ir.ir import Graph, Op, producers

PRODUCT = "dot_general"
BROADCAST = "broadcast_in_dim"

STEPS = frozenset(
    """abs add add_any cbrt ceil convert_element_type cos div erf exp exp2 expm1 floor log log1p logistic max min mul
    neg rsqrt sin sqrt sub tan tanh""".split()
)
"""Ops that XLA's generator of products can write."""
_MAY_BE_CHEAP = STEPS | {BROADCAST}
FLOATS = frozenset({"float32", "bfloat16", "float16"})
"""Products of other types go to the library, which reads buffers."""


@dataclass(frozen=True, slots=True)
class Prologues:
    """``inside[v]``: products compute ``v`` themselves. ``silent[i]``: op ``i`` runs inside products only, or is a
    product that computes its operands."""

    inside: list[bool]
    silent: list[bool]

    @classmethod
    def none(cls, graph: Graph) -> Prologues:
        """For compilers that compute nothing inside products."""
        return cls([False] * len(graph.values), [False] * len(graph.ops))


def prologues(
    graph: Graph, views: Sequence[bool], read_by: Sequence[Sequence[int]], *, numbers: bool = False
) -> Prologues:
    """What products compute. ``views[i]``: the result of op ``i`` is its operand's buffer. ``numbers``: arrays of one
    element count as numbers. Linear in edges."""
    made = producers(graph)
    inside = [False] * len(graph.values)
    for op in graph.ops:
        if len(op.results) == 1:
            if views[op.id] and op.operands:
                inside[op.results[0]] = inside[op.operands[0]]
            elif op.primitive in _MAY_BE_CHEAP:
                inside[op.results[0]] = _is_cheap(graph, op, made, numbers)
    silent = [False] * len(graph.ops)
    kept = set(graph.outputs)
    for op in reversed(graph.ops):
        if op.primitive == PRODUCT:
            silent[op.id] = graph.values[op.operands[0]].dtype in FLOATS if op.operands else False
        elif len(op.results) == 1 and inside[op.results[0]] and op.results[0] not in kept:
            silent[op.id] = bool(read_by[op.results[0]]) and all(silent[o] for o in read_by[op.results[0]])
    return Prologues(inside, silent)


def _is_cheap(graph: Graph, op: Op, made: Sequence[int], numbers: bool) -> bool:
    """Whether ``op`` is an elementwise step that reads one array, and else only numbers or broadcast inputs."""
    if op.primitive == BROADCAST:
        return _is_broadcast_input(graph, op.results[0], made)
    if op.primitive not in STEPS or not op.operands:
        return False
    source, result = graph.values[op.operands[0]], graph.values[op.results[0]]
    if len(op.operands) == 1:
        if op.primitive == "convert_element_type":
            return source.nbytes <= result.nbytes
        # Both together are one op to XLA, which reads three operands.
        before = graph.ops[made[source.id]].primitive if made[source.id] >= 0 else ""
        return {op.primitive, before} != {"max", "min"}
    if op.operands[0] == op.operands[1]:
        return False
    return any(_is_broadcast_input(graph, v, made) or (numbers and not graph.values[v].shape) for v in op.operands)


def _is_broadcast_input(graph: Graph, v: int, made: Sequence[int]) -> bool:
    if made[v] < 0 or graph.ops[made[v]].primitive != BROADCAST:
        return False
    operands = graph.ops[made[v]].operands
    while operands and made[operands[0]] >= 0 and graph.ops[made[operands[0]]].primitive in ("reshape", "squeeze"):
        operands = graph.ops[made[operands[0]]].operands
    return not operands or made[operands[0]] < 0
