"""The coordinator: events in, commands out.

A connection speaks for a lease from its ADMIT or RECLAIM until it ends or a later connection of the process does. The
kernel names the process behind a connection.

Invariant: ``handle(event, now)`` is deterministic, does not wait and has no effects but its commands, in order. A grant
is on record before it is sent. Outside input never raises: it is answered, counted, or ends its connection.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from jaxtensile.runtime.coordinate.desk import Desk, Phase
from jaxtensile.runtime.coordinate.requests import Requests
from jaxtensile.runtime.decide import journal
from jaxtensile.runtime.decide.events import (
    CapacityChanged,
    Command,
    Connected,
    Connection,
    Disconnected,
    Event,
    Garbled,
    JournalFailed,
    JournalWorks,
    ProcessDied,
    Received,
    Restarted,
    Rules,
    Settings,
    SettingsChanged,
    Stopping,
    Terminate,
    Tick,
    Watch,
)
from jaxtensile.runtime.decide.leases import Happening, Lease, Process, State
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.protocol.messages import Reject, Snapshot
from jaxtensile.units import Seconds, format_bytes


class Coordinator:
    """The state of one daemon. The first event is ``Restarted``, with its journal's contents."""

    def __init__(
        self, capacities: Mapping[str, Capacity], settings: Settings | None = None, rules: Rules | None = None
    ) -> None:
        self._desk = Desk(capacities, settings or Settings(), rules or Rules())
        self._requests = Requests(self._desk)
        self._recovered_at: Seconds = 0.0
        self.arbiter, self.counters, self.chronicle = self._desk.arbiter, self._desk.counters, self._desk.chronicle

    @property
    def phase(self) -> Phase:
        """The phase, from start to end."""
        return self._desk.phase

    @property
    def epoch(self) -> int:
        """The number of this start."""
        return self._desk.epoch

    @property
    def journal_works(self) -> bool:
        """Whether the journal, as far as known, allows grants."""
        return self._desk.outbox.works

    def handle(self, event: Event, now: Seconds) -> list[Command]:
        """The commands for an event at a monotonic time."""
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[Event], now: Seconds) -> list[Command]:
        """The commands for simultaneous events, with one decision for all."""
        self._hear(events, now)
        self._decide()
        return self._desk.outbox.take(self.arbiter.leases)

    def hear(self, events: Iterable[Event], now: Seconds) -> list[Command]:
        """The commands for simultaneous events that need no decision. Carry them out, then ``decide``."""
        self._hear(events, now)
        return self._desk.outbox.take(self.arbiter.leases)

    def decide(self) -> list[Command]:
        """The commands of one decision for all that was heard, at that time."""
        self._decide()
        return self._desk.outbox.take(self.arbiter.leases)

    def _hear(self, events: Iterable[Event], now: Seconds) -> None:
        self._desk.now = now
        for event in events:
            if type(event) is Received:
                self._requests.received(event.connection, event.message)
            else:
                self._handle(event)

    def _decide(self) -> None:
        desk, arbiter = self._desk, self.arbiter
        decides = desk.phase == "serving" or desk.phase == "draining"
        settled = decides and desk.undecided
        if settled:
            desk.undecided = False
            arbiter.settle(desk.now, grants=desk.outbox.works)
        if arbiter.told:
            desk.tell()
        if decides and (settled or desk.turns.due):
            desk.take_turns()
        if desk.outbox.outgrown(len(arbiter.leases)):
            desk.compact()

    @property
    def wake(self) -> Seconds | None:
        """When a ``Tick`` is due if nothing else happens; None: never."""
        desk, leases = self._desk, self.arbiter.leases.values()
        late = [a for a in leases if a.deadline is not None and a.id not in desk.terminated]
        times = [a.deadline for a in late if a.deadline is not None and not self._untold(a)]
        if desk.settings.lease_ttl < math.inf:
            beats = [a.beat for a in leases if a.connection is not None and a.rung >= 0]
            if beats:
                times.append(min(beats) + desk.settings.lease_ttl)
        times += [a.end_by for a in leases if a.end_by is not None]
        if desk.phase == "recovering":
            times.append(self._recovered_at)
        if self.arbiter.recheck is not None:
            times.append(self.arbiter.recheck)
        if desk.turns.wake is not None:
            times.append(desk.turns.wake)
        return min(times, default=None)

    def snapshot(self, after: int) -> Snapshot:
        """The state at the last event, with the leases above ``after`` that fit into a message."""
        return self._desk.snapshot(after)

    # Events.

    def _handle(self, event: Event) -> None:
        desk, arbiter = self._desk, self.arbiter
        match event:
            case Received():
                self._requests.received(event.connection, event.message)
            case Tick():
                self._tick()
            case Connected():
                self._connected(event)
            case Disconnected():
                self._disconnected(event.connection)
            case ProcessDied():
                self._died(event.process)
            case Garbled():
                if (peer := desk.speakers.peers.get(event.connection)) is not None and not peer.closed:
                    desk.refuse(event.connection, "protocol", event.detail)
            case CapacityChanged():
                arbiter.resize(event.capacities)
                said = ", ".join(f"{name} {format_bytes(c.limit)}" for name, c in sorted(event.capacities.items()))
                desk.note("capacity", detail=said)
                desk.undecided = True
            case SettingsChanged():
                desk.settings = arbiter.settings = event.settings
                desk.note("settings")
                desk.undecided = True
            case Restarted():
                self._restarted(event)
            case JournalFailed():
                if desk.outbox.works:
                    desk.note("journal failed", detail="no grants until it can be written again")
                desk.outbox.failed()
            case JournalWorks():
                for lease in arbiter.leases.values():  # what they were to be told may not have been sent
                    if lease.deadline is not None and self._untold(lease):
                        lease.deadline = desk.now + desk.settings.revoke_deadline
                    if desk.outbox.unsure(lease.id):
                        lease.since = desk.now
                    if lease.connection is not None and lease.rung >= 0:
                        arbiter.told[lease.id] = lease
                desk.outbox.restored()
                desk.compact()
                desk.note("journal works")
                desk.undecided = True
            case Stopping():
                desk.phase = "draining"
                desk.note("draining")
                for lease in [*arbiter.queue]:
                    desk.reply(lease.connection, Reject(job=lease.job, reason="the coordinator is stopping"))
                    desk.forget(lease, Happening.LOST, "the coordinator is stopping")

    def _restarted(self, event: Restarted) -> None:
        desk, known = self._desk, event.replayed
        desk.opened(known, event.boot_id)
        for old in known.leases.values():
            lease = journal.revived(known, old, desk.now)
            desk.speakers.own(lease)
            self.arbiter.restore(lease, old.charges)
            if lease.gated and desk.rules.turns_last:
                desk.turns.restore(lease, 0, desk.now)
            desk.outbox.do(Watch(lease.process))
        desk.phase = "recovering" if known.leases else "serving"
        desk.note(desk.phase, detail=f"epoch {desk.epoch}, {len(known.leases)} leases")
        self._recovered_at = desk.now + desk.settings.recovery
        desk.compact()

    def _connected(self, event: Connected) -> None:
        desk, most = self._desk, self._desk.settings.max_clients
        desk.speakers.met(event.connection, event.process)
        peers = desk.speakers.peers
        if len(peers) > most and sum(not p.closed for p in peers.values()) > most:
            self.counters["busy"] += 1
            desk.error(event.connection, "busy", f"{most} clients are connected", retry_after=1.0)
            desk.close(event.connection)

    def _disconnected(self, connection: Connection) -> None:
        desk = self._desk
        peer = desk.speakers.gone(connection)
        if peer is None:
            return
        for lease in [*peer.known.leases.values()]:
            if lease.connection == connection or (not desk.rules.generations and lease.process == peer.process):
                self._lost(lease, "its connection ended", free=not desk.rules.free_on_death)

    def _died(self, process: Process) -> None:
        speakers = self._desk.speakers
        for lease in [*speakers.leases_of(process).values()]:
            self._desk.forget(lease, Happening.DIED, "its process died")
        for peer in speakers.connected(process):
            peer.closed = True  # what it still said is not to be answered with a lease

    def _tick(self) -> None:
        desk, now = self._desk, self._desk.now
        for lease in [*self.arbiter.leases.values()]:
            if lease.rung < 0:
                continue
            if lease.connection is not None and now >= lease.beat + desk.settings.lease_ttl:
                self.counters["silent"] += 1
                desk.close(lease.connection)
                self._lost(lease, "it was silent", free=not desk.rules.ttl_quarantines)
            if lease.deadline is not None and now >= lease.deadline and not self._untold(lease):
                self._overdue(lease)
            if lease.end_by is not None and now >= lease.end_by:
                lease.end_by = None
                self.counters["overdue"] += 1
                desk.note("overdue", lease, "keeps its turn")
                if desk.settings.on_overdue == "terminate":
                    self._terminate(lease, "it keeps its turn")
        if desk.phase == "recovering" and now >= self._recovered_at:
            desk.serve()
        if self.arbiter.recheck is not None and now >= self.arbiter.recheck:
            desk.undecided = True
        if desk.turns.wake is not None and now >= desk.turns.wake:
            desk.turns.due = True

    def _untold(self, lease: Lease) -> bool:
        """Whether the lease's order waits for the journal; its deadline starts when it is sent."""
        outbox = self._desk.outbox
        return not outbox.works and (not lease.knows or outbox.unsure(lease.id))

    def _overdue(self, lease: Lease) -> None:
        desk = self._desk
        if lease.state is State.REVOKING:
            self.arbiter.happened(lease, Happening.DEADLINE)
            self.counters["overdue"] += 1
            desk.note("overdue", lease)
            desk.undecided = True
        if desk.settings.on_overdue == "terminate":
            self._terminate(lease, "it is overdue")
        else:
            lease.deadline = None

    def _terminate(self, lease: Lease, why: str) -> None:
        desk = self._desk
        if lease.id not in desk.terminated:
            desk.terminated.add(lease.id)
            desk.note("terminated", lease, why)
            desk.outbox.do(Terminate(lease.process))

    def _lost(self, lease: Lease, why: str, *, free: bool) -> None:
        """Quarantine or free a lease that nobody speaks for any more."""
        if lease.state is State.QUEUED or free:
            self._desk.forget(lease, Happening.LOST if lease.state is State.QUEUED else Happening.DIED, why)
        elif lease.state is not State.QUARANTINED:
            lease.connection = None
            self.counters["quarantined"] += 1
            self._desk.note("quarantined", lease, why)
            self._desk.turns.call_off(lease)
            if not self._desk.rules.turns_last:
                self._desk.turns.done(lease, self._desk.now)
            self.arbiter.happened(lease, Happening.LOST)
            self._desk.undecided = True
