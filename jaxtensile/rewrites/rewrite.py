"""A change to a program as a value: where it applies, how it is made, and how it is described.

To add one: a file here with its value, and its place in ``search.registry`` and a switch. Search, recipes and reports
use this interface alone.
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
"""Share of the temporaries from which a value is worth a change. A guess."""


class Start(Protocol):
    """The program of a request to change."""

    @property
    def request(self) -> Any: ...
    @property
    def base(self) -> Traced: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewrite:
    """A kind of change.

    ``key``: its name in recipes. ``title``: its name for users when a fault leaves it out. ``find``: ways to make the
    change, each as plain data of type ``form`` (``sites``: hashable, known to msgspec). ``apply``: the changed program,
    None if nothing changes. ``describe``: a line of the report, or empty. ``extra``: seconds of a step that its ops do
    not show. ``sharded``: applies to programs that XLA divides among devices too. ``last``: tried once nothing else
    fits. ``in_bodies``: saves bytes in bodies of loops and branches, which the model knows least. ``reorders``: changes
    only the order of ops. ``same_work``: changes only where values lie, which the model's seconds do not know.
    """

    key: str
    title: str
    form: Any
    find: Callable[[Start], Iterable[Any]]
    apply: Callable[[Start, Any], Traced | None]
    describe: Callable[[Any], str] = lambda _: ""
    extra: Callable[[Start, Traced, Seconds], Seconds] = lambda *_: 0.0
    sharded: bool = True
    last: bool = False
    in_bodies: bool = False
    reorders: bool = False
    same_work: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """A rewrite that was made, and where."""

    rewrite: Rewrite
    sites: Any


def large(traced: Traced) -> Bytes:
    """Bytes from which a value of the program is worth a change."""
    return max(int(LARGE * live_ranges(traced.graph).temp), 1)


def traced_for(request: Any, jaxpr: Any) -> Traced:
    """A program of the request, traced as it is planned."""
    return on_device(request, trace_jaxpr(jaxpr, request.donated, keep_unused=request.keep_unused))


def on_device(request: Any, traced: Traced) -> Traced:
    """``traced`` with the sizes and the workspaces that it has on the request's device."""
    traced = traced if request.local is None else request.local(traced)
    graph = compiler_of(request.device).with_workspaces(traced.graph)
    return traced if graph is traced.graph else replace(traced, graph=graph)


def changed(start: Start, change: Callable[[], Any | None]) -> Traced | None:
    """The program of the closed jaxpr that ``change`` makes; None if it makes none.

    Also None if an operation does not fit the types of a mesh with explicit axes.
    """
    try:
        jaxpr = change()
    except _compat.ShardingTypeError:
        return None
    return None if jaxpr is None else traced_for(start.request, jaxpr)
