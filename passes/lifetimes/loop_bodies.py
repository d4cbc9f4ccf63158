"""What a loop's body keeps besides the loop's own arguments and results.

A body reads slices of arrays and stacks slices of results; its carries lie in one memory from run to run. XLA

* copies a slice that anything but an elementwise kernel, a sum or an update in place reads (``dynamic-slice`` before
  the product);
* writes a stacked result into its stack directly only if an elementwise kernel makes it and nobody else reads it, or
  if it is an update of a slice;
* writes a carry into the old one's memory only once nobody reads that any more; else into its own, copied at the end.

H200 and CPU, jax 0.10.2 and 0.12, 33 loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtensile.ir.ir import Graph, Op, producers
from jaxtensile.passes.lifetimes.fusion import IN_PLACE, PRODUCT, REDUCTIONS, Kernels, is_fusible
from jaxtensile.passes.lifetimes.in_place import read_beside, read_late
from jaxtensile.switches import on


@dataclass(frozen=True, slots=True)
class Loop:
    """How a loop runs a body: with ``consts`` constants, then ``carries``, then slices."""

    consts: int
    carries: int


def loop_of(op: Op, body: Graph) -> Loop | None:
    """How ``op`` runs ``body``; None if it is a branch, or runs once."""
    if op.primitive == "scan":
        return Loop(*op.carried) if op.trip_count > 1 and on("loop_bodies") else None
    outputs = len(body.output_slots)
    if op.primitive == "while" and on("loop_bodies") and outputs <= len(body.inputs):
        return Loop(len(body.inputs) - outputs, outputs)
    return None


def slices_kept(graph: Graph, kernels: Kernels, loop: Loop) -> dict[int, int]:
    """Slices that are copied, with the first op that reads the copy."""
    slices = set[int](graph.inputs[loop.consts + loop.carries :])
    found: dict[int, int] = {}
    products = set[int]()
    for op in graph.ops if slices else ():
        if not kernels.is_root[op.id]:
            continue
        reads = kernels.reads[op.id]
        if op.primitive == PRODUCT and kernels.by.products:
            products.update(op.results)
        # XLA:GPU's products compute what follows them as well, from buffers.
        follows = not products.isdisjoint(reads) or any(r in kernels.added for r in op.results)
        if follows or not (is_fusible(op.primitive) or op.primitive in REDUCTIONS | IN_PLACE):
            for b in slices.intersection(reads):
                found.setdefault(b, op.id)
    return found


def results_kept(
    graph: Graph, kernels: Kernels, loop: Loop, start: Sequence[int], stop: Sequence[int]
) -> dict[int, int]:
    """Results with memory of their own while the body runs, each with the op after which it is free."""
    home, given, n = kernels.home, set[int](graph.inputs), len(graph.ops)
    olds = [home[v] for v in graph.inputs[loop.consts : loop.consts + loop.carries]]
    outputs = [home[v] if v is not None else -1 for v in graph.output_slots]
    # Arguments that lie elsewhere when the body ends. XLA:GPU stacks one before its memory is wanted.
    moved = {b for k, b in enumerate(outputs[: loop.carries]) if b in given and b != olds[k]}
    moved.update(b for b in outputs[loop.carries :] if b in given and not kernels.by.twice)
    maker = producers(graph)
    found: dict[int, int] = {}
    for k, b in enumerate(outputs):
        if b < 0 or b in given or not kernels.is_root[maker[b]]:
            continue
        op = graph.ops[maker[b]]
        if k >= loop.carries:
            updated = op.primitive in IN_PLACE and kernels.home[op.operands[0]] in given
            read = stop[b] > start[b] + 1 and not (updated and kernels.by.twice)
            if b not in outputs[: loop.carries] and (read or not (updated or is_fusible(op.primitive))):
                found.setdefault(b, stop[b] if kernels.by.twice else n)  # XLA:CPU stacks last
        elif (
            olds[k] in moved
            # XLA:CPU copies before it knows the order.
            or (not kernels.by.twice and read_beside(graph, kernels, maker, olds[k], op))
            or read_late(graph, kernels, maker, olds[k], op, b, start[b], stop[olds[k]])
        ):
            found[b] = n
    return found


def freed(graph: Graph, kernels: Kernels, loop: Loop, stop: Sequence[int]) -> dict[int, int]:
    """By result that is a carry, the op from which on the old one's memory is free for it."""
    olds = graph.inputs[loop.consts : loop.consts + loop.carries]
    news = graph.output_slots[: loop.carries]
    return {kernels.home[r]: stop[kernels.home[c]] for c, r in zip(olds, news, strict=False) if r is not None}
