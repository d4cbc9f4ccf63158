"""A program lowered with a mark on every equation, which the locations of its operations keep.

Marks are names of scopes: ``jt7_`` for equation 7, ``jt7.0.3_`` for equation 3 of its body 0. An operation of a loop,
branch or call has more results than its equation, in an order of JAX's. So each result of the equation has a barrier
with a mark: ``jt7r0_`` for the first. A ``shard_map`` over all axes becomes an unknown call between constraints,
because its body has the shapes of one device already. The body of another one has no marks.

Invariant: nothing here runs or compiles.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtensile import _compat
from jaxtensile.devices.backends import CPU
from jaxtensile.program.bodies import with_closed
from jaxtensile.program.trace import Traced, bind, closed_bodies, trace_jaxpr, trace_on

_MARK: Final = re.compile(r"jt(\d[\dr.]*)_(?:/|\"|$)")
MANUAL: Final = "shard_map"
PLACING: Final = {"sharding_constraint": "sharding", "reshard": "dst_sharding", "mesh_cast": "dst_sharding"}
"""Ops that only say how a value is divided, and the parameter that says it."""
_CALL: Final = "jaxtensile_shard_map"


def mark_of(location: str) -> str:
    """The innermost mark in a location; empty if there is none."""
    found = _MARK.findall(location)
    return found[-1] if found else ""


def module_of(program: Traced, arguments: Sequence[Any], outputs: Sequence[Any], platform: str = CPU.name) -> Any:
    """The StableHLO module of a program. ``arguments``: abstract and placed. ``outputs``: shardings of results, None
    where XLA decides. ``platform``: of arguments on a mesh without devices."""
    # Not the arrays, which would be text. JAX makes constants of them, which have no sharding either. References stay.
    names = tuple(v for v, x in program.consts.items() if type(jax.typeof(x)) is _compat.ShapedArray)
    kept = {v: x for v, x in program.consts.items() if v not in names}

    def evaluate(*flat: Any) -> list[Any]:
        consts = kept | dict(zip(names, flat[len(arguments) :], strict=True))
        return _evaluated(program, [*flat[: len(arguments)]], consts, "")

    consts = [jax.ShapeDtypeStruct(jax.numpy.shape(x), x.dtype) for x in map(program.consts.__getitem__, names)]
    jitted = jax.jit(evaluate, keep_unused=True, out_shardings=[*outputs] if outputs else None)
    places = [*(x.sharding for x in arguments), *outputs]
    nowhere = any(map(_compat.is_abstract, places)) and not any(
        isinstance(getattr(s, "mesh", None), Mesh) for s in places
    )
    platforms = (platform,) if nowhere else None
    return jitted.trace(*arguments, *consts).lower(lowering_platforms=platforms).compiler_ir("stablehlo")


def _evaluated(program: Traced, flat: Sequence[Any], consts: dict[int, Any], above: str) -> list[Any]:
    env: dict[int, Any] = dict(zip(program.arguments, flat, strict=True))
    env.update(consts)
    for i, equation in enumerate(program.equations):
        operands = [env[a] if isinstance(a, int) else a.val for a in equation.operands]
        with jax.named_scope(f"jt{above}{i}_"):
            made = _bound(program, i, operands, f"{above}{i}")
        env.update(zip(equation.results, made, strict=True))
    return [env[a] if isinstance(a, int) else a.val for a in program.outputs]


def _bound(program: Traced, i: int, operands: list[Any], mark: str) -> list[Any]:
    equation = program.equations[i]
    eqn = equation.eqn
    if eqn is None or not program.graph.ops[i].bodies:
        return bind(equation, operands)
    if eqn.primitive.name == MANUAL:
        return _manual(eqn, operands) if all_manual(eqn) else bind(equation, operands)
    if eqn.effects or not all(type(v.aval) is _compat.ShapedArray for v in (*eqn.invars, *eqn.outvars)):
        return bind(equation, operands)
    bodies = [_marked(body, f"{mark}.{k}.") for k, body in enumerate(closed_bodies(eqn)[0])]
    made = bind(replace(equation, eqn=with_closed(eqn, bodies)), operands)
    return [_told(x, f"{mark}r{k}") for k, x in enumerate(made)]


def _told(x: Any, mark: str) -> Any:
    with jax.named_scope(f"jt{mark}_"):
        return jax.lax.optimization_barrier(x)


def _marked(closed: Any, above: str) -> Any:
    """A body with marks; itself if its arguments are more than arrays."""
    jaxpr, _ = _compat.open_jaxpr(closed)
    inside = trace_jaxpr(closed)
    return trace_on(lambda *flat: _evaluated(inside, flat, inside.consts, above), [v.aval for v in jaxpr.invars])


def all_manual(eqn: Any) -> bool:
    """Whether a ``shard_map`` is over all axes of its mesh, so that its specs say everything."""
    mesh = eqn.params["mesh"]
    return frozenset(eqn.params.get("newly_manual_axes") or mesh.axis_names) == frozenset(mesh.axis_names)


def _manual(eqn: Any, operands: list[Any]) -> list[Any]:
    """A ``shard_map`` as an unknown call between the constraints of its specs."""
    params = eqn.params

    def constrained(x: Any, spec: Any) -> Any:  # as whole where it is part of a sum
        return jax.lax.with_sharding_constraint(x, NamedSharding(params["mesh"], P(*spec.partitions)))

    given = [constrained(x, spec) for x, spec in zip(operands, params["in_specs"], strict=True)]
    kinds = (jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.outvars)
    made = [jax.ffi.ffi_call(_CALL, kind)(*given) for kind in kinds]  # each its own: Shardy takes no tuples
    return [constrained(x, spec) for x, spec in zip(made, params["out_specs"], strict=True)]


__all__ = ["MANUAL", "all_manual", "mark_of", "module_of"]
