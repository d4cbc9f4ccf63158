"""A request over several devices, planned as the program of one device.

A program made of ``shard_map``s becomes one of a single device (`spmd.in_shards`). Other programs stay as they are,
with sizes of one device (`spmd.per_device`), which are found only where a plan is needed. If Shardy cannot say the
sizes, the bytes of all devices are divided by one ratio, that of the compiled plain program.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Final

from jaxtensile.program.trace import Traced, trace_jaxpr
from jaxtensile.search.request import Evaluate, Request
from jaxtensile.spmd.in_shards import InShards, NotInShardsError, in_shards
from jaxtensile.spmd.local_shapes import Sharded, divided, local_shapes
from jaxtensile.spmd.per_device import PerDevice
from jaxtensile.switches import on
from jaxtensile.xla.compile import Options

SHARDS: Final = "planning inside of shard_map"
SIZES: Final = "sizes of one device"


def of_one_device(request: Request, where: Sharded) -> Request:
    """``request`` as it is planned; ``where``: its program over several devices."""
    request = replace(request, divided=divided(where))
    program = trace_jaxpr(request.jaxpr, request.donated, keep_unused=True)
    notes: tuple[str, ...] = ()
    found = request.faults.spared(SHARDS, lambda: _entered(program, where), _nothing)
    if isinstance(found, InShards):
        return _within(request, found)
    if found:
        notes = (f"shard_maps are planned around, not inside: {found}",)

    @cache
    def sizes() -> tuple[PerDevice | None, tuple[str, ...]]:
        shapes = request.faults.spared(
            SIZES, lambda: local_shapes(program, where) if on("local_sizes") else None, _nothing
        )
        if shapes is None or shapes.guessed:
            said = f" ({shapes.guessed})" if shapes is not None and shapes.guessed else ""
            return None, (f"bytes of single values are those of all devices, divided by one ratio{said}",)
        return PerDevice.of(program, shapes, request.device.backend), ()

    return replace(request, sizes=sizes, notes=notes)


def _nothing() -> None:
    return None


def _entered(program: Traced, where: Sharded) -> InShards | str | None:
    """The program inside of its ``shard_map``s; else why not, None if it has none."""
    try:
        return in_shards(program, where) if on("in_shards") else None
    except NotInShardsError as error:
        return str(error)


def _within(request: Request, shards: InShards) -> Request:
    """``request`` with the program of one device."""
    make = request.make

    def around(evaluate: Evaluate | None, options: Options) -> object:
        return make(None if evaluate is None else shards.around(evaluate), options)

    return replace(
        request, jaxpr=shards.closed, make=around, manual=True, within=shards.within, divided=(1,) * len(shards.inputs)
    )


__all__ = ["of_one_device"]
