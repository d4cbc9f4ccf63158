"""Programs of one request, with the sizes that they have on one device.

Shardy says how the values of the program as written are divided (`spmd.local_shapes`). A rewritten program has the same
equations in other places: an equation is known again by its primitive, its types and the place in the user's code. What
is still unknown is divided like its operands and readers.

What XLA gathers before a reader, and what it adds up behind a product, are ops of their own (`program.resharded`); in
bodies they are workspaces, so that a body keeps its equations.

Invariant: apart from these exchanges ops and values stay as they are; only their sizes change. A program whose sizes
are those of one device already stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from jaxtensile import _compat
from jaxtensile.devices.backends import Backend
from jaxtensile.ir.ir import Graph, Op, Value, ValueId
from jaxtensile.program.resharded import GATHER, SUM, Added, Read, added, parts_of_exchange, with_exchanges
from jaxtensile.program.trace import Equation, Traced, closed_bodies, is_barrier, size_of, trace_jaxpr
from jaxtensile.spmd.local_shapes import Shapes, fill, local_bytes, local_shape, parts_of_type
from jaxtensile.spmd.shardy import Parts, Sum
from jaxtensile.spmd.sums import Summed, combined
from jaxtensile.switches import on
from jaxtensile.units import Bytes

Size = tuple[tuple[int, ...], int]
"""The shape and the bytes of a value on one device."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of an equation: the division of its ``results``, the operands that it ``reads`` in fewer parts than
    they are in, with both, and its only result before a sum over devices."""

    results: tuple[Parts | None, ...]
    reads: Mapping[int, tuple[Parts, Parts]]
    sum: Sum | None


class PerDevice:
    """From programs to the same with the sizes of one device. ``arguments``: of each argument, whole and on one
    device."""

    def __init__(
        self,
        known: Mapping[Hashable, _Known],
        arguments: Sequence[tuple[Size, Size]],
        backend: Backend,
        body: bool = False,
    ) -> None:
        self._known, self._arguments, self._backend, self._body = known, arguments, backend, body

    @classmethod
    def of(cls, program: Traced, shapes: Shapes, backend: Backend) -> PerDevice:
        """``shapes``: of ``program``, the trace as written."""
        known: dict[Hashable, _Known] = {}
        _learn(program, shapes, known)
        values = (program.graph.values[v] for v in program.arguments)
        arguments = [((v.shape, v.nbytes), _cut((v.shape, v.nbytes), shapes.parts.get(v.id))) for v in values]
        return cls(known, arguments, backend)

    def inside(self, closed: Any, graph: Graph) -> PerDevice:
        """The same for programs with the arguments of a body; ``graph``: the body with the sizes of one device."""
        whole = [size_of(v.aval) for v in _compat.open_jaxpr(closed)[0].invars]
        local = [(graph.values[v].shape, graph.values[v].nbytes) for v in graph.inputs]
        return PerDevice(self._known, [*zip(whole, local, strict=False)], self._backend, body=True)

    def __call__(self, traced: Traced) -> Traced:
        own = dict(zip(traced.arguments, self._arguments, strict=False))
        whole, parts = dict[int, Size](), dict[int, Parts]()
        sized = replace(traced, graph=self._graph(traced, traced.graph, own, whole, parts))
        if not on("exchanges"):
            return sized
        if self._body:
            return replace(sized, graph=self._with_room(traced, sized.graph, whole, parts))
        sums = added(traced)
        reads = [read for i in range(len(traced.equations)) for read in self._reads(traced, i, whole, parts)]
        adds = [a for i in range(len(traced.equations)) if (a := self._added(traced, i, whole, parts, sums))]
        return with_exchanges(sized, [*reads, *adds]) if reads or adds else sized

    def _reads(self, traced: Traced, i: int, whole: Mapping[int, Size], parts: Mapping[int, Parts]) -> Iterator[Read]:
        """The operands that equation ``i`` reads in fewer parts than they are in."""
        equation = traced.equations[i]
        known = self._at(equation)
        for at, (before, after) in known.reads.items() if known is not None else ():
            v = equation.operands[at]
            if isinstance(v, int) and parts.get(v) == before:
                yield Read(i, v, after, *_cut(whole[v], after))

    def _added(
        self, traced: Traced, i: int, whole: Mapping[int, Size], parts: Mapping[int, Parts], sums: AbstractSet[int]
    ) -> Added | None:
        """The sum over devices of the result of equation ``i``; None if it has none, or is in ``sums``."""
        known, results = self._at(traced.equations[i]), traced.equations[i].results
        if known is None or known.sum is None or len(results) != 1 or results[0] in sums:
            return None
        (r,), partial = results, known.sum.parts
        after = parts.get(r, (1,) * len(partial))
        if len(after) != len(partial):
            return None
        shape, nbytes = _cut(whole[r], partial)
        return Added(i, r, partial, after, shape, nbytes, self._total(partial, after, nbytes))

    def _total(self, before: Parts, after: Parts, nbytes: Bytes) -> Bytes:
        """Bytes of a sum over devices beside the part of it that a device keeps."""
        return 0 if self._backend.scatters_sums or before == after else nbytes

    def _with_room(self, traced: Traced, graph: Graph, whole: Mapping[int, Size], parts: Mapping[int, Parts]) -> Graph:
        """``graph``, a body, with the bytes that its ops exchange as workspaces: of gathered operands where they are
        read, of sums where the last one is made that XLA combines with them."""
        room: dict[int, Bytes] = {}
        sums: dict[int, Summed] = {}
        totals: dict[int, Bytes] = {}
        for i in range(len(traced.equations)):
            for read in self._reads(traced, i, whole, parts):
                room[i] = room.get(i, 0) + read.nbytes
            if (one := self._added(traced, i, whole, parts, frozenset())) is not None:
                known = self._at(traced.equations[i])
                axes = known.sum.axes if known is not None and known.sum is not None else ""
                sums[i] = Summed(axes, graph.values[one.result].dtype, one.nbytes)
                totals[i] = one.nbytes + one.total
        for group in combined(graph.ops, sums, self._backend.adds_at_once):
            room[group[-1]] = room.get(group[-1], 0) + sum(totals[i] for i in group)
        ops = (replace(op, workspace=max(op.workspace, room.get(op.id, 0))) for op in graph.ops)
        return replace(graph, ops=tuple(ops)) if room else graph

    def _graph(
        self,
        traced: Traced,
        graph: Graph,
        arguments: Mapping[int, tuple[Size, Size]],
        whole: dict[int, Size],
        parts: dict[int, Parts],
    ) -> Graph:
        """``graph`` with the sizes of one device; its ops are the equations of ``traced``. ``arguments``: as for the
        class, by value. Fills ``whole`` and ``parts``, by value."""
        whole |= {v.id: (v.shape, v.nbytes) for v in graph.values} | {v: size for v, (size, _) in arguments.items()}
        for equation in traced.equations:
            if equation.eqn is not None:
                whole.update((r, size_of(v.aval)) for r, v in zip(equation.results, equation.eqn.outvars, strict=True))
        for v, ((before, _), (now, _)) in arguments.items():
            parts[v] = _ratio(before, now)
        bodies: dict[int, tuple[Graph, ...]] = {}
        for op, equation in zip(graph.ops, traced.equations, strict=True):
            self._divide(op, equation, whole, parts, bodies)
        fill(graph, parts, {v: shape for v, (shape, _) in whole.items()})
        sizes = {v: _cut(whole[v], parts.get(v)) for v in whole} | {v: size for v, (_, size) in arguments.items()}
        values = tuple(replace(value, shape=sizes[value.id][0], nbytes=sizes[value.id][1]) for value in graph.values)
        ops = tuple(_scaled(op, graph.values, values, bodies.get(op.id)) for op in graph.ops)
        ops = tuple(
            op if (exchange := parts_of_exchange(e.eqn)) is None else self._exchanged(op, values, exchange)
            for op, e in zip(ops, traced.equations, strict=True)
        )
        return replace(graph, values=values, ops=ops)

    def _divide(
        self,
        op: Op,
        equation: Equation,
        whole: dict[int, Size],
        parts: dict[int, Parts],
        bodies: dict[int, tuple[Graph, ...]],
    ) -> None:
        """Say how the results of ``op`` are divided, as far as that is known."""
        eqn = equation.eqn
        if is_barrier(eqn):
            for v, r in zip(equation.operands, equation.results, strict=True):
                if isinstance(v, int):
                    whole[r] = whole[v]
                    if v in parts:
                        parts[r] = parts[v]
            return
        if op.bodies and op.primitive != "shard_map":
            bodies[op.id] = self._bodies(op, equation, whole, parts)
        exchange, found = parts_of_exchange(eqn), self._at(equation)
        if exchange is not None:
            before, after = exchange
            (v,), (r,) = equation.operands, equation.results
            parts[r] = after
            if before is not None:
                parts[v] = before
            return
        results = found.results if found is not None else (None,) * len(equation.results)
        for r, aval_of, known in zip(equation.results, eqn.outvars, results, strict=True):
            known = known or parts_of_type(aval_of.aval)
            if known is not None and len(known) == len(whole[r][0]) and r not in parts:
                parts[r] = known

    def _bodies(
        self, op: Op, equation: Equation, whole: Mapping[int, Size], parts: dict[int, Parts]
    ) -> tuple[Graph, ...]:
        """The bodies of an op, and how its results are divided that are theirs."""
        found: list[Graph] = []
        _, carries = op.carried
        for graph, closed in zip(op.bodies, closed_bodies(equation.eqn)[0], strict=True):
            inside = trace_jaxpr(closed)
            given: dict[int, tuple[Size, Size]] = {}
            skipped = max(len(equation.operands) - len(inside.arguments), 0)
            for n, v in enumerate(inside.arguments):
                outer = equation.operands[n + skipped] if n + skipped < len(equation.operands) else None
                known = parts.get(outer) if isinstance(outer, int) else None
                sliced = op.primitive == "scan" and n >= sum(op.carried)
                own = inside.graph.values[v]
                size = own.shape, own.nbytes
                given[v] = size, _cut(size, known[1:] if sliced and known is not None else known)
            sizes, divided = dict[int, Size](), dict[int, Parts]()
            local = self._graph(inside, graph, given, sizes, divided)
            found.append(self._with_room(inside, local, sizes, divided) if on("exchanges") else local)
            for k, (r, slot) in enumerate(zip(equation.results, inside.graph.output_slots, strict=False)):
                if slot is None:
                    continue
                cuts = _ratio(inside.graph.values[slot].shape, found[-1].values[slot].shape)
                cuts = (1, *cuts) if op.primitive == "scan" and k >= carries else cuts
                if len(cuts) == len(whole[r][0]):
                    parts[r] = cuts
        return tuple(found)

    def _exchanged(self, op: Op, values: Sequence[Value], parts: tuple[Parts | None, Parts]) -> Op:
        before, after = parts
        if before is None:
            return replace(op, primitive=GATHER)
        return replace(op, primitive=SUM, workspace=self._total(before, after, values[op.operands[0]].nbytes))

    def _at(self, equation: Equation) -> _Known | None:
        """What is known of an equation like this one."""
        if equation.eqn is None:
            return None
        return next((self._known[key] for key in _keys(equation.eqn) if key in self._known), None)


def _learn(program: Traced, shapes: Shapes, known: dict[Hashable, _Known]) -> None:
    reads = _reads(program, shapes)
    for i, equation in enumerate(program.equations):
        if equation.eqn is None:
            continue
        results = tuple(shapes.parts.get(r) for r in equation.results)
        found = _Known(results, reads.get(i, {}), shapes.sums.get(i))
        for key in _keys(equation.eqn):
            known.setdefault(key, found)
        if program.graph.ops[i].primitive == "shard_map":
            continue
        for k, closed in enumerate(closed_bodies(equation.eqn)[0]):
            inside = shapes.bodies.get((i, k))
            if inside is not None:
                _learn(trace_jaxpr(closed), inside, known)


def _reads(program: Traced, shapes: Shapes) -> dict[int, dict[int, tuple[Parts, Parts]]]:
    """By equation and operand: how an operand that is read in fewer parts is divided, and how it is read."""
    found: dict[int, dict[int, tuple[Parts, Parts]]] = {}
    for reshard, readers in shapes.reshards:
        if math.prod(reshard.after) >= math.prod(reshard.before):
            continue
        for i in readers:
            for at, v in enumerate(program.equations[i].operands):
                like = isinstance(v, int) and program.graph.values[v].shape == reshard.shape
                if like and shapes.parts.get(v) == reshard.before:
                    found.setdefault(i, {})[at] = reshard.before, reshard.after
                    break
    return found


def _keys(eqn: Any) -> tuple[Hashable, Hashable]:
    """Keys of an equation that its copies share, the closest first."""
    avals = (v.aval for v in (*eqn.invars, *eqn.outvars))
    types = tuple((getattr(aval, "shape", ()), str(getattr(aval, "dtype", ""))) for aval in avals)
    return (eqn.primitive.name, types, eqn.source_info.traceback), (eqn.primitive.name, types)


def _ratio(whole: Sequence[int], local: Sequence[int]) -> Parts:
    """Into how many parts each dimension is divided."""
    return tuple(-(-d // max(n, 1)) for d, n in zip(whole, local, strict=True))


def _cut(size: Size, parts: Parts | None) -> Size:
    """The size of the largest part."""
    shape, nbytes = size
    if parts is None or len(parts) != len(shape) or math.prod(parts) == 1:
        return size
    return local_shape(shape, parts), local_bytes(shape, nbytes, parts)


def _scaled(op: Op, before: Sequence[Value], now: Sequence[Value], bodies: tuple[Graph, ...] | None) -> Op:
    """``op`` with the work and the workspaces of one device: in as many parts as its most divided value."""

    def ratio(v: ValueId) -> int:
        return max(math.prod(before[v].shape) // max(math.prod(now[v].shape), 1), 1)

    if bodies is not None:
        flops = max(body.flops for body in bodies) * op.trip_count if op.flops else op.flops
        return replace(op, bodies=bodies, flops=flops)
    share = max(map(ratio, (*op.operands, *op.results)), default=1)
    if share == 1:
        return op
    of = op.results[0] if op.primitive == "pad" or not op.operands else op.operands[0]
    return replace(op, flops=op.flops / share, padded=op.padded // ratio(of), workspace=op.workspace // ratio(of))


__all__ = ["PerDevice"]
