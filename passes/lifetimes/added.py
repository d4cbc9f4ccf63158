"""Products and scatters that XLA adds into an existing buffer.

A product is never stored if its only reader is an elementwise op with an input (of the program or the loop body) or a
number. XLA:GPU computes both together from compute capability 8.0, over the input's buffer. More such ops may follow,
if each reads no fewer bytes than it writes or makes a result (``FuseTowardUsers`` in
``xla/service/gpu/transforms/gemm_fusion.cc``, ``IsOutputWorthFusing`` in
``xla/service/gpu/triton_tiling_propagation.cc``). The library adds one array
(``xla/service/gpu/transforms/gemm_rewriter.cc``). So gradients summed by a loop need no buffer, and gradient descent on
a donated weight uses the weight's.

A scatter into zeros that is then added to an array becomes a scatter into the array (``HandleAdd`` in
``xla/hlo/transforms/simplifiers/algebraic_simplifier.cc``): the gradient of an embedding table.

Invariant: a value that is not stored is read by one kernel alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtensile.ir.ir import Graph, Op, producers
from jaxtensile.passes.lifetimes.prologue import BROADCAST, FLOATS, PRODUCT, STEPS
from jaxtensile.switches import on
from jaxtensile.units import KIB, MIB

_ADD = frozenset({"add", "add_any"})
_SCATTER = frozenset({"scatter-add", "scatter_add"})
_TURNS = frozenset({"transpose"})
"""Ops that XLA's layouts make nothing of, next to a product."""
_MERGED = 128 * MIB
"""Bytes of a product below which others of its operands are merged with it: 112 MiB are, 128 not (H200, jax 0.12)."""
_TOLERANCE = KIB
"""Bytes by which a step may write more than it reads: padding and numbers. A guess; GPU buffers are multiples of 256
bytes."""


def added(
    graph: Graph,
    read_by: Sequence[Sequence[int]],
    home: Sequence[int],
    reads: Sequence[Sequence[int]],
    is_root: Sequence[bool],
    *,
    generated: bool,
) -> dict[int, int]:
    """For the result of each kernel that adds a product to an input, the product; of several the first.

    ``read_by``: readers of each value. ``home``, ``reads``, ``is_root``: as in ``Kernels``. ``generated``: whether
    products compute the ops that follow them. Linear in edges.
    """
    values, made = graph.values, producers(graph)
    given, wanted = set[int](graph.inputs), set[int](graph.outputs)

    def is_number(v: int) -> bool:
        op = graph.ops[made[v]] if made[v] >= 0 else None
        return not values[v].shape or (op is not None and op.primitive == BROADCAST and not op.operands)

    def added_up(op: Op) -> int | None:
        """The buffer that a product is added into; None if the product is stored."""
        v, over = op.results[0], False
        by_steps = generated and all(values[s].dtype in FLOATS for s in (*op.operands, v))
        while v not in wanted and len(read_by[v]) == 1:
            step = graph.ops[read_by[v][0]]
            if step.primitive not in (STEPS if by_steps else _ADD) or len(step.results) != 1:
                return None
            result, others = step.results[0], [s for s in step.operands if s != v]
            if not all(s in given or is_number(s) for s in others):
                return None
            read = sum(values[s].nbytes for s in step.operands)
            if read < values[result].nbytes - _TOLERANCE and result not in wanted:
                return None
            over = over or any(
                s in given and values[s].nbytes == values[result].nbytes and s not in reads[op.id] for s in others
            )
            if is_root[step.id]:
                return result if over else None
            if not by_steps:
                return None
            v = result
        return None

    found: dict[int, int] = {}
    for op in graph.ops:
        if op.primitive == PRODUCT and home[op.results[0]] == op.results[0]:
            result = added_up(op)
            if result is not None and on("added_products"):
                found.setdefault(result, op.results[0])
    return found


def joined_products(graph: Graph, read_by: Sequence[Sequence[int]]) -> dict[int, int]:
    """For the result of each kernel that computes a product beside another product's result, the former.

    XLA:GPU does so since jaxlib 0.12 where all that follows the one product is elementwise, and the other operands are
    inputs, numbers, or of one other product each, through ops of one operand. It reads that as a buffer, and may write
    over it; of two such products the first is not stored. Small products of the same matrix are one. ``read_by``:
    readers of each value. Linear in edges.
    """
    values, made = graph.values, producers(graph)
    given, wanted = set[int](graph.inputs), set[int](graph.outputs)
    found: dict[int, int] = {}
    stored = set[int]()

    def is_floating(op: Op) -> bool:
        return len(op.results) == 1 and all(values[s].dtype in FLOATS for s in (*op.operands, *op.results))

    def is_spread(v: int) -> bool:
        """Whether ``v`` is a number or an input in many places."""
        op = graph.ops[made[v]] if made[v] >= 0 else None
        return op is not None and op.primitive == BROADCAST and given.issuperset(op.operands)

    def product_of(v: int) -> int | None:
        """The product that ``v`` is computed from alone."""
        while made[v] >= 0:
            op = graph.ops[made[v]]
            if op.primitive == PRODUCT:
                return v
            if op.primitive not in STEPS | _TURNS or len(op.operands) != 1:
                return None
            v = op.operands[0]
        return None

    def merges(op: Op, other: int) -> bool:
        """Whether both may be one product to XLA, whose result is there as a whole: they share an operand, and one is
        small. Which axes they sum over, in which they have to be alike, is not known here."""
        both = op, graph.ops[made[other]]
        least = min(sum(values[v].nbytes for v in (*p.operands, *p.results)) for p in both)
        return least < _MERGED and not set(both[0].operands).isdisjoint(both[1].operands)

    def joins(op: Op) -> tuple[int, set[int]] | None:
        """The last result of the kernel, and the products that it reads."""
        v, others, end = op.results[0], set[int](), None
        while v not in wanted and len(read_by[v]) == 1:
            step = graph.ops[read_by[v][0]]
            if step.primitive not in STEPS | _TURNS or not is_floating(step):
                break
            result = step.results[0]
            read = {s: product_of(s) for s in step.operands if s != v and s not in given and values[s].shape}
            if any(of is None and not is_spread(s) for s, of in read.items()):
                break
            others |= {of for of in read.values() if of is not None}
            if not others.isdisjoint((op.results[0], *found.values())) or any(merges(op, other) for other in others):
                return None
            v = result
            if others and values[v].nbytes <= values[op.results[0]].nbytes:
                end = v
        return None if end is None else (end, others)

    for op in graph.ops:
        if op.primitive != PRODUCT or op.results[0] in stored or not is_floating(op):
            continue
        kernel = joins(op)
        if kernel is not None and kernel[0] not in found and on("joined_products"):
            found[kernel[0]] = op.results[0]
            stored |= kernel[1]
    return found


def sums_of_scatters(graph: Graph, read_by: Sequence[Sequence[int]]) -> list[int]:
    """Sums of an array and a scatter that nobody else reads: XLA:CPU scatters into the array, which has to be there."""
    made = producers(graph)
    return [
        op.results[0]
        for op in graph.ops
        if op.primitive in _ADD
        for v in op.operands
        if made[v] >= 0 and graph.ops[made[v]].primitive in _SCATTER and len(read_by[v]) == 1
    ]


def scattered(
    graph: Graph, read_by: Sequence[Sequence[int]], home: Sequence[int], is_root: Sequence[bool]
) -> dict[int, int]:
    """For each sum of an array and a scatter into zeros, the scatter; for the scatter, the zeros.

    ``read_by``, ``home``, ``is_root``: as of ``added``. Linear in edges.
    """
    made, wanted = producers(graph), set(graph.outputs)

    def alone(v: int) -> bool:
        return home[v] == v and made[v] >= 0 and len(read_by[v]) == 1 and v not in wanted

    found: dict[int, int] = {}
    for op in graph.ops:
        if op.primitive not in _SCATTER or not op.operands:
            continue
        zeros, v = op.operands[0], op.results[0]
        if not (alone(zeros) and alone(v)):
            continue
        number, step = graph.ops[made[zeros]], graph.ops[read_by[v][0]]
        if number.primitive != BROADCAST or number.operands or step.primitive not in _ADD or not is_root[step.id]:
            continue
        others = [s for s in step.operands if s != v]
        if len(others) == 1 and step.results[0] not in found and on("scattered_sums"):
            found |= {v: zeros, step.results[0]: v}
    return found
