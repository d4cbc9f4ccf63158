"""What does a ladder ask for, rung by rung?

Invariant: all of it follows from the ladder, the resources and the rungs that may be used, so it is worked out once
for all leases that bring the same, as the jobs of one program do.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from msgspec import Struct

from jaxtensile.runtime.decide.leases import HOST, NOTHING, Charge
from jaxtensile.runtime.protocol.messages import Rung
from jaxtensile.units import Bytes

KEPT: Final = 64
"""Ladders of which what follows is kept; one of 256 rungs on 64 devices is some 200 kB. A bound on memory alone."""


class Demand(Struct, frozen=True, kw_only=True):
    """Of a job on its resources: its devices, then host memory."""

    ladder: tuple[Rung, ...]
    resources: tuple[str, ...]
    low: int
    """The guaranteed rung."""
    high: int
    """The highest rung the job wants."""
    needs: tuple[tuple[Charge, ...], ...]
    """What each rung needs of each resource."""
    slowdowns: tuple[float, ...]
    """Seconds per step on each rung ÷ those on the fastest."""
    best: tuple[int, ...]
    """For each rung the least of those above it on which the job is fastest; itself where there is none."""
    least: tuple[tuple[str, Bytes], ...]
    """What the guaranteed rung needs of each device, and of host memory if it needs any."""
    touched: frozenset[str]
    """Resources of which any of its rungs needs bytes."""


@lru_cache(KEPT)
def demand_of(ladder: tuple[Rung, ...], resources: tuple[str, ...], low: int, high: int) -> Demand:
    """The demand of a ladder of which the rungs from ``low`` to ``high`` may be used."""
    needs = needs_of(ladder, len(resources) - 1)
    fastest = min(r.seconds for r in ladder)
    rows = needs[low : high + 1]
    return Demand(
        ladder=ladder,
        resources=resources,
        low=low,
        high=high,
        needs=needs,
        slowdowns=tuple(r.seconds / fastest for r in ladder),
        best=tuple(
            min(range(rung + 1, high + 1), key=lambda r: ladder[r].seconds, default=rung) for rung in range(len(ladder))
        ),
        least=tuple((r, c.level) for r, c in zip(resources, needs[low], strict=True) if r != HOST or c.level),
        touched=frozenset(name for k, name in enumerate(resources) if any(row[k].level for row in rows)),
    )


def needs_of(ladder: tuple[Rung, ...], devices: int) -> tuple[tuple[Charge, ...], ...]:
    """What each rung needs of each device and of host memory."""
    return tuple((*(Charge(r.persistent, r.temp),) * devices, Charge(r.host) if r.host else NOTHING) for r in ladder)
