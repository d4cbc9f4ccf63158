"""Which products does XLA add to what is there already?

A product with one reader, an elementwise op whose other operand is what the program or the body of a loop is given, or
a number, is computed together with it: the product by itself is never stored, and what it is added to is written over.
So XLA:GPU does from compute capability 8.0 on, as often as such steps follow that read no fewer bytes than they write,
or make a result (``FuseTowardUsers`` in ``xla/service/gpu/transforms/gemm_fusion.cc``, ``IsOutputWorthFusing`` in
``xla/service/gpu/triton_tiling_propagation.cc``); its library adds one array
(``xla/service/gpu/transforms/gemm_rewriter.cc``). So the gradients of parts that a loop adds up take no memory of their
own, and those that a step of gradient descent takes off a donated weight take that of the weight.

Invariant: what is not stored is read by one kernel alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxtensile.ir import Graph, Op, consumers, producers
from jaxtensile.passes.fusion import Kernels
from jaxtensile.passes.prologue import BROADCAST, FLOATS, PRODUCT, STEPS
from jaxtensile.units import KIB

_ADD = frozenset({"add", "add_any"})
_TOLERANCE = KIB
"""Bytes by which a step may write more than it reads."""


def added(graph: Graph, kernels: Kernels) -> dict[int, int]:
    """For the root of each kernel that adds a product to what it is given, the product; of several the first.

    Linear in edges.
    """
    found: dict[int, int] = {}
    if not kernels.by.twice:
        return found
    read_by, made = consumers(graph), producers(graph)
    given, wanted = set[int](graph.inputs), set[int](graph.outputs)

    def is_number(v: int) -> bool:
        op = graph.ops[made[v]] if made[v] >= 0 else None
        return not graph.values[v].shape or (op is not None and op.primitive == BROADCAST and not op.operands)

    for op in graph.ops:
        if op.primitive == PRODUCT and kernels.home[op.results[0]] == op.results[0]:
            root = _added_by(graph, kernels, read_by, given, wanted, is_number, op)
            if root is not None:
                found.setdefault(root, op.results[0])
    return found


def _added_by(
    graph: Graph,
    kernels: Kernels,
    read_by: Sequence[Sequence[int]],
    given: set[int],
    wanted: set[int],
    is_number: Callable[[int], bool],
    op: Op,
) -> int | None:
    """The root of the kernel that adds a product to something, None where that is its own."""
    values, v, over = graph.values, op.results[0], False
    generated = kernels.by.products and all(values[s].dtype in FLOATS for s in (*op.operands, v))
    while v not in wanted and len(read_by[v]) == 1:
        step = graph.ops[read_by[v][0]]
        if step.primitive not in (STEPS if generated else _ADD) or len(step.results) != 1:
            return None
        result, others = step.results[0], [s for s in step.operands if s != v]
        if not all(s in given or is_number(s) for s in others):
            return None
        if sum(values[s].nbytes for s in step.operands) < values[result].nbytes - _TOLERANCE and result not in wanted:
            return None
        over = over or any(
            s in given and values[s].nbytes == values[result].nbytes and s not in kernels.reads[op.id] for s in others
        )
        if kernels.is_root[step.id]:
            return step.id if over else None
        if not generated:
            return None
        v = result
    return None
