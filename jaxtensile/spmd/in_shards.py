"""A program made of ``shard_map``s, as one program of a single device with explicit collectives.

The bodies of its ``shard_map``s follow one another in it, so that what one hands to the next is a value like any other.
In between are ops that act on each part alone: elementwise ops on arrays divided alike, reductions with a sum over
devices behind them, and anything on arrays that every device holds whole. A loop is one of these if all that its
iterations do is, and it may hold ``shard_map``s too.

Invariant: every device runs the same ops in the same order. An op outside of the ``shard_map``s is here only if each
device can make its part from its own parts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtensile import _compat
from jaxtensile.passes.lifetimes.fusion import ELEMENTWISE
from jaxtensile.program.trace import (
    Equation,
    Traced,
    closed_bodies,
    is_barrier,
    jaxprs_in,
    trace_jaxpr,
    trace_on,
    traced_within,
)
from jaxtensile.spmd.local_shapes import Sharded
from jaxtensile.spmd.marked import MANUAL, PLACING, all_manual

Axes = tuple[tuple[str, ...], ...]
"""For each dimension of an array, the axes of the mesh that divide it."""
_ALIKE: Final = (ELEMENTWISE - {"random_bits", "threefry2x32"}) | frozenset(
    "copy copy_p stop_gradient bitcast_convert_type".split()
)
"""Ops that make each element of equal elements of their operands."""
_TOTALS: Final = {"reduce_sum": lax.psum, "reduce_max": lax.pmax, "reduce_min": lax.pmin}
_CALLS: Final = frozenset({"jit", "pjit"})
_PLACES: Final = frozenset({"sharding", "out_sharding"})
"""Parameters that say how a whole array is divided."""
Evaluate = Callable[[list[Any]], list[Any]]


class NotInShardsError(Exception):
    """The program is more than ``shard_map``s and what can be done part by part; says which op is not."""


@dataclass(frozen=True)
class InShards:
    """``closed``: the program of one device. ``inputs``, ``outputs``: how the whole arrays are divided. ``checked``:
    whether its ``shard_map``s check which values differ between devices."""

    closed: Any
    mesh: Any
    inputs: tuple[P, ...]
    outputs: tuple[P, ...]
    checked: bool

    def around(self, evaluate: Evaluate) -> Evaluate:
        """From the evaluation of a program like ``closed`` to that of the whole program."""

        def run(flat: list[Any]) -> list[Any]:
            mapped = jax.shard_map(
                lambda *parts: tuple(evaluate([*parts])),
                mesh=self.mesh,
                in_specs=self.inputs,
                out_specs=self.outputs,
                check_vma=self.checked,
            )
            return [*mapped(*flat)]

        return run

    def within(self) -> Any:
        """The context in which the program is traced."""
        return _compat.in_shard_map(self.mesh, self.checked)


def in_shards(program: Traced, where: Sharded) -> InShards | None:
    """``program``, a trace of ``where.traced``, as one of a single device; None if it has no ``shard_map``.

    Raises ``NotInShardsError``.
    """
    maps = [*_maps(e.eqn for e in program.equations if e.eqn is not None)]
    if not maps:
        return None
    mesh, checked = _mesh(maps, where), bool(maps[0].params["check_vma"])
    if not all(all_manual(m) and bool(m.params["check_vma"]) is checked for m in maps):
        raise NotInShardsError("its shard_maps are over some axes of their mesh alone, or check differently")
    given = _given(program, where, mesh)
    work = _Shards(checked)
    results: list[Axes] = []

    def evaluate(*flat: Any) -> list[Any]:
        found = work.run(program, [_Part(x, axes) for x, axes in zip(flat, given, strict=True)])
        results[:] = [part.axes for part in found]
        return [part.x for part in found]

    specs = tuple(map(_spec, given))
    avals = where.traced.jaxpr.in_avals
    with traced_within(lambda: _compat.in_shard_map(mesh, checked)):
        types = [_compat.type_of_part(mesh, checked, s, a) for s, a in zip(specs, avals, strict=True)]
        closed = trace_on(evaluate, types)
    outputs = tuple(map(_spec, results))
    for spec, asked, aval in zip(outputs, where.outputs, _compat.open_jaxpr(closed)[0].outvars, strict=False):
        if asked is not None and not asked.is_equivalent_to(NamedSharding(mesh, spec), len(aval.aval.shape)):
            raise NotInShardsError(f"a result is asked for as {asked} and made as {spec}")
    return InShards(closed, mesh, specs, outputs, checked)


def _maps(eqns: Iterable[Any]) -> Iterator[Any]:
    """The ``shard_map``s among equations and in loops."""
    for eqn in eqns:
        if eqn.primitive.name == MANUAL:
            yield eqn
        else:
            for body in jaxprs_in(eqn.params.values()):
                yield from _maps((body.jaxpr if hasattr(body, "jaxpr") else body).eqns)


def _mesh(maps: Sequence[Any], where: Sharded) -> Any:
    """The mesh of all devices."""
    named = [s.mesh for s in where.inputs if isinstance(s, NamedSharding)]
    meshes = [*(m.params["mesh"] for m in maps), *named]
    concrete = {m for m in meshes if isinstance(m, jax.sharding.Mesh)}
    if len(concrete) != 1 or len({tuple(m.shape.items()) for m in meshes}) != 1:
        raise NotInShardsError("its shard_maps and arguments are not all on one mesh")
    (mesh,) = concrete
    if mesh.size != where.count:
        raise NotInShardsError(f"its mesh is of {mesh.size} devices, and it runs on {where.count}")
    return mesh


def _given(program: Traced, where: Sharded, mesh: Any) -> list[Axes]:
    """How each argument is divided; one without a sharding like its first reader among the ``shard_map``s wants it."""
    wanted: dict[int, Axes] = {}
    for equation in program.equations:
        if equation.eqn is not None and equation.eqn.primitive.name == MANUAL:
            for a, spec in zip(equation.operands, equation.eqn.params["in_specs"], strict=True):
                if isinstance(a, int):
                    wanted.setdefault(a, _axes(spec, len(program.graph.values[a].shape)))
    found: list[Axes] = []
    for v, sharding, aval in zip(program.arguments, where.inputs, where.traced.jaxpr.in_avals, strict=True):
        rank = len(getattr(aval, "shape", ()))
        if type(aval) is not _compat.ShapedArray:
            raise NotInShardsError(f"an argument is no array: {aval}")
        if isinstance(sharding, NamedSharding):
            if sharding.memory_kind not in (None, "device") and sharding.memory_kind != _default_kind(mesh):
                raise NotInShardsError(f"an argument waits in {sharding.memory_kind} memory")
            found.append(_axes(sharding.spec, rank))
        elif sharding is None or sharding.is_fully_replicated:
            found.append(wanted.get(v, ((),) * rank) if sharding is None else ((),) * rank)
        else:
            raise NotInShardsError(f"an argument has a sharding of another kind: {sharding}")
        if not _evenly(aval.shape, found[-1], mesh):
            raise NotInShardsError(f"an argument of shape {aval.shape} is divided unevenly by {found[-1]}")
    return found


def _default_kind(mesh: Any) -> str:
    return str(mesh.devices.flat[0].default_memory().kind)


def _axes(spec: Any, rank: int) -> Axes:
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise NotInShardsError(f"an array is divided as {spec}")
    each = [() if a is None else tuple(a) if isinstance(a, tuple) else (a,) for a in spec]
    if not all(isinstance(a, str) for axes in each for a in axes):
        raise NotInShardsError(f"an array is divided as {spec}")
    return (*each, *((),) * (rank - len(each)))


def _evenly(shape: Sequence[int], axes: Axes, mesh: Any) -> bool:
    """Whether all parts are of one size."""
    sizes = dict(mesh.shape)
    return all(d % math.prod(sizes[a] for a in named) == 0 for d, named in zip(shape, axes, strict=True))


def _spec(axes: Axes) -> P:
    return P(*(a[0] if len(a) == 1 else a or None for a in axes))


class _Part(NamedTuple):
    """A device's part of an array, and the axes that divide the array. ``filled``: a function from axes to the part,
    for an array of one number that no op has wanted yet."""

    x: Any
    axes: Axes
    filled: Callable[[Axes], Any] | None = None

    def divided(self, axes: Axes) -> _Part:
        return _Part(self.filled(axes), axes) if self.filled is not None else self


class _Shards:
    """Evaluates whole programs on parts."""

    def __init__(self, checked: bool) -> None:
        self.checked = checked

    def run(self, program: Traced, given: Sequence[_Part]) -> list[_Part]:
        return [part.divided(part.axes) for part in self.results(program, given)]

    def results(self, program: Traced, given: Sequence[_Part]) -> list[_Part]:
        """The results of a program; of one number where it is not known yet how they are divided."""
        env: dict[int, _Part] = dict(zip(program.arguments, given, strict=True))
        env.update((v, _whole(x)) for v, x in program.consts.items())

        def read(atom: Any) -> _Part:
            return env[atom] if isinstance(atom, int) else _whole(atom.val)

        for i, equation in enumerate(program.equations):
            made = self.step(program, i, [read(a) for a in equation.operands])
            env.update(zip(equation.results, made, strict=True))
        return [*map(read, program.outputs)]

    def step(self, program: Traced, i: int, parts: list[_Part]) -> list[_Part]:
        """The results of equation ``i``."""
        equation = program.equations[i]
        eqn, name = equation.eqn, program.graph.ops[i].primitive
        if is_barrier(eqn):
            parts = [part.divided(part.axes) for part in parts]
            behind = _compat.barrier(part.x for part in parts)
            return [_Part(x, part.axes) for x, part in zip(behind, parts, strict=True)]
        if name == MANUAL:
            return self.entered(eqn, parts)
        if name == "scan" and not _compat.has_effects(eqn):
            found = self.looped(equation, parts)
            if found is not None:
                return found
        elif name in _CALLS and all("Unspecified" in type(s).__name__ for s in _shardings(eqn)):
            return self.run(trace_jaxpr(closed_bodies(eqn)[0][0]), parts)
        if name == "broadcast_in_dim" and not parts[0].axes:
            return [self.filled(eqn, parts[0])]
        placed = eqn.params.get(PLACING.get(name, ""))
        if isinstance(placed, NamedSharding):
            shape, here = eqn.outvars[0].aval.shape, jax.sharding.get_abstract_mesh()
            wanted = _axes(placed.spec, len(shape))
            if not _evenly(shape, wanted, here):
                raise NotInShardsError(f"an array of shape {shape} is divided unevenly by {wanted}")
            part = parts[0].divided(wanted)
            if part.axes == wanted:
                return [part]
        elif not _compat.has_effects(eqn) and not program.graph.ops[i].bodies:
            found = self.alike(equation, name, parts)
            if found is not None:
                return found
        raise NotInShardsError(f"{name} at {program.source(i)} is not done part by part")

    def looped(self, equation: Equation, parts: list[_Part]) -> list[_Part] | None:
        """The results of a loop whose iterations are done part by part; None if devices have different iterations, or
        an iteration hands on an array that is divided otherwise than the one that it took."""
        params = equation.eqn.params
        consts, carries = _compat.scan_split(params)
        body = trace_jaxpr(params["jaxpr"])
        fixed, first, through = parts[:consts], parts[consts : consts + carries], parts[consts + carries :]
        if any(p.axes[0] for p in through) or not params["length"]:
            return None
        made: list[Axes] = []
        kept: list[int] = []
        """Carries of one number that iterations hand on as they are."""

        def outs(taken: Sequence[_Part], carry: Sequence[Any], slices: Sequence[Any]) -> list[Any]:
            values, rows = iter(carry), iter(slices)
            given = [p if p.filled else _Part(next(values), p.axes) for p in taken]
            each = [_row(p) if p.filled else _Part(next(rows), p.axes[1:]) for p in through]
            found = self.results(body, [*fixed, *given, *each])
            made[:] = [part.axes for part in found]
            kept[:] = [k for k, p in enumerate(taken) if p.filled and found[k].filled is p.filled]
            return [self.varying(part.divided(part.axes)) for k, part in enumerate(found) if k not in kept]

        arrays = [p.x for p in through if not p.filled]
        taken = first
        while True:
            kinds = [self.varying(p) for p in taken if not p.filled], [x[0] for x in arrays]
            jax.eval_shape(functools.partial(outs, taken), *kinds)
            wrong = [k for k, p in enumerate(taken) if k not in kept and (p.filled or p.axes != made[k])]
            if not wrong:
                break
            if not all(taken[k].filled for k in wrong):
                return None
            # A number that is repeated is divided like what the first iteration makes of it.
            taken = [p.divided(made[k]) if k in wrong else p for k, p in enumerate(taken)]
        count = carries - len(kept)

        def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            found = outs(taken, carry, slices)
            return found[:count], found[count:]

        here = jax.sharding.get_abstract_mesh()
        with _compat.equation_context(equation.eqn, equation.stack), jax.sharding.use_abstract_mesh(here):
            last, stacked = lax.scan(
                step,
                [self.varying(p) for p in taken if not p.filled],
                arrays,
                length=params["length"],
                reverse=params["reverse"],
                unroll=params["unroll"],
            )
        left = iter(last)
        ends = [p if p.filled else _Part(next(left), p.axes) for p in taken]
        return [*ends, *(_Part(x, ((), *axes)) for x, axes in zip(stacked, made[carries:], strict=True))]

    def varying(self, part: _Part) -> Any:
        """The part, of a type that differs between the devices that have different parts."""
        over = tuple(a for axes in part.axes for a in axes)
        return _compat.varying_over(part.x, over) if self.checked and over else part.x

    def alike(self, equation: Any, name: str, parts: list[_Part]) -> list[_Part] | None:
        """The results of an op that makes its part of operands' parts; None if it is none."""
        divided = {p.axes for p in parts if any(p.axes)}
        ranks = {len(p.axes) for p in parts if p.axes}
        # Between types of other widths, a bitcast adds or takes away a dimension.
        each = name in _ALIKE and all(len(v.aval.shape) in {*ranks, 0} for v in equation.eqn.outvars)
        if each and any(p.filled for p in parts) and all(p.filled or not p.axes for p in parts):
            (whole,) = {p.axes for p in parts if p.filled}
            return [_Part(None, whole, lambda axes: _bound(equation, [p.divided(axes).x for p in parts])[0])]
        if not divided:  # every device makes all of it
            parts = [p.divided(p.axes) for p in parts]
            made = _bound(equation, [p.x for p in parts])
            return [_Part(x, ((),) * len(v.aval.shape)) for x, v in zip(made, equation.eqn.outvars, strict=True)]
        if len(divided) > 1:
            return None
        (axes,) = divided
        if each and all(p.filled or p.axes in (axes, ()) for p in parts):
            xs = [p.divided(axes if p.filled else p.axes).x for p in parts]
            made = _bound(equation, _compat.varying_alike(xs) if len(xs) > 1 else xs)
            return [_Part(x, axes) for x in made]
        if name in _TOTALS and len(parts) == 1:
            gone = set(equation.eqn.params["axes"])
            (x,) = _bound(equation, [parts[0].x])
            over = tuple(a for d in sorted(gone) for a in axes[d])
            if over:
                x = _TOTALS[name](_compat.varying_over(x, over), over)
            return [_Part(x, tuple(a for d, a in enumerate(axes) if d not in gone))]
        return None

    def filled(self, eqn: Any, part: _Part) -> _Part:
        """An array of one number."""
        shape = eqn.params["shape"]
        sizes = dict(jax.sharding.get_abstract_mesh().shape)

        def at(axes: Axes) -> Any:
            # A dimension of 1 is repeated by the op that reads it.
            own = [
                d if d == 1 else d // math.prod(sizes[a] for a in named) for d, named in zip(shape, axes, strict=True)
            ]
            return lax.broadcast(jnp.asarray(part.x, eqn.outvars[0].aval.dtype), own)

        return _Part(None, ((),) * len(shape), at)

    def entered(self, eqn: Any, parts: list[_Part]) -> list[_Part]:
        """The results of a ``shard_map``: of its body, in place of its call."""
        given: list[Any] = []
        for part, spec in zip(parts, eqn.params["in_specs"], strict=True):
            wanted = _axes(spec, len(part.axes))
            part = part.divided(wanted)
            if part.axes != wanted:
                raise NotInShardsError(f"a shard_map takes an array that is divided as {part.axes} by {spec}")
            given.append(self.varying(part))
        # Its own checkpoints stay what they are, so that they may be undone.
        outs = _compat.jaxpr_as_fun(closed_bodies(eqn)[0][0])(*given)
        return [_Part(x, _axes(spec, len(jnp.shape(x)))) for x, spec in zip(outs, eqn.params["out_specs"], strict=True)]


def _row(part: _Part) -> _Part:
    """One slice of an array of one number."""
    filled = part.filled
    assert filled is not None
    return _Part(None, part.axes[1:], lambda axes: filled(((), *axes))[0])


def _shardings(eqn: Any) -> tuple[Any, ...]:
    return (*eqn.params["in_shardings"], *eqn.params["out_shardings"])


def _whole(x: Any) -> _Part:
    return _Part(x, ((),) * len(jnp.shape(x)))


def _bound(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation from outside of the ``shard_map``s, on parts."""
    eqn, here = equation.eqn, jax.sharding.get_abstract_mesh()
    params = {k: None if k in _PLACES else v for k, v in eqn.params.items()}
    with _compat.equation_context(eqn, equation.stack), jax.sharding.use_abstract_mesh(here):
        out = eqn.primitive.bind(*operands, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


__all__ = ["InShards", "NotInShardsError", "in_shards"]
