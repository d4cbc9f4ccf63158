"""The turns of jobs in several processes that share a device: which of them may have the temporaries of a step.

A job asks for a turn before a step, keeps it over its steps until others wait, and gives it back at a step boundary,
when the device has run what it was given and the allocator has given its bytes back. Several have a turn at once where
their temporaries fit together and nobody there wants more bytes. A turn is for all devices of its job.

Order: start-time fair queueing (Goyal, Vin, Cheng 1996), as in ``runtime.client.gate``, with a virtual time for each
device. A turn's tag on a device is max(virtual time, end of the job's last turn); whoever is least ahead of the virtual
time on all of its devices goes first, and nobody overtakes it there. The virtual time goes on during a turn that nobody
waits for: it is not held against its job.

A turn is to end when somebody waits who has had less of its share, and it has lasted long enough for what handing it
over costs; for a higher class, at once.

Invariant: on each device the persistent bytes and the temporaries of all turns fit, or there is one turn. A turn ends
when its job says so, or with its process: silence, the end of a connection and a restart of the coordinator end none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from math import inf
from typing import Final

from jaxtensile.runtime.decide.leases import HELD, OVERDUE, REVOKING, Lease
from jaxtensile.runtime.decide.ledger import Account, Ledger
from jaxtensile.units import Seconds

CLASS: Final = 8.0
"""Factor between the shares of neighbouring classes. A guess: high enough to be noticed, low enough that nobody
starves."""
CLASSES: Final = 8
"""Classes further from 0 than this count as that far, so that the lowest gets a turn within hours."""
SHORTEST: Final[Seconds] = 0.02
"""Seconds before a turn ends for others of its class: handing over takes messages of some 0.3 ms
(``benchmarks/coordinator/daemon``)."""
KEPT: Final = 1 << 10
"""Shares that are remembered. Only bounds memory."""
COST: Final = 0.05
"""Share of a turn that handing it over may take. A guess, as ``Settings.min_gain``."""


@lru_cache(KEPT)
def share(priority: int, weight: float) -> float:
    """A job's share of the turns beside others."""
    return weight * CLASS ** max(-CLASSES, min(priority, CLASSES))


_Running = Mapping[str, list[Lease]]
"""Those whose turn it is on each device, with temporaries there, in the order in which it came."""


class Turns:
    """The turns on a ledger's gated accounts. Report what jobs say, then ``settle``; tell ``begun`` and ``ended``."""

    __slots__ = ("_asking", "_leases", "_ledger", "_now", "begun", "due", "ended", "wake")

    def __init__(self, ledger: Ledger, leases: Mapping[int, Lease]) -> None:
        self._ledger, self._leases = ledger, leases
        self._now: dict[str, float] = {}
        """Virtual time, by device."""
        self._asking: dict[int, Lease] = {}
        self.due = False
        """There is something to settle."""
        self.wake: Seconds | None = None
        """When a turn has lasted long enough for those who wait."""
        self.begun: list[Lease] = []
        self.ended: list[Lease] = []

    # What jobs say.

    def ask(self, lease: Lease, number: int, now: Seconds) -> None:
        """A job asks for a turn."""
        if lease.turn >= 0:
            self.done(lease, now)
        lease.asks, self.due = number, True
        for name in lease.gated:
            places = [self._position(a, name, now) for a in self._with(self._ledger.accounts[name])]
            self._now[name] = max([self._now.get(name, 0.0), *places])
            lease.tags[name] = max(lease.served.get(name, 0.0), self._now[name])
        self._asking[lease.id] = lease

    def call_off(self, lease: Lease) -> None:
        """A job asks no more."""
        lease.asks, self.due = -1, True
        self._asking.pop(lease.id, None)

    def done(self, lease: Lease, now: Seconds) -> None:
        """A job's turn is over."""
        if lease.turn > 0:
            waited_for = {name for a in self._asking.values() for name in a.gated}
            for name in lease.gated:
                lease.served[name] = position = self._position(lease, name, now)
                if name not in waited_for:
                    self._now[name] = max(self._now.get(name, 0.0), position)
        self._put(lease, -1, now)

    def restore(self, lease: Lease, number: int, now: Seconds) -> None:
        """A job has the turn of that number, whatever was known of it; 0: it may have one."""
        self._put(lease, number, now)

    def forget(self, lease: Lease) -> None:
        """A lease has ended, and its turn with it."""
        self.call_off(lease)
        lease.turn, lease.ending = -1, False

    def _put(self, lease: Lease, turn: int, now: Seconds) -> None:
        lease.turn, lease.turned, lease.ending, lease.end_by, self.due = turn, now, False, None, True
        for name in lease.gated:
            self._ledger.accounts[name].turn(lease.id, its=turn >= 0)

    def _with(self, account: Account) -> list[Lease]:
        """Those whose turn it is, with temporaries there, in the order in which it came."""
        return [self._leases[k] for k in account.turns if k in account.charges and account.charges[k].temp]

    def _position(self, lease: Lease, name: str, now: Seconds) -> float:
        """Virtual time of a device in a job's turn."""
        return lease.tags.get(name, 0.0) + max(now - lease.turned, 0.0) / share(lease.priority, lease.weight)

    # Decisions.

    def settle(self, now: Seconds, wanting: Callable[[], Iterable[Lease]]) -> None:
        """Begin the turns that fit, and end those that others wait for. ``wanting``: the leases that wait for bytes, or
        would be faster with more: where these are, turns are taken one at a time."""
        self.due, self.wake = False, None
        accounts = self._ledger.accounts
        if not self._asking and not any(len(account.turns) > 1 for account in accounts.values()):
            return
        alone = {name for lease in wanting() for name in lease.touched}
        running = {name: self._with(account) for name, account in accounts.items()}
        self._go_on(running, now)
        behind: set[str] = set()
        for *_, lease in sorted([(self._ahead(a), -a.priority, a.id, a) for a in self._asking.values()]):
            places = [name for name in lease.gated if self._temp(lease, name)]
            if behind.isdisjoint(places) and self._fits(lease, places, running, alone):
                turn = lease.asks
                self.call_off(lease)
                self._put(lease, turn, now)
                for name in places:
                    self._now[name] = max(self._now[name], lease.tags[name])
                    running[name].append(lease)
                self.begun.append(lease)
            else:
                behind.update(places)
                self._end_for(lease, places, running, now)
        for name, account in accounts.items():
            if len(account.turns) > 1 and (name in alone or account.used > account.limit):
                first = next(iter(self._with(account)), None)
                for lease in [self._leases[k] for k in account.turns]:
                    if lease is not first:  # also who has no temporaries yet: it may be what is to get some
                        self._end(lease)
        self.due = False

    def _go_on(self, running: _Running, now: Seconds) -> None:
        """Move each virtual time to the first of those who wait or run. On a device that others leave idle, as they
        wait for another one, it would stand still, and who was ahead there would wait for ever."""
        first: dict[str, float] = {}
        for lease in self._asking.values():
            for name in lease.gated:
                first[name] = min(first.get(name, inf), lease.tags[name])
        for name, tag in first.items():
            places = [self._position(a, name, now) for a in running[name]]
            self._now[name] = max(self._now[name], min([tag, *places]))

    def _ahead(self, lease: Lease) -> float:
        return max([lease.tags[name] - self._now[name] for name in lease.gated], default=0.0)

    def _temp(self, lease: Lease, name: str) -> bool:
        charge = self._ledger.accounts[name].charges.get(lease.id)
        return charge is not None and charge.temp > 0

    def _fits(self, lease: Lease, places: Iterable[str], running: _Running, alone: set[str]) -> bool:
        if lease.state not in (HELD, REVOKING, OVERDUE):
            return False
        for name in places:
            if not self._ledger.accounts[name].turn_fits(lease.id) or (name in alone and running[name]):
                return False
        return True

    def _end_for(self, waiter: Lease, places: Iterable[str], running: _Running, now: Seconds) -> None:
        for name in places:
            for lease in running[name]:
                if lease.ending or lease.turn <= 0:
                    continue
                # So long that handing over is cheap, and that the waiter is the one who has had less than its share.
                least = max(SHORTEST, lease.hands_over / COST)
                behind = (waiter.tags[name] - lease.tags.get(name, 0.0)) * share(lease.priority, lease.weight)
                enough = lease.turned + max(least, behind)
                if waiter.priority > lease.priority or now >= enough:
                    self._end(lease)
                else:
                    self.wake = enough if self.wake is None else min(self.wake, enough)

    def _end(self, lease: Lease) -> None:
        if lease.turn > 0 and not lease.ending:
            lease.ending = True
            self.ended.append(lease)
