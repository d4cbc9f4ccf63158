"""How full are a thousand machines with a hundred thousand jobs, beside first-fit?

    python -m benchmarks.concurrent.fleet [--quick]

The policy of ``runtime/placement`` under a virtual clock, and two baselines on the same jobs and the same
losses of machines: *first-fit* (by arrival, each job on the first node that has room; one that does not fit is passed
over) and *in order* (the same, but nobody passes the oldest). Every placement is audited here with sums of its own: no
device above its bytes, a job of several hosts on all or none.

Utilisation is byte-seconds of floors of running jobs over byte-seconds of the devices that are there. A lost machine's
jobs start again from nothing; what they had done is lost and is not counted. Seconds are CPU of the decisions alone.
Results go to ``fleet.json`` and ``fleet.md``; ``--quick`` prints only, of 50 machines and 3,000 jobs.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import time
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.isolate import save
from benchmarks.machine import commit, describe
from jaxtensile.runtime.placement.asks import Ask, Placed, Rules
from jaxtensile.runtime.placement.fleet import Fleet
from jaxtensile.runtime.placement.nodes import Room
from jaxtensile.units import GIB

HERE = Path(__file__).parent
CARDS = ((8, 80), (8, 40), (4, 24), (1, 16))
"""Machines in equal parts: devices, and GiB of each."""
SHAPES = ((1, 1, 0.80), (2, 1, 0.08), (4, 1, 0.06), (8, 1, 0.04), (8, 2, 0.012), (8, 4, 0.006), (8, 8, 0.002))
"""Devices, hosts, and share of the jobs."""
STEP = 2
"""GiB: floors are multiples of it, from one to the largest device's, small ones more often."""
MEDIAN = 600.0
"""Seconds of a job: log-normal with this median, half a day at most."""
SPREAD, LONGEST = 1.5, 43_200.0
LOSSES = 40
"""Machines lost during the run, each for half an hour."""
WAITS = ("wait_mean", "wait_p99", "wait_max", "large_wait_mean", "large_wait_max")
LOADS = (1.0, 1.3)
"""Byte-seconds of the jobs that come, over those of the devices in that time."""


@dataclass(frozen=True)
class Job:
    number: int
    at: float
    seconds: float
    floor: int
    devices: int
    hosts: int

    @property
    def total(self) -> int:
        return self.floor * self.devices * self.hosts


class Policy(Protocol):
    def join(self, name: str, limits: list[int]) -> None: ...
    def lost(self, name: str) -> None: ...
    def submit(self, job: Job, now: float) -> None: ...
    def ended(self, job: Job) -> None: ...
    def decide(self, now: float) -> Iterable[tuple[int, list[tuple[str, tuple[int, ...]]]]]: ...


class Ours:
    """The fleet of the package."""

    def __init__(self, **rules: float) -> None:
        self.fleet = Fleet(Rules(**rules))

    def join(self, name: str, limits: list[int]) -> None:
        self.fleet.report(name, [Room(str(k), limit) for k, limit in enumerate(limits)])

    def lost(self, name: str) -> None:
        self.fleet.lost(name)

    def submit(self, job: Job, now: float) -> None:
        asked = Ask(
            job=str(job.number), floor=job.floor, devices=job.devices, hosts=job.hosts, order=job.number, since=now
        )
        self.fleet.submit(asked)

    def ended(self, job: Job) -> None:
        self.fleet.ended(str(job.number))

    def decide(self, now: float) -> Iterable[tuple[int, list[tuple[str, tuple[int, ...]]]]]:
        for found in self.fleet.decide(now):
            assert isinstance(found, Placed), f"{found}: every job fits some machine"
            yield int(found.job), [(p.node, tuple(map(int, p.devices))) for p in found.places]


class FirstFit:
    """Each job, in the order of arrival, on the first nodes that have room; ``strict``: nobody passes the oldest."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.names: list[str] = []
        self.free: dict[str, list[int]] = {}
        self.queues: dict[tuple[int, int, int], deque[Job]] = defaultdict(deque)
        self.jobs: dict[int, Job] = {}
        self.at: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
        self.room: dict[int, Any] = {}

    def join(self, name: str, limits: list[int]) -> None:
        if name not in self.names:
            insort(self.names, name)
        self.free[name] = [*limits]
        self.room = {}

    def lost(self, name: str) -> None:
        del self.free[name]
        self.names.remove(name)
        self.room = {}
        for number in [n for n, places in self.at.items() if any(p[0] == name for p in places)]:
            job = self.jobs[number]
            self.ended(job)
            queue = self.queues[job.devices, job.hosts, job.floor]
            queue.append(job)
            self.queues[job.devices, job.hosts, job.floor] = deque(sorted(queue, key=lambda j: j.number))

    def submit(self, job: Job, now: float) -> None:
        self.jobs[job.number] = job
        self.queues[job.devices, job.hosts, job.floor].append(job)

    def ended(self, job: Job) -> None:
        for name, devices in self.at.pop(job.number):
            if name in self.free:
                for d in devices:
                    self.free[name][d] += job.floor
                self.changed(name)

    def rooms(self, devices: int) -> Any:
        """The floor that so many devices of each node have room for, nodes in order."""
        if devices not in self.room:
            self.room[devices] = np.array([self.of(name, devices) for name in self.names])
        return self.room[devices]

    def of(self, name: str, devices: int) -> int:
        free = sorted(self.free[name], reverse=True)
        return free[devices - 1] if len(free) >= devices else -1

    def changed(self, name: str) -> None:
        at = self.names.index(name)
        for devices, rooms in self.room.items():
            rooms[at] = self.of(name, devices)

    def decide(self, now: float) -> Iterable[tuple[int, list[tuple[str, tuple[int, ...]]]]]:
        most: dict[tuple[int, int], int] = {}
        while True:
            heads = sorted((queue[0].number, shape) for shape, queue in self.queues.items() if queue)
            for number, (devices, hosts, floor) in heads:
                if (devices, hosts) not in most:
                    rooms = self.rooms(devices)
                    most[devices, hosts] = int(np.partition(rooms, -hosts)[-hosts]) if len(rooms) >= hosts else -1
                if floor <= most[devices, hosts]:
                    places: list[tuple[str, tuple[int, ...]]] = []
                    for at in np.flatnonzero(self.rooms(devices) >= floor)[:hosts]:
                        free = self.free[self.names[at]]
                        chosen = [d for d, room in enumerate(free) if room >= floor][:devices]
                        for d in chosen:
                            free[d] -= floor
                        places.append((self.names[at], tuple(chosen)))
                    for name, _ in places:
                        self.changed(name)
                    self.queues[devices, hosts, floor].popleft()
                    self.at[number] = places
                    yield number, places
                    most = {}
                    break
                if self.strict:
                    return
            else:
                return


def machines(count: int) -> dict[str, list[int]]:
    return {f"node{k:04d}": [CARDS[k % len(CARDS)][1] * GIB] * CARDS[k % len(CARDS)][0] for k in range(count)}


def work(count: int, nodes: dict[str, list[int]], load: float, seed: int) -> list[Job]:
    """Jobs whose byte-seconds are ``load`` times those of the devices while they come."""
    rnd = random.Random(seed)
    drawn: list[Job] = []
    for number in range(count):
        devices, hosts, _ = rnd.choices(SHAPES, [s[2] for s in SHAPES])[0]
        most = max(size for width, size in CARDS if width >= devices)
        floor = STEP * GIB * max(1, round((most / STEP) ** rnd.random()))
        seconds = min(MEDIAN * rnd.lognormvariate(0, SPREAD), LONGEST)
        drawn.append(Job(number, rnd.random(), seconds, floor, devices, hosts))
    capacity = sum(map(sum, nodes.values()))
    within = sum(job.total * job.seconds for job in drawn) / capacity / load
    times = sorted(job.at * within for job in drawn)
    return [replace(job, at=at) for job, at in zip(drawn, times, strict=True)]


class Overcommitted(Exception):
    pass


def simulate(policy: Policy, nodes: dict[str, list[int]], jobs: list[Job], losses: int, seed: int) -> dict[str, Any]:
    """Run all jobs to their ends; audited."""
    rnd = random.Random(seed)
    last = jobs[-1].at
    events: list[tuple[float, int, str, Any]] = [(job.at, k, "come", job) for k, job in enumerate(jobs)]
    for k, name in enumerate(rnd.sample(sorted(nodes), losses)):
        at = rnd.uniform(0.1, 0.9) * last
        events += [(at, -2 * k - 2, "lose", name), (at + 1800.0, -2 * k - 1, "join", name)]
    heapq.heapify(events)
    ticket = len(jobs)
    used = {name: [0] * len(limits) for name, limits in nodes.items()}
    there, at, running, attempt = {*nodes}, {}, 0, defaultdict(int)
    waited: dict[int, float] = {}
    area: dict[str, float] = defaultdict(float)
    waiting = 0
    began: dict[int, float] = {}
    now, room, restarts, most = 0.0, sum(map(sum, nodes.values())), 0, 0
    for name, limits in nodes.items():
        policy.join(name, limits)
    cpu = 0.0

    def leave(job: Job) -> None:
        nonlocal running
        for name, devices in at.pop(job.number):
            for d in devices:
                used[name][d] -= job.floor
        running -= job.total

    while events:
        when, _, what, about = heapq.heappop(events)
        if when <= last:
            area["used"] += running * (when - now)
            area["room"] += room * (when - now)
        if waiting:
            area["used, some wait"] += running * (when - now)
            area["room, some wait"] += room * (when - now)
        now = when
        if what == "end":
            job, which = about
            if attempt[job.number] != which:
                continue
            leave(job)
        elif what == "lose":
            there.discard(about)
            room -= sum(nodes[about])
            for number in [n for n, ps in at.items() if any(p[0] == about for p in ps)]:
                leave(jobs[number])
                waiting += 1
                attempt[number] += 1
                restarts += 1
                area["lost"] += jobs[number].total * (now - began[number])
        elif what == "join":
            there.add(about)
            room += sum(nodes[about])
        waiting += what == "come"
        start = time.process_time()
        match what:
            case "come":
                policy.submit(about, now)
            case "end":
                policy.ended(about[0])
            case "lose":
                policy.lost(about)
            case _:
                policy.join(about, nodes[about])
        found = [*policy.decide(now)]
        cpu += time.process_time() - start
        for number, places in found:
            job = jobs[number]
            if number in at or len({p[0] for p in places}) != job.hosts:
                raise Overcommitted(f"job {number} of {job.hosts} hosts at {places}")
            for name, devices in places:
                if name not in there or len({*devices}) != job.devices:
                    raise Overcommitted(f"job {number} on {devices} of {name}")
                for d in devices:
                    used[name][d] += job.floor
                    if used[name][d] > nodes[name][d]:
                        raise Overcommitted(f"{name}:{d} at {now}")
            at[number] = places
            waiting -= 1
            running += job.total
            most = max(most, running)
            waited.setdefault(number, now - job.at)
            began[number] = now
            ticket += 1
            heapq.heappush(events, (now + job.seconds, ticket, "end", (job, attempt[number])))
    assert len(waited) == len(jobs) and not at, "every job has run to its end"
    waits = sorted(waited.values())
    large = sorted(w for n, w in waited.items() if jobs[n].devices * jobs[n].hosts >= 8)
    return {
        "utilisation": (area["used"] - area["lost"]) / area["room"],
        "utilisation_some_wait": (area["used, some wait"] - area["lost"]) / max(area["room, some wait"], 1.0),
        "makespan_hours": now / 3600,
        "arrivals_hours": last / 3600,
        "wait_mean": float(np.mean(waits)),
        "wait_p99": waits[int(0.99 * len(waits))],
        "wait_max": waits[-1],
        "large_wait_mean": float(np.mean(large or [0.0])),
        "large_wait_max": (large or [0.0])[-1],
        "restarts": restarts,
        "cpu_seconds": cpu,
        "overcommits": 0,
    }


POLICIES: dict[str, Any] = {
    "ours": Ours,
    "ours, never holding": lambda: Ours(hold_after=float("inf")),
    "first-fit": FirstFit,
    "in order": lambda: FirstFit(strict=True),
}


def table(result: dict[str, Any]) -> str:
    m = result["machine"]
    lines = [
        f"# {result['jobs']:,} jobs on {result['nodes']:,} machines ({result['devices']:,} devices), simulated",
        "",
        f"Python {m['python']}, {m['cpus']} cores, {m['date']}, commit {result['commit']}: `python -m "
        "benchmarks.concurrent.fleet` makes it again. Load: byte-seconds of the jobs over those of the devices while "
        "jobs come. Utilisation: of that time, without what lost "
        "machines had begun, and of the time in which some job waits. Waits are of the first start; "
        "large: eight devices or more. CPU: of all decisions, one core. A placement above a device's bytes, or of some "
        "hosts only, ends the run: there was none.",
        "",
        "| load | policy | utilisation | while some wait | all done after | mean wait | p99 | longest | large: mean | "
        "longest | CPU |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        waits = [
            f"{row[k] / 60:.1f} min" for k in ("wait_mean", "wait_p99", "wait_max", "large_wait_mean", "large_wait_max")
        ]
        lines.append(
            f"| {row['load']} | {row['policy']} | {row['utilisation']:.2%} | "
            f"{row['utilisation_some_wait']:.2%} | {row['makespan_hours']:.1f} h of "
            f"{row['arrivals_hours']:.1f} | {' | '.join(waits)} | {row['cpu_seconds']:.0f} s |"
        )
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.concurrent.fleet", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="50 machines and 3,000 jobs; print only")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--policies", nargs="*", default=[*POLICIES], help="which (default: all)")
    options = parser.parse_args()
    count, number = (50, 3_000) if options.quick else (options.nodes, options.jobs)
    nodes = machines(count)
    result: dict[str, Any] = {
        "machine": describe(),
        "commit": commit(),
        "nodes": count,
        "devices": sum(map(len, nodes.values())),
        "jobs": number,
        "rows": [],
    }
    for load in LOADS:
        jobs = work(number, nodes, load, seed=7)
        for name in options.policies:
            row = simulate(POLICIES[name](), nodes, jobs, LOSSES * count // 1000, seed=11)
            result["rows"].append({"load": load, "policy": name, **row})
            print(json.dumps(result["rows"][-1]), flush=True)
            if not options.quick and len(options.policies) == len(POLICIES):
                save(HERE / "fleet.json", result, table)
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
