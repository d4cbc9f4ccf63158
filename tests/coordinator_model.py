"""A world for the coordinator, and a checker of every invariant that shares no code with it.

Processes die, stop, fork and come back; connections lose what is on its way; a daemon is killed between two commands.
Jobs speak by the ``Client`` that they have in earnest. They ask for leases and for more, compile for long, are
interrupted between any two things that they do, are suspended, and end; names are used again. Some have several
devices, and the limits of devices and of host memory bind at once.

``World(seed, rules).walk(n)`` does ``n`` random things and raises ``Violation`` at the first that breaks an invariant.
"""

from collections import Counter, deque
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from threading import Lock

from msgspec import structs

from jaxtensile.errors import CoordinatorError
from jaxtensile.runtime.client.client import ANSWER, Client
from jaxtensile.runtime.coordinate.coordinator import Coordinator
from jaxtensile.runtime.decide.events import (
    OBJECTIVES,
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
from jaxtensile.runtime.decide.journal import decode, encode, replay
from jaxtensile.runtime.decide.leases import HOST, Process, State
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.decide.rota import RESTLESS
from jaxtensile.runtime.protocol.messages import (
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

FIRST = 10.0
"""Seconds for which a job that compiles its first plan stays where it is, as in ``jaxtensile.jobs.stepping``."""
SPEAKING = (State.HELD, State.REVOKING, State.OVERDUE)


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True, slots=True)
class Care:
    """What jobs and their processes do so that all goes well. Each can be left out, to see that it is missed."""

    clamps: bool = True
    """Who comes back keeps to what it holds."""
    owns: bool = True
    """A handle knows the process that made it: in a forked child nothing is done by it."""
    abandons: bool = True
    """A forked child closes its parent's connections."""
    records: bool = True
    """What asks is on record, so that what an interrupt leaves behind is given back."""
    numbers: bool = True
    """Jobs of one name that a process has one after another are told apart."""
    withdraws: bool = True
    """Who waits no more says so until it is heard: it may have been granted what it waited for."""
    turns: bool = True
    """Jobs of one process take turns on each of their devices."""
    waits: bool = True
    """Jobs of several processes wait for their turns."""
    hands_over: bool = True
    """And give them back when others wait."""
    moves: bool = True
    """A job that compiles goes where it is told to be meanwhile."""
    hurries: bool = True
    """And within the deadline, however much its first plan is worth waiting for."""


@dataclass(eq=False, slots=True)
class Line:
    """A connection. What was sent and not read yet is in the queues; ``None`` is its end."""

    id: int
    handle: "Handle"
    world: "World"
    up: deque = field(default_factory=deque)
    down: deque = field(default_factory=deque)
    open_up: bool = True
    """The client has not closed it."""
    open_down: bool = True
    """The daemon has not closed it."""
    said_all: bool = False
    """The client says nothing more, and still hears."""
    told: bool = False
    """The client was granted something on it."""
    kept: list = field(default_factory=list)
    """Forked processes that have it open too."""

    def send(self, requests):
        if self.world.batch is not None:
            self.world.batch.append((self, requests))
        elif self.open_up and not self.said_all:
            self.up.extend(requests)

    def end(self):
        """Shut for what the client says, whoever else has it open."""
        if self.open_up and not self.said_all:
            self.said_all = True
            self.up.append(None)


@dataclass(eq=False, slots=True)
class Program:
    """A process."""

    process: Process
    alive: bool = True
    stopped: bool = False
    woke: float = 0.0
    """When it went on after it was stopped."""
    reaped: bool = False
    jobs: list = field(default_factory=list)
    inherited: list = field(default_factory=list)
    """Of a forked one: its copies of its parent's handles."""


@dataclass(eq=False, slots=True)
class Job:
    """What ``jaxtensile.job`` is to the coordinator: all that it has taken is in ``client`` and ``asking``."""

    program: Program
    admit: Admit
    """What it asks to be admitted with."""
    client: "Handle | None" = None
    asking: "Handle | None" = None
    leaving: "Handle | None" = None
    """Its release is waited for, until then."""
    until: float = 0.0
    doing: str = "idle"
    since: float = 0.0
    """When it began to compile."""
    first: bool = True
    """It has run no step yet."""
    over: bool = False
    waits: int = 0
    """Bytes of its state on each device, once they wait on the host."""
    renewed: Admit | None = None
    """The ladder that it waits for, on its way to the host or back."""


class Handle:
    """A ``Client`` and its link: as ``SocketLink``, one connection after another until it is done."""

    __slots__ = (
        "closing",
        "gated",
        "had",
        "halfway",
        "holder",
        "job",
        "keeps",
        "known",
        "line",
        "names",
        "needs",
        "program",
        "real",
        "speaks",
        "step",
        "uses",
        "world",
    )  # fmt: skip

    def __init__(self, world, program, job, admit, keeps=False):
        self.world, self.program, self.job = world, program, job
        self.line = self.uses = None
        """``uses``: what it holds where that is less than its rung needs: while its state is elsewhere."""
        self.closing = False
        self.halfway = 0.0
        """When half of the time has passed in which it is to shrink."""
        self.keeps = keeps
        """Its allocator never gives bytes back."""
        self.step = 0
        self.had = 0
        """Turns so far."""
        self.real = ()
        """Bytes that stay and bytes of a step that it may hold just now, of each resource."""
        self.names = (*admit.devices, HOST)
        self.gated = (*(world.gated,) * len(admit.devices), False)
        self.known, self.needs = admit, _needs(admit)
        self.speaks = Client(admit, lambda _: self)
        self.holder = self.speaks._holder
        world.asked += world.care.numbers
        self.holder._number = world.asked
        self.holder._clamp = world.care.clamps

    @property
    def there(self):
        return self.program.alive and not self.program.stopped

    def close(self):
        """Of its link: say no more, and hear out what was said before."""
        self.closing = True
        if self.line is not None:
            self.line.end()

    def connected(self, line):
        self.line = line
        line.up.append("hello")
        self.speaks.connected(line)
        if self.closing and self.speaks.done:
            line.end()

    def heard(self, message):
        self.speaks.heard(message)
        if self.speaks.done:
            self.line.end()
        self.changed()

    def changed(self):
        """It is on another rung, or dead: what does it hold?"""
        h = self.holder
        if h.admit is not self.known:
            self.known, self.needs = h.admit, _needs(h.admit)
        if not self.program.alive:
            rows = []
        elif h.held < 0:
            rows = [self.real] if self.keeps and self.real else []
        elif self.uses is not None:
            rows = [self.uses]
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
                for c, gated in zip(zip(*rows, strict=True), self.gated, strict=False)
            )
        if self.real:
            use = self.in_use()
            self.speaks.beat(self.step, 1e-3, use, max(use))

    def in_use(self):
        return tuple(p + t for p, t in self.real)

    def copied(self, program):
        """It, in a forked child: its own memory, and the same connection."""
        world, line = self.world, self.line
        child = copy(self)
        child.program, child.job, child.real = program, None, ()
        child.speaks = speaks = copy(self.speaks)
        child.holder = speaks._holder = copy(self.holder)
        speaks._outbox, speaks._link, speaks._lock = [], child, Lock()
        if world.care.owns:
            speaks._owner = -1
        if world.care.abandons:
            child.line = speaks._line = None
        elif line is not None:
            line.kept.append(program)
        return child


def _needs(admit):
    return tuple((*((r.persistent, r.temp),) * len(admit.devices), (r.host, 0)) for r in admit.ladder)


class World:
    """Everything that is not the coordinator, and the coordinator."""

    ACTIONS = (
        ("_hear", 14),
        ("_deliver", 14),
        ("_step", 10),
        ("_turn", 14),
        ("_connect", 5),
        ("_tick", 4),
        ("_reap", 3),
        ("_beat", 2),
        ("_born", 1.0),
        ("_finish", 0.5),
        ("_renew", 1.5),
        ("_kill", 0.35),
        ("_hang_up", 0.7),
        ("_stop", 0.4),
        ("_say_again", 0.3),
        ("_mischief", 0.3),
        ("_daemon_dies", 0.25),
        ("_daemon_starts", 4),
        ("_resize", 0.06),
        ("_disk", 0.06),
        ("_go_on", 8),
        ("_another_job", 0.6),
        ("_compile", 0.8),
        ("_more", 0.7),
        ("_suspend", 2.0),
        ("_resume", 1.5),
        ("_interrupt", 0.6),
        ("_fork", 0.15),
        ("_child", 0.6),
    )

    def __init__(self, seed=0, rules=None, *, gated=None, most=5, text=False, care=None, likelier=None):
        self.rnd = rnd = Random(seed) if isinstance(seed, int) else seed
        self.rules = rules or Rules()
        self.care = care or Care()
        self.faultless = False
        """Nothing goes wrong any more, and no job asks for anything new."""
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
        self.gated = rnd.random() < 0.3 if gated is None else gated
        self.turning = self.gated and rnd.random() < 0.8
        """Its jobs are of several processes, and ask for their turns."""
        devices = tuple(f"cuda:{k}" for k in range(rnd.choice((1, 1, 2, 3))))
        self.devices = devices
        self.capacities = {d: Capacity(capacity=rnd.randint(10, 24), reserve=1, gated=self.gated) for d in devices}
        self.capacities[HOST] = Capacity(capacity=rnd.randint(2, 8))
        self.physical = {r: c.limit for r, c in self.capacities.items()}
        self.most = most
        self.at_once = 2 if isinstance(seed, int) and seed % 3 == 0 else RESTLESS
        """Jobs among which bytes are shifted in one turn: in a third of the worlds there are more."""
        self.programs = []
        self.handles = []
        self.lines = {}
        self.batch = None
        """What is said at once, and heard as one."""
        self.next_line = self.next_start = self.asked = 0
        self.journal = []
        self.disk_full = False
        self.watched = set()
        self.daemon = None
        self.told = False
        """Something since the last check."""
        self.token = (0, 0)
        self.ladders = {}
        """Of leases, as a daemon that was killed knew them."""
        self.risen = {}
        self.crash = 0.004
        self.counted = Counter()
        """What happened, by what an event is called."""
        self.counts = {}
        names, weights = zip(*{**dict(self.ACTIONS), **(likelier or {})}.items(), strict=True)
        self._actions = [getattr(self, n) for n in names]
        self._weights = [*accumulate(weights)]
        self._daemon_starts()

    # The daemon.

    def tell(self, *events):
        """Events for the daemon, if it is there; it may be killed anywhere in carrying out what they lead to."""
        if self.daemon is None:
            return
        self.told = True
        if self._carries_out(self.daemon.hear(events, self.now)):
            self._carries_out(self.daemon.decide())

    def _carries_out(self, commands):
        """Whether the daemon lives."""
        last = self.rnd.randrange(len(commands) + 1) if commands and self.rnd.random() < self.crash else None
        blocked = False
        for k, command in enumerate(commands):
            if k == last:
                self._daemon_dies()
                return False
            blocked = self._carry_out(command, blocked) or blocked
        if blocked:
            self.tell(JournalFailed())
        elif last is not None:
            self._daemon_dies()
        return self.daemon is not None

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
                if not any(p.process == process and not p.reaped for p in self.programs):
                    self.watched.add(process)
            case Terminate(process=process):
                for p in self.programs:
                    if p.process == process and p.alive:
                        self._not_for_compiling(p)
                        self._end(p)
        return False

    def _sent(self, message):
        """Tokens only grow, and a revoke aims above the floor, and inside a minimum hold only for a waiter or a higher
        class."""
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
        if (
            self.now - at < self.settings.min_hold - 1e-9
            and lease.wanted_by is None
            and not any(other.priority > lease.priority for other in self.daemon.arbiter.leases.values())
        ):
            raise Violation("revoked inside its minimum hold")

    def _not_for_compiling(self, program):
        """Nobody is ended because it compiles: somebody else of the process is overdue."""
        leases = [a for a in self.daemon.arbiter.leases.values() if a.process == program.process]
        late = {a.id for a in leases if a.deadline is not None and self.now >= a.deadline}
        if any(program.woke > a.deadline - self.settings.revoke_deadline for a in leases if a.id in late):
            return  # it was stopped when it was told
        handles = [h for h in self.handles if h.program is program and h.holder.lease in late]
        if not program.stopped and handles and all(h.job.doing == "compile" and h.job.client is h for h in handles):
            raise Violation(f"{program.process} is ended because it compiles")

    def _renumbered(self, lease, renewed=1):
        """Rungs are those of another ladder: what it has now it has had since the last time it rose."""
        self.counted["ladders renewed"] += renewed
        self.risen[lease] = (1 << 30, self.risen.get(lease, (-1, 0.0))[1])

    def _daemon_starts(self):
        if self.daemon is not None or self.disk_full:
            return False
        records = (
            decode(b"".join(self.journal) + self.rnd.choice((b"", b'0f3a91c2 {"wha'))) if self.text else self.journal
        )
        known = replay(records, "boot")
        for k, lease in known.leases.items():
            if self.ladders.get(k, lease.ladder) != lease.ladder:  # that it had another one since is not on record
                self._renumbered(k, 0)
        self.daemon = Coordinator(self.capacities, self.settings, self.rules)
        self.daemon.arbiter.rota.at_once = self.at_once
        self.watched.clear()
        self.counts = dict.fromkeys(self.physical, 1 << 60)  # a shrink may not have been written down
        self.tell(Restarted(known, "boot"))
        return True

    def _daemon_dies(self):
        if self.daemon is None:
            return False
        self.ladders = {k: lease.ladder for k, lease in self.daemon.arbiter.leases.items()}
        self.daemon = None
        self.counted["daemon kills"] += 1
        for line in self.lines.values():
            for _ in range(self.rnd.randrange(len(line.down) + 1)):  # what was not in the socket yet
                line.down.pop()
            line.open_down = False
            line.down.append(None)
            line.up.clear()
        self.lines = {k: a for k, a in self.lines.items() if a.open_up}
        return True

    def _tick(self):
        self._moments_pass()
        wake = None if self.daemon is None else self.daemon.wake
        self.now += self.rnd.choice((0.01, 0.5, 1.0, 2.5, 4.0))
        if wake is not None and self.now < wake < self.now + 1.0 and self.rnd.random() < 0.5:
            self.now = wake  # to the very moment
        self._moments_pass()
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
        dead = [p for p in self.programs if not p.alive and not p.reaped]
        if not dead:
            return False
        program = self.rnd.choice(dead)
        program.reaped = True
        self.tell(ProcessDied(program.process))
        return True

    def _hear(self):
        """The daemon reads a message, or the end, of some connection."""
        ready = [a for a in self.lines.values() if a.up]
        if not ready or self.daemon is None:
            return False
        self._heard(self.rnd.choice(ready))
        return True

    def _heard(self, line):
        said = line.up.popleft()
        if said is None:
            del self.lines[line.id]
            if line.open_down:
                line.open_down = False
                line.down.append(None)
            self.tell(Disconnected(line.id))
        elif said == "hello":
            self.tell(Connected(line.id, line.handle.program.process))
        elif line.open_down:
            self.tell(Received(line.id, said))

    # Processes and handles.

    def _some(self, condition):
        found = [h for h in self.handles if h.program.alive and not h.program.stopped and condition(h)]
        return self.rnd.choice(found) if found else None

    def _some_job(self, condition):
        found = [j for p in self.programs if p.alive and not p.stopped for j in p.jobs if not j.over and condition(j)]
        return self.rnd.choice(found) if found else None

    def _process(self):
        """A new one; pids are used again."""
        self.next_start += 1
        pid = self.rnd.choice([p.process.pid for p in self.programs if not p.alive] or [100 + self.next_start])
        if any(p.alive and p.process.pid == pid for p in self.programs):
            pid = 1000 + self.next_start
        return Process(pid, self.next_start)

    def _born(self):
        if sum(p.alive for p in self.programs) >= self.most:
            return False
        self.handles = [h for h in self.handles if h.line is not None or (h.program.alive and not self._done(h))]
        self.programs = [
            p for p in self.programs if p.alive or not p.reaped or any(h.program is p for h in self.handles)
        ]
        program = Program(self._process())
        self.programs.append(program)
        self._begin(program)
        return True

    def _done(self, handle):
        return handle.speaks.done and not handle.real

    def _another_job(self):
        """A process has several, each with a name of its own; the name of one that has ended may be used again."""
        found = [p for p in self.programs if p.alive and not p.stopped and not p.inherited and len(p.jobs) < 2]
        if not found or len(self.handles) > 3 * self.most:
            return False
        self._begin(self.rnd.choice(found))
        return True

    def _begin(self, program):
        names = {"job0", "job1"} - {j.admit.job for j in program.jobs}
        program.jobs.append(Job(program, self._job(self.rnd.choice(sorted(names)))))

    def handle(self, program, job, admit):
        keeps = not self.gated and "more" not in admit.job and self.rnd.random() < 0.06
        handle = Handle(self, program, job, admit, keeps)
        self.handles.append(handle)
        return handle

    # Jobs. What one does to its leases is not cut in two by an interrupt; between two of these it can be interrupted.

    def _go_on(self):
        """A job's next own action."""
        found = [j for p in self.programs if p.alive and not p.stopped for j in p.jobs]
        return bool(found) and self._goes_on(self.rnd.choice(found))

    def _goes_on(self, job):
        if job.leaving is not None:
            if job.leaving.holder.phase == "releasing" and self.now < job.until:
                return False
            job.leaving.speaks.close()
            job.leaving = None
            return True
        if job.over:
            for handle in (job.asking, job.client):
                if handle is not None:
                    self._release(job, handle)
                    return True
            job.program.jobs.remove(job)
            return True
        return getattr(self, f"_job_{job.doing}")(job)

    def _release(self, job, handle):
        """``Client.release``, up to where it waits for the answer."""
        if job.asking is handle:
            job.asking = None
        else:
            job.client = None
        speaks = handle.speaks
        speaks.pulse()
        waited = handle.holder.phase == "waiting"
        use, handle.uses = handle.in_use() if handle.keeps else (), None
        if waited and not self.care.withdraws:
            handle.holder.phase = "ended"
            speaks.close()
        speaks.give_back(use)
        handle.changed()
        if handle.holder.phase == "releasing" and not (waited and handle.line is None):
            job.leaving, job.until = handle, self.now + ANSWER
        else:
            speaks.close()

    def _ask(self, job, admit, doing):
        """Ask for bytes. What asked before and was interrupted is given back first."""
        if job.asking is not None:
            self._release(job, job.asking)
        else:
            job.asking, job.doing = self.handle(job.program, job, admit), doing
        return True

    def _job_idle(self, job):
        return self._ask(job, job.admit, "ask")

    def _job_ask(self, job):
        """It waits for its lease."""
        asking = job.asking
        phase = asking.holder.phase
        if phase == "holding":
            job.client, job.asking = asking, None
            job.doing, job.since = "compile", self.now
            self.counted["compiles"] += 1
        elif phase == "ended":
            job.over = True
        elif not self.faultless and self.rnd.random() < 0.02:
            job.over = True  # closed by another thread
        else:
            return False
        return True

    def _job_compile(self, job):
        if not self.faultless and self.rnd.random() < 0.8:
            return False
        client = job.client
        if client.holder.phase != "holding":
            job.over = True
        elif job.first and not self.faultless and self.rnd.random() < 0.2:
            # There is no plan for that rung: it asks again, with what it knows now.
            job.admit, job.doing = self._job(job.admit.job, job.admit.devices), "idle"
            self._release(job, client)
        else:
            job.doing, job.first = "steps", False
        return True

    def _job_steps(self, job):
        if job.asking is not None:  # as ``finally`` does, or who asks next
            self._release(job, job.asking)
            return True
        if job.client.holder.phase == "ended":
            job.over = True
            return True
        return False

    def _compile(self):
        """A call of another shape, for however long."""
        job = self._some_job(lambda j: j.doing == "steps" and j.asking is None and j.leaving is None)
        if job is None:
            return False
        job.doing, job.since = "compile", self.now
        self.counted["compiles"] += 1
        self._settle(job)
        return True

    def _settle(self, job):
        """While it compiles no step runs, and it goes where it is told to be; but for its first plan, for a while."""
        client = job.client
        if not self.care.moves or client is None or client.holder.phase != "holding":
            return
        patience = FIRST if job.first else 0.0
        end = job.since + patience
        if self.care.hurries and client.speaks.halfway is not None:
            end = min(end, client.halfway)
        client.speaks.end_turn()
        if self.now < end:
            return
        while self._boundary(client):
            pass

    def _moments_pass(self):
        """What takes no time happens before some passes: jobs that compile, or wait to be admitted, hear and are heard.
        Steps take as long as they do."""
        for handle in self.handles:
            if handle.there and handle.job is not None and handle.job.doing == "compile":
                handle.speaks.pulse()
        busy = True
        while busy and self.daemon is not None:
            busy = False
            for handle in self.handles:
                job = handle.job
                if (
                    job is None
                    or not handle.there
                    or handle is not {"compile": job.client, "ask": job.asking}.get(job.doing)
                ):
                    continue
                if self.daemon is not None and handle.line is None and handle.holder.phase != "ended":
                    self._connects(handle)
                while self.daemon is not None and (line := handle.line) is not None and (line.up or line.down):
                    busy = True
                    if line.up:
                        self._heard(line)
                    else:
                        self._read(handle)
                if job.doing == "ask" and job.leaving is None and not job.over and handle.holder.phase == "holding":
                    self._job_ask(job)
                if job.doing == "compile":
                    self._settle(job)

    def _more(self):
        """A call needs more than the job has: a second lease asks for that."""
        job = self._some_job(
            lambda j: j.doing == "steps" and j.client.holder.phase == "holding" and j.leaving is None and not j.waits
        )
        if job is None or len(self.handles) > 3 * self.most:
            return False
        self.counted["second leases"] += 1
        return self._asks_for_more(job, "more")

    def _asks_for_more(self, job, doing):
        own = job.client.holder
        here, rnd = own.admit.ladder[own.held], self.rnd
        more, host = rnd.randint(1, 5), rnd.choice((0, 0, 1))
        temp = here.temp if self.gated else 0
        missing = Rung(persistent=more, temp=temp, host=host, seconds=1.0)
        asked = structs.replace(own.admit, job=f"{own.admit.job} (more)", ladder=(missing,), floor=0)
        return self._ask(job, asked, doing)

    def _job_more(self, job):
        """It waits for a second lease, whose bytes then go over to the first one."""
        room, own = job.asking, job.client
        if room.holder.phase == "holding" and own.holder.held >= 0:
            need = room.holder.admit.ladder[0]
            here = own.holder.admit.ladder[own.holder.held]
            rung = structs.replace(here, persistent=here.persistent + need.persistent, host=here.host + need.host)
            with self._at_once():
                room.speaks.give_back()
                room.changed()
                own.speaks.renew(structs.replace(own.holder.admit, ladder=(rung,), floor=0), 0, own.in_use())
        elif room.holder.phase == "waiting" and (self.faultless or self.rnd.random() < 0.1):
            pass  # for too long
        elif room.holder.phase != "ended" and own.holder.phase == "holding":
            return False
        job.doing = "steps"
        self._release(job, room)
        return True

    @contextmanager
    def _at_once(self):
        """In one process what is said inside is heard as one."""
        if not self.gated:
            yield
            return
        self.batch = []
        yield
        said, self.batch = self.batch, None
        if self.daemon is not None and all(line.open_up and line.open_down and not line.up for line, _ in said):
            self.tell(*(Received(line.id, message) for line, messages in said for message in messages))
        else:
            for line, messages in said:
                line.send(messages)

    # To the host and back.

    def _at_rest(self, job):
        own = job.client and job.client.holder
        if own is None or own.phase != "holding" or job.leaving is not None or job.client.line is None:
            return False
        return own.moving < 0 and own.target == own.held and not own.renewing

    def _suspend(self):
        """First the host bytes are charged, then the state moves."""
        job = self._some_job(lambda j: j.doing == "steps" and not j.waits and not j.client.keeps and self._at_rest(j))
        if job is None:
            return False
        own = job.client.holder
        most = own.admit.ladder[0].persistent
        if not most or any(r.persistent != most for r in own.admit.ladder):  # else a rung would not cover its state
            return False
        job.waits = self.rnd.randint(1, most)
        job.renewed = _with_host(own.admit, job.waits * len(own.admit.devices))
        job.doing = "charging"
        job.client.speaks.renew(job.renewed, own.held, job.client.in_use())
        return True

    def _job_charging(self, job):
        client, own = job.client, job.client.holder
        if own.phase != "holding":
            job.over = True
        elif own.admit is job.renewed and own.moving < 0:
            job.doing = "moving"
            here = own.admit.ladder[own.held]  # while it moves, an array is in both places
            client.uses = _on_each(own.admit.devices, here.persistent, job.waits)
        elif not own.renewing:
            job.doing, job.waits = "steps", 0
        else:
            return False
        client.changed()
        return True

    def _job_moving(self, job):
        """It is on the host, and the rest of its bytes is given back when the coordinator hears of it."""
        client, own = job.client, job.client.holder
        if own.phase != "holding":
            job.over = True
            return True
        client.uses = _on_each(own.admit.devices, client.uses[0][0] - job.waits, job.waits)
        client.changed()
        job.doing = "away"
        self.counted["jobs suspended"] += 1
        return True

    def _job_away(self, job):
        """Its ladder is what it holds; that is said until it counts."""
        client, own = job.client, job.client.holder
        if own.phase != "holding":
            job.over = True
            return True
        if own.moving < 0 and own.target != own.held:
            return self._boundary(client)
        stays, host = client.uses[0][0], own.admit.ladder[own.held].host
        rest = (Rung(persistent=stays, host=host, seconds=1.0),)
        if own.admit.ladder == rest or not self._at_rest(job):
            return False
        client.speaks.renew(structs.replace(own.admit, ladder=rest, floor=0, suspended=True), 0, client.in_use())
        return True

    def _resume(self):
        """It asks for its ladder again; where there is no room, it is still away."""
        job = self._some_job(lambda j: j.doing == "away" and self._at_rest(j))
        if job is None:
            return False
        own, stays, rnd = job.client.holder, job.client.uses[0][0], self.rnd
        host = own.admit.ladder[own.held].host
        rung = Rung(persistent=stays + job.waits, temp=rnd.randint(0, 3), host=host, seconds=1.0)
        job.renewed = structs.replace(own.admit, ladder=(rung,), suspended=False)
        job.doing = "back"
        job.client.speaks.renew(job.renewed, 0, job.client.in_use())
        return True

    def _job_back(self, job):
        client, own = job.client, job.client.holder
        if own.phase != "holding":
            job.over = True
        elif own.admit is job.renewed and own.moving < 0:
            client.uses, job.doing = None, "steps"
            job.waits = 0
        elif not own.renewing:
            job.doing = "away"
        else:
            return False
        client.changed()
        return True

    # Interrupts and forks.

    def _interrupt(self):
        """Ctrl-C between two of a job's own actions: what it does ends, and it does something else, or nothing more."""
        job = self._some_job(lambda j: j.leaving is None and j.doing != "idle")
        if job is None:
            return False
        self.counted["interrupts"] += 1
        rnd = self.rnd
        if not self.care.records:
            job.asking = None
        elif job.asking is not None and rnd.random() < 0.5:
            self._release(job, job.asking)
        # else it came before ``try``: what asks is on record
        if job.client is None:
            job.doing = "idle"
        elif job.client.uses is not None:
            job.doing = "moving" if job.doing == "moving" else "away"
        elif job.doing == "charging":
            pass  # said again until it is known whether it counts
        else:
            job.doing, job.first = "steps", False
        if rnd.random() < 0.2:
            job.over = True
        return True

    def _fork(self):
        """A child has copies of its parent's handles, and does what it likes with them."""
        found = [p for p in self.programs if p.alive and not p.stopped and not p.inherited]
        handles = [h for h in self.handles if h.line is not None and h.program in found and h.job is not None]
        if not handles or sum(p.alive for p in self.programs) > 2 * self.most:
            return False
        parent = self.rnd.choice(handles).program
        child = Program(self._process())
        child.inherited = [h.copied(child) for h in handles if h.program is parent]
        self.programs.append(child)
        self.counted["forks"] += 1
        return True

    def _child(self):
        found = [p for p in self.programs if p.alive and not p.stopped and p.inherited]
        if not found:
            return False
        program = self.rnd.choice(found)
        handle = self.rnd.choice(program.inherited)
        speaks = handle.speaks
        match self.rnd.randrange(8):
            case 0:
                self._end(program)
            case 1:
                self._begin(program)  # a job of its own, whatever its parent has
                program.inherited = []
            case 2 | 3:
                speaks.pulse()
                speaks.give_back(())
            case 4:
                speaks.close()
            case _:
                try:
                    speaks.require_mine()  # a step
                except CoordinatorError:
                    return True
                if handle.holder.phase == "holding":
                    speaks._due = False
                    handle.uses = None
                    handle.changed()
                    self.handles.append(handle)
        return True

    def _renew(self):
        """A job has another ladder; one of its rungs covers where it is."""
        client = self._some(lambda h: h.line is not None and h.holder.held >= 0 and self._steps(h))
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
        return client.speaks.renew(new, ladder.index(middle), client.in_use())

    def _steps(self, handle):
        job = handle.job
        return handle.holder.phase == "holding" and job is not None and job.client is handle and job.doing == "steps"

    def _job(self, name, devices=None):
        rnd = self.rnd
        devices = devices or tuple(rnd.sample(self.devices, rnd.randint(1, len(self.devices))))
        level, seconds, ladder = rnd.randint(1, 8), rnd.uniform(1.5, 4), []
        host, state = rnd.choice((0, 0, 1, 2)), rnd.randint(1, level) if rnd.random() < 0.5 else None
        for _ in range(rnd.randint(1, 4)):
            temp = rnd.randint(0, level) if state is None else level - state
            ladder.append(Rung(persistent=level - temp, temp=temp, host=host, seconds=seconds))
            level, seconds = level + rnd.randint(1, 6), seconds * rnd.uniform(0.6, 1.0)
            host = rnd.randint(0, host)
        return Admit(
            job=name,
            devices=devices,
            ladder=tuple(ladder),
            floor=rnd.choice((0, 0, ladder[0].level)),
            priority=rnd.choice((0, 0, 0, 1)),
            weight=rnd.choice((1.0, 1.0, 2.0)),
        )

    def _connect(self):
        client = self._some(lambda h: h.line is None and h.job is not None and not h.speaks.done)
        if client is None or self.daemon is None:
            return False
        self._connects(client)
        return True

    def _connects(self, handle):
        self.next_line += 1
        line = self.lines[self.next_line] = Line(self.next_line, handle, self)
        handle.connected(line)

    def _deliver(self):
        """A client reads a message, or the end, of its connection."""
        client = self._some(lambda h: h.line is not None and h.line.down)
        if client is None:
            return False
        self._read(client)
        return True

    def _read(self, client):
        line = client.line
        message = line.down.popleft()
        if message is None:
            self._leave(client, 0)
            return
        if isinstance(message, Grant | Revoke | Renewed):
            line.told = True
        listens = client.holder.phase in ("waiting", "holding")
        if (
            isinstance(message, Grant | Revoke)
            and listens
            and client.holder.lease in (0, message.lease)
            and message.rung >= len(client.needs)
        ):
            raise Violation("granted a rung that it does not have")
        if isinstance(message, Revoke):
            client.halfway = self.now + message.deadline / 2
        before = client.holder.turn
        client.heard(message)
        self.counted["turns"] += client.holder.turn > before
        client.had += client.holder.turn > before
        job = client.job
        if job is not None and job.client is client and job.doing == "compile":
            self._settle(job)

    def _say(self, client, messages):
        if client.line is not None:
            client.line.send(messages)

    def _step(self):
        """A step boundary, or the end of a move to another rung."""
        client = self._some(lambda h: h.holder.held >= 0 and self._at_boundaries(h))
        return client is not None and self._boundary(client)

    def _turn(self):
        """A job is to run a step; or it plans, and gives its turn back."""
        client = self._some(lambda h: self.turning and self._steps(h))
        return client is not None and self._takes_turn(client, self.rnd.random() < 0.3)

    def _takes_turn(self, client, plans):
        holder = client.holder
        if holder.moving >= 0:
            return False
        if plans:
            client.speaks.end_turn(self.rnd.choice((0.0, 0.1)))
        elif not self.care.waits:
            holder.turn, holder.asks = max(holder.turn, 0), -1
        elif holder.turn < 0 or holder.ending:
            self._ends_turn(client)
            if holder.asks >= 0:
                return False
            client.speaks.turn(0.0)
        else:
            return False
        return True

    def _ends_turn(self, client):
        """At a step boundary, or while no step runs."""
        if client.holder.ending and self.care.hands_over:
            client.speaks.end_turn(self.rnd.choice((0.0, 0.0, 0.1)))

    def _at_boundaries(self, handle):
        """It comes to step boundaries, or waits at one."""
        job = handle.job
        return job is not None and job.client is handle and job.doing in ("steps", "more", "charging", "back")

    def _boundary(self, client):
        holder = client.holder
        if holder.moving >= 0:
            use = client.needs[holder.moving] if not client.keeps else client.real
            client.speaks.moved(tuple(p + t for p, t in use))
        else:
            client.step += 1
            self._ends_turn(client)
            try:
                if client.speaks.boundary() is None:
                    return False
            except CoordinatorError:
                client.job.over = True
                return False
        client.changed()
        return True

    def _beat(self):
        client = self._some(lambda h: h.line is not None and h.holder.phase == "holding")
        if client is None:
            return False
        client.speaks.pulse()
        return True

    def _finish(self):
        job = self._some_job(lambda j: True)
        if job is None:
            return False
        job.over = True
        return True

    def _leave(self, client, lost):
        """The client's end of its connection is closed; the last ``lost`` messages never were sent."""
        line, client.line = client.line, None
        if not line.said_all:
            for _ in range(min(lost, len(line.up))):
                line.up.pop()
            if not any(p.alive for p in line.kept):
                line.up.append(None)
        line.open_up = False
        line.down.clear()
        client.speaks.disconnected("")
        if not line.open_down and self.daemon is None:
            self.lines.pop(line.id, None)

    def _hang_up(self):
        client = self._some(lambda h: h.line is not None and h.job is not None)
        if client is None:
            return False
        self._leave(client, self.rnd.randrange(len(client.line.up) + 1))
        return True

    def _kill(self):
        living = [p for p in self.programs if p.alive]
        if not living:
            return False
        self._end(self.rnd.choice(living))
        return True

    def _end(self, program):
        self.counted["process deaths"] += 1
        program.alive = program.stopped = False
        for handle in self.handles:
            if handle.program is program:
                handle.changed()
                if handle.line is not None and handle.job is not None:
                    self._leave(handle, self.rnd.randrange(len(handle.line.up) + 1))
        program.jobs, program.inherited = [], []

    def _stop(self):
        living = [p for p in self.programs if p.alive]
        if not living:
            return False
        program = self.rnd.choice(living)
        program.stopped, program.woke = not program.stopped, self.now
        return True

    def _say_again(self):
        client = self._some(lambda h: h.line is not None and h.holder.phase == "waiting")
        if client is None:
            return False
        self._say(client, client.holder._introduced(()))
        return True

    def _mischief(self):
        """Words about what is another's, or long over, or nothing."""
        client = self._some(lambda h: h.line is not None and h.line.told)
        if client is None:
            return False
        rnd, own = self.rnd, client.holder.lease
        other = own + rnd.choice((-2, -1, 1, 2, 1000))
        known = {} if self.daemon is None else self.daemon.arbiter.leases
        mine = own - 1 in known and known[own - 1].process == client.program.process
        before = own + 1000 if mine else own - 1
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
                Reclaim(lease=max(before, 0), token=stale, rung=0, in_use=()),
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
        self.faultless = True
        self.settled_after = self.now + 40.0
        if self.disk_full:
            self._disk()
        for program in self.programs:
            program.stopped = False
        self._quiet(lambda: self.now > self.settled_after and not self.daemon.arbiter.recheck)
        self._nobody_left_behind()
        self._everybody_has_a_turn()
        return self

    def _everybody_has_a_turn(self):
        """Who runs steps gets turns, one after another or at once."""
        steps = [h for h in self.handles if self.turning and h.there and self._steps(h) and h.line is not None]
        before = {id(h): h.had for h in steps}
        for _ in range(40 * (len(steps) + 1)):
            for handle in steps:
                self._takes_turn(handle, False)
            self._quiet(lambda: False, 1)
            steps = [h for h in steps if self._steps(h) and h.line is not None]
            if all(h.holder.turn >= 0 or h.had > before[id(h)] for h in steps):
                return
        raise Violation("somebody waits for its turn for ever")

    def _quiet(self, enough, rounds=400):
        """Until nothing happens any more."""
        for _ in range(rounds):
            busy = False
            for action in (self._daemon_starts, self._reap, self._connect, self._hear, self._deliver):
                while action():
                    busy = True
                    self.check()
            for program in self.programs:
                for job in [*program.jobs]:
                    if self._goes_on(job):
                        busy = True
                        self.check()
            for handle in self.handles:
                h = handle.holder
                moves = h.phase == "holding" and (self._at_boundaries(handle) or h.moving >= 0)
                if moves and handle.there and handle.job is not None and self._boundary(handle):
                    busy = True
                    self.check()
            if not busy and enough():
                break
            self.now += 1.0
            for handle in self.handles:  # time passes, and everybody is heard of
                if handle.program.alive and handle.job is not None:
                    handle.speaks.pulse()
            while self._hear():
                self.check()
            self._ticked()
            self.check()

    def _nobody_left_behind(self):
        d = self.daemon
        handles = {h.holder.lease: h for h in self.handles if h.program.alive and h.holder.lease}
        for lease in d.arbiter.leases.values():
            handle = handles.get(lease.id)
            gone = handle is not None and handle.holder.phase == "ended" and handle.keeps
            if lease.state not in (State.HELD, State.QUEUED) and not gone:
                raise Violation(f"{lease.state} though everybody does what is asked")
            if lease.state is State.HELD and (handle is None or handle.holder.phase != "holding"):
                raise Violation(f"lease {lease.id} is held, and no job knows of it")
        if d.phase != "serving":
            raise Violation(f"still {d.phase}")
        if d.arbiter.queue:
            first = d.arbiter.queue[0]
            accounts = d.arbiter.ledger.accounts
            others = [(a, self._charged(a)) for a in d.arbiter.leases.values() if a.rung >= 0]
            floor = (first, first.needs[first.low])
            if (
                not any(c.free < 0 for c in accounts.values())
                and _fit(d, [*((a, self._guaranteed(a)) for a, _ in others), floor])
                and (all(self._way(a, others) for a, _ in others) or _fit(d, [*self._down(others), floor]))
            ):
                raise Violation("the first waiter fits beside all floors and was not admitted")

    def everybody_goes(self):
        """Jobs end, and what they had is free though their processes live; then these end, and all is free."""
        self.crash = 0.0
        self.faultless = True
        if self.disk_full:
            self._disk()
        for program in self.programs:
            program.stopped = False
            for job in program.jobs:
                job.over = True
        self._quiet(lambda: not any(p.jobs for p in self.programs))
        kept = {h.holder.lease for h in self.handles if h.keeps}
        for lease in self.daemon.arbiter.leases.values():
            if lease.id not in kept:
                raise Violation(f"lease {lease.id} is {lease.state}, and its job has ended")
        for program in self.programs:
            if program.alive and not program.inherited:
                self._end(program)
        for _ in range(10_000):
            if not (self._hear() or self._reap()):
                break
            self.check()
        if self.daemon._desk.speakers.peers:
            raise Violation("a process is dead, and its connection has not ended")
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
        self.counted["events"] += 1
        daemon = self.daemon
        totals = dict.fromkeys(self.physical, 0)
        temps = {name: {} for name in self.physical}
        leases = {} if daemon is None else daemon.arbiter.leases
        for client in self.handles:
            if not client.real:
                continue
            number, process = client.holder.lease, client.program.process
            lease = leases.get(number)
            if lease is not None and lease.process != process:
                raise Violation(f"{process} uses the lease of {lease.process}")
            for name, (p, t) in zip(client.names, client.real, strict=True):
                gated = self.gated and name != HOST
                totals[name] += p if gated else p + t
                if gated and self.turning:
                    temps[name][id(client)] = t if client.holder.turn >= 0 else 0
                elif gated:
                    gate = name if self.care.turns else client.names[0]
                    temps[name][gate] = max(t, temps[name].get(gate, 0))
                if daemon is not None and (p or t):
                    charge = daemon.arbiter.ledger.accounts[name].charges.get(number)
                    if charge is None:
                        raise Violation(f"{process} holds {p + t} of {name} and is charged nothing")
                    cp, ct = charge.persistent, charge.temp
                    if (p > cp or t > ct) if gated else p + t > cp + ct:
                        raise Violation(f"{process} holds {p}+{t} of {name}, charged {charge}")
        for name, limit in self.physical.items():
            held = totals[name] + sum(temps[name].values())
            if held > limit:
                raise Violation(f"{held} of {name} are held, there are {limit}")
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
        living = {p.process for p in self.programs if p.alive or not p.reaped} | self.watched
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
        for client in self.handles:
            line = client.line
            if client.program.alive and line is not None and line.told and not line.said_all and line.open_down:
                holder = client.holder
                if holder.phase == "holding" and line.id in self.lines and line.told:
                    lease = arbiter.leases.get(holder.lease)
                    if lease is None or lease.state is State.QUARANTINED or lease.connection != line.id:
                        raise Violation(
                            f"{client.program.process} is connected and its lease is {lease and lease.state}"
                        )
        if d.phase != "serving" or over or not d.journal_works or self.disk_full or self._crowded(d):
            return
        if arbiter.queue:
            self._check_first(d, arbiter.queue[0])
        elif not revoking and not (self.gated and len(self.devices) > 1):
            # Of several devices whose jobs take turns a division takes the largest temp of any for that of each: some
            # surplus is not given out.
            self._check_idle(d)

    def _crowded(self, d):
        """Have several their turns at once, where somebody wants more bytes? Then all but one were told to end them."""
        wanted = {name for a in d.arbiter.wanting() for name in a.touched}
        found = False
        for name, account in d.arbiter.ledger.accounts.items():
            there = [d.arbiter.leases[k] for k in account.turns]
            if len(there) > 1 and name in wanted:
                found = True
                if sum(a.turn > 0 and not a.ending for a in there) > 1:
                    raise Violation(f"several have turns on {name}, and somebody wants its bytes")
        return found

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

    def _way(self, a, rows):
        """May it go down to its floor beside these charges, charged what covers both ends?"""
        return _fit(self.daemon, [(b, self._both(b) if b is a else kept) for b, kept in rows])

    def _down(self, rows):
        """What is charged when all have gone down that can, one after another: each may open ways of others."""
        for _ in rows:
            for k, (a, _) in enumerate(rows):
                if _gives(a) and self._way(a, rows):
                    rows = [*rows[:k], (a, a.needs[a.low]), *rows[k + 1 :]]
        return rows

    def _guaranteed(self, a):
        """What a job may count on: its floor while it speaks, what it keeps for good, else both."""
        if a.stuck:
            return self._charged(a)
        return a.needs[a.low] if a.state in (State.HELD, State.REVOKING) else self._both(a)

    def _check_first(self, d, first):
        """The first waiter gets in as soon as it fits, and room is made for it as soon as it may be."""
        others = [a for a in d.arbiter.leases.values() if a.rung >= 0]
        charged = self._charged
        floor = (first, first.needs[first.low])
        floors = [(a, self._guaranteed(a)) for a in others]
        if not _fit(d, [*floors, floor], first):
            return
        if _fit(d, [*((a, charged(a)) for a in others), floor], first):
            raise Violation("the first waiter fits and was not admitted")
        now = [(a, charged(a)) for a in others]
        promised = [(a, a.needs[a.rung] if a.state is State.REVOKING else kept) for a, kept in now]
        if d.wake is None:
            raise Violation("a waiter, and nothing to wake up for")
        if _fit(d, [*promised, floor], first):
            return
        least = [(a, a.needs[a.low] if _gives(a) and self._way(a, now) else kept) for a, kept in promised]
        if _fit(d, [*least, floor], first):
            raise Violation("room could be made for the first waiter, and nobody was asked")
        if not any(a.state is State.REVOKING for a in others) and _fit(d, [*self._down(now), floor], first):
            raise Violation("one could open the way of another for the first waiter, and nobody was asked")

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


def _gives(a):
    """Can it be asked for bytes?"""
    return not a.stuck and a.state in (State.HELD, State.REVOKING)


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


def _on_each(devices, stays, host):
    """``stays`` bytes of each device, and on the host ``host`` for each."""
    return (*((stays, 0),) * len(devices), (host * len(devices), 0))


def _with_host(admit, host):
    """A ladder with so many host bytes more on every rung."""
    return structs.replace(admit, ladder=tuple(structs.replace(r, host=r.host + host) for r in admit.ladder))


def broken_walks(walks, events, **given):
    """The seeds of walks that break an invariant, as they are found."""
    for seed in range(walks):
        try:
            World(seed, **given).walk(events).settle_down().everybody_goes()
        except Violation:
            yield seed
