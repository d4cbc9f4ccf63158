"""A planned step as one flat program that may be cut, or the reason why it stays whole."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxtensile import _compat
from jaxtensile.ir.ir import Graph
from jaxtensile.ir.plan import Program
from jaxtensile.passes.order.early_updates import early_updates
from jaxtensile.passes.verify.check import check
from jaxtensile.program.cse import cse, rebuilt
from jaxtensile.program.trace import Traced, trace_jaxpr

FEWEST = 2
"""Ops of a program that can be cut."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """``traced``: the program with every rewrite of its plan in it. ``flat``: its flat arguments, captured ones first,
    as it was traced for. ``captured``: the values of these. ``out_tree``: of its results. ``device``: where committed
    arguments are; None if none is."""

    traced: Traced
    flat: tuple[Any, ...]
    captured: tuple[Any, ...]
    out_tree: Any
    device: Any

    @property
    def graph(self) -> Graph:
        return self.traced.graph

    @cached_property
    def given(self) -> dict[int, Any]:
        """By value of the program, the argument."""
        return dict(zip(self.traced.arguments, self.flat, strict=True))

    def there(self) -> AbstractContextManager[Any]:
        """Where arguments are committed to another device than the default one, what none of them says where to be is
        there too, as in one executable."""
        default = _compat.default_device()
        device = default if self.device is None else next(iter(self.device.device_set))
        return nullcontext() if device == default else jax.default_device(device)


def leaves(jitted: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The flat arguments of a call of ``jitted``, without static ones."""
    static, names = _compat.static_arguments(jitted)
    given = tuple(x for i, x in enumerate(args) if i not in static)
    return tuple(jax.tree.leaves((given, {k: x for k, x in kwargs.items() if k not in names})))


def step_of(jitted: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Step | str:
    """The program that ``jitted`` runs for these arguments, or why it cannot be cut."""
    traced = jitted.trace(*args, **kwargs)
    captured = _compat.captured(traced)
    if effect := _compat.effect_in_order(traced.jaxpr):
        return f"its effects keep their order within one executable: {effect}"
    known = trace_jaxpr(traced.jaxpr, _compat.donated_inputs(traced))
    whole = _why_whole(known, traced.jaxpr)
    if whole:
        return whole
    given = (*captured, *leaves(jitted, args, kwargs))
    if len(given) != len(known.arguments):
        return f"it takes {len(known.arguments)} arrays, and is called with {len(given)} leaves"
    places = {x.sharding for x in map(_as_lowered, given) if x is not None and x.sharding is not None}
    if any(not isinstance(place, SingleDeviceSharding) for place in places) or len(places) > 1:
        return f"its arguments are divided among devices: {', '.join(sorted(map(str, places)))}"
    device = next(iter(places)) if places else None
    return Step(traced=_in_order(cse(known)), flat=given, captured=captured, out_tree=traced.out_tree, device=device)


def _as_lowered(x: Any) -> Any:
    """An argument that says where it is; None for any other."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    return x if isinstance(x, jax.Array) and x.committed else None


def _why_whole(traced: Traced, closed: Any) -> str:
    graph = traced.graph
    if len(graph.ops) < FEWEST:
        return f"it has {len(graph.ops)} operations, and {FEWEST} are the fewest that can be cut"
    if any(v.space == "host" for v in graph.values):
        return "values of it wait in host memory, and are on their way over more than one executable"
    jaxpr, _ = _compat.open_jaxpr(closed)
    kinds = [
        v.aval for v in (*jaxpr.invars, *(v for e in traced.equations if e.eqn is not None for v in e.eqn.outvars))
    ]
    if any(type(aval) is not _compat.ShapedArray for aval in kinds):
        return "it has references or tokens, which no executable can hand on"
    if any(_compat.partition_spec(aval) is not None for aval in kinds):
        return "its types say how it is divided among devices"
    return ""


def _in_order(traced: Traced) -> Traced:
    """The program with updates behind their gradients, so that no group holds all gradients for a later one."""
    order = early_updates(traced.graph)
    if order is None:
        return traced
    new, number = rebuilt(traced, {}, order)
    old = {int(n): v for v, n in number.items()}
    check(
        traced.graph,
        Program(new.graph, tuple(order), tuple(old[n] for n in range(len(new.graph.values)))),
    )
    return new


__all__ = ["Step", "leaves", "step_of"]
