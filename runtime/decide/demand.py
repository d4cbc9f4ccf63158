"""The demand of a ladder, rung by rung.

Invariant: it depends only on the ladder, the resources and the usable rungs, so it is computed once for all leases with
the same, such as jobs of one program.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from msgspec import Struct

from jaxtensile.runtime.decide.leases import HOST, NOTHING, Charge
from jaxtensile.runtime.protocol.messages import Rung
from jaxtensile.units import Bytes

KEPT: Final = 64
"""Ladders whose demands are cached; 256 rungs on 64 devices take some 200 kB. Only bounds memory."""


class Demand(Struct, frozen=True, kw_only=True):
    """A job's demand on its resources: its devices, then host memory."""

    ladder: tuple[Rung, ...]
    resources: tuple[str, ...]
    low: int
    """The guaranteed rung."""
    high: int
    """The highest rung the job wants."""
    needs: tuple[tuple[Charge, ...], ...]
    """The charge of each rung on each resource."""
    slowdowns: tuple[float, ...]
    """Seconds per step on each rung ÷ those on the fastest."""
    best: tuple[int, ...]
    """For each rung, the lowest of the fastest rungs above it; itself if none is above."""
    least: tuple[tuple[str, Bytes], ...]
    """Bytes of the guaranteed rung on each device, and on the host if it needs any."""
    touched: frozenset[str]
    """Resources that any usable rung needs."""


@lru_cache(KEPT)
def demand_of(ladder: tuple[Rung, ...], resources: tuple[str, ...], low: int, high: int) -> Demand:
    """The demand of a ladder with usable rungs from ``low`` to ``high``."""
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
    """The charge of each rung on each device, then on the host."""
    return tuple((*(Charge(r.persistent, r.temp),) * devices, Charge(r.host) if r.host else NOTHING) for r in ladder)
