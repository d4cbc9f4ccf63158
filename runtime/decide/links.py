"""The seconds of steps that run at once on a device: its compute and its link are shared.

A step that is alone computes for a part of its seconds, and copies into the device and out of it for others. Of steps
that run at once these parts add up, each kind by itself. Where a sum is above 1, all take so many times as long: the
jobs of a device share its link whether or not each alone hides its copies.

Where jobs take turns, a step is alone on its device, and its copies take what they take alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple

from jaxtensile.runtime.protocol.messages import Rung

KEPT: Final = 1 << 10
"""Rungs whose loads are remembered, as ``policy.KEPT`` for claims. Only bounds memory."""


class Loads(NamedTuple):
    """The parts of a step's seconds in which it computes, copies into the device, and out of it."""

    compute: float = 1.0
    into: float = 0.0
    out: float = 0.0


ALONE: Final = Loads()
"""Of a step without copies."""


@lru_cache(KEPT)
def loads_of(rung: Rung) -> Loads:
    """The loads of a rung's steps."""
    seconds = rung.seconds
    return Loads(max(seconds - rung.wait, 0.0) / seconds, rung.into / seconds, rung.out / seconds)


def copies(ladder: Iterable[Rung]) -> bool:
    """Whether a step on any rung copies."""
    return any(r.into or r.out for r in ladder)


def added(loads: Iterable[Loads]) -> Loads:
    """The loads of all together."""
    compute = into = out = 0.0
    for each in loads:
        compute, into, out = compute + each.compute, into + each.into, out + each.out
    return Loads(compute, into, out)


def stretch(loads: Loads) -> float:
    """How many times as long steps take that load a device so, together."""
    return max(1.0, *loads)
