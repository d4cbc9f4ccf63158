"""A world for the coordinator: processes that die, stop and come back, connections that lose what is on its way, a
daemon that is killed between two commands; and a checker of every invariant that shares no code with the coordinator.

``World(seed, rules).walk(n)`` does ``n`` random things and raises ``Violation`` at the first that breaks an invariant.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

from jaxtensile.runtime.coordinator import Coordinator
from jaxtensile.runtime.events import (
    CapacityChanged,
    Close,
    Compact,
    Connected,
    Disconnected,
    JournalFailed,
    JournalWorks,
    ProcessDied,
    Received,
    Record,
    Restarted,
    Rules,
    Send,
    Settings,
    Terminate,
    Tick,
    Watch,
)
from jaxtensile.runtime.holder import Holder
from jaxtensile.runtime.journal import decode, encode, replay
from jaxtensile.runtime.leases import HOST, Process, State
from jaxtensile.runtime.ledger import Capacity
from jaxtensile.runtime.messages import (
    Ack,
    Admit,
    Beat,
    Grant,
    Reclaim,
    Release,
    Renew,
    Renewed,
    Revoke,
    Rung,
    Status,
    Token,
)
from jaxtensile.runtime.policy import OBJECTIVES

SPEAKING = (State.HELD, State.REVOKING, State.OVERDUE)


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(eq=False, slots=True)
class Line:
    """A connection. What was sent and not read yet is in the queues; ``None`` is its end."""

    id: int
    client: "Client"
    up: deque = field(default_factory=deque)
    down: deque = field(default_factory=deque)
    open_up: bool = True
    """The client has not closed it."""
    open_down: bool = True
    """The daemon has not closed it."""
    told: bool = False
    """The client was granted something on it."""


@dataclass(eq=False, slots=True)
class Client:
    process: Process
    holder: Holder
    needs: tuple
    line: Line | None = None
    alive: bool = True
    stopped: bool = False
    reaped: bool = False
    keeps: bool = False
    """Its allocator never gives bytes back."""
    step: int = 0
    real: tuple = ()
    """Bytes that stay and bytes of a step that it may hold just now, of each resource."""
    names: tuple = ()

    def changed(self):
        """It is on another rung, or dead: what does it hold?"""
        h = self.holder
        if not self.alive:
            rows = []
        elif h.held < 0:
            rows = [self.real] if self.keeps and self.real else []
        else:
            rows = [self.needs[h.held]]
            if h.moving >= 0:
                rows.append(self.needs[h.moving])
            if self.keeps and self.real:
                rows.append(self.real)
        if self.keeps:
            self.real = tuple((max(p + t for p, t in column), 0) for column in zip(*rows, strict=True))
        elif len(rows) == 1:
            self.real = rows[0]
        else:
            self.real = tuple(
                (max(p for p, _ in c), max(t for _, t in c)) if gated else (max(p + t for p, t in c), 0)
                for c, gated in zip(zip(*rows, strict=True), (*self.gated, False), strict=False)
            )

    gated: tuple = ()

    def in_use(self):
        return tuple(p + t for p, t in self.real)


class World:
    """Everything that is not the coordinator, and the coordinator."""

    ACTIONS = (
        ("_hear", 14),
        ("_deliver", 14),
        ("_step", 10),
        ("_connect", 5),
        ("_tick", 4),
        ("_reap", 3),
        ("_beat", 2),
        ("_born", 1.0),
        ("_finish", 0.5),
        ("_renew", 0.7),
        ("_kill", 0.35),
        ("_hang_up", 0.7),
        ("_stop", 0.4),
        ("_say_again", 0.3),
        ("_mischief", 0.3),
        ("_daemon_dies", 0.25),
        ("_daemon_starts", 4),
        ("_resize", 0.06),
        ("_disk", 0.06),
    )

    def __init__(self, seed=0, rules=None, *, gated=None, most=5, text=False, clamp=True):
        self.rnd = rnd = Random(seed) if isinstance(seed, int) else seed
        self.rules = rules or Rules()
        self.clamp = clamp
        """Whether jobs keep to what they hold when they come back."""
        self.text = text
        self.now = self.ticked = 0.0
        self.settings = Settings(
            policy=rnd.choice(OBJECTIVES),
            lease_ttl=rnd.choice((5.0, 10.0)),
            min_hold=rnd.choice((0.0, 0.0, 3.0, 30.0)),
            min_gain=rnd.choice((0.0, 0.05)),
            revoke_deadline=rnd.choice((4.0, 60.0)),
            on_overdue=rnd.choice(("wait", "wait", "terminate")),
            recovery=2.0,
        )
        self.gated = rnd.random() < 0.15 if gated is None else gated
        devices = ("cuda:0",) if self.gated else tuple(f"cuda:{k}" for k in range(rnd.choice((1, 1, 2))))
        self.devices = devices
        self.capacities = {d: Capacity(capacity=rnd.randint(10, 24), reserve=1, gated=self.gated) for d in devices}
        self.capacities[HOST] = Capacity(capacity=rnd.randint(2, 8))
        self.physical = {r: c.limit for r, c in self.capacities.items()}
        self.most = most
        self.clients = []
        self.lines = {}
        self.next_line = self.next_start = 0
        self.journal = []
        self.disk_full = False
        self.watched = set()
        self.daemon = None
        self.told = False
        """Something since the last check."""
        self.token = (0, 0)
        self.risen = {}
        self.crash = 0.004
        self.events = self.kills = self.deaths = self.renewals = 0
        self.counts = {}
        names, weights = zip(*self.ACTIONS, strict=True)
        self._actions = [getattr(self, n) for n in names]
        self._weights = [*accumulate(weights)]
        self._daemon_starts()

    # The daemon.

    def tell(self, *events):
        """Events for the daemon, if it is there; it may be killed anywhere in carrying out what they lead to."""
        if self.daemon is None:
            return
        self.told = True
        commands = self.daemon.handle_all(events, self.now)
        last = self.rnd.randrange(len(commands) + 1) if commands and self.rnd.random() < self.crash else None
        blocked = False
        for k, command in enumerate(commands):
            if k == last:
                self._daemon_dies()
                return
            blocked = self._carry_out(command, blocked) or blocked
        if blocked:
            self.tell(JournalFailed())
        elif last is not None:
            self._daemon_dies()

    def _carry_out(self, command, blocked):
        match command:
            case Send(connection=k, message=message, after_record=after_record):
                line = self.lines.get(k)
                if blocked and after_record:
                    if isinstance(message, Grant):  # decided, and said later
                        self.risen[message.lease] = (message.rung, self.now)
                    elif isinstance(message, Renewed):
                        self._renumbered(message.lease)
                    return False
                if isinstance(message, Grant | Revoke | Renewed):
                    self._sent(message)
                if line is not None and line.open_down:
                    line.down.append(message)
            case Record(record=record):
                if self.disk_full:
                    return True
                self.journal.append(encode(record) if self.text else record)
            case Compact(records=records):
                if self.disk_full:
                    return True
                self.journal = [encode(r) for r in records] if self.text else [*records]
            case Close(connection=k):
                line = self.lines.get(k)
                if line is not None and line.open_down:
                    line.open_down = False
                    line.down.append(None)
            case Watch(process=process):
                if any(c.process == process and c.reaped for c in self.clients) or not any(
                    c.process == process for c in self.clients
                ):
                    self.watched.add(process)
            case Terminate(process=process):
                for c in self.clients:
                    if c.process == process and c.alive:
                        self._end(c)
        return False

    def _sent(self, message):
        """Tokens only grow, and a revoke aims above the floor, and inside a minimum hold only for a higher class."""
        token = (message.token.epoch, message.token.sequence)
        if token <= self.token:
            raise Violation(f"token {token} after {self.token}")
        self.token = token
        if isinstance(message, Renewed):
            self._renumbered(message.lease)
            return
        lease = self.daemon.arbiter.leases[message.lease]
        rung, at = self.risen.get(lease.id, (-1, 0.0))
        if isinstance(message, Grant):
            self.risen[lease.id] = (message.rung, self.now if message.rung > rung else at)
            return
        if message.rung < lease.low:
            raise Violation("revoked below the floor")
        if self.now - at < self.settings.min_hold - 1e-9 and not any(
            other.priority > lease.priority for other in self.daemon.arbiter.leases.values()
        ):
            raise Violation("revoked inside its minimum hold")

    def _renumbered(self, lease):
        """Rungs are those of another ladder: what it has now it has had since the last time it rose."""
        self.renewals += 1
        self.risen[lease] = (1 << 30, self.risen.get(lease, (-1, 0.0))[1])

    def _daemon_starts(self):
        if self.daemon is not None or self.disk_full:
            return False
        records = (
            decode(b"".join(self.journal) + self.rnd.choice((b"", b'0f3a91c2 {"wha'))) if self.text else self.journal
        )
        known = replay(records, "boot")
        self.daemon = Coordinator(self.capacities, self.settings, self.rules)
        self.watched.clear()
        self.counts = dict.fromkeys(self.physical, 1 << 60)  # a shrink may not have been written down
        self.tell(Restarted(known, "boot"))
        return True

    def _daemon_dies(self):
        if self.daemon is None:
            return False
        self.daemon = None
        self.kills += 1
        for line in self.lines.values():
            for _ in range(self.rnd.randrange(len(line.down) + 1)):  # what was not in the socket yet
                line.down.pop()
            line.open_down = False
            line.down.append(None)
            line.up.clear()
        self.lines = {k: a for k, a in self.lines.items() if a.open_up}
        return True

    def _tick(self):
        wake = None if self.daemon is None else self.daemon.wake
        self.now += self.rnd.choice((0.01, 0.5, 1.0, 2.5, 4.0))
        if wake is not None and self.now < wake < self.now + 1.0 and self.rnd.random() < 0.5:
            self.now = wake  # to the very moment
        self._ticked()
        return True

    def _ticked(self):
        self.tell(Tick())
        self.ticked = self.now
        if self.daemon is not None and self.daemon.wake is not None and self.daemon.wake <= self.now:
            raise Violation("it wakes up, and has nothing to do but to wake up again")

    def _reap(self):
        """A pidfd fires."""
        if self.watched:
            process = self.rnd.choice(sorted(self.watched, key=lambda p: p.started))
            self.watched.discard(process)
            self.tell(ProcessDied(process))
            return True
        dead = [c for c in self.clients if not c.alive and not c.reaped]
        if not dead:
            return False
        client = self.rnd.choice(dead)
        client.reaped = True
        self.tell(ProcessDied(client.process))
        return True

    def _hear(self):
        """The daemon reads a message, or the end, of some connection."""
        ready = [a for a in self.lines.values() if a.up]
        if not ready or self.daemon is None:
            return False
        line = self.rnd.choice(ready)
        said = line.up.popleft()
        if said is None:
            del self.lines[line.id]
            self.tell(Disconnected(line.id))
        elif said == "hello":
            self.tell(Connected(line.id, line.client.process))
        elif line.open_down:
            self.tell(Received(line.id, said))
        return True

    # Clients.

    def _some(self, condition):
        found = [c for c in self.clients if c.alive and not c.stopped and condition(c)]
        return self.rnd.choice(found) if found else None

    def _born(self):
        if sum(c.alive for c in self.clients) >= self.most:
            return False
        rnd = self.rnd
        self.clients = [c for c in self.clients if c.alive or not c.reaped or c.line is not None]
        self.next_start += 1
        pid = rnd.choice([c.process.pid for c in self.clients if not c.alive] or [100 + self.next_start])
        if any(c.alive and c.process.pid == pid for c in self.clients):
            pid = 1000 + self.next_start
        client = self.client(Process(pid, self.next_start), self._job())
        self.clients.append(client)
        return True

    def client(self, process, admit):
        holder = Holder(admit, clamp=self.clamp)
        devices = len(admit.devices)
        return Client(
            process,
            holder,
            self._needs(admit),
            keeps=not self.gated and self.rnd.random() < 0.06,
            gated=(self.gated,) * devices,
            names=(*admit.devices, HOST),
        )

    def _needs(self, admit):
        return tuple((*((r.persistent, r.temp),) * len(admit.devices), (r.host, 0)) for r in admit.ladder)

    def _renew(self):
        """A job has another ladder; one of its rungs covers where it is."""
        client = self._some(lambda c: c.line is not None and c.holder.phase == "holding" and c.holder.held >= 0)
        if client is None:
            return False
        rnd, old = self.rnd, client.holder.admit
        here = old.ladder[client.holder.held]
        more = rnd.choice((0, 0, 1))
        middle = Rung(persistent=here.persistent, temp=here.temp + more, host=here.host, seconds=rnd.uniform(1.0, 2.0))
        ladder = [middle]
        for _ in range(rnd.randrange(3)):
            lowest = ladder[0]
            if lowest.level > 1:
                level = rnd.randint(1, lowest.level - 1)
                temp = rnd.randint(0, level)
                host = lowest.host + rnd.choice((0, 0, 1))
                rung = Rung(
                    persistent=level - temp, temp=temp, host=host, seconds=lowest.seconds * rnd.uniform(1.0, 1.6)
                )
                ladder.insert(0, rung)
        for _ in range(rnd.randrange(3)):
            top = ladder[-1]
            seconds = top.seconds * rnd.uniform(0.6, 1.0)
            ladder.append(Rung(persistent=top.persistent, temp=top.temp + rnd.randint(1, 5), seconds=seconds))
        floor = rnd.choice((0, ladder[0].level, middle.level))
        new = Admit(
            job=old.job,
            devices=old.devices,
            ladder=tuple(ladder),
            floor=floor,
            priority=old.priority,
            weight=old.weight,
        )
        said = client.holder.renew(new, ladder.index(middle), client.in_use())
        self._say(client, said)
        return bool(said)

    def _job(self):
        rnd = self.rnd
        devices = tuple(rnd.sample(self.devices, rnd.randint(1, len(self.devices))))
        level, seconds, ladder = rnd.randint(1, 8), rnd.uniform(1.5, 4), []
        host = rnd.choice((0, 0, 1, 2))
        for _ in range(rnd.randint(1, 4)):
            temp = rnd.randint(0, level)
            ladder.append(Rung(persistent=level - temp, temp=temp, host=host, seconds=seconds))
            level, seconds = level + rnd.randint(1, 6), seconds * rnd.uniform(0.6, 1.0)
            host = rnd.randint(0, host)
        return Admit(
            job=f"job{rnd.randrange(2)}",
            devices=devices,
            ladder=tuple(ladder),
            floor=rnd.choice((0, 0, ladder[0].level)),
            priority=rnd.choice((0, 0, 0, 1)),
            weight=rnd.choice((1.0, 1.0, 2.0)),
        )

    def _connect(self):
        client = self._some(lambda c: c.line is None and c.holder.phase != "ended")
        if client is None or self.daemon is None:
            return False
        self.next_line += 1
        line = client.line = self.lines[self.next_line] = Line(self.next_line, client)
        line.up.append("hello")
        line.up.extend(client.holder.connected(client.in_use()))
        return True

    def _deliver(self):
        """A client reads a message, or the end, of its connection."""
        client = self._some(lambda c: c.line is not None and c.line.down)
        if client is None:
            return False
        line = client.line
        message = line.down.popleft()
        if message is None:
            self._leave(client, 0)
        else:
            if isinstance(message, Grant | Revoke | Renewed):
                line.told = True
            listens = client.holder.phase in ("waiting", "holding")
            if isinstance(message, Grant | Revoke) and listens and message.rung >= len(client.needs):
                raise Violation("granted a rung that it does not have")
            before = client.holder.admit
            self._say(client, client.holder.received(message, client.in_use()))
            if client.holder.admit is not before:
                client.needs = self._needs(client.holder.admit)
            client.changed()
        return True

    def _say(self, client, messages):
        if client.line is not None and client.line.open_up:
            client.line.up.extend(messages)

    def _step(self):
        """A step boundary, or the end of a move to another rung."""
        client = self._some(lambda c: c.holder.phase == "holding" and c.holder.held >= 0)
        return client is not None and self._boundary(client)

    def _boundary(self, client):
        holder = client.holder
        if holder.moving >= 0:
            use = client.needs[holder.moving]
            if client.keeps:
                use = client.real
            self._say(client, holder.moved(tuple(p + t for p, t in use)))
        else:
            client.step += 1
            if holder.boundary() is None:
                return False
        client.changed()
        return True

    def _beat(self):
        client = self._some(lambda c: c.line is not None and c.holder.phase == "holding")
        if client is None:
            return False
        use = client.in_use()
        beat = Beat(lease=client.holder.lease, step=client.step, step_us=1000, in_use=use, peak=max(use))
        self._say(client, [beat])
        return True

    def _finish(self):
        client = self._some(lambda c: c.holder.phase == "holding" and c.holder.moving < 0)
        if client is None:
            return False
        self._say(client, client.holder.release(client.in_use() if client.keeps else ()))
        client.changed()
        return True

    def _leave(self, client, lost):
        """The client's end of its connection is closed; the last ``lost`` messages never were sent."""
        line, client.line = client.line, None
        for _ in range(min(lost, len(line.up))):
            line.up.pop()
        line.open_up = False
        line.up.append(None)
        line.down.clear()
        client.holder.disconnected()
        if not line.open_down and self.daemon is None:
            self.lines.pop(line.id, None)

    def _hang_up(self):
        client = self._some(lambda c: c.line is not None)
        if client is None:
            return False
        self._leave(client, self.rnd.randrange(len(client.line.up) + 1))
        return True

    def _kill(self):
        living = [c for c in self.clients if c.alive]
        if not living:
            return False
        self._end(self.rnd.choice(living))
        return True

    def _end(self, client):
        self.deaths += 1
        client.alive = client.stopped = False
        client.changed()
        if client.line is not None:
            self._leave(client, self.rnd.randrange(len(client.line.up) + 1))

    def _stop(self):
        living = [c for c in self.clients if c.alive]
        if not living:
            return False
        client = self.rnd.choice(living)
        client.stopped = not client.stopped
        return True

    def _say_again(self):
        client = self._some(lambda c: c.line is not None and c.holder.phase == "waiting")
        if client is None:
            return False
        self._say(client, [client.holder.admit])
        return True

    def _mischief(self):
        """Words about what is another's, or long over, or nothing."""
        client = self._some(lambda c: c.line is not None and c.line.told)
        if client is None:
            return False
        rnd, own = self.rnd, client.holder.lease
        other = own + rnd.choice((-2, -1, 1, 2, 1000))
        stale = Token(client.holder.token.epoch, max(client.holder.token.sequence - rnd.randint(1, 3), 0))
        message = rnd.choice(
            (
                Status(),
                Ack(lease=own, token=stale, rung=0, in_use=()),
                Ack(lease=max(other, 0), token=stale, rung=0, in_use=()),
                Beat(lease=max(other, 0), step=0, step_us=0, in_use=(99,), peak=0),
                Reclaim(lease=own + 1000, token=stale, rung=0, in_use=()),
                Release(lease=own + 1000, token=stale),
                Renew(lease=own, token=stale, ladder=(Rung(persistent=1, seconds=1.0),), rung=0),
                Renew(lease=own + 1000, token=stale, ladder=(Rung(persistent=1, seconds=1.0),), rung=0),
                Reclaim(lease=max(own - 1, 0), token=stale, rung=0, in_use=()),
            )
        )
        self._say(client, [message])
        return True

    def _resize(self):
        device = self.rnd.choice(self.devices)
        old = self.capacities[device]
        new = Capacity(capacity=self.rnd.randint(8, 24), reserve=1, gated=old.gated)
        self.capacities = {**self.capacities, device: new}
        self.physical[device] = max(self.physical[device], new.limit)
        self.tell(CapacityChanged(self.capacities))
        return True

    def _disk(self):
        self.disk_full = not self.disk_full
        if not self.disk_full:
            self.tell(JournalWorks())
        return True

    # Walks.

    def walk(self, events):
        """So many random things, each checked."""
        choices, actions, weights, check = self.rnd.choices, self._actions, self._weights, self.check
        done = 0
        while done < events:
            for action in choices(actions, cum_weights=weights, k=32):
                if action():
                    done += 1
                    check()
        return self

    def settle_down(self):
        """All faults end, everybody does what is asked: then nobody is left behind."""
        self.crash = 0.0
        self.settled_after = self.now + 40.0
        if self.disk_full:
            self._disk()
        for client in self.clients:
            client.stopped = False
        for _ in range(400):
            busy = False
            for action in (self._daemon_starts, self._reap, self._connect, self._hear, self._deliver):
                while action():
                    busy = True
                    self.check()
            for client in self.clients:
                if client.alive and client.holder.phase == "holding" and self._boundary(client):
                    busy = True
                    self.check()
            if not busy and self.now > self.settled_after and not self.daemon.arbiter.recheck:
                break
            self.now += 1.0
            for client in self.clients:  # time passes, and everybody is heard of
                if client.alive and client.line is not None and client.holder.phase == "holding":
                    use = client.in_use()
                    self._say(client, [Beat(lease=client.holder.lease, step=0, step_us=0, in_use=use, peak=0)])
            while self._hear():
                self.check()
            self._ticked()
            self.check()
        self._nobody_left_behind()
        return self

    def _nobody_left_behind(self):
        d = self.daemon
        for lease in d.arbiter.leases.values():
            gone = any(c.process == lease.process and c.holder.phase == "ended" and c.keeps for c in self.clients)
            if lease.state not in (State.HELD, State.QUEUED) and not gone:
                raise Violation(f"{lease.state} though everybody does what is asked")
        if d.phase != "serving":
            raise Violation(f"still {d.phase}")
        if d.arbiter.queue:
            first = d.arbiter.queue[0]
            accounts = d.arbiter.ledger.accounts
            others = [a for a in d.arbiter.leases.values() if a.rung >= 0]
            floors = [(a, self._guaranteed(a)) for a in others]
            if (
                all(self._way(a, others) for a in others)
                and not any(c.free < 0 for c in accounts.values())
                and _fit(d, [*floors, (first, first.needs[first.low])])
            ):
                raise Violation("the first waiter fits beside all floors and was not admitted")

    def everybody_goes(self):
        """Then all is free and the journal says nothing."""
        self.crash = 0.0
        if self.disk_full:
            self._disk()
        self._daemon_starts()
        for client in self.clients:
            if client.alive:
                self._end(client)
        for _ in range(10_000):
            if not (self._hear() or self._reap()):
                break
            self.check()
        for name, account in self.daemon.arbiter.ledger.accounts.items():
            if account.charges or account.persistent or account.temps:
                raise Violation(f"{account.charges} of {name} is charged and nobody is there")
        if replay(decode(b"".join(self.journal)) if self.text else self.journal, "boot").leases:
            raise Violation("the journal knows a lease and nobody is there")
        return self

    # The checker.

    def check(self):
        """Every invariant that holds at any time. What only the daemon can change is looked at when it was told
        something."""
        self.events += 1
        daemon = self.daemon
        totals = dict.fromkeys(self.physical, 0)
        temps = dict.fromkeys(self.physical, 0)
        leases = {} if daemon is None else {a.process: a.id for a in daemon.arbiter.leases.values()}
        for client in self.clients:
            if not client.real:
                continue
            lease = leases.get(client.process)
            for name, (p, t) in zip(client.names, client.real, strict=True):
                gated = self.gated and name != HOST
                totals[name] += p if gated else p + t
                if gated and t > temps[name]:
                    temps[name] = t
                if daemon is not None and (p or t):
                    charge = daemon.arbiter.ledger.accounts[name].charges.get(lease)
                    if charge is None:
                        raise Violation(f"{client.process} holds {p + t} of {name} and is charged nothing")
                    cp, ct = charge.persistent, charge.temp
                    if (p > cp or t > ct) if gated else p + t > cp + ct:
                        raise Violation(f"{client.process} holds {p}+{t} of {name}, charged {charge}")
        for name, limit in self.physical.items():
            if totals[name] + temps[name] > limit:
                raise Violation(f"{totals[name] + temps[name]} of {name} are held, there are {limit}")
        if daemon is not None and self.told:
            self.told = False
            self._check_leases(daemon)

    def _check_leases(self, d):
        arbiter = d.arbiter
        over = False
        for name, account in arbiter.ledger.accounts.items():
            charged = account.charges.values()
            temp = [c.temp for c in charged]
            used = sum(c.persistent for c in charged) + (
                max(temp, default=0) if self.gated and name != HOST else sum(temp)
            )
            last = self.counts.get(name, 0)
            if used > self.capacities[name].limit:
                over = True
                if used > last:
                    raise Violation(f"{used} of {name} are charged, there are {self.capacities[name].limit}")
            self.counts[name] = used
        living = {c.process for c in self.clients if c.alive or not c.reaped} | self.watched
        revoking = False
        for lease in arbiter.leases.values():
            state = lease.state
            if lease.process not in living and d.phase != "recovering" and state is not State.QUEUED:
                raise Violation(f"lease {lease.id} of a process that is dead")
            revoking = revoking or state is State.REVOKING
            if state in SPEAKING:
                if not lease.low <= lease.rung <= lease.high:
                    raise Violation(f"lease {lease.id} is on rung {lease.rung}")
                for name, need in zip(lease.resources, lease.needs[lease.rung], strict=True):
                    charge = arbiter.ledger.accounts[name].charges.get(lease.id)
                    if (
                        (need.persistent or need.temp)
                        and (charge is None or charge.persistent + charge.temp < need.persistent + need.temp)
                        and self.rules.charge_until_ack
                    ):
                        raise Violation(f"lease {lease.id} is charged less than what it was told")
                if lease.connection is None:
                    raise Violation(f"lease {lease.id} is {state} and nobody speaks for it")
        for client in self.clients:
            line = client.line
            if client.alive and line is not None and line.told and line.open_up and line.open_down:
                holder = client.holder
                if holder.phase == "holding" and line.id in self.lines and line.told:
                    lease = arbiter.leases.get(holder.lease)
                    if lease is None or lease.state is State.QUARANTINED or lease.connection != line.id:
                        raise Violation(f"{client.process} is connected and its lease is {lease and lease.state}")
        if d.phase != "serving" or over or not d.journal_works or self.disk_full:
            return
        if arbiter.queue:
            self._check_first(d, arbiter.queue[0])
        elif not revoking:
            self._check_idle(d)

    def _charged(self, a):
        accounts = self.daemon.arbiter.ledger.accounts
        return tuple(accounts[r].charges.get(a.id, (0, 0)) for r in a.resources)

    def _both(self, a):
        """What covers what a lease is charged and its floor."""
        rows = []
        for x, y in zip(self._charged(a), a.needs[a.low], strict=True):
            p, t = x if isinstance(x, tuple) else (x.persistent, x.temp)
            gated = self.gated and len(rows) < len(a.resources) - 1
            rows.append((max(p, y.persistent), max(t, y.temp)) if gated else (max(p + t, y.persistent + y.temp), 0))
        return tuple(rows)

    def _way(self, a, others):
        """May it go down to its floor, charged what covers both ends?"""
        return _fit(self.daemon, [(b, self._both(b) if b is a else self._charged(b)) for b in others])

    def _guaranteed(self, a):
        """What a job may count on: its floor while it speaks, what it keeps for good, else both."""
        if a.stuck:
            return self._charged(a)
        return a.needs[a.low] if a.state in (State.HELD, State.REVOKING) else self._both(a)

    def _check_first(self, d, first):
        """The first waiter gets in as soon as it fits, and room is made for it as soon as it may be."""
        now, hold = self.ticked, self.settings.min_hold
        others = [a for a in d.arbiter.leases.values() if a.rung >= 0]
        charged = self._charged

        def gives(a):
            if a.stuck or a.state not in (State.HELD, State.REVOKING):
                return False
            return now >= a.since + hold or a.priority < first.priority

        floor = (first, first.needs[first.low])
        floors = [(a, self._guaranteed(a)) for a in others]
        if not _fit(d, [*floors, floor], first):
            return
        if _fit(d, [*((a, charged(a)) for a in others), floor], first):
            raise Violation("the first waiter fits and was not admitted")
        promised = [(a, a.needs[a.rung] if a.state is State.REVOKING else charged(a)) for a in others]

        least = [(a, a.needs[a.low] if gives(a) and self._way(a, others) else kept) for a, kept in promised]
        if d.wake is None:
            raise Violation("a waiter, and nothing to wake up for")
        if _fit(d, [*least, floor], first) and not _fit(d, [*promised, floor], first):
            raise Violation("room could be made for the first waiter, and nobody was asked")

    def _check_idle(self, d):
        """No bytes are free that somebody would be faster with."""
        accounts = d.arbiter.ledger.accounts
        limits = {r: c.limit for r, c in self.capacities.items()}
        for lease in d.arbiter.leases.values():
            if lease.state is not State.HELD:
                continue
            now = lease.ladder[lease.rung].seconds
            for rung in range(lease.rung + 1, lease.high + 1):
                if (
                    lease.ladder[rung].seconds > now * (1 - self.settings.min_gain) - 1e-12
                    or lease.ladder[rung].seconds >= now
                ):
                    continue
                for name, need in zip(lease.resources, lease.needs[rung], strict=True):
                    charges = accounts[name].charges
                    mine = charges.get(lease.id)
                    p, t = (0, 0) if mine is None else (mine.persistent, mine.temp)
                    others = [c for k, c in charges.items() if k != lease.id]
                    if self.gated and name != HOST:
                        used = sum(c.persistent for c in others) + max(p, need.persistent)
                        used += max([t, need.temp, *(c.temp for c in others)])
                    else:
                        used = sum(c.persistent + c.temp for c in others) + max(p + t, need.persistent + need.temp)
                    if used > limits[name]:
                        break
                else:
                    raise Violation(f"lease {lease.id} could be on rung {rung}, and is on {lease.rung}")


def _fit(d, rows, only=None):
    """Do these charges fit, on the resources that the waiter needs?"""
    for name, account in d.arbiter.ledger.accounts.items():
        p, t = 0, [0]
        for lease, charges in rows:
            for r, c in zip(lease.resources, charges, strict=True):
                if r == name:
                    a, b = (c.persistent, c.temp) if hasattr(c, "temp") else c
                    p, t = p + a, [*t, b]
        needed = only is None or any(
            r == name and (n.persistent or n.temp) for r, n in zip(only.resources, only.needs[only.low], strict=True)
        )
        if needed and p + (max(t) if account.gated else sum(t)) > account.limit:
            return False
    return True


def broken_walks(walks, events, *, rules=None, clamp=True):
    """The seeds of walks that break an invariant, as they are found."""
    for seed in range(walks):
        try:
            World(seed, rules, clamp=clamp).walk(events).settle_down().everybody_goes()
        except Violation:
            yield seed
