"""Recent events, for people.

Invariant: entries are numbered without gaps. The last ``KEPT`` are stored, so a frequent reader misses none, and others
learn how many they missed. Entries are short, whatever a job said.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from msgspec import Struct, structs

from jaxtensile.units import Bytes, Seconds

KEPT: Final = 4096
"""Entries kept: a log reads ten times a second (``server._LOG_EVERY``) and misses none below 40,000 a second. About a
megabyte."""
SHORT: Final = 160
"""Letters of a detail, a line or two of a terminal: bounds what is kept of clients' words."""


class Entry(Struct, frozen=True):
    """One event of a lease, or of all."""

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
    """The last entries, and the ``total`` ever added."""

    __slots__ = ("entries", "total")

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque(maxlen=KEPT)
        self.total = 0

    def add(self, entry: Entry) -> None:
        """Add an entry; long details are cut."""
        if len(entry.detail) > SHORT:
            entry = structs.replace(entry, detail=f"{entry.detail[: SHORT - 4]} ...")
        self.entries.append(entry)
        self.total += 1

    def since(self, seen: int) -> tuple[int, list[Entry]]:
        """How many entries after the first ``seen`` are lost, and the rest."""
        new = self.total - seen
        if not new:
            return 0, []
        kept = min(new, len(self.entries))
        return new - kept, [self.entries[k] for k in range(len(self.entries) - kept, len(self.entries))]
