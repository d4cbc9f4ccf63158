"""A simulated machine: devices, a coordinator in earnest, and the processes of its jobs.

Messages take ``MESSAGE`` seconds each way, a dead process is seen after ``REAPED``. Every word to the coordinator is an
event of ``Coordinator.handle``, and its commands are carried out in their order.

Invariant: no process has more bytes on a device than the device; who would is named in ``OvercommittedError``, or, on a
machine where nobody arbitrates, ends with its job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Final, Protocol

from jaxtensile.errors import CoordinatorError
from jaxtensile.runtime.coordinate.coordinator import Coordinator
from jaxtensile.runtime.decide.events import (
    Close,
    Disconnected,
    Event,
    ProcessDied,
    Restarted,
    Send,
    Settings,
    Terminate,
    Tick,
    Watch,
)
from jaxtensile.runtime.decide.journal import Replayed
from jaxtensile.runtime.decide.leases import HOST, Process
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.protocol.messages import Reply
from jaxtensile.runtime.simulate.clock import Clock
from jaxtensile.runtime.simulate.gates import SimulatedGate
from jaxtensile.runtime.simulate.sharing import Device, Shared
from jaxtensile.units import Bytes, Seconds, format_bytes

if TYPE_CHECKING:
    from jaxtensile.runtime.simulate.trace import Trace

MESSAGE: Final[Seconds] = 5e-5
"""Seconds of a message, each way: half of a round trip of one client (``benchmarks/coordinator/daemon.md``)."""
REAPED: Final[Seconds] = 2e-3
"""Seconds until the coordinator has seen that a process is dead (``benchmarks/coordinator/daemon.md``)."""
TRAP: Final[Seconds] = 1e-9
"""Seconds after a wake-up time at which the coordinator is told, so that the time is over for certain."""


class OvercommittedError(CoordinatorError):
    """More bytes are used than a device has."""


class Speaker(Protocol):
    """The process at the other end of a connection."""

    process: Process

    def hear(self, message: Reply) -> None: ...

    def disconnected(self) -> None: ...

    def die(self, why: str) -> None: ...


class Machine:
    """One machine of a simulation.

    ``threads``: its jobs are threads of one process, and have turns at gates; else each is a process. ``physical``: the
    bytes there really are, if not those that the coordinator knows of; then who finds none left ends.
    """

    def __init__(
        self,
        name: str,
        capacities: Mapping[str, Capacity],
        settings: Settings,
        clock: Clock,
        *,
        threads: bool = False,
        shared_link: bool = False,
        physical: Mapping[str, Bytes] | None = None,
        trace: Trace | None = None,
    ) -> None:
        settings = replace(settings, lease_ttl=inf) if threads else settings  # as ``client.local``: nobody is silent
        self.name, self.clock, self.settings, self.threads, self.trace = name, clock, settings, threads, trace
        self.capacities = {HOST: Capacity(capacity=0), **capacities}
        link = (Shared(clock), Shared(clock)) if shared_link else None
        self.devices = {d: Device(d, clock, link) for d in capacities if d != HOST}
        self.gates = {d: SimulatedGate(clock) for d in self.devices} if threads else {}
        self.coordinator = Coordinator(self.capacities, settings)
        self.used = dict.fromkeys(self.devices, 0)
        self.most = dict.fromkeys(self.devices, 0)
        self.ends = physical is not None
        self.physical = {d: c.limit for d, c in self.capacities.items()} if physical is None else dict(physical)
        self.speakers: dict[int, Speaker] = {}
        """By connection."""
        self.processes: dict[Process, list[Speaker]] = {}
        self.changed = False
        """A job was admitted or has left since that was last asked."""
        self._watched: set[Process] = set()
        self._connections = 0
        self._wake: Seconds | None = None
        self._said: list[Event] = []
        self._said_at: Seconds | None = None
        self.hear(Restarted(Replayed()))

    def connected(self, speaker: Speaker) -> int:
        """A number for one more connection."""
        self._connections += 1
        self.speakers[self._connections] = speaker
        return self._connections

    def say(self, *events: Event) -> None:
        """Words on their way to the coordinator. What is said at one time is heard at once, with one decision."""
        now = self.clock.now
        if self._said_at == now:
            self._said.extend(events)
        else:
            self._said, self._said_at = [*events], now
            self.clock.at(now + MESSAGE, self._heard, self._said)

    def _heard(self, events: list[Event]) -> None:
        self.hear(*events)

    def hear(self, *events: Event) -> None:
        """Events have reached the coordinator."""
        now = self.clock.now
        for command in self.coordinator.handle_all(events, now):
            match command:
                case Send(connection=connection, message=message):
                    self.clock.at(now + MESSAGE, self._told, connection, message)
                case Watch(process=process):
                    self._watched.add(process)
                    if process not in self.processes:
                        self.clock.at(now + REAPED, self.reaped, process)
                case Close(connection=connection):
                    self.clock.at(now, self.hear, Disconnected(connection))
                    self.clock.at(now + MESSAGE, self._closed, connection)
                case Terminate(process=process):
                    for speaker in [*self.processes.get(process, ())]:
                        self.clock.at(now, speaker.die, "ended by the coordinator")
                case _:
                    pass  # the journal of a machine that does not fail
        wake = self.coordinator.wake
        if wake is not None and (self._wake is None or wake < self._wake):
            self._wake = max(wake, now)
            self.clock.at(self._wake + TRAP, self._tick, self._wake)

    def _tick(self, planned: Seconds) -> None:
        if planned == self._wake:
            self._wake = None
            self.hear(Tick())

    def _told(self, connection: int, message: Reply) -> None:
        speaker = self.speakers.get(connection)
        if speaker is not None:
            speaker.hear(message)

    def _closed(self, connection: int) -> None:
        speaker = self.speakers.pop(connection, None)
        if speaker is not None:
            speaker.disconnected()

    # Processes.

    def born(self, speaker: Speaker) -> None:
        """A process has started, or one more thread of it."""
        self.processes.setdefault(speaker.process, []).append(speaker)

    def dead(self, speaker: Speaker, connection: int | None) -> None:
        """A process has ended: its connection at once, its bytes when it is reaped."""
        if connection is not None and self.speakers.pop(connection, None) is not None:
            self.say(Disconnected(connection))
        left = self.processes[speaker.process]
        left.remove(speaker)
        if not left and not self.threads:
            del self.processes[speaker.process]
            if speaker.process in self._watched:
                self.clock.at(self.clock.now + REAPED, self.reaped, speaker.process)

    def reaped(self, process: Process) -> None:
        """The coordinator sees that a process is dead."""
        if process in self._watched:
            self._watched.discard(process)
            self.hear(ProcessDied(process))

    # Bytes.

    def use(self, device: str, more: Bytes) -> bool:
        """Allocate so many more bytes on a device, or fewer; False: there are none left."""
        used = self.used[device] + more
        if more > 0 and used > self.physical[device]:
            if self.ends:
                return False
            raise OvercommittedError(
                f"{format_bytes(used)} are in use on {device} of {self.name}, which has "
                f"{format_bytes(self.physical[device])}, at {self.clock.now:.6f} s: a grant was too large"
            )
        self.used[device] = used
        if used > self.most[device]:
            self.most[device] = used
        if self.trace is not None:
            self.trace.bytes(self.name, device, self.clock.now, used)
        return True
