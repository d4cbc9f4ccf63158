"""Which connection speaks for which job?

Invariant: a job is spoken for by the last connection of its process that asked for it. What an earlier one says, or
its end, is late: a process opens a new connection only after it has given up the old one, and connections are numbered
in the order in which they were accepted. Who is behind a connection is what the kernel says.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtensile.runtime.events import Connection, Rules
from jaxtensile.runtime.leases import Lease, Process
from jaxtensile.units import Seconds

Identity = Process | int


@dataclass(slots=True, eq=False)
class Peer:
    """The other end of a connection."""

    process: Process
    welcome: bool = False
    """It has said HELLO."""
    closed: bool = False
    """It is not listened to any more."""


class Speakers:
    """Connections, jobs, and which was the last of the former to speak for one of the latter."""

    __slots__ = ("_jobs", "_last", "_rules", "peers")

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.peers: dict[Connection, Peer] = {}
        self._jobs: dict[tuple[Identity, str], Lease] = {}
        self._last: dict[tuple[Identity, str], Connection] = {}
        """Also for jobs whose lease is no more."""

    def identity(self, process: Process) -> Identity:
        return process if self._rules.process_identity else process.pid

    def same(self, one: Process, other: Process) -> bool:
        return self.identity(one) == self.identity(other)

    def lease_of(self, process: Process, job: str) -> Lease | None:
        """The lease that a job of a process has."""
        return self._jobs.get((self.identity(process), job))

    def own(self, lease: Lease) -> None:
        """A job has a lease."""
        self._jobs[self.identity(lease.process), lease.job] = lease

    def disown(self, lease: Lease) -> None:
        """The lease is no more."""
        key = self.identity(lease.process), lease.job
        if self._jobs.get(key) is lease:
            del self._jobs[key]

    def late(self, connection: Connection, process: Process, job: str) -> bool:
        """Has a later connection spoken for the job?"""
        return self._rules.generations and connection < self._last.get((self.identity(process), job), -1)

    def speak(self, lease: Lease, connection: Connection, now: Seconds) -> None:
        """From now on that connection speaks for the lease."""
        lease.connection, lease.beat = connection, now
        self._last[self.identity(lease.process), lease.job] = connection

    def speaks(self, lease: Lease, connection: Connection) -> bool:
        """Does a connection speak for a lease?"""
        if lease.connection == connection:
            return True
        return not self._rules.generations and self.peers[connection].process == lease.process

    def gone(self, connection: Connection) -> Peer | None:
        """A connection has ended. With the last one of a process no word of an earlier one can come any more."""
        peer = self.peers.pop(connection, None)
        if peer is not None and not any(other.process == peer.process for other in self.peers.values()):
            who = self.identity(peer.process)
            self._last = {key: last for key, last in self._last.items() if key[0] != who}
        return peer
