"""Devices whose compute and links are shared by the steps that run.

Each of a device's three resources, compute and the two ways of its link, is shared equally by the steps that want it
just then: a step that wants ``s`` seconds of it, beside n − 1 others, gets them in n × ``s``. A step computes and
copies at once; it ends when all is done and the seconds have passed in which it does neither.

Invariant: alone, a step takes its rung's ``seconds``.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final

from jaxtensile.runtime.protocol.messages import Rung
from jaxtensile.runtime.simulate.clock import Clock
from jaxtensile.units import Seconds

LEAST: Final[Seconds] = 1e-12
"""Seconds of work that count as none: the rounding of sums of times."""


class Run:
    """A step or a copy that runs, until ``then()``."""

    __slots__ = ("ended", "left", "rest", "then")

    def __init__(self, then: Callable[[], object], rest: Seconds) -> None:
        self.then, self.rest = then, rest
        self.left = 0
        """Resources on which it is not done."""
        self.ended = False
        """It is done, or its process is dead."""


class Shared:
    """One resource: equal shares for all who use it."""

    __slots__ = ("_at", "_clock", "_count", "_done", "_queue", "_version", "busy")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queue: list[tuple[float, int, Run]] = []
        """By the work per user at which each is done."""
        self._done = 0.0
        """Work done per user."""
        self._at: Seconds = 0.0
        self._count = self._version = 0
        self.busy: Seconds = 0.0
        """In which anybody used it."""

    @property
    def users(self) -> int:
        """How many use it."""
        return len(self._queue)

    def join(self, run: Run, seconds: Seconds) -> None:
        """A run wants so many seconds of it."""
        self._advance()
        self._count += 1
        heappush(self._queue, (self._done + seconds, self._count, run))
        self._plan()

    def leave(self, run: Run) -> None:
        """A run's process is dead."""
        self._advance()
        self._queue = [entry for entry in self._queue if entry[2] is not run]
        heapify(self._queue)
        self._plan()

    def _advance(self) -> None:
        now, users = self._clock.now, len(self._queue)
        if users:
            self._done += (now - self._at) / users
            self.busy += now - self._at
        self._at = now

    def _plan(self) -> None:
        self._version += 1
        if self._queue:
            left = max(self._queue[0][0] - self._done, 0.0) * len(self._queue)
            self._clock.at(self._clock.now + left, self._over, self._version)

    def _over(self, version: int) -> None:
        if version != self._version:
            self._clock.events -= 1  # others have joined or left since this was planned
            return
        self._advance()
        queue, least = self._queue, self._queue[0][0] + LEAST
        done: list[Run] = []
        while queue and queue[0][0] <= least:
            done.append(heappop(queue)[2])
        self._plan()
        for run in done:
            run.left -= 1
            if not run.left:
                if run.rest > LEAST:
                    self._clock.at(self._clock.now + run.rest, end, run)
                else:
                    end(run)


def end(run: Run) -> None:
    """A run is done."""
    if not run.ended:
        run.ended = True
        run.then()


class Device:
    """Compute, and the ways of the link into the device and out of it. Devices may share a link."""

    __slots__ = ("_clock", "compute", "into", "name", "out")

    def __init__(self, name: str, clock: Clock, link: tuple[Shared, Shared] | None = None) -> None:
        self.name, self._clock = name, clock
        self.compute = Shared(clock)
        self.into, self.out = link or (Shared(clock), Shared(clock))


def start(
    clock: Clock, devices: list[Device], rung: Rung, part: float, more: Seconds, then: Callable[[], object]
) -> Run:
    """Run ``part`` of a step on devices, and ``more`` seconds of compute."""
    compute = (rung.seconds - rung.wait) * part + more
    into, out = rung.into * part, rung.out * part
    run = Run(then, rung.seconds * part + more - max(compute, into, out))
    wanted = [(d.compute, compute) for d in devices]
    if into > LEAST:
        wanted += [(d.into, into) for d in devices]
    if out > LEAST:
        wanted += [(d.out, out) for d in devices]
    run.left = len(wanted)
    for resource, seconds in wanted:
        resource.join(run, seconds)
    return run


def stop(devices: list[Device], run: Run) -> None:
    """A run ends with its process."""
    run.ended = True
    for device in devices:
        for resource in (device.compute, device.into, device.out):
            resource.leave(run)
