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
from dataclasses import replace

from jaxtensile.ir.ir import Graph, Op, OpId, Value, ValueId, producers
from jaxtensile.passes.lifetimes.lowered import INDEX, STORED, Lowered
from jaxtensile.switches import on
from jaxtensile.units import Bytes


def expanded_pools(graph: Graph) -> Lowered:
    """The graph with what these gradients need; the same graph if it has none."""
    pools = [op for op in graph.ops if op.primitive == "select_and_scatter_add" and on("expanded_pools")]
    if not pools:
        return Lowered(graph, tuple(range(len(graph.ops))))
    return _Expansion(graph, pools).run()


class _Expansion:
    """Scratch of one ``expanded_pools``."""

    def __init__(self, graph: Graph, pools: list[Op]) -> None:
        self.old, self.pools = graph, {op.id: op for op in pools}
        self.values = list(graph.values)
        self.ops: list[Op] = []
        self.origin: list[int] = []
        self.constants: dict[tuple[tuple[int, ...], str], int] = {}
        self.places: dict[int, int] = {}
        """By pool gradient: the places of its maxima, put together."""
        self.after: dict[int, list[Op]] = {}
        """Pool gradients by the op that makes their operand, -1: none does."""
        made = producers(graph)
        for op in pools:
            self.after.setdefault(made[op.operands[-1]], []).append(op)

    def run(self) -> Lowered:
        for op in self.pools.values():
            for kind in self.kinds(op):
                if kind not in self.constants:
                    self.constants[kind] = self.stored(op, (), *kind)
        for op in self.after.get(-1, ()):
            self.place(op)
        for op in self.old.ops:
            if op.id in self.pools:
                self.scatter(op)
            else:
                self.ops.append(op.on(len(self.ops), op.operands, op.results))
                self.origin.append(op.id)
            for pool in self.after.get(op.id, ()):
                self.place(pool)
        graph = replace(self.old, values=tuple(self.values), ops=tuple(self.ops))
        return Lowered(graph, tuple(self.origin))

    def kinds(self, op: Op) -> list[tuple[tuple[int, ...], str]]:
        """The constants of a gradient: an ``iota`` for each axis, and zeros. A name for each, as their dtype."""
        shape, dtype = self.old.values[op.results[0]].shape, self.old.values[op.results[0]].dtype
        return [*((shape, f"int32 of axis {axis}") for axis in range(len(shape))), (shape, dtype)]

    def place(self, op: Op) -> None:
        """Find the places of the maxima, once the operand is there."""
        windows = self.old.values[op.operands[0]]
        count = math.prod(windows.shape)
        *axes, _ = self.kinds(op)
        found = [self.value(INDEX * count, windows.shape, "int32") for _ in axes]
        pooled = self.value(windows.nbytes, windows.shape, windows.dtype)  # comes with them, and nobody reads it
        iotas = (self.constants[kind] for kind in axes)
        self.insert(op, "reduce_window", (op.operands[-1], *iotas), (*found, pooled), op.rereads)
        self.places[op.id] = self.stored(op, tuple(found), (count, len(axes)), "int32")

    def scatter(self, op: Op) -> None:
        source = self.old.values[op.operands[0]]
        updates = self.stored(op, (op.operands[0],), source.shape, source.dtype)
        zeros = self.constants[self.kinds(op)[-1]]
        self.insert(op, "scatter-add", (zeros, updates, self.places[op.id]), op.results)

    def stored(self, op: Op, operands: tuple[int, ...], shape: tuple[int, ...], dtype: str) -> int:
        """A value that no fusion makes where it is read."""
        kind, of_result = dtype.partition(" ")[0], self.old.values[op.results[0]]
        size = INDEX if kind == "int32" else of_result.nbytes // max(math.prod(of_result.shape), 1)
        made = self.value(size * math.prod(shape), shape, kind)
        self.insert(op, STORED, operands, (made,))
        return made

    def value(self, nbytes: Bytes, shape: tuple[int, ...], dtype: str) -> int:
        self.values.append(Value(id=ValueId(len(self.values)), nbytes=nbytes, shape=shape, dtype=dtype))
        return len(self.values) - 1

    def insert(
        self, for_: Op, primitive: str, operands: tuple[int, ...], results: tuple[int, ...], rereads: float = 1.0
    ) -> None:
        ids = tuple(map(ValueId, operands)), tuple(map(ValueId, results))
        made = Op(id=OpId(len(self.ops)), primitive=primitive, operands=ids[0], results=ids[1], rereads=rereads)
        self.ops.append(made)
        self.origin.append(for_.id)


__all__ = ["expanded_pools"]
