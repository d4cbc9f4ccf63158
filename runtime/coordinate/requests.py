"""The coordinator's handling of messages from jobs.

Invariant: a message never raises: it is answered, counted, or ends its connection. Only its own process speaks for a
lease, and late messages change nothing. Bytes that a job reports are charged whatever it was granted; an excess raises
an alarm.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtensile.runtime.coordinate.chronicle import Entry
from jaxtensile.runtime.coordinate.desk import Desk
from jaxtensile.runtime.coordinate.speakers import Peer
from jaxtensile.runtime.decide.admission import demanded
from jaxtensile.runtime.decide.events import Connection
from jaxtensile.runtime.decide.leases import ACK, HELD, QUARANTINED, RECLAIM, RELEASE, Charge, Lease, Process
from jaxtensile.runtime.protocol.messages import (
    VERSION,
    Ack,
    Admit,
    AskTurn,
    Beat,
    Code,
    Done,
    Hello,
    Reclaim,
    Reject,
    Release,
    Renew,
    Request,
    Status,
    Token,
    Welcome,
    Withdraw,
)
from jaxtensile.units import Bytes, format_bytes


class Requests:
    """Handles messages at a desk."""

    __slots__ = ("_desk",)

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def received(self, connection: Connection, message: Request) -> None:
        """Handle a message from a connection."""
        desk = self._desk
        peer = desk.speakers.peers.get(connection)
        if peer is None or peer.closed:
            return
        if not peer.welcome:
            if not isinstance(message, Hello) or message.version != VERSION:
                code: Code = "version" if isinstance(message, Hello) else "protocol"
                desk.refuse(connection, code, f"say HELLO with version {VERSION} first")
                return
            peer.welcome = True
            welcome = Welcome(version=VERSION, epoch=desk.epoch, beat_within=desk.settings.lease_ttl)
            desk.reply(connection, welcome)
            return
        match message:
            case Beat():
                self._beat(connection, message)
            case Ack():
                self._ack(connection, message)
            case AskTurn():
                self._ask_turn(connection, message)
            case Done():
                self._done(connection, message)
            case Admit():
                self._admit(connection, peer, message)
            case Release():
                self._release(connection, peer.process, message)
            case Withdraw():
                self._withdraw(connection, peer, message)
            case Renew():
                self._renew(connection, peer.process, message)
            case Reclaim():
                self._reclaim(connection, peer, message)
            case Status():
                desk.reply(connection, desk.snapshot(message.after))
            case Hello():
                desk.refuse(connection, "protocol", "HELLO is said once")

    def _admit(self, connection: Connection, peer: Peer, message: Admit) -> None:
        desk = self._desk
        ask = message.job, message.number
        if desk.speakers.late(connection, peer, ask):
            desk.counters["stale"] += 1
            return
        if desk.rules.idempotent_admit and (known := peer.known.asks.get(ask)) is not None:
            self._admit_again(known, connection, peer)
            return
        asked = (
            "the coordinator is stopping"
            if desk.phase == "draining"
            else demanded(message.ladder, message.devices, message.floor, message.want, desk.arbiter.ledger)
        )
        if isinstance(asked, str):
            desk.counters["rejected"] += 1
            desk.chronicle.add(Entry(desk.now, "rejected", message.job, 0, peer.process.pid, -1, asked))
            desk.reply(connection, Reject(job=message.job, reason=asked))
            return
        lease = Lease(
            id=desk.number(),
            process=peer.process,
            job=message.job,
            number=message.number,
            resources=asked.resources,
            ladder=asked.ladder,
            low=asked.low,
            high=asked.high,
            needs=asked.needs,
            slowdowns=asked.slowdowns,
            best=asked.best,
            touched=asked.touched,
            priority=message.priority,
            weight=message.weight,
            asked=desk.now,
            suspended=message.suspended,
        )
        desk.speakers.own(lease, peer.known)
        desk.speakers.speak(lease, connection, peer, desk.now)
        desk.arbiter.enqueue(lease)
        desk.undecided = True

    def _admit_again(self, lease: Lease, connection: Connection, peer: Peer) -> None:
        """Answer a repeated ADMIT, whose first answer may be lost: the job holds from now on what it is told now."""
        desk, arbiter = self._desk, self._desk.arbiter
        desk.speakers.speak(lease, connection, peer, desk.now)
        desk.turns.call_off(lease)
        if lease.turn >= 0:
            desk.turns.done(lease, desk.now)
        if lease.rung >= 0:
            if lease.state is not HELD:
                arbiter.happened(lease, RECLAIM)
            lease.rung, lease.deadline, lease.wanted_by = arbiter.covered(lease), None, None
            lease.since = desk.now
            arbiter.changed(lease)
            desk.note("came back", lease)
            desk.all_known()
        arbiter.told[lease.id] = lease
        desk.undecided = True

    def _reclaim(self, connection: Connection, peer: Peer, message: Reclaim) -> None:
        desk, arbiter = self._desk, self._desk.arbiter
        lease = self._lease(connection, peer.process, message.lease)
        if lease is None:
            return
        knows = message.token.sequence > lease.former or not desk.rules.former_ladder
        known = lease.low <= message.rung <= lease.high or not knows
        if lease.rung < 0 or not known or len(message.in_use) > len(lease.resources):
            desk.refuse(connection, "protocol", f"lease {lease.id} was never on rung {message.rung}")
            return
        if desk.speakers.late(connection, peer, (lease.job, lease.number)):
            desk.counters["stale"] += 1
            return
        desk.speakers.speak(lease, connection, peer, desk.now)
        lease.deadline, lease.wanted_by, lease.knows = None, None, knows
        desk.turns.call_off(lease)
        if message.turn < 0:
            desk.turns.done(lease, desk.now)
        else:
            desk.turns.restore(lease, message.turn, desk.now)
        if knows:
            now, said = arbiter.charged(lease), lease.needs[message.rung]
            if arbiter.ledger.wider(lease.resources, now, said) != now:
                self._alarm(lease, "is on a rung that it was not granted")
            lease.rung = message.rung
            charges = self._left(lease, message.in_use)
        else:
            # It speaks of its former ladder: it is within what it is charged, which covers that.
            lease.rung = arbiter.covered(lease)
            charges = self._held(lease, arbiter.charged(lease), message.in_use)
        lease.in_use = message.in_use
        arbiter.happened(lease, RECLAIM, charges)
        desk.note("came back", lease)
        arbiter.told[lease.id] = lease
        desk.undecided = True
        desk.all_known()

    def _renew(self, connection: Connection, process: Process, message: Renew) -> None:
        """Give a job at rest another ladder. Bytes beyond its charge must be free now: waiting would hold bytes that
        others want."""
        desk, arbiter = self._desk, self._desk.arbiter
        lease = self._lease(connection, process, message.lease)
        if lease is None:
            return
        last = message.token == Token(lease.epoch, lease.sequence) and lease.state is HELD
        if not last or self._stale(lease, connection, message.in_use):
            desk.counters["stale"] += 1
            return
        lease.beat, lease.knows = desk.now, True
        asked = (
            demanded(message.ladder, lease.devices, message.floor, message.want, arbiter.ledger)
            if desk.outbox.works
            else "nothing can be written down"
        )
        reason = asked if isinstance(asked, str) else arbiter.renew(lease, asked, message.rung)
        if reason:
            desk.error(connection, "no room", reason, lease=lease.id)
            return
        lease.in_use, lease.suspended = message.in_use, message.suspended
        charges = self._left(lease, message.in_use)
        arbiter.ledger.measured(lease.id, lease.resources, charges)
        arbiter.changed(lease)
        lease.former, lease.knows = message.token.sequence, False
        desk.note("renewed", lease)
        arbiter.told[lease.id] = lease
        desk.undecided = True

    def _ack(self, connection: Connection, message: Ack) -> None:
        desk, arbiter = self._desk, self._desk.arbiter
        lease = self._spoken_for(connection, message.lease, message.in_use)
        if lease is None:
            return
        lease.knows = lease.knows or message.token.sequence > lease.former
        late = message.token != Token(lease.epoch, lease.sequence) or message.rung != lease.rung
        if late and (desk.rules.fencing or not lease.low <= message.rung <= lease.high):
            desk.counters["stale"] += 1
            return
        lease.rung = message.rung
        before = arbiter.charged(lease)
        lease.in_use = message.in_use
        charges = self._left(lease, message.in_use)
        if lease.state is not HELD:
            desk.note("shrunk", lease)
            lease.since, lease.deadline, lease.wanted_by = desk.now, None, None
            desk.undecided = True
        arbiter.happened(lease, ACK, charges)
        if charges != before:
            desk.put_down(lease, charges)
            desk.undecided = True

    def _beat(self, connection: Connection, message: Beat) -> None:
        desk, arbiter = self._desk, self._desk.arbiter
        lease = arbiter.leases.get(message.lease)
        if lease is None:
            self._unknown(connection, message.lease)  # who beats holds it
            return
        if self._stale(lease, connection, message.in_use):
            desk.counters["stale"] += 1
            return
        lease.beat, lease.step, lease.step_us, lease.peak = desk.now, message.step, message.step_us, message.peak
        lease.in_use = message.in_use
        if not desk.rules.measured_wins:
            return
        before = arbiter.charged(lease)
        charges = _at_least(before, message.in_use)
        if charges != before:
            self._keeps(lease, "holds more than it was granted")
            self._charge(lease, charges)

    def _ask_turn(self, connection: Connection, message: AskTurn) -> None:
        desk = self._desk
        lease = desk.arbiter.leases.get(message.lease)
        if lease is None:
            self._unknown(connection, message.lease)
            return
        if self._stale(lease, connection, ()) or message.turn <= max(lease.turn, lease.asks):
            desk.counters["stale"] += 1
            return
        lease.beat = desk.now
        desk.turns.ask(lease, message.turn, desk.now)

    def _done(self, connection: Connection, message: Done) -> None:
        desk, arbiter = self._desk, self._desk.arbiter
        lease = self._spoken_for(connection, message.lease, message.in_use)
        if lease is None:
            return
        if message.turn == lease.asks:
            desk.turns.call_off(lease)
        elif message.turn == lease.turn:
            lease.hands_over = message.cost
            # Where several had one at once, there may be room now for what was to get more.
            desk.undecided = desk.undecided or any(len(arbiter.ledger.accounts[r].turns) > 1 for r in lease.gated)
            desk.turns.done(lease, desk.now)
            self._stays(lease, message.in_use)
        else:
            desk.counters["stale"] += 1

    def _stays(self, lease: Lease, in_use: tuple[Bytes, ...]) -> None:
        """Charge what a job still has after its turn as what it has for good, if that is more."""
        desk, arbiter = self._desk, self._desk.arbiter
        lease.in_use = in_use or lease.in_use
        before = arbiter.charged(lease)
        if not desk.rules.measured_wins or all(u <= c.persistent for u, c in zip(in_use, before, strict=False)):
            return
        self._keeps(lease, "keeps bytes after its turn")
        # What the allocator keeps, the next step uses.
        more = [max(u - c.persistent, 0) for u, c in zip(in_use, before, strict=False)]
        rows = [Charge(c.persistent + m, max(c.temp - m, 0)) for m, c in zip(more, before, strict=False)]
        self._charge(lease, (*rows, *before[len(rows) :]))

    def _release(self, connection: Connection, process: Process, message: Release) -> None:
        desk = self._desk
        if message.lease not in desk.arbiter.leases:
            desk.released(connection, message.lease)  # the answer was lost
            return
        lease = self._lease(connection, process, message.lease)
        if lease is None:
            return
        if desk.rules.measured_wins and any(message.in_use) and lease.rung >= 0:
            self._keeps(lease, "keeps bytes after its release")
            desk.arbiter.changed(lease)
            desk.undecided = True  # it is guaranteed no more than it has
            desk.put_down(lease, desk.arbiter.charged(lease))
            held = format_bytes(max(message.in_use))
            detail = f"{held} are still held: they stay charged until the process ends"
            desk.error(connection, "in use", detail, lease=lease.id)
            return
        desk.forget(lease, RELEASE, "it was released")
        desk.released(connection, lease.id)

    def _withdraw(self, connection: Connection, peer: Peer, message: Withdraw) -> None:
        """End a request. The job was told of no lease, so it holds nothing."""
        desk, ask = self._desk, (message.job, message.number)
        desk.speakers.heard(ask, connection, peer)
        if (lease := peer.known.asks.get(ask)) is not None:
            desk.forget(lease, RELEASE, "it was withdrawn")
        desk.released(connection, 0)

    # Who may speak for a lease.

    def _lease(self, connection: Connection, process: Process, number: int) -> Lease | None:
        """The lease of that number, if it is the process's own; None after an error was sent."""
        desk = self._desk
        lease = desk.arbiter.leases.get(number)
        if lease is None:
            self._unknown(connection, number)
        elif not desk.speakers.same(lease.process, process):
            desk.counters["not yours"] += 1
            desk.error(connection, "not yours", f"lease {number} is another process's", lease=number)
            return None
        return lease

    def _unknown(self, connection: Connection, number: int) -> None:
        self._desk.error(connection, "unknown lease", f"there is no lease {number}: ask to be admitted", lease=number)

    def _spoken_for(self, connection: Connection, number: int, in_use: Sequence[Bytes]) -> Lease | None:
        """The lease of that number, heard of now; None, and counted, if a word about it is late."""
        lease = self._desk.arbiter.leases.get(number)
        if lease is None or self._stale(lease, connection, in_use):
            self._desk.counters["stale"] += 1
            return None
        lease.beat = self._desk.now
        return lease

    def _stale(self, lease: Lease, connection: Connection, in_use: Sequence[Bytes]) -> bool:
        """Whether to ignore a connection's message about a lease."""
        if lease.rung < 0 or lease.state is QUARANTINED or len(in_use) > len(lease.resources):
            return True
        return not self._desk.speakers.speaks(lease, connection)

    # What is measured.

    def _left(self, lease: Lease, in_use: Sequence[Bytes]) -> tuple[Charge, ...]:
        """The charge of a job on its rung: the rung's needs, or measured bytes if larger. A job that holds more does
        not give bytes back, so its charge no longer shrinks."""
        charges = self._held(lease, lease.needs[lease.rung], in_use)
        if not lease.stuck:
            return charges
        arbiter = self._desk.arbiter
        return arbiter.ledger.wider(lease.resources, arbiter.charged(lease), charges)

    def _held(self, lease: Lease, charges: tuple[Charge, ...], in_use: Sequence[Bytes]) -> tuple[Charge, ...]:
        """The charges, raised to measured bytes."""
        if not self._desk.rules.measured_wins:
            return charges
        held = _at_least(charges, in_use)
        if held != charges:
            self._keeps(lease, "holds more than its rung needs")
        return held

    def _charge(self, lease: Lease, charges: tuple[Charge, ...]) -> None:
        """Charge and record what a job was found to hold."""
        desk = self._desk
        desk.arbiter.ledger.measured(lease.id, lease.resources, charges)
        desk.arbiter.changed(lease)
        desk.put_down(lease, charges)
        desk.undecided = True

    def _keeps(self, lease: Lease, fault: str) -> None:
        self._alarm(lease, fault)
        if not lease.stuck:
            lease.stuck, self._desk.undecided = True, True  # it is guaranteed no more than it has, so others may be
        self._desk.counters["kept"] += 1

    def _alarm(self, lease: Lease, fault: str) -> None:
        if fault not in lease.faults:
            self._desk.note("alarm", lease, fault)
        lease.faults.add(fault)


def _at_least(charges: tuple[Charge, ...], held: Sequence[Bytes]) -> tuple[Charge, ...]:
    """The charges, each raised to the bytes held; resources missing from ``held`` keep theirs."""
    if not held or all(have <= charge.level for charge, have in zip(charges, held, strict=False)):
        return charges
    more = [c if have <= c.level else Charge(have - c.temp, c.temp) for c, have in zip(charges, held, strict=False)]
    return (*more, *charges[len(more) :])
