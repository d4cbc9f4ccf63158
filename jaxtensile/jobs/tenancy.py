"""On which rung is a job, and what does the coordinator know of its plans?

Invariant: ``now`` is within what the job is charged; while another ladder is on its way, within both. It changes at a
boundary alone, when no step runs: whoever calls what changes it has the job's step lock. A change is not cut in two by
Ctrl-C (``runtime.uninterrupted``).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import ref

from msgspec import structs

from jaxtensile.errors import BudgetError, CoordinatorError, StoppedError
from jaxtensile.jobs.arbitration import Arbitration
from jaxtensile.jobs.ladder import Ladder, together
from jaxtensile.runtime.client.client import Client
from jaxtensile.runtime.client.gate import Turns
from jaxtensile.runtime.client.uninterrupted import uninterrupted
from jaxtensile.runtime.protocol.messages import Admit, Rung
from jaxtensile.units import Bytes

_OFF: Final = 1.3
"""Measured steps that change the ladder's seconds by more than this factor are told: as much as has a plan renewed
(``feedback.OFF``). A guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What was asked of ``jaxtensile.job``."""

    name: str
    least: Bytes
    want: Bytes
    priority: int
    weight: float
    devices: tuple[str, ...] | None
    overhead: float | None


@dataclass(slots=True)
class Taken:
    """All that a job has to give back. It knows nothing of the job, so it can be given back when that is gone."""

    by: Arbitration | None = None
    client: Client | None = None
    asking: Client | None = None
    """What waits at present, for the job's lease or for more."""

    def give_back(self, in_use: Sequence[Bytes] = ()) -> str:
        """Give it back, for good; what the coordinator had to complain of."""
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
        """Its places at the gates of its devices."""
        self.ladders: list[Ladder] = []
        self.calls: Counter[Ladder] = Counter()
        """Of each step that were timed."""
        self._users: dict[int, ref[Any]] = {}
        """What calls its planned functions, which has what runs at present, by its address. Any thread may add one
        while others go through them: each is one instruction."""
        self.admit: Admit | None = None
        """The ladder that ``now`` is of."""
        self.now: Rung | None = None
        self.renew = False
        """The coordinator is to be told the ladder as it is now."""
        self.over = False
        self.resting: Rung | None = None
        """What it holds while it is suspended, in place of its ladder."""
        self.waits: Bytes = 0
        """Host bytes of its state."""
        self.switches = 0
        """How often the job went to another rung."""
        self._clamped = False
        """``now`` is less than the rung, until another ladder counts."""

    @property
    def by(self) -> Arbitration | None:
        """Who arbitrates, from the job's begin on."""
        return self.taken.by

    @property
    def client(self) -> Client | None:
        """What holds its lease."""
        return self.taken.client

    @property
    def budget(self) -> Bytes:
        """Device bytes that steps of the job may use at present; 0 before its first one and while it is suspended."""
        return 0 if (now := self.now) is None or self.resting is not None else now.level

    @property
    def rung(self) -> int:
        """Which rung of ``ladder`` it is on, from 0; -1 while it has no lease."""
        return -1 if (client := self.client) is None else client.rung

    @property
    def ladder(self) -> tuple[Rung, ...]:
        """What the coordinator knows of the job's plans."""
        return () if (admit := self.admit) is None else admit.ladder

    def bytes_for(self, ladder: Ladder) -> Bytes:
        """What a plan of a step may need now."""
        assert self.now is not None
        return ladder.share(self.now)

    def compile_more(self, ladder: Ladder, error: BudgetError) -> bool:
        """Compile the smallest plan that there is, before asking for its bytes."""
        if error.needs is None or error.needs > self.terms.want:
            return False
        try:
            ladder.compile(error.needs, self.watch)
        except BudgetError:
            return False
        return True

    def covers(self, ladder: Ladder) -> bool:
        """Whether a step has a plan, as far as is known, for the rung that the job is on."""
        now = self.now
        assert now is not None
        return any(p.temp <= now.temp and p.persistent <= now.persistent for p in ladder.places())

    def require_going_on(self) -> None:
        """Raises where the job was ended, by whatever thread."""
        if self.over:
            raise CoordinatorError(f"job {self.terms.name!r} has ended while it waited")

    # Where it was told to be.

    @property
    def told_to_go(self) -> bool:
        """Whether it is to go to another rung, or to a rung of another ladder."""
        client = self.client
        if client is None or not client.admitted:
            return False
        return client.target != client.rung or client.admit is not self.admit

    def told(self) -> bool:
        """Whether there is something to do at its next boundary."""
        client = self.client
        if client is None or not client.admitted:
            return False
        return self.told_to_go or ((self.renew or self._clamped) and not client.renewing)

    def boundary(self) -> None:
        """Between two steps: go where it was told to be, and say what ladder it has now."""
        client = self.client
        if client is not None and (client.due or self.told()):
            uninterrupted(self._boundary, client)

    def _boundary(self, client: Client) -> None:
        rung = client.boundary()
        if rung is not None:
            self.put(client.admit, rung)
            client.moved(self.in_use())
        elif client.rung >= 0 and not client.renewing and (self._clamped or client.admit is not self.admit):
            self.put(client.admit, client.rung)
        if self.renew and not client.renewing:
            self.renew = False
            self.renewal(client)

    def tell(self) -> None:
        """While it compiles for the rung that it is on: say what ladder it has now."""
        client = self.client
        if client is not None and self.renew and not self.told_to_go and not client.renewing:
            self.renew = False
            self.renewal(client)

    def put(self, admit: Admit, rung: int) -> None:
        """It is on a rung from now on."""
        before, self.admit, self.now, self._clamped = self.now, admit, admit.ladder[rung], False
        if before is not None and before.temp != self.now.temp:
            self.switches += 1
        self.forget()

    def used_by(self, call: Any) -> None:
        """``call`` is what calls a planned function of the job."""
        users, key = self._users, id(call)
        users[key] = ref(call, lambda _: users.pop(key, None))

    def forget(self) -> None:
        """Have the next call of each planned function ask again what to run."""
        for user in [*self._users.values()]:
            if (call := user()) is not None:
                call._clear_cache()

    def in_use(self) -> tuple[Bytes, ...]:
        """Measured bytes per device, where they are this job's alone: not while a process has several."""
        return ()

    # What the coordinator is told of its plans.

    def asked(self, ladder: tuple[Rung, ...]) -> Admit:
        """What a ladder is asked to be admitted with."""
        assert self.devices is not None
        return Admit(
            job=self.terms.name,
            devices=self.devices,
            ladder=ladder,
            floor=self.terms.least if ladder[-1].level >= self.terms.least else ladder[-1].level,
            want=max(self.terms.want, 0),
            priority=self.terms.priority,
            weight=self.terms.weight,
            suspended=self.resting is not None,
        )

    def renewal(self, client: Client, *, covering: bool = True) -> None:
        """Tell the coordinator the ladder as it is known now. Until that counts, nothing larger runs than does now."""
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
        """The ladder of all its steps as it is known now."""
        if self.resting is not None:
            return (self.resting,)
        rungs = together(self.ladders, [self.calls[ladder] for ladder in self.ladders])
        return tuple(structs.replace(r, host=r.host + self.waits) for r in rungs) if self.waits else rungs

    def lowest(self, rungs: tuple[Rung, ...], *, covering: bool = True) -> Rung:
        """The lowest of ``rungs`` that is no lower than ``least``, and covers what runs or is compiled."""
        assert self.now is not None
        runs = [p.temp for ladder in self.ladders if (p := ladder.runs(self.bytes_for(ladder))) is not None]
        used, floor = max(runs, default=self.now.temp) if covering else 0, self.asked(rungs).floor
        return next((r for r in rungs if r.temp >= used and r.level >= floor), rungs[-1])

    def misjudged(self) -> bool:
        """Whether measured steps say something else of the rungs than the coordinator knows."""
        new, old = self.together(), self.ladder
        if len(new) != len(old):
            return True
        best, was = min(r.seconds for r in new), min(r.seconds for r in old)
        ratios = [(a.seconds / best) / (b.seconds / was) for a, b in zip(new, old, strict=True)]
        return max(ratios) > _OFF or min(ratios) < 1 / _OFF

    def watch(self, _: str) -> None:
        """Raises ``StoppedError`` where nobody waits for a compile any more."""
        if self.over or not threading.main_thread().is_alive():
            raise StoppedError
