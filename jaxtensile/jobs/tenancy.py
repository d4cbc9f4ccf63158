"""A job's rung, and what the coordinator knows of its plans.

Invariant: ``now`` is within the job's charge; while another ladder is pending, within both. It changes only at a
boundary, when no step runs: callers that change it hold the job's step lock. Ctrl-C does not split a change
(``runtime.uninterrupted``).
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import ref

from msgspec import structs

from jaxtensile.devices.backends import keeps_bytes
from jaxtensile.errors import BudgetError, CoordinatorError, StoppedError
from jaxtensile.jobs.arbitration import Arbitration
from jaxtensile.jobs.ladder import Ladder, together
from jaxtensile.runtime.client.client import Client
from jaxtensile.runtime.client.gate import Turns
from jaxtensile.runtime.client.uninterrupted import uninterrupted
from jaxtensile.runtime.protocol.messages import Admit, Rung
from jaxtensile.spmd.processes.together import Together
from jaxtensile.units import Bytes, Seconds

_OFF: Final = 1.3
"""Factor of change in the ladder's measured seconds beyond which the coordinator is told, as for renewing a plan
(``feedback.OFF``). A guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The arguments of ``jaxtensile.job``."""

    name: str
    least: Bytes
    want: Bytes
    priority: int
    weight: float
    devices: tuple[str, ...] | None
    overhead: float | None
    groups: int = 1


@dataclass(slots=True)
class Taken:
    """Everything a job has to give back. It holds no reference to the job, so it can outlive it."""

    by: Arbitration | None = None
    client: Client | None = None
    asking: Client | None = None
    """The pending request, for the job's lease or for more."""

    def give_back(self, in_use: Sequence[Bytes] = ()) -> str:
        """Give everything back for good; returns the coordinator's complaint."""
        why = ""
        try:
            for client in (self.asking, self.client):
                if client is not None and not client.release(in_use):
                    why = client.reason or "the coordinator did not confirm its release"
        finally:
            self.asking = self.client = None
            if self.by is not None:
                self.by.end()
        return why


class Tenancy:
    """A job's lease as the job sees it."""

    def __init__(self, terms: Terms) -> None:
        self.terms, self.devices = terms, terms.devices
        self.taken = Taken()
        self.turns: tuple[Turns, ...] = ()
        self.ladders: list[Ladder] = []
        self.calls: Counter[Ladder] = Counter()
        """Number of timed calls of each step."""
        self._users: dict[int, ref[Any]] = {}
        """Callers of its planned functions, which hold the running plan, by address. Any thread may add one while
        others iterate: each operation is one instruction."""
        self.admit: Admit | None = None
        """The admission whose ladder ``now`` belongs to."""
        self.now: Rung | None = None
        self.renew = False
        """Whether to tell the coordinator the present ladder."""
        self.over = False
        self.resting: Rung | None = None
        """What it holds while suspended, instead of its ladder."""
        self.forgotten = 0
        """How often all plans were to be asked for again."""
        self.waits: Bytes = 0
        """Host bytes of its state."""
        self.switches = 0
        self.handing_over: Seconds = 0.0
        """Seconds that a turn's first step takes longer than the others."""
        self._own: dict[Rung, Rung] = {}
        """By rung as the coordinator is told it, how its bytes divide, where the two differ."""
        self._clamped = False
        """Whether ``now`` is less than the rung, until another ladder applies."""
        self.processes: Together | None = None
        """If several processes run its steps: how they change plans before the same step."""
        self._said = self._leaving = -1
        """The rung that the others were told last that this one may be on; and the one its lease moves to, once what
        runs is no higher. -1: none."""

    @property
    def by(self) -> Arbitration | None:
        """The arbitration, from the job's beginning on."""
        return self.taken.by

    @property
    def client(self) -> Client | None:
        """The client that holds its lease."""
        return self.taken.client

    @property
    def groups(self) -> int:
        """Executables of a step at most. Between processes a turn lasts for whole steps, and nobody would gain."""
        return self.terms.groups if self.by is not None and self.by.local is not None else 1

    def charged(self, rung: Rung) -> Rung:
        """A rung as the coordinator is told it. What a step in groups needs is there while others run between them, and
        is charged for good."""
        if self.groups < 2 or not rung.temp:
            return rung
        told = structs.replace(rung, persistent=rung.level, temp=0)
        self._own[told] = rung
        return told

    def own(self, told: Rung) -> Rung:
        """The rung that the coordinator was told as ``told``."""
        return self._own.get(told, told)

    @property
    def budget(self) -> Bytes:
        """As ``Job.budget``."""
        return 0 if (now := self.now) is None or self.resting is not None else now.level

    @property
    def rung(self) -> int:
        """As ``Job.rung``."""
        return -1 if (client := self.client) is None else client.rung

    @property
    def ladder(self) -> tuple[Rung, ...]:
        """As ``Job.ladder``."""
        return () if (admit := self.admit) is None else admit.ladder

    def bytes_for(self, ladder: Ladder) -> Bytes:
        """Bytes that a plan of a step may need now."""
        assert self.now is not None
        return ladder.share(self.now)

    def compile_more(self, ladder: Ladder, error: BudgetError) -> bool:
        """Compile the smallest plan before asking for its bytes; whether that succeeded."""
        if error.needs is None or error.needs > self.terms.want:
            return False
        try:
            ladder.compile(error.needs, self.watch)
        except BudgetError:
            return False
        return True

    def covers(self, ladder: Ladder) -> bool:
        """Whether a step has a plan, predicted or compiled, for the job's current rung."""
        now = self.now
        assert now is not None
        return any(p.temp <= now.temp and p.persistent <= now.persistent for p in ladder.places())

    def require_going_on(self) -> None:
        """Raise ``CoordinatorError`` if any thread has ended the job."""
        if self.over:
            raise CoordinatorError(f"job {self.terms.name!r} has ended while it waited")

    # Where it was told to be.

    @property
    def told_to_go(self) -> bool:
        """Whether the job is to move to another rung, or to a rung of another ladder."""
        client = self.client
        if client is None or not client.admitted:
            return False
        return client.target != client.rung or client.admit is not self.admit

    def told(self) -> bool:
        """Whether there is anything to do at the next boundary."""
        client = self.client
        if client is None or not client.admitted:
            return False
        if self.processes is not None:
            arrived = self._leaving >= 0 and self.processes.allows(self._leaving)
            return client.turn_ends or arrived or client.target != self._said
        return self.told_to_go or client.turn_ends or ((self.renew or self._clamped) and not client.renewing)

    def boundary(self) -> None:
        """Between two steps: change the rung as told, and report the present ladder."""
        client = self.client
        if client is not None and (client.due or self.told()):
            uninterrupted(self._boundary, client)

    def _boundary(self, client: Client) -> None:
        if client.turn_ends:
            self.end_turn()
        if self.processes is not None:
            return self._boundary_together(client, self.processes)
        rung = client.boundary()
        if rung is not None:
            self.put(client.admit, rung)
            client.moved(self.in_use())
        elif client.rung >= 0 and not client.renewing and (self._clamped or client.admit is not self.admit):
            self.put(client.admit, client.rung)
        if self.renew and not client.renewing:
            self.renew = False
            self.renewal(client)

    def _boundary_together(self, client: Client, others: Together) -> None:
        """The lease may be above what runs, and never below: it goes down after all processes have."""
        if client.target != self._said:
            self._said = client.target
            others.may(self._said)
        if self._leaving < 0:
            rung = client.boundary()
            self._leaving = -1 if rung is None else rung
        if self._leaving >= 0 and others.allows(self._leaving):
            self._leaving = -1
            client.moved(self.in_use())

    def entered(self, client: Client, others: Together) -> None:
        """The job has its lease in this process; it begins with the rung that it may be on in all."""
        self._said = client.target
        others.may(self._said)
        others.begin()
        self.put(client.admit, others.rung)

    def begin_step(self) -> None:
        """A step is about to run: change plans, if all processes do before this one."""
        others = self.processes
        if others is None or others.rung < 0 or self.admit is None:
            return
        before = others.rung
        if (rung := others.step()) != before:
            uninterrupted(self.put, self.admit, rung)
            self.boundary()

    def end_turn(self) -> None:
        """Give the job's turn back, between two steps: the bytes of a step are free again, unless XLA's allocator keeps
        them."""
        client, now = self.client, self.now
        if client is not None and now is not None and (client.has_turn or client.turn_ends):
            devices = self.devices or ()
            kept = any(keeps_bytes(name, os.environ) for name in devices)
            client.end_turn(self.handing_over, (now.level,) * len(devices) if kept else ())

    def tell(self) -> None:
        """While compiling for the current rung: report the present ladder."""
        client = self.client
        if client is not None and self.renew and not self.told_to_go and not client.renewing:
            self.renew = False
            self.renewal(client)

    def put(self, admit: Admit, rung: int) -> None:
        """Put the job on a rung of ``admit``."""
        before, self.admit, self.now, self._clamped = self.now, admit, self.own(admit.ladder[rung]), False
        part = "temp" if self.processes is None else "level"  # what tells its plans apart
        if before is not None and getattr(before, part) != getattr(self.now, part):
            self.switches += 1
        self.forget()

    def used_by(self, call: Any) -> None:
        """As ``Job.used_by``."""
        users, key = self._users, id(call)
        users[key] = ref(call, lambda _: users.pop(key, None))

    def forget(self) -> None:
        """Make the next call of each planned function ask again for its plan."""
        self.forgotten += 1
        for user in [*self._users.values()]:
            if (call := user()) is not None:
                call._clear_cache()

    def in_use(self) -> tuple[Bytes, ...]:
        """Measured bytes per device; empty, as several jobs of a process cannot be told apart."""
        return ()

    # What the coordinator is told of its plans.

    def asked(self, ladder: tuple[Rung, ...]) -> Admit:
        """The admission request for a ladder."""
        assert self.devices is not None
        return Admit(
            job=self.terms.name,
            devices=self.devices,
            ladder=tuple(map(self.charged, ladder)),
            floor=self.terms.least if ladder[-1].level >= self.terms.least else ladder[-1].level,
            want=max(self.terms.want, 0),
            priority=self.terms.priority,
            weight=self.terms.weight,
            suspended=self.resting is not None,
        )

    def renewal(self, client: Client, *, covering: bool = True) -> None:
        """Tell the coordinator the present ladder. Until it applies, nothing larger runs than now."""
        uninterrupted(self._renewal, client, covering=covering)

    def _renewal(self, client: Client, *, covering: bool) -> None:
        assert self.now is not None and self.admit is not None
        rungs = self.together()
        asked = self.asked(rungs)
        if asked == self.admit:
            return
        rung = self.lowest(rungs, covering=covering)
        before = self.now
        less = {"persistent": min(rung.persistent, before.persistent), "temp": min(rung.temp, before.temp)}
        self.now, self._clamped = structs.replace(before, **less), True
        self.forget()
        if not client.renew(asked, rungs.index(rung), self.in_use()):
            self.now, self._clamped, self.renew = before, False, True

    def together(self) -> tuple[Rung, ...]:
        """The present ladder of all the job's steps together."""
        if self.resting is not None:
            return (self.resting,)
        rungs = together(self.ladders, [self.calls[ladder] for ladder in self.ladders])
        if self.processes is not None:
            # Charged for good: who has his turn here and waits for it elsewhere would keep others from it.
            rungs = tuple(structs.replace(r, persistent=r.level, temp=0) for r in rungs)
        return tuple(structs.replace(r, host=r.host + self.waits) for r in rungs) if self.waits else rungs

    def lowest(self, rungs: tuple[Rung, ...], *, covering: bool = True) -> Rung:
        """The lowest of ``rungs`` that is at least ``least`` and, if ``covering``, covers the plans that run or are
        compiled."""
        assert self.now is not None
        runs = [p.temp for ladder in self.ladders if (p := ladder.runs(self.bytes_for(ladder))) is not None]
        used, floor = max(runs, default=self.now.temp) if covering else 0, self.asked(rungs).floor
        return next((r for r in rungs if r.temp >= used and r.level >= floor), rungs[-1])

    def misjudged(self) -> bool:
        """Whether measured steps contradict the rungs that the coordinator knows."""
        if self.processes is not None:
            return False  # all processes have one ladder, and measure different times
        new, old = self.together(), self.ladder
        if len(new) != len(old):
            return True
        best, was = min(r.seconds for r in new), min(r.seconds for r in old)
        ratios = [(a.seconds / best) / (b.seconds / was) for a, b in zip(new, old, strict=True)]
        return max(ratios) > _OFF or min(ratios) < 1 / _OFF

    def watch(self, _: str) -> None:
        """Raise ``StoppedError`` if nobody waits for a compile any more."""
        if self.over or not threading.main_thread().is_alive():
            raise StoppedError
