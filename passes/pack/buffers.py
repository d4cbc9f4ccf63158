"""Buffers and packings.

Invariant: a buffer is live in ``[lower, upper)`` and takes ``[offset, offset + size)`` bytes. A packing is one offset
per buffer, in order; its height is the highest end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtensile.units import Bytes


@dataclass(frozen=True, slots=True)
class Buffer:
    """``size`` bytes during ``[lower, upper)`` (steps or any clock) at a multiple of ``alignment`` bytes.

    ``ValueError`` for an empty lifetime, a negative size or an alignment below one.
    """

    lower: int
    upper: int
    size: Bytes
    alignment: Bytes = 1

    def __post_init__(self) -> None:
        if self.upper <= self.lower:
            raise ValueError(f"a buffer lives in [{self.lower}, {self.upper}): that is empty")
        if self.size < 0 or self.alignment < 1:
            raise ValueError(f"a buffer has size {self.size} and alignment {self.alignment}: at least 0 and 1")


@dataclass(frozen=True, slots=True)
class Packing:
    """``offsets[i]``: start of buffer ``i``, in bytes. ``height``: bytes of the arena."""

    offsets: tuple[Bytes, ...]
    height: Bytes


def packing(buffers: Sequence[Buffer], offsets: Sequence[Bytes]) -> Packing:
    """The offsets with their height."""
    ends = (o + b.size for o, b in zip(offsets, buffers, strict=True))
    return Packing(tuple(offsets), max(ends, default=0))


def aligned(offset: Bytes, alignment: Bytes) -> Bytes:
    """The least multiple of ``alignment`` from ``offset`` on."""
    return -(-offset // alignment) * alignment


def max_load(buffers: Sequence[Buffer]) -> Bytes:
    """Most bytes live at once: a lower bound of any packing. ``O(n log n)``."""
    events = [(b.lower, b.size) for b in buffers] + [(b.upper, -b.size) for b in buffers]
    live = most = 0
    for _, change in sorted(events):  # at one time the ends, which are negative, come first
        live += change
        most = max(most, live)
    return most


@dataclass(frozen=True, slots=True)
class Grid:
    """Lifetimes in sections: nothing begins or ends between ``times[k]`` and ``times[k + 1]``.

    Buffer ``i`` covers sections ``first[i]`` up to, not including, ``last[i]``.
    """

    times: list[int]
    first: list[int]
    last: list[int]

    @property
    def sections(self) -> int:
        """Number of sections."""
        return max(0, len(self.times) - 1)


def grid(buffers: Sequence[Buffer]) -> Grid:
    """The sections of the buffers' lifetimes."""
    times = sorted({t for b in buffers for t in (b.lower, b.upper)})
    at = {t: k for k, t in enumerate(times)}
    return Grid(times, [at[b.lower] for b in buffers], [at[b.upper] for b in buffers])
