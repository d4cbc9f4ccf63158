"""The local shape of every value of a program: the shape of its part on one device.

Arguments have the shapes of their shardings. On meshes with explicit axes types give the shapes of all values. Others
come from Shardy's propagation (`spmd.shardy`). A value without an answer is divided like the nearest value of its
shape. If the propagation fails, all values but the arguments are divided by one ratio.

Invariant: an argument has exactly the local shape of its sharding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import jax
from jax.sharding import AxisType

from jaxtensile import _compat
from jaxtensile.devices.backends import CPU
from jaxtensile.faults import strict, told
from jaxtensile.ir.ir import Graph, Op
from jaxtensile.program.trace import Traced, closed_bodies, trace_jaxpr
from jaxtensile.spmd.marked import MANUAL, all_manual, module_of
from jaxtensile.spmd.shardy import Parts, Propagated, Reshard, Sum, Typed, propagated

ROUNDS: Final = 3
"""Passes over unknown values, each one reader or operand further. A guess: two were enough."""


@dataclass(frozen=True)
class Sharded:
    """A program over ``count`` devices. ``traced``: the result of ``jax.jit``'s ``trace``. ``inputs``, ``outputs``: a
    sharding for each input and output of its jaxpr, None if XLA decides. ``platform``: of a mesh without devices."""

    traced: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    count: int
    platform: str = CPU.name

    def parts(self, i: int, aval: Any) -> Parts | None:
        """Of input ``i``; None if it has no sharding."""
        sharding = self.inputs[i]
        try:
            return None if sharding is None else parts_of(tuple(aval.shape), sharding)
        except (NotImplementedError, ValueError):  # partial sums; or what JAX refuses itself
            return None


@dataclass(frozen=True)
class Shapes:
    """The division of a program's values. ``parts``: by value, the number of parts of each dimension. ``bodies``: by
    (op, body).

    ``outputs``: parts of each result as the caller gets it; empty if unknown. ``reshards``: each with the ops that read
    it. ``sums``: by op, its only result before the sum over devices. ``guessed``: why the propagation failed; empty if
    it did not. ``program``: the equations of a ``shard_map``'s body that replaces its call; None for other programs.
    """

    parts: Mapping[int, Parts]
    bodies: Mapping[tuple[int, int], Shapes] = field(default_factory=dict[tuple[int, int], "Shapes"])
    outputs: tuple[Parts | None, ...] = ()
    reshards: tuple[tuple[Reshard, tuple[int, ...]], ...] = ()
    sums: Mapping[int, Sum] = field(default_factory=dict[int, Sum])
    guessed: str = ""
    program: Traced | None = None


def sharded(
    traced: Any,
    args: Any,
    kwargs: Any,
    static: tuple[frozenset[int], frozenset[str]],
    count: int,
    *,
    platform: str = CPU.name,
) -> Sharded:
    """The shardings of a trace's arguments and results. ``static``: positions and names of arguments that are no
    arrays."""
    numbers, names = static
    dynamic = (
        tuple(x for i, x in enumerate(args) if i not in numbers),
        {k: x for k, x in kwargs.items() if k not in names},
    )
    given, outputs = _compat.given_shardings(traced)
    leaves = jax.tree.leaves(dynamic)
    own = [*map(_placed, _compat.captured(traced)), *map(_placed, leaves)]
    if len(own) != len(given):
        own = [None] * len(given)
    return Sharded(traced, tuple(g or o for g, o in zip(given, own, strict=True)), outputs, count, platform)


def _placed(x: Any) -> Any:
    """The sharding of an argument that says where it is."""
    sharding = getattr(x, "sharding", None)
    return sharding if sharding is not None and getattr(x, "committed", True) else None


def parts_of(shape: tuple[int, ...], sharding: Any) -> Parts:
    """Into how many parts a sharding divides each dimension."""
    local = sharding.shard_shape(shape)
    return tuple(-(-d // max(n, 1)) for d, n in zip(shape, local, strict=True))


def divided(where: Sharded) -> tuple[int, ...]:
    """The number of parts of each argument. An argument without a sharding may be divided by XLA: it counts as divided
    among all devices."""
    each = (where.parts(i, aval) for i, aval in enumerate(where.traced.jaxpr.in_avals))
    return tuple(where.count if parts is None else math.prod(parts) for parts in each)


def local_shape(shape: tuple[int, ...], parts: Parts) -> tuple[int, ...]:
    """The shape of the largest part."""
    return tuple(-(-d // n) for d, n in zip(shape, parts, strict=True)) if len(shape) == len(parts) else shape


def local_bytes(shape: tuple[int, ...], nbytes: int, parts: Parts) -> int:
    """Bytes of the largest part of an array of ``nbytes``."""
    count = math.prod(shape)
    return -(-nbytes * math.prod(local_shape(shape, parts)) // count) if count else nbytes


def local_shapes(program: Traced, where: Sharded) -> Shapes:
    """Of every value of ``program``, a trace of ``where.traced``."""
    avals = where.traced.jaxpr.in_avals
    given = {v: p for i, v in enumerate(program.arguments) if (p := where.parts(i, avals[i])) is not None}
    typed = _explicit(where)
    try:
        found = propagated(module_of(program, _types(where), where.outputs, where.platform))
    except Exception as error:  # private parts of JAX, which may be elsewhere in another version, or refuse a program
        refused = isinstance(error, ImportError | AttributeError) or type(error).__name__ == "MLIRError"
        if strict() and not refused and not typed:  # types say it all; JAX does not write each such program again
            raise
        return _read(program, None, given, "") if typed else _guess(program, given, told(error))
    if typed:
        return _read(program, replace(found, results={}, reshards=()), given, "")
    for v, parts in zip(program.arguments, found.arguments, strict=False):
        given.setdefault(v, parts)
    outputs = found.outputs[: len(program.outputs)]  # references that are closed over come behind
    return replace(_read(program, found, given, ""), outputs=outputs)


def _types(where: Sharded) -> list[Any]:
    """The arguments, abstract and placed."""
    return [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=getattr(a, "weak_type", False))
        for a, s in zip(where.traced.jaxpr.in_avals, where.inputs, strict=True)
    ]


def _explicit(where: Sharded) -> bool:
    """Whether all axes of the mesh are explicit, so that types say everything."""
    meshes = [s.mesh for s in where.inputs if hasattr(s, "mesh")]
    return bool(meshes) and all(kind == AxisType.Explicit for m in meshes for kind in m.axis_types)


def parts_of_type(aval: Any) -> Parts | None:
    """By a type with a sharding over explicit axes."""
    found = _compat.partition_spec(aval)
    if found is None:
        return None
    mesh, spec = found
    return _by_spec(aval.shape, dict(mesh.shape), spec)


def _by_spec(shape: Sequence[int], sizes: Mapping[str, int], spec: Any) -> Parts:
    divided = spec.partitions  # not of the sums that an array may be a part of: such a part is whole
    axes = (*divided, *(None,) * (len(shape) - len(divided)))
    return tuple(
        math.prod(sizes.get(a, 1) for a in (axis if isinstance(axis, tuple) else (axis,)) if isinstance(a, str))
        for axis in axes
    )


def _read(program: Traced, found: Propagated | None, given: Mapping[int, Parts], above: str) -> Shapes:
    """The shapes of ``program``, whose marks begin with ``above``."""
    graph = program.graph
    parts: dict[int, Parts] = dict(given)
    for i, equation in enumerate(program.equations):
        shapes = [graph.values[r].shape for r in equation.results]
        typed = _typed(shapes, f"{above}{i}", found) if found is not None else None
        if graph.ops[i].primitive == MANUAL and all_manual(equation.eqn):
            typed = _of_specs(equation.eqn)
        for k, r in enumerate(equation.results):
            known = typed[k] if typed is not None else None
            if known is None and equation.eqn is not None:
                known = parts_of_type(equation.eqn.outvars[k].aval)
            if known is not None and len(known) == len(shapes[k]):
                parts[r] = known
    fill(graph, parts)
    bodies = {
        (i, k): _inside(program, i, k, closed, found, parts, above)
        for i, equation in enumerate(program.equations)
        if graph.ops[i].bodies
        for k, closed in enumerate(closed_bodies(equation.eqn)[0])
    }
    reshards, sums = _of_this(found, above, program)
    return Shapes(parts, bodies, reshards=reshards, sums=sums)


def _of_specs(eqn: Any) -> list[Parts | None]:
    """The parts of a ``shard_map``'s results."""
    mesh, specs = eqn.params["mesh"], eqn.params["out_specs"]
    return [_by_spec(v.aval.shape, dict(mesh.shape), spec) for v, spec in zip(eqn.outvars, specs, strict=True)]


def _of_this(
    found: Propagated | None, above: str, program: Traced
) -> tuple[tuple[tuple[Reshard, tuple[int, ...]], ...], dict[int, Sum]]:
    """The reshards and sums of the equations with this beginning of their marks."""
    if found is None:
        return (), {}
    ops, values = program.graph.ops, program.graph.values

    def own(mark: str) -> int | None:
        rest = mark[len(above) :]
        return int(rest) if mark.startswith(above) and rest.isdigit() and int(rest) < len(ops) else None

    reshards = [(r, tuple(i for m in r.readers if (i := own(m)) is not None)) for r in found.reshards]
    sums: dict[int, Sum] = {}
    for mark, several in found.sums.items():
        i = own(mark)
        if i is not None and len(ops[i].results) == 1 and not ops[i].bodies:
            shape = values[ops[i].results[0]].shape
            fit = [one for one in several if one.shape == shape]
            sums |= {i: fit[-1]} if fit else {}
    return tuple((r, at) for r, at in reshards if at), sums


def _inside(
    program: Traced,
    i: int,
    k: int,
    closed: Any,
    found: Propagated | None,
    parts: Mapping[int, Parts],
    above: str,
) -> Shapes:
    """The shapes inside body ``k`` of op ``i``."""
    body, op = trace_jaxpr(closed), program.graph.ops[i]
    if op.primitive == MANUAL:
        return Shapes({}, program=body if all_manual(program.equations[i].eqn) else None)
    operands = program.equations[i].operands
    # A loop's body takes slices of what it goes through, a branch all but the first operand.
    skipped = len(operands) - len(body.arguments)
    consts, carries = op.carried
    given: dict[int, Parts] = {}
    for n, v in enumerate(body.arguments):
        at = n + max(skipped, 0)
        outer = operands[at] if at < len(operands) else None
        known = parts.get(outer) if isinstance(outer, int) else None
        if known is None:
            continue
        if op.primitive == "scan" and n >= consts + carries:
            known = known[1:]
        if len(known) == len(body.graph.values[v].shape):
            given[v] = known
    return _read(body, found, given, f"{above}{i}.{k}.")


def _typed(shapes: Sequence[tuple[int, ...]], mark: str, found: Propagated) -> list[Parts | None] | None:
    """The parts of the results of the equation with this mark."""
    each = [found.results.get(f"{mark}r{k}") for k in range(len(shapes))]
    if any(each):
        return [one[-1][0][1][: len(s)] if one else None for one, s in zip(each, shapes, strict=True)]
    return _of_results(shapes, found.results.get(mark, ()))


def _of_results(
    shapes: Sequence[tuple[int, ...]], operations: Sequence[tuple[Typed, ...]]
) -> list[Parts | None] | None:
    """The parts of an equation's results, by the last operation under its mark that has such results."""
    for typed in reversed(operations):
        each: list[Parts] | None = _in_turn(shapes, typed)
        if each is not None:
            return [*each]
    if len(shapes) < 2:
        return None
    alone: list[Parts | None] = []
    for shape in shapes:
        one = _of_results([shape], operations)
        alone.append(one[0] if one else None)
    return alone


def _in_turn(shapes: Sequence[tuple[int, ...]], typed: Sequence[Typed]) -> list[Parts] | None:
    """The parts of the last results that have these shapes in this order."""
    out: list[Parts] = []
    left: list[Typed] = [*typed]
    for shape in reversed(shapes):
        while left and left[-1][0][: len(shape)] != tuple(shape):
            left.pop()
        if not left:
            return None
        out.append(left.pop()[1][: len(shape)])
    return out[::-1]


def fill(graph: Graph, parts: dict[int, Parts], shapes: Mapping[int, tuple[int, ...]] | None = None) -> None:
    """Divide unknown values like operands and readers of their shape; else along the dimensions of an operand that they
    keep. ``shapes``: of whole values, None: those of the graph."""
    whole: Mapping[int, tuple[int, ...]] = shapes or {value.id: value.shape for value in graph.values}
    read_by: dict[int, list[int]] = {}
    for op in graph.ops:
        for v in op.operands:
            read_by.setdefault(v, []).append(op.id)
    unknown: list[tuple[Op, int]] = [(op, r) for op in graph.ops for r in op.results if r not in parts]
    for _ in range(ROUNDS):
        for op, r in unknown:
            if r not in parts:
                like = _like(graph, whole, parts, op, r, read_by.get(r, ()))
                if like is not None:
                    parts[r] = like


def _like(
    graph: Graph,
    whole: Mapping[int, tuple[int, ...]],
    parts: Mapping[int, Parts],
    op: Op,
    r: int,
    readers: Sequence[int],
) -> Parts | None:
    """The parts of a known value near result ``r`` of ``op``."""
    shape = whole[r]
    near: list[int] = [*op.operands]
    for j in readers:
        near += [*graph.ops[j].results, *graph.ops[j].operands]
    for v in near:
        if v in parts and whole[v] == shape:
            return parts[v]
    return next(_kept(whole, parts, op.operands, shape), None)


def _kept(
    whole: Mapping[int, tuple[int, ...]], parts: Mapping[int, Parts], operands: Sequence[int], shape: tuple[int, ...]
) -> Iterator[Parts]:
    """The parts of dimensions that a reduction or a reshape of an operand keeps, in their order."""
    for v in operands:
        old = whole[v]
        if v in parts and math.prod(old) >= math.prod(shape):
            left: list[tuple[int, int]] = list(zip(old, parts[v], strict=True))
            found: list[int] = []
            for d in shape:
                while left and left[0][0] != d:
                    left.pop(0)
                found.append(left.pop(0)[1] if left else 1)
            yield tuple(found)


def _guess(program: Traced, given: Mapping[int, Parts], why: str) -> Shapes:
    """Arguments as they are, everything else by one ratio: into as many parts as the most divided argument."""
    ratio = max((math.prod(p) for p in given.values()), default=1)
    found = _divided(program.graph, given, ratio)
    manual = {
        (op.id, 0): _inside(program, op.id, 0, closed_bodies(program.equations[op.id].eqn)[0][0], None, {}, "")
        for op in program.graph.ops
        if op.primitive == MANUAL
    }
    return replace(found, bodies={**found.bodies, **manual}, guessed=why)


def _divided(graph: Graph, given: Mapping[int, Parts], ratio: int) -> Shapes:
    alike = {(graph.values[v].shape, graph.values[v].dtype): p for v, p in given.items() if v in graph.donated}
    parts: dict[int, Parts] = {v: (1,) * len(graph.values[v].shape) for v in graph.inputs}
    parts |= given
    results = set(graph.outputs)
    for op in graph.ops:
        for r in op.results:
            value = graph.values[r]
            same = alike.get((value.shape, value.dtype)) if r in results else None
            parts[r] = same or _spread(value.shape, ratio)
    bodies: dict[tuple[int, int], Shapes] = {
        (op.id, k): _divided(body, {v: _spread(body.values[v].shape, ratio) for v in body.inputs}, ratio)
        for op in graph.ops
        if op.primitive != MANUAL
        for k, body in enumerate(op.bodies)
    }
    return Shapes(parts, bodies)


def _spread(shape: tuple[int, ...], ratio: int) -> Parts:
    """``ratio`` parts, along the first dimensions that are long enough."""
    out: list[int] = []
    for d in shape:
        n = math.gcd(d, ratio)
        out.append(n)
        ratio //= n
    return tuple(out)


__all__ = [
    "Shapes",
    "Sharded",
    "divided",
    "fill",
    "local_bytes",
    "local_shape",
    "local_shapes",
    "parts_of",
    "parts_of_type",
    "sharded",
]
