"""What does the coordinator do when something happens?

Invariant: ``handle(event, now)`` is deterministic, takes no time and touches nothing: what is to be done are commands,
in their order. All that is granted is on record before it is sent. What comes from outside never raises: it is
answered, counted, or ends the connection it came by.

A connection speaks for a lease from ADMIT or RECLAIM on until a later connection of the process does, or it ends. The
process behind a connection is what the kernel says it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from jaxtensile.runtime import journal
from jaxtensile.runtime.admission import asked_for, impossible
from jaxtensile.runtime.arbiter import Arbiter
from jaxtensile.runtime.chronicle import Chronicle, Entry
from jaxtensile.runtime.events import (
    CapacityChanged,
    Close,
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
    Send,
    Settings,
    SettingsChanged,
    Stopping,
    Terminate,
    Tick,
    Watch,
)
from jaxtensile.runtime.leases import Charge, Happening, Lease, Process, State
from jaxtensile.runtime.ledger import Capacity
from jaxtensile.runtime.messages import (
    VERSION,
    Ack,
    Admit,
    Beat,
    Code,
    Error,
    Grant,
    Hello,
    Queued,
    Reclaim,
    Reject,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Request,
    Revoke,
    Snapshot,
    Status,
    Token,
    Welcome,
)
from jaxtensile.runtime.outbox import Outbox
from jaxtensile.runtime.speakers import Peer, Speakers
from jaxtensile.runtime.status import snapshot
from jaxtensile.units import Bytes, Seconds, format_bytes

Phase = Literal["starting", "recovering", "serving", "draining"]


class Coordinator:
    """The state of one daemon. Give it ``Restarted`` first, with what its journal said; then whatever happens."""

    def __init__(
        self, capacities: Mapping[str, Capacity], settings: Settings | None = None, rules: Rules | None = None
    ) -> None:
        self.settings = settings or Settings()
        self.rules = rules or Rules()
        self.phase: Phase = "starting"
        self.epoch = 0
        self.arbiter = Arbiter(capacities, self.settings, self.rules)
        self.counters: Counter[str] = Counter()
        self.chronicle = Chronicle()
        self._speakers = Speakers(self.rules)
        self._outbox = Outbox(journal_first=self.rules.journal_first)
        self._terminated: set[int] = set()
        self._boot_id = ""
        self._sequence = self._last_lease = 0
        self._recovered_at: Seconds = 0.0
        self._now: Seconds = 0.0
        """When it was told something last."""
        self._settle = False

    def handle(self, event: Event, now: Seconds) -> list[Command]:
        """What is to be done about an event, at a time of the monotonic clock."""
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[Event], now: Seconds) -> list[Command]:
        """What is to be done about events that happened at once: the same, with one decision for all."""
        self._now = now
        for event in events:
            self._handle(event, now)
        if self._settle and self.phase in ("serving", "draining"):
            self._settle = False
            self.arbiter.settle(now, grants=self._outbox.works)
        if self.arbiter.told:
            self._tell(now)
        if self._outbox.outgrown(len(self.arbiter.leases)):
            self._compact()
        return self._outbox.take(self.arbiter.leases.keys())

    @property
    def journal_works(self) -> bool:
        """Whether grants are possible, as far as the journal is concerned."""
        return self._outbox.works

    @property
    def wake(self) -> Seconds | None:
        """When there is something to do though nothing happens: a ``Tick`` is due."""
        times = [
            a.beat + self.settings.lease_ttl
            for a in self.arbiter.leases.values()
            if a.connection is not None and a.rung >= 0
        ]
        times += [
            a.deadline for a in self.arbiter.leases.values() if a.deadline is not None and a.id not in self._terminated
        ]
        if self.phase == "recovering":
            times.append(self._recovered_at)
        if self.arbiter.recheck is not None:
            times.append(self.arbiter.recheck)
        return min(times, default=None)

    def snapshot(self, after: int) -> Snapshot:
        """The state when something happened last; of the leases those above ``after`` that fit into a message."""
        return snapshot(self.arbiter, after, self.epoch, self.phase, self.counters, self.chronicle, self._now)

    # Events.

    def _handle(self, event: Event, now: Seconds) -> None:
        match event:
            case Received():
                self._received(event.connection, event.message, now)
            case Tick():
                self._tick(now)
            case Connected():
                self._connected(event)
            case Disconnected():
                self._disconnected(event.connection)
            case ProcessDied():
                self._died(event.process)
            case Garbled():
                if (peer := self._speakers.peers.get(event.connection)) is not None and not peer.closed:
                    self._refuse(event.connection, "protocol", event.detail)
            case CapacityChanged():
                self.arbiter.resize(event.capacities)
                said = ", ".join(f"{name} {format_bytes(c.limit)}" for name, c in sorted(event.capacities.items()))
                self._note("capacity", detail=said)
                self._settle = True
            case SettingsChanged():
                self.settings = self.arbiter.settings = event.settings
                self._note("settings")
                self._settle = True
            case Restarted():
                self._restarted(event, now)
            case JournalFailed():
                if self._outbox.works:
                    self._note("journal failed", detail="no grants until it can be written again")
                self._outbox.failed()
            case JournalWorks():
                for lease in self.arbiter.leases.values():  # what they were to be told may not have been sent
                    if self._outbox.unsure(lease.id):
                        lease.since = now
                    if lease.connection is not None and lease.rung >= 0:
                        self.arbiter.told[lease.id] = lease
                self._outbox.restored()
                self._compact()
                self._note("journal works")
                self._settle = True
            case Stopping():
                self.phase = "draining"
                self._note("draining")
                for lease in [*self.arbiter.queue]:
                    self._reply(lease.connection, Reject(job=lease.job, reason="the coordinator is stopping"))
                    self._forget(lease, Happening.LOST, "the coordinator is stopping")

    def _restarted(self, event: Restarted, now: Seconds) -> None:
        known = event.replayed
        self.epoch, self._boot_id = known.epoch + 1, event.boot_id or known.boot_id
        self._sequence, self._last_lease = known.sequence, known.lease
        for old in known.leases.values():
            lease = journal.revived(known, old, now)
            self._speakers.own(lease)
            self.arbiter.restore(lease, old.charges)
            self._outbox.do(Watch(lease.process))
        self.phase = "recovering" if known.leases else "serving"
        self._note(self.phase, detail=f"epoch {self.epoch}, {len(known.leases)} leases")
        self._recovered_at = now + self.settings.recovery
        self._compact()

    def _connected(self, event: Connected) -> None:
        peer = self._speakers.peers[event.connection] = Peer(event.process)
        most, peers = self.settings.max_clients, self._speakers.peers
        if len(peers) > most and sum(not p.closed for p in peers.values()) > most:
            peer.closed = True
            self.counters["busy"] += 1
            self._error(event.connection, "busy", f"{self.settings.max_clients} clients are connected", retry_after=1.0)
            self._close(event.connection)

    def _disconnected(self, connection: Connection) -> None:
        peer = self._speakers.gone(connection)
        if peer is None:
            return
        for lease in [*self.arbiter.leases.values()]:
            if lease.connection == connection or (not self.rules.generations and lease.process == peer.process):
                self._lost(lease, "its connection ended", free=not self.rules.free_on_death)

    def _died(self, process: Process) -> None:
        for lease in [*self.arbiter.leases.values()]:
            if self._speakers.same(lease.process, process):
                self._forget(lease, Happening.DIED, "its process died")
        for peer in self._speakers.peers.values():
            if peer.process == process:
                peer.closed = True  # what it still said is not to be answered with a lease

    def _tick(self, now: Seconds) -> None:
        for lease in [*self.arbiter.leases.values()]:
            if lease.rung < 0:
                continue
            if lease.connection is not None and now >= lease.beat + self.settings.lease_ttl:
                self.counters["silent"] += 1
                self._close(lease.connection)
                self._lost(lease, "it was silent", free=not self.rules.ttl_quarantines)
            if lease.deadline is not None and now >= lease.deadline:
                self._overdue(lease)
        if self.phase == "recovering" and now >= self._recovered_at:
            self._serve()
        if self.arbiter.recheck is not None and now >= self.arbiter.recheck:
            self._settle = True

    def _overdue(self, lease: Lease) -> None:
        if lease.state is State.REVOKING:
            self.arbiter.happened(lease, Happening.DEADLINE)
            self.counters["overdue"] += 1
            self._note("overdue", lease)
            self._settle = True
        if self.settings.on_overdue == "terminate" and lease.id not in self._terminated:
            self._terminated.add(lease.id)
            self._note("terminated", lease, "it is overdue")
            self._outbox.do(Terminate(lease.process))
        elif self.settings.on_overdue == "wait":
            lease.deadline = None

    def _lost(self, lease: Lease, why: str, *, free: bool) -> None:
        """Nobody speaks for a lease any more."""
        if lease.state is State.QUEUED or free:
            self._forget(lease, Happening.LOST if lease.state is State.QUEUED else Happening.DIED, why)
        elif lease.state is not State.QUARANTINED:
            lease.connection = None
            self.counters["quarantined"] += 1
            self._note("quarantined", lease, why)
            self.arbiter.happened(lease, Happening.LOST)
            self._settle = True

    def _forget(self, lease: Lease, happening: Happening, why: str = "") -> None:
        """A lease ends."""
        self.counters["freed" if lease.rung >= 0 else "left"] += 1
        self._note("freed" if lease.rung >= 0 else "left", lease, why)
        self.arbiter.happened(lease, happening)
        self._speakers.disown(lease)
        self._terminated.discard(lease.id)
        if lease.written:
            self._outbox.write(journal.Freed(lease=lease.id))
        self._settle = True
        self._all_known()

    def _all_known(self) -> None:
        """Recovery ends early when there is nobody to wait for."""
        if self.phase == "recovering" and all(a.state is not State.QUARANTINED for a in self.arbiter.leases.values()):
            self._serve()

    def _serve(self) -> None:
        self.phase, self._settle = "serving", True
        self._note("serving")

    def _note(self, what: str, lease: Lease | None = None, detail: str = "") -> None:
        if lease is None:
            self.chronicle.add(Entry(self._now, what, detail=detail))
        else:
            about = lease.job, lease.id, lease.process.pid, lease.rung, detail, lease.waited, lease.step, lease.peak
            self.chronicle.add(Entry(self._now, what, *about))

    # Messages.

    def _received(self, connection: Connection, message: Request, now: Seconds) -> None:
        peer = self._speakers.peers.get(connection)
        if peer is None or peer.closed:
            return
        if not peer.welcome:
            if not isinstance(message, Hello) or message.version != VERSION:
                code: Code = "version" if isinstance(message, Hello) else "protocol"
                self._refuse(connection, code, f"say HELLO with version {VERSION} first")
                return
            peer.welcome = True
            self._reply(connection, Welcome(version=VERSION, epoch=self.epoch, beat_within=self.settings.lease_ttl))
            return
        match message:
            case Beat():
                self._beat(connection, message, now)
            case Ack():
                self._ack(connection, message, now)
            case Admit():
                self._admit(connection, peer.process, message, now)
            case Reclaim():
                self._reclaim(connection, peer.process, message, now)
            case Renew():
                self._renew(connection, peer.process, message, now)
            case Release():
                self._release(connection, peer.process, message)
            case Status():
                self._reply(connection, self.snapshot(message.after))
            case Hello():
                self._refuse(connection, "protocol", "HELLO is said once")

    def _admit(self, connection: Connection, process: Process, message: Admit, now: Seconds) -> None:
        if self._speakers.late(connection, process, message.job):
            self.counters["stale"] += 1
            return
        known = self._speakers.lease_of(process, message.job) if self.rules.idempotent_admit else None
        if known is not None:
            self._admit_again(known, connection, now)
            return
        stopping = "the coordinator is stopping" if self.phase == "draining" else ""
        reason = stopping or impossible(message, self.arbiter.ledger)
        if reason:
            self.counters["rejected"] += 1
            self.chronicle.add(Entry(self._now, "rejected", message.job, 0, process.pid, -1, reason))
            self._reply(connection, Reject(job=message.job, reason=reason))
            return
        self._last_lease += 1
        lease = asked_for(message, self._last_lease, process)
        lease.asked = now
        self._speakers.speak(lease, connection, now)
        self._speakers.own(lease)
        self.arbiter.enqueue(lease)
        self.arbiter.told[lease.id] = lease
        self._settle = True

    def _admit_again(self, lease: Lease, connection: Connection, now: Seconds) -> None:
        """The first answer may have been lost."""
        self._speakers.speak(lease, connection, now)
        if lease.rung >= 0:
            if lease.state is not State.HELD:
                self.arbiter.happened(lease, Happening.RECLAIM)
            lease.rung, lease.deadline, lease.wanted_by = self.arbiter.covered(lease), None, None
            self.arbiter.changed(lease)
            self._note("came back", lease)
            self._all_known()
        self.arbiter.told[lease.id] = lease
        self._settle = True

    def _reclaim(self, connection: Connection, process: Process, message: Reclaim, now: Seconds) -> None:
        lease = self._lease(connection, process, message.lease)
        if lease is None:
            return
        knows = message.token.sequence > lease.former or not self.rules.former_ladder
        known = lease.low <= message.rung <= lease.high or not knows
        if lease.rung < 0 or not known or len(message.in_use) > len(lease.resources):
            self._refuse(connection, "protocol", f"lease {lease.id} was never on rung {message.rung}")
            return
        if self._speakers.late(connection, process, lease.job):
            self.counters["stale"] += 1
            return
        self._speakers.speak(lease, connection, now)
        lease.deadline, lease.wanted_by, lease.knows = None, None, knows
        if knows:
            lease.rung = message.rung
            charges = self._left(lease, message.in_use)
        else:
            # It speaks of its former ladder: it is within what it is charged, which covers that.
            lease.rung = self.arbiter.covered(lease)
            charges = self._held(lease, self.arbiter.charged(lease), message.in_use)
        lease.in_use = message.in_use
        self.arbiter.happened(lease, Happening.RECLAIM, charges)
        self._note("came back", lease)
        self.arbiter.told[lease.id] = lease
        self._settle = True
        self._all_known()

    def _renew(self, connection: Connection, process: Process, message: Renew, now: Seconds) -> None:
        """Another ladder for a job that is at rest. Whatever it needs more than it is charged must be there at once:
        who waited for it would hold what others wait for."""
        lease = self._lease(connection, process, message.lease)
        if lease is None:
            return
        last = message.token == Token(lease.epoch, lease.sequence) and lease.state is State.HELD
        if not last or self._stale(lease, connection, message.in_use):
            self.counters["stale"] += 1
            return
        lease.beat, lease.knows = now, True
        asked = Admit(
            job=lease.job,
            devices=lease.resources[:-1],
            ladder=message.ladder,
            floor=message.floor,
            want=message.want,
            priority=lease.priority,
            weight=lease.weight,
        )
        reason = impossible(asked, self.arbiter.ledger) if self._outbox.works else "nothing can be written down"
        reason = reason or self.arbiter.renew(lease, asked_for(asked, lease.id, process), message.rung)
        if reason:
            self._error(connection, "no room", reason, lease=lease.id)
            return
        lease.in_use = message.in_use
        charges = self._left(lease, message.in_use)
        self.arbiter.ledger.measured(lease.id, lease.resources, charges)
        self.arbiter.changed(lease)
        lease.former, lease.knows = message.token.sequence, False
        self._note("renewed", lease)
        self.arbiter.told[lease.id] = lease
        self._settle = True

    def _ack(self, connection: Connection, message: Ack, now: Seconds) -> None:
        lease = self.arbiter.leases.get(message.lease)
        if lease is None or self._stale(lease, connection, message.in_use):
            self.counters["stale"] += 1
            return
        lease.beat = now
        lease.knows = lease.knows or message.token.sequence > lease.former
        late = message.token != Token(lease.epoch, lease.sequence) or message.rung != lease.rung
        if late and (self.rules.fencing or not lease.low <= message.rung <= lease.high):
            self.counters["stale"] += 1
            return
        lease.rung = message.rung
        before = self.arbiter.charged(lease)
        lease.in_use = message.in_use
        charges = self._left(lease, message.in_use)
        if lease.state is not State.HELD:
            self._note("shrunk", lease)
            lease.since, lease.deadline, lease.wanted_by = now, None, None
            self._settle = True
        self.arbiter.happened(lease, Happening.ACK, charges)
        if charges != before:
            self._put_down(lease)
            self._settle = True

    def _beat(self, connection: Connection, message: Beat, now: Seconds) -> None:
        lease = self.arbiter.leases.get(message.lease)
        if lease is None or self._stale(lease, connection, message.in_use):
            self.counters["stale"] += 1
            return
        lease.beat, lease.step, lease.step_us, lease.peak = now, message.step, message.step_us, message.peak
        lease.in_use = message.in_use
        if not self.rules.measured_wins:
            return
        before = self.arbiter.charged(lease)
        charges = tuple(map(_at_least, before, _padded(message.in_use, len(before))))
        if charges != before:
            self._keeps(lease, "holds more than it was granted")
            self.arbiter.ledger.measured(lease.id, lease.resources, charges)
            self.arbiter.changed(lease)
            self._put_down(lease)
            self._settle = True

    def _release(self, connection: Connection, process: Process, message: Release) -> None:
        lease = self.arbiter.leases.get(message.lease)
        if lease is None:
            self._reply(connection, Released(lease=message.lease), after_record=True)  # the answer was lost
            return
        lease = self._lease(connection, process, message.lease)
        if lease is None:
            return
        if self.rules.measured_wins and any(message.in_use) and lease.rung >= 0:
            self._keeps(lease, "keeps bytes after its release")
            self.arbiter.changed(lease)
            self._settle = True  # it is guaranteed no more than it has
            self._put_down(lease)
            held = format_bytes(max(message.in_use))
            detail = f"{held} are still held: they stay charged until the process ends"
            self._error(connection, "in use", detail, lease=lease.id)
            return
        self._forget(lease, Happening.RELEASE, "it was released")
        self._reply(connection, Released(lease=lease.id), after_record=True)

    # Who may speak for a lease.

    def _lease(self, connection: Connection, process: Process, number: int) -> Lease | None:
        """The lease of that number, if it is the process's own."""
        lease = self.arbiter.leases.get(number)
        if lease is None:
            self._error(connection, "unknown lease", f"there is no lease {number}: ask to be admitted", lease=number)
        elif not self._speakers.same(lease.process, process):
            self.counters["not yours"] += 1
            self._error(connection, "not yours", f"lease {number} is another process's", lease=number)
            return None
        return lease

    def _stale(self, lease: Lease, connection: Connection, in_use: Sequence[Bytes]) -> bool:
        """Is what a connection says of a lease not to be listened to?"""
        if lease.rung < 0 or lease.state is State.QUARANTINED or len(in_use) > len(lease.resources):
            return True
        return not self._speakers.speaks(lease, connection)

    def _left(self, lease: Lease, in_use: Sequence[Bytes]) -> tuple[Charge, ...]:
        """What a job is charged that says it is on its rung: what that needs, and what it was measured to hold. A job
        that holds more does not give bytes back, and what it is charged does not shrink any more."""
        charges = self._held(lease, lease.needs[lease.rung], in_use)
        return (
            self.arbiter.ledger.wider(lease.resources, self.arbiter.charged(lease), charges) if lease.stuck else charges
        )

    def _held(self, lease: Lease, charges: tuple[Charge, ...], in_use: Sequence[Bytes]) -> tuple[Charge, ...]:
        """What may be charged, or what was measured where that is more."""
        if not self.rules.measured_wins:
            return charges
        held = tuple(map(_at_least, charges, _padded(in_use, len(charges))))
        if held != charges:
            self._keeps(lease, "holds more than its rung needs")
        return held

    def _keeps(self, lease: Lease, fault: str) -> None:
        if fault not in lease.faults:
            self._note("alarm", lease, fault)
        lease.stuck = True
        lease.faults.add(fault)
        self.counters["kept"] += 1

    # What is said.

    def _tell(self, now: Seconds) -> None:
        """Say what was decided: one message per lease, of the state that it ended in."""
        decided, self.arbiter.told = self.arbiter.told, {}
        for lease in decided.values():
            if lease.rung < 0:
                ahead = self.arbiter.queue.index(lease)
                self._reply(lease.connection, Queued(job=lease.job, ahead=ahead))
                self._note("waits", lease, f"behind {ahead}")
                continue
            sure = lease.state is State.REVOKING and lease.knows and not self._outbox.unsure(lease.id)
            if not self._outbox.works and not sure:
                continue  # said when it can be written down
            self._sequence += 1
            if not lease.sequence:
                lease.beat, lease.waited = now, now - lease.asked
                self.counters["admitted"] += 1
                self.counters["waited_us"] += int(lease.waited * 1e6)
                self._outbox.do(Watch(lease.process))
            lease.epoch, lease.sequence = self.epoch, self._sequence
            if not lease.knows:
                lease.written = ()  # all that it is goes on record once more
                token = Token(self.epoch, self._sequence)
                renewed = Renewed(job=lease.job, lease=lease.id, token=token, former=lease.former)
                self._reply(lease.connection, renewed, after_record=True)
                self._sequence += 1
                lease.sequence = self._sequence
            token = Token(self.epoch, self._sequence)
            more = self.arbiter.charged(lease) != lease.written
            if more:
                self._put_down(lease)
            if lease.state is State.REVOKING:
                left = max((lease.deadline or now) - now, 0.0)
                self.counters["revokes"] += 1
                self._note("revoked", lease)
                told = Revoke(job=lease.job, lease=lease.id, token=token, rung=lease.rung, deadline=left)
                self._reply(lease.connection, told, after_record=more)
            else:
                self.counters["grants"] += 1
                self._note("granted", lease)
                told = Grant(job=lease.job, lease=lease.id, token=token, rung=lease.rung)
                self._reply(lease.connection, told, after_record=True)

    def _reply(self, connection: Connection | None, message: Reply, *, after_record: bool = False) -> None:
        if connection is not None and connection in self._speakers.peers:
            self._outbox.do(Send(connection, message, after_record))

    def _error(
        self,
        connection: Connection,
        code: Code,
        detail: str,
        *,
        retry_after: Seconds | None = None,
        lease: int | None = None,
    ) -> None:
        self._reply(connection, Error(code=code, detail=detail, retry_after=retry_after, lease=lease))

    def _refuse(self, connection: Connection, code: Code, detail: str) -> None:
        """Answer, and end the connection."""
        self.counters["refused"] += 1
        process = self._speakers.peers[connection].process
        self.chronicle.add(Entry(self._now, "refused", pid=process.pid, detail=detail))
        self._error(connection, code, detail)
        self._close(connection)

    def _close(self, connection: Connection) -> None:
        self._speakers.peers[connection].closed = True
        self._outbox.do(Close(connection))

    def _put_down(self, lease: Lease) -> None:
        """What a lease is charged goes on record; the first time with all that it is."""
        charges = self.arbiter.charged(lease)
        record = journal.charge(lease, charges) if lease.written else journal.admission(lease, charges)
        if self._outbox.write(record):
            lease.written = charges

    def _compact(self) -> None:
        """The journal anew: what it said of leases that are no more is left out."""
        records: list[journal.Record] = [
            journal.Opened(
                format=journal.FORMAT,
                boot_id=self._boot_id,
                epoch=self.epoch,
                sequence=self._sequence,
                lease=self._last_lease,
            )
        ]
        for lease in self.arbiter.leases.values():
            if lease.rung >= 0:
                lease.written = self.arbiter.charged(lease)
                records.append(journal.admission(lease, lease.written))
                if lease.stuck:
                    records.append(journal.charge(lease, lease.written))
        self._outbox.replace(tuple(records))


def _at_least(charge: Charge, held: Bytes) -> Charge:
    return charge if held <= charge.level else Charge(held - charge.temp, charge.temp)


def _padded(in_use: Sequence[Bytes], length: int) -> Sequence[Bytes]:
    return in_use if len(in_use) == length else (*in_use, *(0,) * (length - len(in_use)))
