"""A change to a program as a value: where it can be made, the program with it, and what is said of it.

To add one: a file here with its value, and its place in ``search.registry``. Search, recipes, reports and the checker
know it through this interface alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from jaxtensile import _compat
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.program.trace import Traced, trace_jaxpr
from jaxtensile.units import Bytes, Seconds
from jaxtensile.xla.compilers import compiler_of

LARGE: Final = 1 / 16
"""From this share of the temporaries on values are worth a change. A guess."""


class Start(Protocol):
    """What is changed: a program of a request."""

    @property
    def request(self) -> Any: ...
    @property
    def base(self) -> Traced: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewrite:
    """``key``: what recipes call it; ``title``: what users are told where it is left out by a fault.

    ``find``: the ways to make the change, each as plain data that says where (``sites``, of type ``form``: hashable,
    and known to msgspec); ``apply``: the program with it, None where it comes to nothing; ``describe``: a line of the
    report, empty for none; ``extra``: seconds of a step that its ops do not show. ``sharded``: also of programs on
    several devices; ``last``: asked for once nothing else fits; ``in_bodies``: what it saves is in bodies of loops and
    branches, which the model knows least; ``reorders``: it changes nothing but the order of ops.
    """

    key: str
    title: str
    form: Any
    find: Callable[[Start], Iterable[Any]]
    apply: Callable[[Start, Any], Traced | None]
    describe: Callable[[Any], str] = lambda _: ""
    extra: Callable[[Start, Traced, Seconds], Seconds] = lambda *_: 0.0
    sharded: bool = False
    last: bool = False
    in_bodies: bool = False
    reorders: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """A rewrite that was made, and where."""

    rewrite: Rewrite
    sites: Any


def large(traced: Traced) -> Bytes:
    """Bytes from which on a value of the program is worth a change."""
    return max(int(LARGE * live_ranges(traced.graph).temp), 1)


def traced_for(request: Any, jaxpr: Any) -> Traced:
    """A program of the request as it is planned."""
    return on_device(request, trace_jaxpr(jaxpr, request.donated, keep_unused=request.keep_unused))


def on_device(request: Any, traced: Traced) -> Traced:
    """``traced`` with what its ops need by themselves on the request's device."""
    graph = compiler_of(request.device).with_workspaces(traced.graph)
    return traced if graph is traced.graph else replace(traced, graph=graph)


def changed(start: Start, change: Callable[[], Any | None]) -> Traced | None:
    """The program of the closed jaxpr that ``change`` makes; None where it makes none, and on meshes with explicit axes
    where it takes an operation that their types do not allow."""
    try:
        jaxpr = change()
    except _compat.ShardingTypeError:
        return None
    return None if jaxpr is None else traced_for(start.request, jaxpr)
