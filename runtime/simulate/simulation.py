"""A simulation: machines, the jobs that come, and who of them goes where.

The decisions are those of the package: ``placement.Fleet`` chooses the devices of jobs that name none, each machine's
``Coordinator`` grants bytes and turns, ``Holder`` follows. Only time, bytes and links are made up.

Invariant: the same jobs on the same machines give the same outcomes, whatever the machine that simulates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from jaxtensile.errors import CoordinatorError
from jaxtensile.runtime.decide.admission import demanded
from jaxtensile.runtime.decide.events import Settings
from jaxtensile.runtime.decide.leases import HOST
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.placement.asks import Ask, Placed, Rules
from jaxtensile.runtime.placement.fleet import Fleet
from jaxtensile.runtime.placement.nodes import Room
from jaxtensile.runtime.simulate.clock import Clock
from jaxtensile.runtime.simulate.jobs import Job, Outcome
from jaxtensile.runtime.simulate.machine import Machine
from jaxtensile.runtime.simulate.trace import Trace
from jaxtensile.runtime.simulate.worker import Worker
from jaxtensile.units import Bytes, Seconds

PLACES_EVERY: Final[Seconds] = 1.0
"""Seconds between two decisions of the fleet, as ``cluster.actors`` asks its machines in a small cluster."""


class StuckError(CoordinatorError):
    """Nothing is to happen any more, and jobs have not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of a simulation; see ``Machine``."""

    capacities: Mapping[str, Capacity]
    threads: bool = False
    shared_link: bool = False
    physical: Mapping[str, Bytes] | None = None


class Simulation:
    """Machines and their jobs in virtual time. ``check``: called with each machine's name after every event."""

    def __init__(
        self,
        nodes: Mapping[str, Node],
        settings: Settings,
        *,
        trace: Trace | None = None,
        check: Callable[[Simulation], object] | None = None,
        placement: Rules | None = None,
    ) -> None:
        self.clock = Clock()
        self.trace, self._check = trace, check
        self.machines = {
            name: Machine(
                name,
                node.capacities,
                settings,
                self.clock,
                threads=node.threads,
                shared_link=node.shared_link,
                physical=node.physical,
                trace=trace,
            )
            for name, node in nodes.items()
        }
        self.outcomes: list[Outcome] = []
        self.workers: list[Worker] = []
        """Processes that live."""
        self._fleet = Fleet(placement or Rules())
        self._waiting: dict[str, Outcome] = {}
        """Jobs that the fleet places."""
        self._placed: dict[str, Worker] = {}
        self._places = False
        for name, machine in self.machines.items():
            self._report(name, machine)

    def add(self, jobs: Iterable[Job]) -> Simulation:
        """Let jobs come."""
        for job in jobs:
            outcome = Outcome(job=job)
            self.outcomes.append(outcome)
            number = len(self.outcomes)
            if job.devices:
                self.clock.at(job.arrives, self._start, outcome, next(iter(self.machines)), job.devices, number)
            else:
                self.clock.at(job.arrives, self._submit, outcome, number)
        return self

    def run(self, until: Seconds = float("inf")) -> Sequence[Outcome]:
        """The outcomes, once all jobs have ended or at that time.

        Raises ``StuckError`` if jobs wait for what never happens.
        """
        check = self._check
        self.clock.run(until, None if check is None else lambda: check(self))
        left = [o.job.name for o in self.outcomes if o.ended is None]
        if left and self.clock.idle:
            raise StuckError(f"{len(left)} jobs wait for ever, {left[0]!r} first: nothing is to happen any more")
        return self.outcomes

    # Where jobs go.

    def _start(self, outcome: Outcome, machine: str, devices: tuple[str, ...], number: int) -> Worker:
        worker = Worker(self.machines[machine], outcome.job, devices, outcome, number)
        self.workers = [w for w in self.workers if w.alive] if len(self.workers) % 64 == 63 else self.workers
        self.workers.append(worker)
        return worker

    def _submit(self, outcome: Outcome, number: int) -> None:
        job, now = outcome.job, self.clock.now
        name = f"{number} {job.name}"
        self._waiting[name] = outcome
        self._fleet.submit(
            Ask(
                job=name,
                floor=self._floor(job),
                devices=job.count,
                priority=job.priority,
                order=number,
                since=now,
            )
        )
        self._soon(0.0)

    def _floor(self, job: Job) -> Bytes:
        """The bytes that a job is guaranteed, by the admission of the first machine that could have it; its floor where
        none can."""
        for machine in self.machines.values():
            devices = tuple(machine.devices)[: job.count]
            asked = demanded(job.admitted, devices, job.floor, job.want, machine.coordinator.arbiter.ledger)
            if not isinstance(asked, str):
                return asked.ladder[asked.low].level
        return job.floor or job.admitted[0].level

    def _soon(self, after: Seconds) -> None:
        if not self._places:
            self._places = True
            self.clock.at(self.clock.now + after, self._place)

    def _place(self) -> None:
        self._places = False
        for name, machine in self.machines.items():
            if machine.changed:
                machine.changed = False
                self._report(name, machine)
        for name, worker in [*self._placed.items()]:
            if not worker.alive:
                del self._placed[name]
                self._fleet.ended(name)
        for found in self._fleet.decide(self.clock.now):
            outcome = self._waiting.pop(found.job)
            if isinstance(found, Placed):
                number = int(found.job.partition(" ")[0])
                place = found.places[0]
                self._placed[found.job] = self._start(outcome, place.node, place.devices, number)
            else:
                outcome.ended, outcome.why = self.clock.now, found.reason
        if self._waiting or self._placed:
            self._soon(PLACES_EVERY)

    def _report(self, name: str, machine: Machine) -> None:
        arbiter = machine.coordinator.arbiter
        rooms = [Room(d, arbiter.ledger.accounts[d].limit, arbiter.floors.accounts[d].used) for d in machine.devices]
        there = {f"{lease.number} {lease.job}" for lease in arbiter.leases.values() if lease.rung >= 0}
        self._fleet.report(name, rooms, there)


def alone(job: Job, device: Capacity, settings: Settings | None = None) -> Outcome:
    """The outcome of one job by itself on a device that has all it wants."""
    name = "device:0"
    alone = structs.replace(job, devices=(name,), arrives=0.0)
    nodes = {"alone": Node(capacities={name: device, HOST: Capacity(capacity=1 << 60)})}
    return Simulation(nodes, settings or Settings()).add([alone]).run()[0]
