"""The coordinator of a process whose jobs are threads: no socket, nothing to start.

Leases need no beats, since jobs share the coordinator's process, and no job is ended for keeping bytes. Devices are
*gated*: jobs take turns with their steps.

Invariant: a job hears messages in the order of their decisions, and no lock is held, so it may answer from within.
Ctrl-C splits no decision (``runtime.uninterrupted``). The thread that reports an event carries out what follows. One
more thread waits for times: the end of a minimum hold, or a deadline.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from jaxtensile.runtime.client.client import Client
from jaxtensile.runtime.client.gate import Gate
from jaxtensile.runtime.client.uninterrupted import uninterrupted
from jaxtensile.runtime.coordinate.coordinator import Coordinator
from jaxtensile.runtime.decide.events import (
    CapacityChanged,
    Connected,
    Disconnected,
    Event,
    Received,
    Restarted,
    Send,
    Settings,
    Tick,
)
from jaxtensile.runtime.decide.journal import Replayed
from jaxtensile.runtime.decide.leases import HOST, Process
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.protocol.messages import Reply, Request, Snapshot
from jaxtensile.units import Seconds

LOCAL: Final = Settings(min_hold=1.0)
"""A short minimum hold: switching compiled plans in one process costs no more than the next call."""


class LocalCoordinator:
    """The coordinator of this process. A ``Client`` is made with its ``link``."""

    def __init__(
        self,
        capacities: Mapping[str, Capacity],
        settings: Settings | None = None,
        clock: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._changed = threading.Condition(threading.Lock())
        self._lines: dict[int, _LocalLine] = {}
        self._last = 0
        self._alarm: threading.Thread | None = None
        self._alarm_at = math.inf
        self._gates: dict[str, Gate] = {}
        self._batch = threading.local()
        self._process = Process(os.getpid(), 0)
        settings = replace(settings or LOCAL, lease_ttl=math.inf, on_overdue="wait")
        self._core = Coordinator(_gated(capacities), settings)
        self._core.handle(Restarted(Replayed()), clock())

    def link(self, client: Client) -> LocalLink:
        """A connection for one job."""
        return uninterrupted(self._linked, client)

    def _linked(self, client: Client) -> LocalLink:
        with self._changed:
            self._last += 1
            line = self._lines[self._last] = _LocalLine(self, self._last, client)
        with self.at_once():  # with what the client says first: one decision
            self.tell(Connected(line.number, self._process))
            client.connected(line)
        return LocalLink(line)

    def gate(self, device: str) -> Gate:
        """The gate at which the jobs of a device take turns."""
        return self._gates.setdefault(device, Gate())

    def resize(self, capacities: Mapping[str, Capacity]) -> None:
        """Change the capacities. Jobs lose bytes only by shrinking in their own time."""
        self.tell(CapacityChanged(_gated(capacities)))

    def status(self) -> Snapshot:
        """Devices and all leases, as they are now."""
        return uninterrupted(self._status)

    def _status(self) -> Snapshot:
        with self._changed:
            found = self._page(0)
            while found.more:
                next_ = self._page(found.leases[-1].lease)
                found = Snapshot(
                    epoch=next_.epoch,
                    phase=next_.phase,
                    policy=next_.policy,
                    devices=next_.devices,
                    leases=found.leases + next_.leases,
                    more=next_.more,
                    waiting=next_.waiting,
                    counters=next_.counters,
                )
            return found

    def tell(self, *events: Event) -> None:
        """Handle events: decide, and send the decisions."""
        batch: list[Event] | None = getattr(self._batch, "events", None)
        if batch is not None:
            batch.extend(events)
        else:
            uninterrupted(self._tell, events)

    def _tell(self, events: Sequence[Event]) -> None:
        with self._changed:
            spoken = self._decide(events)
        for line in spoken:
            self._deliver(line)

    @contextmanager
    def at_once(self) -> Generator[None]:
        """Handle this thread's events inside the ``with`` as one: nothing is given to others in between."""
        self._batch.events = events = list[Event]()
        try:
            yield
        finally:
            del self._batch.events
            self.tell(*events)

    def _decide(self, events: Sequence[Event]) -> list[_LocalLine]:
        """The lines with something to send that nobody is sending on; call it under the lock."""
        spoken: list[_LocalLine] = []
        for command in self._core.handle_all(events, self._clock()):
            if isinstance(command, Send) and (line := self._lines.get(command.connection)) is not None:
                line.inbox.append(command.message)
                if not line.delivering:
                    line.delivering = True
                    spoken.append(line)
        self._set_alarm()
        return spoken

    def _deliver(self, line: _LocalLine) -> None:
        """Send all messages of a line, as its only sender. Then end it, if that is wanted."""
        spoken: list[_LocalLine] = []
        while True:
            with self._changed:
                if not line.inbox:
                    line.delivering = False
                    ends = line.closing and self._lines.pop(line.number, None) is not None
                    if ends:
                        spoken = self._decide((Disconnected(line.number),))
                    break
                message = line.inbox.popleft()
            line.client.heard(message)
        if ends:
            line.client.disconnected("it was closed")
        for other in spoken:
            self._deliver(other)

    def hang_up(self, line: _LocalLine) -> None:
        """End a connection, after all that was sent on it. A lease that was not released on it is quarantined."""
        uninterrupted(self._hang_up, line)

    def _hang_up(self, line: _LocalLine) -> None:
        with self._changed:
            line.closing = True
            if line.delivering:
                return  # whoever is at it ends it
            line.delivering = True
        self._deliver(line)

    def _page(self, after: int) -> Snapshot:
        return self._core.snapshot(after)

    # Time.

    def _set_alarm(self) -> None:
        before, wake = self._alarm_at, self._core.wake
        self._alarm_at = math.inf if wake is None else wake
        if self._alarm_at == math.inf:
            return
        if self._alarm is None:
            self._alarm = threading.Thread(target=self._ring, name="jaxtensile-coordinator", daemon=True)
            self._alarm.start()
        elif self._alarm_at < before:
            self._changed.notify_all()  # else it wakes up early enough, and looks again

    def _ring(self) -> None:
        while True:
            with self._changed:
                while (left := self._alarm_at - self._clock()) > 0:
                    if left == math.inf:
                        self._alarm = None
                        return
                    self._changed.wait(left)
            self.tell(Tick())


class _LocalLine:
    __slots__ = ("_coordinator", "client", "closing", "delivering", "inbox", "number")

    def __init__(self, coordinator: LocalCoordinator, number: int, client: Client) -> None:
        self._coordinator, self.number, self.client = coordinator, number, client
        self.inbox: deque[Reply] = deque()
        self.delivering = self.closing = False

    def send(self, requests: Sequence[Request]) -> None:
        self._coordinator.tell(*(Received(self.number, request) for request in requests))

    def close(self) -> None:
        self._coordinator.hang_up(self)


class LocalLink:
    """The link of a client in the coordinator's process."""

    __slots__ = ("_line",)

    def __init__(self, line: _LocalLine) -> None:
        self._line = line

    def close(self) -> None:
        """End the connection."""
        self._line.close()


def _gated(capacities: Mapping[str, Capacity]) -> dict[str, Capacity]:
    return {name: replace(c, gated=name != HOST) for name, c in capacities.items()}
