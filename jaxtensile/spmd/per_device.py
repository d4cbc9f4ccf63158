"""Programs of one request, with the sizes that they have on one device.

Shardy says how the values of the program as written are divided (`spmd.local_shapes`). A rewritten program has the same
equations in other places: an equation is known again by its primitive, its types and the place in the user's code. What
is still unknown is divided like its operands and readers.

Invariant: ops and values stay as they are; only their sizes change. A program whose sizes are those of one device
already stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxtensile import _compat
from jaxtensile.ir.ir import Graph, Op, Value, ValueId
from jaxtensile.program.trace import Equation, Traced, closed_bodies, is_barrier, size_of, trace_jaxpr
from jaxtensile.spmd.local_shapes import Shapes, fill, local_bytes, local_shape, parts_of_type
from jaxtensile.spmd.shardy import Parts

Size = tuple[tuple[int, ...], int]
"""The shape and the bytes of a value on one device."""


class PerDevice:
    """From programs to the same with the sizes of one device. ``arguments``: of each argument, whole and on one
    device."""

    def __init__(
        self, known: Mapping[Hashable, tuple[Parts | None, ...]], arguments: Sequence[tuple[Size, Size]]
    ) -> None:
        self._known, self._arguments = known, arguments

    @classmethod
    def of(cls, program: Traced, shapes: Shapes) -> PerDevice:
        """``shapes``: of ``program``, the trace as written."""
        known: dict[Hashable, tuple[Parts | None, ...]] = {}
        _learn(program, shapes, known)
        values = (program.graph.values[v] for v in program.arguments)
        return cls(known, [((v.shape, v.nbytes), _cut((v.shape, v.nbytes), shapes.parts.get(v.id))) for v in values])

    def inside(self, closed: Any, graph: Graph) -> PerDevice:
        """The same for programs with the arguments of a body; ``graph``: the body with the sizes of one device."""
        whole = [size_of(v.aval) for v in _compat.open_jaxpr(closed)[0].invars]
        local = [(graph.values[v].shape, graph.values[v].nbytes) for v in graph.inputs]
        return PerDevice(self._known, [*zip(whole, local, strict=False)])

    def __call__(self, traced: Traced) -> Traced:
        own = dict(zip(traced.arguments, self._arguments, strict=False))
        return replace(traced, graph=self._graph(traced, traced.graph, own))

    def _graph(self, traced: Traced, graph: Graph, arguments: Mapping[int, tuple[Size, Size]]) -> Graph:
        """``graph`` with the sizes of one device; its ops are the equations of ``traced``. ``arguments``: as for the
        class, by value."""
        whole = {v.id: (v.shape, v.nbytes) for v in graph.values} | {v: size for v, (size, _) in arguments.items()}
        for equation in traced.equations:
            if equation.eqn is not None:
                whole.update((r, size_of(v.aval)) for r, v in zip(equation.results, equation.eqn.outvars, strict=True))
        parts: dict[int, Parts] = {}
        for v, ((before, _), (now, _)) in arguments.items():
            parts[v] = _ratio(before, now)
        bodies: dict[int, tuple[Graph, ...]] = {}
        for op, equation in zip(graph.ops, traced.equations, strict=True):
            self._divide(op, equation, whole, parts, bodies)
        fill(graph, parts, {v: shape for v, (shape, _) in whole.items()})
        sizes = {v: _cut(whole[v], parts.get(v)) for v in whole} | {v: size for v, (_, size) in arguments.items()}
        values = tuple(replace(value, shape=sizes[value.id][0], nbytes=sizes[value.id][1]) for value in graph.values)
        ops = tuple(_scaled(op, graph.values, values, bodies.get(op.id)) for op in graph.ops)
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
        for r, aval_of, known in zip(equation.results, eqn.outvars, self._at(equation), strict=True):
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
            found.append(self._graph(inside, graph, given))
            for k, (r, slot) in enumerate(zip(equation.results, inside.graph.output_slots, strict=False)):
                if slot is None:
                    continue
                divided = _ratio(inside.graph.values[slot].shape, found[-1].values[slot].shape)
                divided = (1, *divided) if op.primitive == "scan" and k >= carries else divided
                if len(divided) == len(whole[r][0]):
                    parts[r] = divided
        return tuple(found)

    def _at(self, equation: Equation) -> tuple[Parts | None, ...]:
        """What is known of the results of an equation like this one."""
        nothing = (None,) * len(equation.results)
        for key in _keys(equation.eqn):
            if key in self._known:
                return self._known[key]
        return nothing


def _learn(program: Traced, shapes: Shapes, known: dict[Hashable, tuple[Parts | None, ...]]) -> None:
    for i, equation in enumerate(program.equations):
        if equation.eqn is None:
            continue
        found = tuple(shapes.parts.get(r) for r in equation.results)
        for key in _keys(equation.eqn):
            known.setdefault(key, found)
        if program.graph.ops[i].primitive == "shard_map":
            continue
        for k, closed in enumerate(closed_bodies(equation.eqn)[0]):
            inside = shapes.bodies.get((i, k))
            if inside is not None:
                _learn(trace_jaxpr(closed), inside, known)


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
