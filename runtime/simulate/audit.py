"""The invariants of a simulation, derived again from what jobs hold and what the coordinator charges.

After every event: on each device the charges are within the limit, those of temporaries counted for the turns that are
there; no process has more bytes than it is charged; a lease has a process, or one whose end is not seen yet; a job that
is connected and holds a lease is known to hold it; tokens rise; who waits first is admitted once it fits; who waits for
a turn gets it within ``patience`` times what its share allows.

Invariant: it shares no sum with the ledger, and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from jaxtensile.errors import CoordinatorError
from jaxtensile.runtime.decide.leases import HOST, OVERDUE, QUARANTINED, QUEUED, Charge, Lease
from jaxtensile.runtime.decide.turns import share
from jaxtensile.runtime.simulate.machine import Machine
from jaxtensile.runtime.simulate.simulation import Simulation
from jaxtensile.runtime.simulate.worker import Worker
from jaxtensile.units import Bytes, Seconds, format_bytes

PATIENCE: Final = 3.0
"""Times that a wait for a turn may exceed the longest turns of all others by their shares: they were ahead, or begin
before they are counted. A guess."""
SLACK: Final[Seconds] = 1.0
"""Seconds of a wait for a turn that are never too long: messages and allocators. A guess."""


class ViolationError(CoordinatorError):
    """An invariant does not hold."""


class Audit:
    """Checks a simulation after every event: ``Simulation(check=Audit())``."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self.checked = 0
        self._patience = patience
        self._tokens: dict[str, tuple[int, int]] = {}
        self._longest: dict[str, dict[str, tuple[Seconds, float]]] = {}
        """By machine and job: the longest time for which it has done one thing but wait, and its share."""
        self._doing: dict[tuple[str, int], tuple[str, Seconds]] = {}
        """What each job did when it was last looked at, and since when."""

    def __call__(self, it: Simulation) -> None:
        """Raises ``ViolationError`` at the first that does not hold."""
        self.checked += 1
        by_machine: dict[str, list[Worker]] = {name: [] for name in it.machines}
        for worker in it.workers:
            if worker.alive or worker.used:
                by_machine[worker.machine.name].append(worker)
        for name, machine in it.machines.items():
            self._machine(machine, by_machine[name])

    def _machine(self, machine: Machine, workers: list[Worker]) -> None:
        arbiter, now = machine.coordinator.arbiter, machine.clock.now
        used: Counter[str] = Counter()
        for worker in workers:
            for device in worker.devices:
                used[device.name] += worker.used
        for name, account in arbiter.ledger.accounts.items():
            charged = _sum(account.charges, {*account.turns} if account.gated else {*account.charges})
            if charged > account.limit:
                self._broken(machine, f"{format_bytes(charged)} of {format_bytes(account.limit)} are charged on {name}")
            if name != HOST and (used[name] != machine.used[name] or used[name] > machine.physical[name]):
                self._broken(machine, f"{format_bytes(used[name])} are used on {name}")
        leases = {(a.process, a.job, a.number): a for a in arbiter.leases.values()}
        for worker in workers:
            self._worker(machine, worker, leases.pop((worker.process, *worker.ask), None), now)
        for (process, *_), lease in leases.items():
            if process in machine.processes and not machine.threads:
                self._broken(machine, f"lease {lease.id} of {lease.job!r}, which has none")
        if arbiter.queue and all(a.state is not OVERDUE for a in arbiter.leases.values()):
            first = arbiter.queue[0]
            floor = first.needs[first.low]
            if arbiter.floors.fits(first.id, first.resources, floor) and arbiter.ledger.fits(
                first.id, first.resources, floor
            ):
                self._broken(machine, f"{first.job!r} waits first, and fits")

    def _worker(self, machine: Machine, worker: Worker, lease: Lease | None, now: Seconds) -> None:
        holder, job = worker.holder, worker.job
        if worker.used:
            if lease is None:
                self._broken(machine, f"{job.name!r} has {format_bytes(worker.used)}, and no lease")
                return
            for name in worker.names:
                account = machine.coordinator.arbiter.ledger.accounts[name]
                charge = account.charges.get(lease.id, Charge(0))
                turn = not account.gated or machine.threads or lease.id in account.turns or lease.stuck
                allowed = charge.persistent + (charge.temp if turn else 0)
                if worker.used > allowed and worker.alive:
                    had, may = format_bytes(worker.used), format_bytes(allowed)
                    self._broken(machine, f"{job.name!r} has {had} on {name}, and may have {may}")
        if not worker.alive:
            return
        if holder.phase == "holding" and worker.connected and not worker.stopped and lease is None:
            self._broken(machine, f"{job.name!r} holds a lease that nobody knows of")
        if lease is not None and lease.state is not QUEUED and lease.state is not QUARANTINED:
            key, token = f"{machine.name} {job.name} {lease.id}", (lease.epoch, lease.sequence)
            if token < self._tokens.get(key, (0, 0)):
                self._broken(machine, f"a token of {job.name!r} fell from {self._tokens[key]} to {token}")
            self._tokens[key] = token
        longest = self._longest.setdefault(machine.name, {})
        was, since = self._doing.get(worker.ask, ("", now))
        self._doing[worker.ask] = worker.doing, worker.since
        if was != "waits":
            took, theirs = longest.get(job.name, (0.0, share(job.priority, job.weight)))
            longest[job.name] = max(took, now - since), theirs
        if worker.doing == "waits":
            kept, mine = now - worker.since, share(job.priority, job.weight)
            most = sum(took * max(theirs / mine, 1.0) for took, theirs in longest.values())
            if kept > SLACK + self._patience * most:
                self._broken(machine, f"{job.name!r} has waited for its turn for {kept:.3f} s")

    def _broken(self, machine: Machine, what: str) -> None:
        raise ViolationError(f"at {machine.clock.now:.6f} s on {machine.name}: {what}")


def everything_is_free(it: Simulation) -> None:
    """Raises ``ViolationError`` if a lease or a byte is left after all jobs have ended."""
    for machine in it.machines.values():
        accounts = machine.coordinator.arbiter.ledger.accounts.values()
        if machine.coordinator.arbiter.leases or any(a.used for a in accounts) or any(machine.used.values()):
            raise ViolationError(f"all jobs of {machine.name} have ended, and not all is free")


def _sum(charges: Mapping[int, Charge], turns: set[int]) -> Bytes:
    """Bytes that may be there at once: all that stay, the temporaries of those whose turn it is, and at least the
    largest."""
    temps = [c.temp for k, c in charges.items() if k in turns]
    return sum(c.persistent for c in charges.values()) + max(
        sum(temps), max((c.temp for c in charges.values()), default=0)
    )
