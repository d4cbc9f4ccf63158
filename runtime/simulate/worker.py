"""A simulated process that runs a job under the coordinator's orders.

It speaks by ``Holder``, as processes in earnest do: asks to be admitted, compiles the plan of its rung, has turns,
moves between two steps, gives its lease back. What it does between is time.

Invariant: its bytes on a device are its rung's: those that stay from its admission, those of a step while it has its
turn, and until the allocator has given them back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from jaxtensile.runtime.client.holder import Holder
from jaxtensile.runtime.decide.events import Connected, Received
from jaxtensile.runtime.decide.leases import Process
from jaxtensile.runtime.protocol.messages import Admit, Beat, Reply, Request, Rung
from jaxtensile.runtime.simulate.gates import Member
from jaxtensile.runtime.simulate.jobs import Job, Outcome
from jaxtensile.runtime.simulate.machine import REAPED, Machine
from jaxtensile.runtime.simulate.sharing import Run, start, stop
from jaxtensile.units import Bytes, Seconds

BEATS: Final = 4
"""Beats within ``lease_ttl``, as ``client.socket_link``."""


class Worker:
    """One job on a machine's devices, from its start; ``number``: of all processes there were."""

    __slots__ = (
        "_compiled",
        "_connection",
        "_fresh",
        "_heard",
        "_keeps",
        "_members",
        "_number",
        "_part",
        "_plans",
        "_run",
        "_then",
        "_turns",
        "alive",
        "devices",
        "doing",
        "holder",
        "job",
        "machine",
        "names",
        "outcome",
        "process",
        "since",
        "stopped",
        "used",
    )

    def __init__(self, machine: Machine, job: Job, devices: tuple[str, ...], outcome: Outcome, number: int) -> None:
        self.machine, self.job, self.outcome, self._number = machine, job, outcome, number
        self.names, self.devices = devices, [machine.devices[d] for d in devices]
        self.process = Process(1, 0) if machine.threads else Process(number, number)
        self.holder = Holder(
            Admit(
                job=job.name,
                devices=devices,
                ladder=job.admitted,
                floor=job.floor,
                want=job.want,
                priority=job.priority,
                weight=job.weight,
            ),
            number,
        )
        self.alive, self.stopped = True, False
        self._keeps = job.keeps
        self.doing = "starts"
        """What it does: starts, asks, compiles, moves, waits, steps, gives or ends."""
        self._plans = job.ladder
        self._connection: int | None = None
        self._compiled: set[int] = set()
        self._members = (
            [Member(machine.gates[d], job.priority, job.weight) for d in sorted(devices)] if (machine.threads) else []
        )
        self._turns = 0
        """Gates at which it has its turn."""
        self._fresh = True
        """Its next step is the first of a turn."""
        self._part = 0
        """Parts of its step that are done."""
        self._run: Run | None = None
        self.used: Bytes = 0
        """Bytes that it has on each of its devices."""
        self.since: Seconds = 0.0
        """When it began to do that."""
        self._heard: list[Reply] = []
        """Messages that came while it was stopped."""
        self._then: list[Callable[[], object]] = []
        """And what it was about to do."""
        clock = machine.clock
        machine.born(self)
        clock.at(clock.now + job.starts, self._when_going, self._asks)
        if job.killed is not None:
            clock.at(job.arrives + job.killed, self.die, "killed")
        for at, how_long in job.stops:
            clock.at(job.arrives + at, self._stop, how_long)

    @property
    def ask(self) -> tuple[str, int]:
        """Its job's name, and the number of its request."""
        return self.job.name, self._number

    @property
    def connected(self) -> bool:
        """Whether it has a connection to the coordinator."""
        return self._connection is not None

    # Time.

    def _after(self, seconds: Seconds, then: Callable[[], object]) -> None:
        if seconds > 0:
            self.machine.clock.at(self.machine.clock.now + seconds, self._when_going, then)
        else:
            then()

    def _when_going(self, then: Callable[[], object]) -> None:
        """Do it, if the process is alive, and once it is not stopped."""
        if self.stopped:
            self._then.append(then)
        elif self.alive:
            then()

    def _stop(self, how_long: Seconds) -> None:
        if self.alive and not self.stopped:
            self.stopped = True
            self.machine.clock.at(self.machine.clock.now + how_long, self._go_on)

    def _go_on(self) -> None:
        if not self.alive:
            return
        self.stopped = False
        heard, self._heard = self._heard, []
        then, self._then = self._then, []
        for message in heard:  # of the old connection, where there is a new one
            self.hear(message)
        if self._connection is None and self.doing != "starts":
            self.disconnected()
        for do in then:
            self._when_going(do)

    # Words.

    def _say(self, requests: list[Request]) -> None:
        if self._connection is not None and requests:
            self.machine.say(*[Received(self._connection, request) for request in requests])

    def _connect(self) -> None:
        self._connection = connection = self.machine.connected(self)
        said = [Received(connection, request) for request in self.holder.connected(self.in_use())]
        self.machine.say(Connected(connection, self.process), *said)

    def _asks(self) -> None:
        self._does("asks")
        self._connect()
        ttl = self.machine.settings.lease_ttl
        if ttl < float("inf"):
            self._beat(ttl / BEATS)

    def _beat(self, every: Seconds) -> None:
        if not self.alive or self.doing == "ends":
            return
        if not self.stopped and self.holder.phase == "holding":
            self._say([Beat(lease=self.holder.lease, step=self.outcome.steps, step_us=0, in_use=(), peak=0)])
        self.machine.clock.at(self.machine.clock.now + every, self._beat, every)

    def in_use(self) -> tuple[Bytes, ...]:
        """What it has to say of its bytes: nothing, or what its allocator keeps."""
        return (self.used,) * len(self.devices) if self._keeps else ()

    def disconnected(self) -> None:
        """Its connection has ended: it opens another."""
        self._connection = None
        if self.stopped or not self.alive or self.doing == "ends":
            return
        self.holder.disconnected()
        self._connect()

    def hear(self, message: Reply) -> None:
        """A message of the coordinator."""
        if not self.alive:
            return
        if self.stopped:
            self._heard.append(message)
            return
        self._say(self.holder.received(message, self.in_use()))
        phase = self.holder.phase
        if phase == "ended":
            self._ended(self.holder.reason)
        elif self.doing == "asks" and phase == "holding":
            self._admitted()
        elif self.doing == "waits":
            if self.holder.turn >= 0:
                self._has_turn()
            elif not self.machine.threads and self.holder.target != self.holder.held:
                self._boundary()  # it moves while it waits

    # A job's life.

    def _admitted(self) -> None:
        self.outcome.admitted = self.machine.clock.now
        self.machine.changed = True
        if self._allocate(self._rung.persistent + (0 if self._turning else self._rung.temp)):
            self._compile(self._boundary)

    @property
    def _rung(self) -> Rung:
        return self.holder.admit.ladder[self.holder.held]

    @property
    def _turning(self) -> bool:
        """Whether the bytes of its steps are there only in its turns."""
        return self.machine.threads or (self.holder.turns and self._rung.temp > 0)

    def _allocate(self, nbytes: Bytes) -> bool:
        """Have so many bytes on each device; False: there are too few, and it has ended."""
        if self._keeps:
            nbytes = max(nbytes, self.used)
        for k, name in enumerate(self.names):
            if not self.machine.use(name, nbytes - self.used):
                for other in self.names[:k]:
                    self.machine.use(other, self.used - nbytes)
                self.die("out of memory")
                return False
        self.used = nbytes
        return True

    def _compile(self, then: Callable[[], object]) -> None:
        """Have the plan of its rung compiled."""
        rung = self.holder.held if self.holder.moving < 0 else self.holder.moving
        if rung in self._compiled:
            then()
            return
        self._compiled.add(rung)
        self._does("compiles")
        self._after(self.job.compiles, lambda: (self._told("compile"), then()))

    def _boundary(self) -> None:
        """Between two steps: it moves if it was told to, gives its turn back if others wait, and goes on."""
        if self.outcome.steps >= self.job.steps:
            self._leaves()
            return
        rung = self.holder.boundary()
        if rung is not None:
            if rung not in self._compiled and self.holder.turn >= 0:
                self._gives_turn(lambda: self._compile(self._moves))
                return
            if rung not in self._compiled and self.holder.asks >= 0:
                self._say(self.holder.end_turn(0.0, ()))
            self._compile(self._moves)
        elif self.holder.ending:
            self._gives_turn(self._steps)
        else:
            self._steps()

    def _moves(self) -> None:
        before, after = self._rung, self.holder.admit.ladder[self.holder.moving]
        self._does("moves")
        self._after(self.job.gives if after.level < before.level else 0.0, self._moved)

    def _moved(self) -> None:
        after = self.holder.admit.ladder[self.holder.moving]
        temp = 0 if self._turning and (self.holder.turn < 0 or self.used <= self._rung.persistent) else after.temp
        if self._allocate(after.persistent + temp):
            self.outcome.moves += 1
            self._say(self.holder.moved(self.in_use()))
            self._told("move")
            self._boundary()

    def _gives_turn(self, then: Callable[[], object]) -> None:
        self._does("gives")

        def given() -> None:
            if self._allocate(self._rung.persistent):
                self._fresh = True
                job = self.job
                cost = job.gives + job.takes if job.says is None else job.says
                self._say(self.holder.end_turn(cost, self.in_use()))
                then()

        self._after(self.job.gives, given)

    def _steps(self) -> None:
        """Its next step, or the next part of it, once it is its turn."""
        if self.machine.threads:
            self._does("waits")
            self._turns = 0
            self._take_gates()
        elif not self._turning or self.holder.turn >= 0:
            self._step()
        else:
            self._does("waits")
            self._say(self.holder.ask_turn())

    def _take_gates(self) -> None:
        if self._turns < len(self._members):
            self._turns += 1
            gate = self.machine.gates[sorted(self.names)[self._turns - 1]]
            gate.take(self._members[self._turns - 1], lambda: self._when_going(self._take_gates))
        else:
            self._has_turn()

    def _has_turn(self) -> None:
        self.outcome.waits.append(self.machine.clock.now - self.since)
        self.outcome.turns += 1
        self._step()

    def _step(self) -> None:
        held = self._rung
        if not self._allocate(held.level):
            return
        if self.outcome.first_step is None:
            self.outcome.first_step = self.machine.clock.now
        self._does("steps")
        more = self.job.takes if self._fresh and self._turning and not self.machine.threads else 0.0
        self._fresh = False
        self._run = start(
            self.machine.clock,
            self.devices,
            self._plans[self.holder.held],
            1 / self.job.groups if self.machine.threads else 1.0,
            more,
            self._stepped,
        )

    def _stepped(self) -> None:
        self._run = None
        self.outcome.stepping += self.machine.clock.now - self.since
        self._told("step")
        if self.stopped:
            self._then.append(self._after_step)
        elif self.alive:
            self._after_step()

    def _after_step(self) -> None:
        if self.machine.threads:
            self._part += 1
            if self._part >= self.job.groups:
                self._part = 0
                self._count()
            if self._allocate(self._rung.persistent):
                self._give_gates()
                if self._part:
                    self._steps()
                else:
                    self._boundary()
            return
        self._count()
        self._boundary()

    def _count(self) -> None:
        held = self.holder.held
        self.outcome.steps += 1
        self.outcome.rungs[held] = self.outcome.rungs.get(held, 0) + 1

    def _give_gates(self) -> None:
        for name, member in zip(sorted(self.names), self._members, strict=True):
            self.machine.gates[name].give(member)

    # Ends.

    def _leaves(self) -> None:
        """All its steps are done: what its allocator gives back is free at once, the rest with its process."""
        if self._keeps:
            self.die("")
            return
        self._does("gives")
        self._after(self.job.gives, self._releases)

    def _releases(self) -> None:
        self._does("ends")
        self._allocate(0)
        self._say([*self.holder.end_turn(0.0, ()), *self.holder.release(())])

    def _ended(self, reason: str) -> None:
        self.die(reason)

    def die(self, why: str) -> None:
        """Its process ends, wherever it is. Of a thread: its job does, and gives all back."""
        if not self.alive:
            return
        self.alive = False
        now = self.machine.clock.now
        self.outcome.ended, self.outcome.why = now, why
        self.machine.changed = True
        if self._run is not None:
            stop(self.devices, self._run)
        self._keeps = False
        if self.machine.threads:
            self._allocate(0)
            if self.holder.phase in ("waiting", "holding"):
                self._say(self.holder.release(()))
        else:
            self.machine.clock.at(now + REAPED / 2, self._allocate, 0)  # the driver frees before it is reaped
        for name, member in zip(sorted(self.names), self._members[: self._turns], strict=False):
            self.machine.gates[name].leave(member)
        self.machine.dead(self, self._connection)
        self._connection = None

    # For people.

    def _does(self, what: str) -> None:
        self.doing, self.since = what, self.machine.clock.now

    def _told(self, what: str) -> None:
        trace = self.machine.trace
        if trace is not None:
            trace.slice(self.machine.name, self.job.name, what, self.since, self.machine.clock.now, self.holder.held)
