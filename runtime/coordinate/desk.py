"""State shared by the coordinator's parts, and how it is sent and recorded.

Invariant: a grant is on record before it is sent. Every GRANT, REVOKE and RENEWED carries a higher token than all
before. A batch sends one message per lease, with the final state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from jaxtensile.runtime.coordinate.chronicle import Chronicle, Entry
from jaxtensile.runtime.coordinate.outbox import Outbox
from jaxtensile.runtime.coordinate.speakers import Speakers
from jaxtensile.runtime.coordinate.status import snapshot
from jaxtensile.runtime.decide import journal
from jaxtensile.runtime.decide.arbiter import Arbiter
from jaxtensile.runtime.decide.events import Close, Connection, Rules, Send, Settings, Watch
from jaxtensile.runtime.decide.leases import QUARANTINED, REVOKING, Charge, Happening, Lease
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.decide.turns import Turns
from jaxtensile.runtime.protocol.messages import (
    Begin,
    Code,
    End,
    Error,
    Grant,
    Queued,
    Released,
    Renewed,
    Reply,
    Revoke,
    Snapshot,
    Token,
)
from jaxtensile.units import Seconds

Phase = Literal["starting", "recovering", "serving", "draining"]


class Desk:
    """The books of a coordinator."""

    def __init__(self, capacities: Mapping[str, Capacity], settings: Settings, rules: Rules) -> None:
        self.settings, self.rules = settings, rules
        self.phase: Phase = "starting"
        self.epoch = 0
        self.now: Seconds = 0.0
        """Time of the last event."""
        self.arbiter = Arbiter(capacities, settings, rules)
        self.turns = Turns(self.arbiter.ledger, self.arbiter.leases)
        self.speakers = Speakers(rules)
        self.outbox = Outbox(journal_first=rules.journal_first)
        self.counters: Counter[str] = Counter()
        self.chronicle = Chronicle()
        self.undecided = False
        """The arbiter has changes to look at."""
        self.terminated: set[int] = set()
        """Leases whose processes were told to end."""
        self._boot_id = ""
        self._sequence = self._last_lease = 0

    def opened(self, known: journal.Replayed, boot_id: str) -> None:
        """Start after a coordinator that left a journal."""
        self.epoch, self._boot_id = known.epoch + 1, boot_id or known.boot_id
        self._sequence, self._last_lease = known.sequence, known.lease

    def snapshot(self, after: int) -> Snapshot:
        """The state at the last event, with the leases above ``after`` that fit into a message."""
        return snapshot(self.arbiter, after, self.epoch, self.phase, self.counters, self.chronicle, self.now)

    # What becomes of leases.

    def number(self) -> int:
        """The number of a new lease."""
        self._last_lease += 1
        return self._last_lease

    def forget(self, lease: Lease, happening: Happening, why: str = "") -> None:
        """End a lease."""
        what = "freed" if lease.rung >= 0 else "left"
        self.counters[what] += 1
        self.note(what, lease, why)
        self.arbiter.happened(lease, happening)
        self.turns.forget(lease)
        self.speakers.disown(lease)
        self.terminated.discard(lease.id)
        if lease.written:
            self.outbox.write(journal.Freed(lease=lease.id))
        self.undecided = True
        if self.phase == "recovering":
            self.all_known()

    def all_known(self) -> None:
        """End recovery early if no lease is quarantined any more."""
        if self.phase == "recovering" and all(a.state is not QUARANTINED for a in self.arbiter.leases.values()):
            self.serve()

    def serve(self) -> None:
        """End recovery."""
        self.phase, self.undecided = "serving", True
        self.note("serving")

    def note(self, what: str, lease: Lease | None = None, detail: str = "") -> None:
        """Add an event to the chronicle."""
        if lease is None:
            self.chronicle.add(Entry(self.now, what, detail=detail))
            return
        a = lease
        self.chronicle.add(Entry(self.now, what, a.job, a.id, a.process.pid, a.rung, detail, a.waited, a.step, a.peak))

    # What is said.

    def reply(self, connection: Connection | None, message: Reply, after_record: bool = False) -> None:
        """Send a message, if the connection exists."""
        if connection is not None and connection in self.speakers.peers:
            self.outbox.do(Send(connection, message, after_record))

    def released(self, connection: Connection, lease: int) -> None:
        """Say that a lease is free, once that is on record."""
        if connection in self.speakers.peers:
            self.outbox.free(Send(connection, Released(lease=lease), True))

    def error(
        self,
        connection: Connection,
        code: Code,
        detail: str,
        *,
        retry_after: Seconds | None = None,
        lease: int | None = None,
    ) -> None:
        """Send an error."""
        self.reply(connection, Error(code=code, detail=detail, retry_after=retry_after, lease=lease))

    def refuse(self, connection: Connection, code: Code, detail: str) -> None:
        """Send an error, and end the connection."""
        self.counters["refused"] += 1
        process = self.speakers.peers[connection].process
        self.chronicle.add(Entry(self.now, "refused", pid=process.pid, detail=detail))
        self.error(connection, code, detail)
        self.close(connection)

    def close(self, connection: Connection) -> None:
        """End a connection."""
        self.speakers.peers[connection].closed = True
        self.outbox.do(Close(connection))

    def tell(self) -> None:
        """Send the decisions: one message per lease, with its final state."""
        decided, self.arbiter.told = self.arbiter.told, {}
        for lease in decided.values():
            if lease.rung < 0:
                ahead = self.arbiter.queue.index(lease)
                self.reply(lease.connection, Queued(job=lease.job, ahead=ahead))
                self.note("waits", lease, f"behind {ahead}")
                continue
            sure = lease.state is REVOKING and lease.knows and not self.outbox.unsure(lease.id)
            if self.outbox.works or sure:  # else it is said when it can be written down
                self._tell(lease)

    def _tell(self, lease: Lease) -> None:
        now = self.now
        accounts = self.arbiter.ledger.accounts
        if not lease.sequence:
            lease.gated = tuple(name for name in lease.resources if accounts[name].gated)
            lease.beat, lease.waited = now, now - lease.asked
            self.counters["admitted"] += 1
            if lease.waited:
                self.counters["waited_us"] += int(lease.waited * 1e6)
            self.outbox.do(Watch(lease.process))
        lease.epoch = self.epoch
        token = self._token(lease)
        if not lease.knows:
            lease.written = ()  # all that it is goes on record once more
            renewed = Renewed(job=lease.job, lease=lease.id, token=token, former=lease.former)
            self.reply(lease.connection, renewed, after_record=True)
            token = self._token(lease)
        charges = self.arbiter.charged(lease)
        more = charges != lease.written
        if more:
            self.put_down(lease, charges)
        if lease.state is REVOKING:
            left = max((lease.deadline or now) - now, 0.0)
            self.counters["revokes"] += 1
            self.note("revoked", lease)
            turns = bool(lease.gated)
            told = Revoke(job=lease.job, lease=lease.id, token=token, rung=lease.rung, deadline=left, turns=turns)
            self.reply(lease.connection, told, after_record=more)
        else:
            self.counters["grants"] += 1
            self.note("granted", lease)
            told = Grant(job=lease.job, lease=lease.id, token=token, rung=lease.rung, turns=bool(lease.gated))
            self.reply(lease.connection, told, after_record=True)

    def take_turns(self) -> None:
        """Begin and end turns, and say so."""
        turns = self.turns
        turns.settle(self.now, self.arbiter.wanting)
        begun, turns.begun, ended, turns.ended = turns.begun, [], turns.ended, []
        for lease in begun:
            self.counters["turns"] += 1
            self.reply(lease.connection, Begin(lease=lease.id, turn=lease.turn))
        for lease in ended:
            if lease.connection is not None:
                lease.end_by = self.now + self.settings.revoke_deadline
            self.reply(lease.connection, End(lease=lease.id, turn=lease.turn))

    def _token(self, lease: Lease) -> Token:
        self._sequence += 1
        lease.sequence = self._sequence
        return Token(self.epoch, self._sequence)

    # What is written down.

    def put_down(self, lease: Lease, charges: tuple[Charge, ...]) -> None:
        """Record a lease's charges; the first time, the whole lease."""
        record = journal.charge(lease, charges) if lease.written else journal.admission(lease, charges)
        if self.outbox.write(record):
            lease.written = charges

    def compact(self) -> None:
        """Rewrite the journal without leases that have ended."""
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
        self.outbox.replace(tuple(records))
