"""The graph of the program of one device: local shapes, and what devices hand each other as ops of its own.

An operand that a reader wants less divided is gathered once, before its first reader, and lives until its last. A
product whose sums the devices still have to add up is there as it is before that.

Invariant: ops are those of the whole program in their order, with reshards in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from jaxtensile.ir.ir import Graph, Op, OpId, Value, ValueId
from jaxtensile.spmd.local_shapes import Shapes, local_bytes, local_shape
from jaxtensile.spmd.shardy import Parts, Sum
from jaxtensile.spmd.sums import together
from jaxtensile.units import Bytes

GATHER: Final = "all_gather"
SLICE: Final = "slice"
EXCHANGE: Final = "all_to_all"
REDUCE: Final = "all_reduce"
_VIEW: Final = "reshape"
_SHARDING: Final = frozenset({"sharding_constraint", "reshard", "mesh_cast"})
"""Ops that only say how a value is divided."""


@dataclass(frozen=True)
class Local:
    """``graph``: of one device. ``origin``: of each op, the op of the whole program that it is or is for."""

    graph: Graph
    origin: tuple[OpId, ...]


def local_graph(graph: Graph, shapes: Shapes, at_once: Bytes = 0) -> Local:
    """The graph of one device; ``at_once``: bytes that its compiler adds up over devices in one go."""
    making = _Making(graph, shapes, at_once)
    for op in graph.ops:
        making.add(op)
    ops, before = together(making.ops, making.values, making.sums, at_once)
    made = replace(graph, values=tuple(making.values), ops=tuple(ops))
    return Local(made, tuple(making.origin[i] for i in before))


class _Making:
    """Scratch of one ``local_graph``."""

    def __init__(self, graph: Graph, shapes: Shapes, at_once: Bytes) -> None:
        self.whole, self.shapes, self.at_once = graph, shapes, at_once
        self.values = [cut(v, shapes.parts.get(v.id)) for v in graph.values]
        self.ops: list[Op] = []
        self.origin: list[OpId] = []
        self.sums: dict[int, str] = {}
        """By op that adds up over devices: over which axes."""
        self.gathered: dict[tuple[int, Parts], ValueId] = {}
        self.wanted: dict[int, list[tuple[tuple[int, ...], Parts, Parts]]] = {}
        for reshard, readers in shapes.reshards:
            for i in readers:
                self.wanted.setdefault(i, []).append((reshard.shape, reshard.before, reshard.after))

    def add(self, op: Op) -> None:
        instead = self._operands(op)
        operands = tuple(instead.get(v, v) for v in op.operands)
        results, after = op.results, None
        if op.id in self.shapes.sums:
            r, one = op.results[0], self.shapes.sums[op.id]
            after = r, self._new(r, one.parts), one
            results = (after[1],)
        primitive = op.primitive
        if primitive in _SHARDING and operands and self.values[operands[0]].shape == self.values[results[0]].shape:
            primitive = _VIEW
        elif primitive in _SHARDING and operands:
            primitive = self._kind(operands[0], results[0])
        bodies = tuple(
            local_graph(body, inside, self.at_once).graph if (inside := self.shapes.bodies.get((op.id, k))) is not None else body
            for k, body in enumerate(op.bodies)
        )
        self._append(
            replace(
                op,
                primitive=primitive,
                operands=operands,
                results=results,
                slots=tuple(instead.get(ValueId(s), s) if s >= 0 else s for s in op.slots),
                flops=op.flops / self._share(op, operands),
                padded=self._scaled(op, op.padded),
                workspace=self._scaled(op, op.workspace),
                bodies=bodies,
            ),
            op.id,
        )
        if after is not None:
            self._sum(*after, op.id)

    def _sum(self, result: ValueId, partial: ValueId, one: Sum, origin: OpId) -> None:
        """Add up ``partial`` over the devices, and take this device's share of the sum."""
        same = self.values[result].shape == self.values[partial].shape
        total = result if same else self._new(result, one.parts)
        self.sums[len(self.ops)] = one.axes
        self._append(Op(id=OpId(0), primitive=REDUCE, operands=(partial,), results=(total,)), origin)
        if not same:
            self._append(Op(id=OpId(0), primitive=SLICE, operands=(total,), results=(result,)), origin)

    def _append(self, op: Op, origin: OpId) -> None:
        self.ops.append(replace(op, id=OpId(len(self.ops))))
        self.origin.append(origin)

    def _operands(self, op: Op) -> Mapping[ValueId, ValueId]:
        """The resharded operands of an op, made here unless an earlier reader wanted them."""
        found: dict[ValueId, ValueId] = {}
        for shape, before, after in self.wanted.get(op.id, ()):
            for v in op.operands:
                value = self.whole.values[v]
                if v in found or value.shape != shape or self.shapes.parts.get(v) != before:
                    continue
                if (v, after) not in self.gathered:
                    new = self.gathered[v, after] = self._new(v, after)
                    kind = self._kind(v, new)
                    self._append(Op(id=OpId(0), primitive=kind, operands=(v,), results=(new,)), op.id)
                found[v] = self.gathered[v, after]
                break
        return found

    def _kind(self, before: int, after: int) -> str:
        """The op that turns one value into another of the same whole array."""
        now, then = self.values[before].nbytes, self.values[after].nbytes
        return GATHER if then > now else SLICE if then < now else EXCHANGE

    def _new(self, like: ValueId, parts: Parts) -> ValueId:
        new = ValueId(len(self.values))
        self.values.append(replace(cut(self.whole.values[like], parts), id=new))
        return new

    def _share(self, op: Op, operands: tuple[ValueId, ...]) -> int:
        """Into how many parts an op's work is divided: its most divided operand's or result's."""
        sizes = [
            (self.whole.values[v], self.values[w])
            for v, w in (*zip(op.operands, operands, strict=True), *((r, r) for r in op.results))
        ]
        return max((_ratio(whole, local) for whole, local in sizes), default=1)

    def _scaled(self, op: Op, nbytes: int) -> int:
        if not nbytes:
            return 0
        of = op.results[0] if op.primitive == "pad" or not op.operands else op.operands[0]
        return nbytes // _ratio(self.whole.values[of], self.values[of])


def _ratio(whole: Value, local: Value) -> int:
    return max(math.prod(whole.shape) // max(math.prod(local.shape), 1), 1)


def cut(value: Value, parts: Parts | None) -> Value:
    """A value as one device has it."""
    if parts is None or len(parts) != len(value.shape) or math.prod(parts) == 1:
        return value
    return replace(
        value, shape=local_shape(value.shape, parts), nbytes=local_bytes(value.shape, value.nbytes, parts)
    )


__all__ = ["Local", "local_graph"]
