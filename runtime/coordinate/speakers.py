"""Which connection speaks for which job.

Invariant: the last connection of its process to ask for a job speaks for it. Messages and ends of earlier ones are
late: a process gives a connection up before it opens the next, and connections are numbered as accepted. The kernel
names the process. A number distinguishes a process's successive jobs of one name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtensile.runtime.decide.events import Connection, Rules
from jaxtensile.runtime.decide.leases import Lease, Process
from jaxtensile.units import Seconds

Identity = Process | int
Ask = tuple[str, int]
"""A job's name, and the number of its process's request."""


@dataclass(slots=True, eq=False)
class _Known:
    """A process that is connected or has leases."""

    peers: dict[Connection, Peer] = field(default_factory=dict[Connection, "Peer"])
    leases: dict[int, Lease] = field(default_factory=dict[int, Lease])
    asks: dict[Ask, Lease] = field(default_factory=dict[Ask, Lease])
    last: dict[Ask, Connection] = field(default_factory=dict[Ask, Connection])
    """The last connection to speak for an ask, also after its lease."""


@dataclass(slots=True, eq=False)
class Peer:
    """The other end of a connection."""

    process: Process
    known: _Known
    welcome: bool = False
    """It has said HELLO."""
    closed: bool = False
    """Its messages are ignored."""


class Speakers:
    """Connections, jobs, and which connection spoke last for a job."""

    __slots__ = ("_known", "_rules", "peers")

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._known: dict[Identity, _Known] = {}
        self.peers: dict[Connection, Peer] = {}

    def __len__(self) -> int:
        """The number of known processes."""
        return len(self._known)

    def _identity(self, process: Process) -> Identity:
        return process if self._rules.process_identity else process.pid

    def _of(self, process: Process) -> _Known:
        who = self._identity(process)
        if (known := self._known.get(who)) is None:
            known = self._known[who] = _Known()
        return known

    def _forget(self, process: Process, known: _Known) -> None:
        if not known.peers:
            known.last.clear()  # no word of an earlier connection can come any more
            if not known.leases:
                self._known.pop(self._identity(process), None)

    def same(self, one: Process, other: Process) -> bool:
        return one == other or self._identity(one) == self._identity(other)

    # Connections.

    def met(self, connection: Connection, process: Process) -> Peer:
        """A process has connected."""
        known = self._of(process)
        peer = self.peers[connection] = known.peers[connection] = Peer(process, known)
        return peer

    def gone(self, connection: Connection) -> Peer | None:
        """A connection has ended."""
        peer = self.peers.pop(connection, None)
        if peer is not None:
            del peer.known.peers[connection]
            self._forget(peer.process, peer.known)
        return peer

    def connected(self, process: Process) -> list[Peer]:
        """The connections of a process."""
        known = self._known.get(self._identity(process))
        return [] if known is None else [p for p in known.peers.values() if p.process == process]

    # Leases.

    def leases_of(self, process: Process) -> Mapping[int, Lease]:
        """A process's leases, by number."""
        known = self._known.get(self._identity(process))
        return {} if known is None else known.leases

    def own(self, lease: Lease, known: _Known | None = None) -> None:
        """Register a lease; ``known``: the record of its process."""
        known = known or self._of(lease.process)
        known.asks[lease.job, lease.number] = known.leases[lease.id] = lease

    def disown(self, lease: Lease) -> None:
        """Remove a lease."""
        known = self._of(lease.process)
        known.leases.pop(lease.id, None)
        ask = lease.job, lease.number
        if known.asks.get(ask) is lease:
            del known.asks[ask]
        if not known.peers:
            self._forget(lease.process, known)

    # Who speaks.

    def late(self, connection: Connection, peer: Peer, ask: Ask) -> bool:
        """Whether a later connection has spoken for it."""
        return self._rules.generations and connection < peer.known.last.get(ask, -1)

    def heard(self, ask: Ask, connection: Connection, peer: Peer) -> None:
        """Record that a connection spoke for an ask: earlier ones are late."""
        peer.known.last[ask] = max(connection, peer.known.last.get(ask, -1))

    def speak(self, lease: Lease, connection: Connection, peer: Peer, now: Seconds) -> None:
        """Let a connection speak for the lease from now on."""
        lease.connection, lease.beat = connection, now
        peer.known.last[lease.job, lease.number] = connection

    def speaks(self, lease: Lease, connection: Connection) -> bool:
        """Whether a connection speaks for a lease."""
        if lease.connection == connection:
            return True
        return not self._rules.generations and self.peers[connection].process == lease.process
