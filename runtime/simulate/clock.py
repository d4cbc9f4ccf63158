"""A virtual clock: what is to happen, in the order of time.

Invariant: of equal times, what was planned first happens first, so a simulation is the same each time.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from jaxtensile.units import Seconds


class Clock:
    """The time, and what is planned."""

    __slots__ = ("_planned", "_planned_ever", "events", "now")

    def __init__(self) -> None:
        self.now: Seconds = 0.0
        self.events = 0
        """How many things have happened."""
        self._planned: list[tuple[Seconds, int, Callable[..., object], tuple[Any, ...]]] = []
        self._planned_ever = 0

    def at(self, when: Seconds, do: Callable[..., object], *about: Any) -> None:
        """Plan ``do(*about)``; at once if that time is over."""
        self._planned_ever += 1
        heappush(self._planned, (when, self._planned_ever, do, about))

    def run(self, until: Seconds, after: Callable[[], object] | None = None) -> None:
        """Let all happen that is planned up to a time. ``after``: called after each."""
        planned = self._planned
        while planned and planned[0][0] <= until:
            when, _, do, about = heappop(planned)
            if when > self.now:
                self.now = when
            self.events += 1
            do(*about)
            if after is not None:
                after()

    @property
    def idle(self) -> bool:
        """Whether nothing is planned."""
        return not self._planned
