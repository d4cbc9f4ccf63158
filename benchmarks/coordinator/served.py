"""How long is anybody's answer away while many devices are divided?

    python -m benchmarks.coordinator.served [--quick]

1,000 jobs of eight plans on 64 devices of one ``jaxtensile serve``, the questions of ``divide``: all come at once, then
one after another leaves and comes back, and every job answers at once what it is told. Meanwhile another process, which
holds nothing, asks something that changes nothing every 5 ms: what it waits is what a decision keeps others waiting.
Milliseconds of wall time; daemon, jobs and the one that asks share the machine's cores. Results go to ``served.json``
and ``served.md``; ``--quick`` prints only.

    python -m benchmarks.coordinator.served PATH      the one that asks
"""

from __future__ import annotations

import argparse
import gc
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from benchmarks.coordinator.daemon import cpu, daemon
from benchmarks.coordinator.divide import KINDS, question
from benchmarks.isolate import ROOT, heading, save
from benchmarks.machine import describe
from jaxtensile.runtime.daemon.server import more_descriptors
from jaxtensile.runtime.decide.policy import Claim
from jaxtensile.runtime.protocol.messages import (
    VERSION,
    Ack,
    Admit,
    Error,
    Grant,
    Hello,
    Queued,
    Release,
    Released,
    Revoke,
    Rung,
    Withdraw,
)
from jaxtensile.runtime.protocol.wire import REPLIES, frame, take

HERE: Final = Path(__file__).parent
DEVICES, JOBS = 64, 1000
EVENTS: Final = 300
PAUSE, EVERY = 0.05, 0.005
"""Seconds between two events, and between two questions."""
HOST_UNIT: Final = 1024
"""Pinned host bytes are so much fewer than in ``divide``: a machine has no more than its memory."""
LIMIT: Final = 60.0
TARGET: Final = 50.0


class Job:
    """One job's connection, which does what it is told."""

    def __init__(self, path: str, claim: Claim) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self._rest = b""
        host = claim.resources[-1] == "host"
        ladder = tuple(
            Rung(
                persistent=o.needs[0].persistent,
                temp=o.needs[0].temp,
                host=o.needs[-1].level // HOST_UNIT if host else 0,
                seconds=o.slowdown,
            )
            for o in claim.options
        )
        devices = claim.resources[:-1] if host else claim.resources
        self._admit = frame(Admit(job=f"job {claim.id}", devices=devices, ladder=ladder, weight=claim.weight))
        self.lease: Grant | Revoke | None = None
        self.told = 0
        """Times that it was moved."""
        self.socket.sendall(frame(Hello(version=VERSION)))

    def come(self) -> None:
        self.socket.sendall(self._admit)

    def leave(self) -> None:
        assert self.lease is not None
        self.socket.sendall(frame(Release(lease=self.lease.lease, token=self.lease.token)))
        self.lease = None

    def hear(self) -> None:
        """Read what came, and be where it says."""
        data = self.socket.recv(1 << 16)
        assert data, "the coordinator has gone"
        taken = take(self._rest + data, REPLIES)
        self._rest = taken.rest
        for message in taken.messages:
            if isinstance(message, Grant | Revoke):
                self.told += self.lease is not None
                self.lease = message
                self.socket.sendall(frame(Ack(lease=message.lease, token=message.token, rung=message.rung, in_use=())))
            elif isinstance(message, Error):
                raise AssertionError(message.detail)


def config(rooms: dict[str, Any]) -> str:
    """Of the daemon: exactly those rooms; nobody is given up for not speaking."""
    lines = ["[coordinator]", 'min_hold = "0s"', 'lease_ttl = "1h"', "max_clients = 4096"]
    for name, room in rooms.items():
        if name != "host":
            turns = str(room.gated).lower()
            lines += [f'[device."{name}"]', f"capacity = {room.free}", "reserve = 0", f"turns = {turns}"]
            if "host" in rooms:
                lines.append(f"host = {rooms['host'].free // HOST_UNIT}")
    return "\n".join(lines) + "\n"


class Crowd:
    """All jobs."""

    def __init__(self, path: str, claims: Sequence[Claim]) -> None:
        self.jobs = [Job(path, claim) for claim in claims]
        self._by = {job.socket.fileno(): job for job in self.jobs}
        self._epoll = select.epoll()
        for descriptor in self._by:
            self._epoll.register(descriptor, select.EPOLLIN)

    def serve(self, until: float) -> None:
        """Do what is told until then."""
        while (left := until - time.perf_counter()) > 0:
            for descriptor, _ in self._epoll.poll(left):
                self._by[descriptor].hear()

    def admitted(self) -> float:
        """Seconds until all have a lease."""
        began = time.perf_counter()
        while any(job.lease is None for job in self.jobs):
            self.serve(time.perf_counter() + 0.01)
            assert time.perf_counter() < began + LIMIT, "not all were admitted"
        return time.perf_counter() - began


def measured(kind: str, events: int) -> dict[str, Any]:
    """One line of the table."""
    claims, rooms = question(kind, DEVICES, JOBS, 0)
    random = Random(kind)
    with daemon(config(rooms)) as (path, process):
        crowd = Crowd(str(path), claims)
        before = cpu(process.pid)
        for job in crowd.jobs:
            job.come()
        first = crowd.admitted()
        first_cpu = cpu(process.pid) - before
        crowd.serve(time.perf_counter() + 2)
        asking = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.coordinator.served", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert asking.stdout is not None and asking.stdout.readline() == "asks\n"
        for job in crowd.jobs:
            job.told = 0
        away: list[Job] = []
        began, before = time.perf_counter(), cpu(process.pid)
        for n in range(events):
            if away and n % 2:
                away.pop(0).come()
            else:
                job = random.choice([job for job in crowd.jobs if job.lease is not None])
                job.leave()
                away.append(job)
            crowd.serve(began + (n + 1) * PAUSE)
        spent = cpu(process.pid) - before
        out, _ = asking.communicate("\n")
        took = sorted(float(x) for x in out.split())
    cuts = statistics.quantiles(took, n=100)
    return {
        "kind": kind,
        "asked": len(took),
        "p50": cuts[49],
        "p99": cuts[98],
        "worst": took[-1],
        "moved": sum(job.told for job in crowd.jobs),
        "cpu_ms": 1e3 * spent / events,
        "all": first,
        "all_cpu": first_cpu,
    }


def ask(path: str) -> None:
    """Ask every ``EVERY`` seconds until stdin says so, then print what each answer took."""
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    rest = b""

    def heard(kind: tuple[type, ...]) -> None:
        nonlocal rest
        while True:
            taken = take(rest + link.recv(1 << 16), REPLIES)
            rest = taken.rest
            if not kind or any(isinstance(m, kind) for m in taken.messages):
                return

    link.sendall(frame(Hello(version=VERSION)))
    heard(())
    gc.disable()
    print("asks", flush=True)
    took: list[float] = []
    while not select.select([sys.stdin], [], [], EVERY)[0]:
        asked = time.perf_counter()
        link.sendall(frame(Withdraw(job="nobody")))
        heard((Released, Error, Queued))
        took.append(1e3 * (time.perf_counter() - asked))
    print(*(f"{t:.4f}" for t in took))


def table(result: dict[str, Any]) -> str:
    out = heading("Answers while many devices are divided", result["machine"], __doc__)
    out += [
        f"{JOBS:,} jobs on {DEVICES} devices, {result['events']} events; ms. Target: p99 of at most {TARGET:.0f} ms."
    ]
    out += ["", "| jobs are on | answers: p50 | p99 | worst | moved | CPU of the daemon an event | all admitted, s |"]
    out += ["|---|---|---|---|---|---|---|"]
    for r in result["rows"]:
        out.append(
            f"| {r['kind']} | {r['p50']:.2f} | {r['p99']:.1f} | {r['worst']:.1f} | {r['moved']} | {r['cpu_ms']:.1f} | "
            f"{r['all']:.1f} |"
        )
    return "\n".join(out) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.path:
        ask(options.path)
        return
    more_descriptors()
    events = 40 if options.quick else EVENTS
    result: dict[str, Any] = {"machine": describe(), "events": events, "rows": []}
    for kind in KINDS:
        result["rows"].append(measured(kind, events))
        if not options.quick:
            save(HERE / "served.json", result, table)
    print(table(result))


if __name__ == "__main__":
    main()
