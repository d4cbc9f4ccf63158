"""The graph of the program of one device: local shapes, with collectives as ops of their own.

A less divided operand is gathered once, before its first reader, and lives until its last reader. A partial sum is one
value, its sum over devices another. The body of a ``shard_map`` over all axes replaces its call.

Invariant: each op of the whole program is there once, after the ops that make its operands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from jaxtensile.devices.backends import Backend
from jaxtensile.ir.ir import Graph, Op, OpId, Value, ValueId
from jaxtensile.program.trace import Traced
from jaxtensile.spmd.local_shapes import Shapes, local_bytes, local_shape
from jaxtensile.spmd.marked import PLACING
from jaxtensile.spmd.shardy import Parts, Sum
from jaxtensile.spmd.sums import together
from jaxtensile.units import Bytes

GATHER: Final = "all_gather"
SLICE: Final = "slice"
EXCHANGE: Final = "all_to_all"
REDUCE: Final = "all_reduce"
_VIEW: Final = "reshape"
_SUMS: Final = frozenset({"psum", "psum2", "psum_invariant"})
"""Ops of a ``shard_map`` that add up over devices."""


@dataclass(frozen=True)
class Local:
    """``graph``: of one device. ``origin``: for each op, its op in the whole program; for a collective, the op that
    needs it. ``places``: for each op, a program and the op in it whose line to name."""

    graph: Graph
    origin: tuple[OpId, ...]
    places: tuple[tuple[Traced, int], ...]

    def source(self, op: int) -> str:
        """The user's line of op ``op``."""
        program, at = self.places[op]
        return program.source(at)


def whole(program: Traced) -> Local:
    """The program of a single device."""
    ops = tuple(op.id for op in program.graph.ops)
    return Local(program.graph, ops, tuple((program, o) for o in ops))


def local_graph(program: Traced, shapes: Shapes, backend: Backend) -> Local:
    """The graph of one device of a platform."""
    making = _Making(program.graph, shapes, backend, program)
    ops, before = making.made()
    slots = making.slots
    outputs = tuple(v for v in slots if v is not None)
    graph = replace(program.graph, values=tuple(making.values), ops=tuple(ops), outputs=outputs, output_slots=slots)
    places = tuple(making.places[i] for i in before)
    return Local(graph, tuple(making.origin[i] for i in before), places)


def _body(graph: Graph, shapes: Shapes, backend: Backend) -> Graph:
    making = _Making(graph, shapes, backend, None)
    ops, _ = making.made()
    return replace(graph, values=tuple(making.values), ops=tuple(ops))


class _Making:
    """Scratch of one graph. ``program``: its equations; None for a body."""

    def __init__(self, graph: Graph, shapes: Shapes, backend: Backend, program: Traced | None) -> None:
        self.whole, self.shapes, self.backend, self.program = graph, shapes, backend, program
        self.values = [cut(v, shapes.parts.get(v.id)) for v in graph.values]
        self.ops: list[Op] = []
        self.origin: list[OpId] = []
        self.places: list[tuple[Traced, int]] = []
        self.sums: dict[int, str] = {}
        """By op that adds up over devices: over which axes."""
        self.slots = graph.output_slots
        self.gathered: dict[tuple[int, Parts], ValueId] = {}
        self.wanted: dict[int, list[tuple[tuple[int, ...], Parts, Parts]]] = {}
        for reshard, readers in shapes.reshards:
            for i in readers:
                self.wanted.setdefault(i, []).append((reshard.shape, reshard.before, reshard.after))

    def made(self) -> tuple[list[Op], list[int]]:
        """The ops, and for each its position in ``origin``."""
        self.slots = self.whole.output_slots
        for op in self.whole.ops:
            inside = self.shapes.bodies.get((op.id, 0))
            if inside is not None and inside.program is not None:
                self._spliced(op, inside.program)
            else:
                self._add(op)
        if len(self.shapes.outputs) == len(self.slots):
            self.slots = tuple(map(self._returned, self.slots, self.shapes.outputs))
        return together(self.ops, self.values, self.sums, self.backend.adds_at_once)

    def _returned(self, v: ValueId | None, parts: Parts | None) -> ValueId | None:
        """A result as the caller gets it."""
        if v is None or parts is None or cut(self.whole.values[v], parts).shape == self.values[v].shape:
            return v
        new = self._new(v, parts)
        origin = next((op.id for op in reversed(self.whole.ops) if v in op.results), OpId(0))
        self._append(Op(id=OpId(0), primitive=self._kind(v, new), operands=(v,), results=(new,)), origin)
        return new

    def _add(self, op: Op) -> None:
        instead = self._operands(op)
        operands = tuple(instead.get(v, v) for v in op.operands)
        results, one = op.results, self.shapes.sums.get(op.id)
        if one is not None:
            results = (self._new(op.results[0], one.parts),)
        primitive = op.primitive
        if primitive in PLACING and operands:
            primitive = self._kind(operands[0], results[0])
        bodies = tuple(
            _body(body, inside, self.backend) if (inside := self.shapes.bodies.get((op.id, k))) is not None else body
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
        if one is not None:
            self._sum(op.results[0], results[0], one, op.id)

    def _sum(self, result: ValueId, partial: ValueId, one: Sum, origin: OpId) -> None:
        """Add up ``partial`` over the devices, and take this device's share of the sum."""
        same = self.backend.scatters_sums or self.values[result].shape == self.values[partial].shape
        total = result if same else self._new(result, one.parts)
        self.sums[len(self.ops)] = one.axes
        self._append(Op(id=OpId(0), primitive=REDUCE, operands=(partial,), results=(total,)), origin)
        if not same:
            self._append(Op(id=OpId(0), primitive=SLICE, operands=(total,), results=(result,)), origin)

    def _spliced(self, op: Op, inside: Traced) -> None:
        """The body of a ``shard_map`` in place of its call."""
        instead = self._operands(op)
        slots: Sequence[int] = op.slots or op.operands
        given: list[ValueId | None] = [instead.get(ValueId(s), ValueId(s)) if s >= 0 else None for s in slots]
        now: dict[int, ValueId | None] = dict(zip(inside.arguments, given, strict=True))
        outputs: list[tuple[ValueId, ValueId | None]] = [*zip(op.results, inside.graph.output_slots, strict=True)]
        taken: dict[int, ValueId] = {}
        for result, made in reversed(outputs):
            if made is not None and made not in now:
                taken[made] = result
        for value in inside.graph.values:
            if value.id in taken:
                now[value.id] = taken[value.id]
            elif value.id not in now:
                new = ValueId(len(self.values))
                now[value.id] = new
                self.values.append(replace(value, id=new))
        for inner in inside.graph.ops:
            if inner.primitive in _SUMS:
                self.sums[len(self.ops)] = str(inside.equations[inner.id].eqn.params.get("axes"))
            slots_now: list[int] = [-1 if s < 0 else _or_literal(now[s]) for s in inner.slots]
            self._append(
                replace(
                    inner,
                    operands=_known(now, inner.operands),
                    results=_known(now, inner.results),
                    slots=tuple(slots_now),
                ),
                op.id,
                (inside, inner.id),
            )
        for result, made in outputs:
            behind = None if made is None else now[made]
            if behind != result:
                operands = () if behind is None else (behind,)
                self._append(Op(id=OpId(0), primitive=_VIEW, operands=operands, results=(result,)), op.id)

    def _append(self, op: Op, origin: OpId, place: tuple[Traced, int] | None = None) -> None:
        self.ops.append(replace(op, id=OpId(len(self.ops))))
        self.origin.append(origin)
        if place is not None:
            self.places.append(place)
        elif self.program is not None:
            self.places.append((self.program, origin))

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
        now, then = self.values[before], self.values[after]
        if now.shape == then.shape:
            return _VIEW
        return GATHER if then.nbytes > now.nbytes else SLICE if then.nbytes < now.nbytes else EXCHANGE

    def _new(self, like: ValueId, parts: Parts) -> ValueId:
        new = ValueId(len(self.values))
        self.values.append(replace(cut(self.whole.values[like], parts), id=new))
        return new

    def _share(self, op: Op, operands: tuple[ValueId, ...]) -> int:
        """Into how many parts an op's work is divided: its most divided operand's or result's."""
        pairs = (*zip(op.operands, operands, strict=True), *((r, r) for r in op.results))
        return max((_ratio(self.whole.values[v], self.values[w]) for v, w in pairs), default=1)

    def _scaled(self, op: Op, nbytes: Bytes) -> Bytes:
        if not nbytes:
            return 0
        of = op.results[0] if op.primitive == "pad" or not op.operands else op.operands[0]
        return nbytes // _ratio(self.whole.values[of], self.values[of])


def _known(now: Mapping[int, ValueId | None], of: Sequence[ValueId]) -> tuple[ValueId, ...]:
    """The values that a body's values are now, without literals."""
    found = (now[v] for v in of)
    return tuple(v for v in found if v is not None)


def _or_literal(v: ValueId | None) -> int:
    return -1 if v is None else v


def _ratio(entire: Value, local: Value) -> int:
    return max(math.prod(entire.shape) // max(math.prod(local.shape), 1), 1)


def cut(value: Value, parts: Parts | None) -> Value:
    """A value as one device has it."""
    if parts is None or len(parts) != len(value.shape) or math.prod(parts) == 1:
        return value
    return replace(value, shape=local_shape(value.shape, parts), nbytes=local_bytes(value.shape, value.nbytes, parts))


__all__ = ["Local", "local_graph", "whole"]
