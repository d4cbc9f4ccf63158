"""What happened lately, for people?

Invariant: entries are numbered without gaps; the last ``KEPT`` are there, so that a log that looks often enough misses
none, and says how many it missed. Each is short, whatever a job has said that it tells of.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from msgspec import Struct, structs

from jaxtensile.units import Bytes, Seconds

KEPT: Final = 4096
"""Entries that are kept: a log looks ten times a second (``server._LOG_EVERY``), so none is missed below 40,000 a
second. About a megabyte."""
SHORT: Final = 160
"""Letters of a detail: a line or two of a terminal. Without a bound what clients said was kept whole."""


class Entry(Struct, frozen=True):
    """One thing that happened to a lease, or to all."""

    at: Seconds
    what: str
    job: str = ""
    lease: int = 0
    pid: int = 0
    rung: int = -1
    detail: str = ""
    waited: Seconds = 0.0
    step: int = 0
    peak: Bytes = 0


class Chronicle:
    """The last entries, and how many there ever were."""

    __slots__ = ("entries", "total")

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque(maxlen=KEPT)
        self.total = 0

    def add(self, entry: Entry) -> None:
        """Something has happened."""
        if len(entry.detail) > SHORT:
            entry = structs.replace(entry, detail=f"{entry.detail[: SHORT - 4]} ...")
        self.entries.append(entry)
        self.total += 1

    def since(self, seen: int) -> tuple[int, list[Entry]]:
        """How many entries after the first ``seen`` are gone already, and the others."""
        new = self.total - seen
        if not new:
            return 0, []
        kept = min(new, len(self.entries))
        return new - kept, [self.entries[k] for k in range(len(self.entries) - kept, len(self.entries))]
