"""A program divided among devices that are here or nowhere, carried over to those of a target.

JAX compiles a program if its arguments have devices, and meshes inside then need none. So arguments and results get the
target's devices, and the meshes inside of the program lose theirs.

Invariant: nothing here moves or copies an array, or compiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from jaxtensile import _compat
from jaxtensile.spmd.location import as_for, is_spread, mesh_on
from jaxtensile.spmd.placement import Placement

_NAMING = ("in_shardings", "out_shardings")
"""Options of ``jax.jit`` that may name devices."""


class Carried(NamedTuple):
    """A function, its options of ``jax.jit``, and its arguments, abstract."""

    fun: Callable[..., Any]
    options: Mapping[str, Any]
    args: Any
    kwargs: Any


def carried(
    target: str,
    trace: Callable[[], Any],
    plain: Any,
    fun: Callable[..., Any],
    options: Mapping[str, Any],
    args: Any,
    kwargs: Any,
) -> Carried:
    """``fun`` and its arguments for devices of ``target``, as many as it is divided among.

    ``plain``: the ``jax.jit`` result of ``fun`` with ``options``. ``trace``: gives its trace for these arguments, and
    is asked where more than the arguments may name devices. Raises ``TargetError`` for shardings that are no
    ``NamedSharding``s.
    """
    named = _compat.names_shardings(plain)
    if not (named or _compat.mesh_in_force() is not None or any(map(is_spread, jax.tree.leaves((args, kwargs))))):
        return Carried(fun, options, *as_for(target, plain, args, kwargs))
    traced = trace()
    if named:
        options = {name: x for name, x in options.items() if name not in _NAMING}
        ins, outs = _compat.given_shardings(traced)
        args, kwargs = _with_shardings(plain, ins[len(_compat.captured(traced)) :], args, kwargs)
        if any(x is not None for x in outs):
            there = [None if x is None else NamedSharding(mesh_on(target, x.mesh), x.spec) for x in outs]
            options = {**options, "out_shardings": traced.out_tree.unflatten(there)}
    args, kwargs = as_for(target, plain, args, kwargs)
    placed = [x for x in jax.tree.leaves((args, kwargs)) if is_spread(x)]
    foreign = any(found != x.sharding.device_set for found in _compat.device_sets(traced) for x in placed[:1])
    return Carried(without_devices(fun) if foreign else fun, options, args, kwargs)


def _with_shardings(plain: Any, shardings: Sequence[Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with the shardings that ``jax.jit`` was given, where they have none of their own."""

    def placed(i: int, x: Any, _: bool) -> Any:
        return x if shardings[i] is None or is_spread(x) else _compat.placed(x, shardings[i])

    return Placement(plain, lambda: False).dynamic(placed, args, kwargs)


def in_force(target: str | None) -> AbstractContextManager[None]:
    """A context in which the mesh in force, if there is one, is over devices of the target."""
    mesh = _compat.mesh_in_force()
    return nullcontext() if target is None or mesh is None else _compat.using_mesh(mesh_on(target, mesh))


def without_devices(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function to trace: ``fun``, with meshes of devices as meshes of the same axes without any."""

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        dynamic = [i for i, x in enumerate(leaves) if _compat.is_tracer(x)]
        trees: list[Any] = []

        def flat(*given: Any) -> list[Any]:
            known = dict(zip(dynamic, given, strict=True))
            inner, named = tree.unflatten([known.get(i, x) for i, x in enumerate(leaves)])
            found, out = jax.tree.flatten(fun(*inner, **named))
            trees.append(out)
            return found

        closed = jax.make_jaxpr(flat)(*(leaves[i] for i in dynamic))
        results = _compat.jaxpr_as_fun(_without_devices(closed, {}))(*(leaves[i] for i in dynamic))
        return trees[-1].unflatten(results)

    return run


def _without_devices(x: Any, known: dict[int, Any]) -> Any:
    """The parameter of an equation, or a program. ``known``: of programs by identity: JAX lowers a function that is
    called twice once."""
    change = functools.partial(_without_devices, known=known)
    if _compat.is_program(x):
        if id(x) not in known:
            eqns = (e.replace(params={k: change(v) for k, v in e.params.items()}) for e in x.eqns)
            known[id(x)] = _compat.with_equations(x, eqns)
        return known[id(x)]
    if isinstance(x, Mesh):
        return x.abstract_mesh
    if isinstance(x, NamedSharding):
        return x if _compat.is_abstract(x) else NamedSharding(x.mesh.abstract_mesh, x.spec, memory_kind=x.memory_kind)
    if type(x) in (list, tuple):
        return type(x)(map(change, x))
    if isinstance(x, dict):
        return {k: change(v) for k, v in x.items()}
    return x


__all__ = ["Carried", "carried", "in_force", "without_devices"]
