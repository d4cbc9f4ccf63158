"""Gradients of max pools as XLA:CPU expands them (``SelectAndScatterExpander`` in ``xla/service``).

A pool over the operand and an ``iota`` per axis gives the places of the maxima, an s32 each. It waits for nothing but
the operand, and so runs in the forward pass; the places are put together and wait for the gradient, which is scattered
into zeros. The ``iota``s and the zeros are constants, which XLA:CPU makes first of all: four times the operand in s32
and once in its own type for an image, for every shape once.

Measured in compiled networks on jax 0.10.2 and 0.12.0.1.

Invariant: inputs and outputs are the same values; every other original op appears once, in order.
"""

from __future__ import annotations

import math

from jaxtensile.ir.ir import Graph, Op, producers
from jaxtensile.passes.lifetimes.fusion import STORED
from jaxtensile.passes.lowering.lowered import INDEX, Lowered, Rewriting
from jaxtensile.switches import on
from jaxtensile.units import Bytes


def expanded_pools(graph: Graph) -> Lowered:
    """The graph with what these gradients need; the same graph if it has none."""
    pools = [op for op in graph.ops if op.primitive == "select_and_scatter_add" and on("expanded_pools")]
    if not pools:
        return Lowered(graph, tuple(range(len(graph.ops))))
    return _Expansion(graph, pools).run()


class _Expansion(Rewriting):
    """Scratch of one ``expanded_pools``."""

    def __init__(self, graph: Graph, pools: list[Op]) -> None:
        super().__init__(graph)
        self.pools = {op.id: op for op in pools}
        self.iotas: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.zeros: dict[tuple[tuple[int, ...], str], int] = {}
        self.places: dict[int, int] = {}
        """By pool gradient: the places of its maxima, put together."""
        self.after: dict[int, list[Op]] = {}
        """Pool gradients by the op that makes their operand, -1: none does."""
        made = producers(graph)
        for op in pools:
            self.after.setdefault(made[op.operands[-1]], []).append(op)

    def run(self) -> Lowered:
        for op in self.pools.values():
            self.constants(op)
        for op in self.after.get(-1, ()):
            self.place(op)
        for op in self.old.ops:
            if op.id in self.pools:
                self.scatter(op)
            else:
                self.add(op, op.operands)
            for pool in self.after.get(op.id, ()):
                self.place(pool)
        return self.done()

    def constants(self, op: Op) -> None:
        """An ``iota`` for each axis of the operand, and zeros, where they are not there yet."""
        result = self.old.values[op.results[0]]
        if result.shape not in self.iotas:
            size = INDEX * math.prod(result.shape)
            self.iotas[result.shape] = tuple(self.stored(op, (), size, result.shape, "int32") for _ in result.shape)
        if (result.shape, result.dtype) not in self.zeros:
            made = self.stored(op, (), result.nbytes, result.shape, result.dtype)
            self.zeros[result.shape, result.dtype] = made

    def place(self, op: Op) -> None:
        """Find the places of the maxima, once the operand is there."""
        windows, iotas = self.old.values[op.operands[0]], self.iotas[self.old.values[op.results[0]].shape]
        count = math.prod(windows.shape)
        found = [self.value(INDEX * count, windows.shape, "int32") for _ in iotas]
        pooled = self.value(windows.nbytes, windows.shape, windows.dtype)  # comes with them, and nobody reads it
        self.insert(op, "reduce_window", (op.operands[-1], *iotas), (*found, pooled), op.rereads)
        size = INDEX * count * len(iotas)
        self.places[op.id] = self.stored(op, tuple(found), size, (count, len(iotas)), "int32")

    def scatter(self, op: Op) -> None:
        source, result = (self.old.values[v] for v in (op.operands[0], op.results[0]))
        updates = self.stored(op, (op.operands[0],), source.nbytes, source.shape, source.dtype)
        zeros = self.zeros[result.shape, result.dtype]
        self.insert(op, "scatter-add", (zeros, updates, self.places[op.id]), op.results)

    def stored(self, op: Op, operands: tuple[int, ...], nbytes: Bytes, shape: tuple[int, ...], dtype: str) -> int:
        """A value that no fusion makes where it is read."""
        made = self.value(nbytes, shape, dtype)
        self.insert(op, STORED, operands, (made,))
        return made


__all__ = ["expanded_pools"]
