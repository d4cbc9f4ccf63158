"""A compiled step in groups: cut by the model, compiled, and measured against the bytes that it may take.

Only a measured number flows back: groups that take more than they may are cut anew for as much less, at most twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtensile.devices.profiles import DeviceProfile
from jaxtensile.groups.pieces import Pieces, compiled
from jaxtensile.groups.step import Step, step_of
from jaxtensile.passes.groups.divide import cut
from jaxtensile.passes.groups.form import form, made_again
from jaxtensile.passes.groups.segments import Segments, segments
from jaxtensile.passes.lifetimes.fusion import fuse
from jaxtensile.passes.seconds.cost import COPY_SHARE, op_costs
from jaxtensile.passes.verify.groups_check import check_groups
from jaxtensile.units import Bytes, Seconds, format_bytes, format_seconds
from jaxtensile.xla.compile import Options
from jaxtensile.xla.compilers import compiler_of

ROUNDS = 3
"""Times that a step is cut and compiled at most. A guess: each takes a compile of the whole step."""
LAUNCH: Seconds = 1e-4
"""Seconds to start one more executable and wait for its end. 8 executables of 18 arrays each took 0.46 ms more than one
on 2 cores (CPU, jax 0.12.0.1): 65 us each."""


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """``pieces``: None if the step stays whole. ``said``: how it was cut, or why it was not, for the report."""

    pieces: Pieces | None
    said: str


def grouped(
    jitted: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    device: DeviceProfile,
    options: Options,
    count: int,
    needs: Bytes,
    most: Bytes,
) -> Grouped:
    """The program that ``jitted`` runs, in at most ``count`` groups.

    ``needs``: device bytes of the whole step, as XLA allocates it.
    ``most``: bytes that the groups may take, at least ``needs``. ``options``: those of the step.
    """
    step = step_of(jitted, args, kwargs)
    if isinstance(step, str):
        return Grouped(pieces=None, said=f"it runs whole, not in {count} groups: {step}")
    table, again = table_of(step, device)
    aim = table.whole + most - needs
    least: Bytes | None = None
    for _ in range(ROUNDS):
        cuts = cut(table, count, aim)
        if not cuts:
            break
        pieces = compiled_at(step, again, cuts, options, count)
        if pieces.device <= most:
            return Grouped(pieces=pieces, said=_said(table, cuts, pieces))
        least = pieces.device if least is None else min(least, pieces.device)
        aim -= pieces.device - most
    why = f"cut, it takes {format_bytes(least)}" if least is not None else "no cut of it is predicted to fit"
    return Grouped(
        pieces=None,
        said=f"it runs whole, not in {count} groups: {why}, and may take {format_bytes(most)}; give it more bytes",
    )


def table_of(step: Step, device: DeviceProfile) -> tuple[Segments, list[bool]]:
    """Where a step may be cut and what that costs, and the ops that every group makes for itself."""
    graph = step.graph
    kernels = fuse(graph, by=compiler_of(device).fuser)
    again = made_again(graph, kernels)
    seconds = op_costs(graph, device).seconds
    bandwidth = device.reached("memory_bandwidth", COPY_SHARE)
    return segments(graph, kernels, seconds, again, launch=LAUNCH, bandwidth=bandwidth), again


def compiled_at(step: Step, again: list[bool], cuts: tuple[int, ...], options: Options, count: int) -> Pieces:
    """The groups between ``cuts``, checked and compiled."""
    groups = form(step.graph, again, cuts)
    check_groups(step.graph, groups, count)
    return compiled(step, groups, options)


def _said(table: Segments, cuts: tuple[int, ...], pieces: Pieces) -> str:
    longest = max(float(table.seconds[pair]) for pair in table.pairs(cuts))
    whole = float(table.seconds[0, -1])
    return (
        f"in {len(pieces.pieces)} groups that take {format_bytes(pieces.device)}; the longest is predicted to be "
        f"{format_seconds(longest)} of {format_seconds(whole)}, and {format_bytes(pieces.held)} stay between them"
    )


__all__ = ["Grouped", "compiled_at", "grouped", "table_of"]
