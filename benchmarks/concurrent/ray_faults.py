"""What becomes of fifty jobs on three Ray nodes when nodes, coordinators, daemons, agents and jobs are killed?

    python -m benchmarks.concurrent.ray_faults [--jobs N]

Real everything but the machines: ``ray.cluster_utils.Cluster`` puts three nodes on this one, each with a daemon of its
own (``jaxtensile serve``) over so many bytes of the CPU, and each job is a process with a small JAX training
(``ray_job``). Needs ``pip install 'jaxtensile[ray]'``. Every daemon is asked for its state some ten times a second: a
device with more charged than it has is an overcommit. A daemon that was killed begins with every lease as if it had its
turn, until its job has said so or has ended; what it counts twice then is told apart.

Utilisation is of the bytes of the nodes that are there, while jobs wait: by floors of placed jobs, which includes the
seconds in which they import JAX, and of admitted ones. For comparison the policy and first-fit are simulated on the
same nodes, without faults, with the same floors and the times that the jobs took, in twenty orders of submission.
Results go to ``ray_faults.json`` and ``ray_faults.md``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.concurrent.fleet import FirstFit, Job, Ours, simulate
from benchmarks.isolate import ROOT, save
from benchmarks.machine import commit, describe
from jaxtensile.errors import CoordinatorError
from jaxtensile.runtime.cluster.records import ENDED
from jaxtensile.runtime.cluster.submit import Cluster
from jaxtensile.runtime.daemon.inquiry import ask
from jaxtensile.units import MIB, format_bytes

HERE = Path(__file__).parent
NODES = (40, 32, 24)
"""MiB of the CPU that each node's daemon grants."""
FLOORS = {4: 6, 8: 9, 12: 12, 16: 15}
"""MiB without which a job is not started, by its layers. Its smallest plan needs 3 to 4, the plain program 14 to 51."""
STEPS = 40
FAULTS = ("coordinator", "daemon", "job", "agent", "coordinator", "node", "daemon", "job")
"""What is killed, one after another."""
EVERY = 15.0
"""Seconds between two of them, and before the first."""
LIMIT = 1500.0
"""Seconds in which all jobs have to end."""
CONFIG = """
[device]
capacity = "{mib}MiB"
reserve = 0
[coordinator]
min_hold = "1s"
"""


class Nodes:
    """A Ray cluster on this machine whose nodes have daemons of their own."""

    def __init__(self, folder: Path, sizes: tuple[int, ...]) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        self.folder, self.sockets, self.limits = folder, {}, {}
        self.cluster = RayCluster()
        self.nodes = [self.add(k, mib) for k, mib in enumerate(sizes)]
        self.cluster.wait_for_nodes()

    def add(self, number: int, mib: int) -> Any:
        place = self.folder / f"n{number}"
        place.mkdir(mode=0o700)
        (place / "jaxtensile.toml").write_text(CONFIG.format(mib=mib))
        self.sockets[number], self.limits[number] = place / "s", mib * MIB
        environment = {
            "JAXTENSILE_SOCKET": str(place / "s"),
            "JAXTENSILE_CONFIG": str(place / "jaxtensile.toml"),
            "JAX_PLATFORMS": "cpu",
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        return self.cluster.add_node(num_cpus=4, object_store_memory=80 * MIB, env_vars=environment)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()

    def number_of(self, node_id: str) -> int:
        return next(k for k, node in enumerate(self.nodes) if node.node_id == node_id)


class Audit(threading.Thread):
    """Asks every daemon for its state, again and again."""

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(daemon=True)
        self.nodes, self.looks, self.alive = nodes, Counter(), {*nodes.sockets}
        self.over, self.twice = [], []
        self.placed = 0
        """Floors of placed jobs."""
        self.most: Counter[int] = Counter()
        self.waiting = True
        self.area = {"floors": 0.0, "placed": 0.0, "charged": 0.0, "room": 0.0}
        self.stopped = False

    def run(self) -> None:
        last = time.monotonic()
        while not self.stopped:
            floors = charged = 0
            for number in [*self.alive]:
                try:
                    found = ask(self.nodes.sockets[number], 1.0)
                except CoordinatorError:
                    self.looks["no answer"] += 1
                    continue
                self.looks["answers"] += 1
                device = next(d for d in found.devices if d.device != "host")
                if device.charged > device.capacity - device.reserve:
                    unheard = [lease.job for lease in found.leases if lease.state == "quarantined"]
                    (self.twice if unheard else self.over).append((number, device.charged, found.phase, unheard))
                else:
                    self.most[number] = max(self.most[number], device.charged)
                floors, charged = floors + device.guaranteed, charged + device.charged
            now = time.monotonic()
            if self.waiting:
                room = sum(self.nodes.limits[k] for k in self.alive)
                for what, value in (("floors", floors), ("placed", self.placed), ("charged", charged), ("room", room)):
                    self.area[what] += value * (now - last)
            last = now
            time.sleep(0.1)


def kill(what: str, cluster: Cluster, nodes: Nodes, audit: Audit) -> str:
    """Kill something that is there; what it was."""
    import ray

    reports = {nodes.number_of(number): report for number, report in cluster.nodes()}
    busiest = max(reports, key=lambda k: len([t for t in reports[k].tasks if not t.ended]))
    if what == "coordinator":
        pid = cluster.coordinator_pid()
    elif what == "daemon":
        pid = int(Path(f"{nodes.sockets[busiest]}.lock").read_text())
    elif what == "agent":
        agent = ray.get_actor(f"agent-{nodes.nodes[busiest].node_id}", namespace="jaxtensile")
        pid = ray.get(agent.pid.remote())
    elif what == "job":
        leases = ask(nodes.sockets[busiest]).leases
        pid = next(lease.pid for lease in leases if lease.pid and lease.rung >= 0)
    else:
        last = max(k for k in audit.alive if k)  # the first one is Ray's head
        audit.alive.discard(last)
        nodes.cluster.remove_node(nodes.nodes[last], allow_graceful=False)
        return f"node {last} with {len([t for t in reports[last].tasks if not t.ended])} jobs"
    os.kill(pid, signal.SIGKILL)
    return f"{what} of node {busiest}" if what != "coordinator" else what


def run(jobs: int, folder: Path) -> dict[str, Any]:
    nodes = Nodes(folder, NODES)
    cluster = Cluster(nodes.cluster.address)
    audit = Audit(nodes)
    audit.start()
    began, kinds = time.monotonic(), [*FLOORS.items()]
    files = {}
    for k in range(jobs):
        layers, mib = kinds[k % len(kinds)]
        arguments = [layers, STEPS, mib * MIB, folder / f"j{k}"]
        command = [sys.executable, "-m", "benchmarks.concurrent.ray_job", *map(str, arguments)]
        job = cluster.submit(f"train-{k}", command, floor=mib * MIB, retries=2, folder=str(ROOT))
        files[job] = (folder / f"j{k}", mib * MIB)
    never = cluster.submit("never", ["true"], floor=10 * max(NODES) * MIB, folder=str(ROOT))
    submitted = time.monotonic() - began
    names, faults, killed = [*files, never], [*FAULTS], []
    next_at = time.monotonic() + EVERY
    while True:
        records = cluster.jobs(names).records
        states = Counter(r.state for r in records)
        audit.waiting = states["waiting"] > 1
        audit.placed = sum(r.floor for r in records if r.state == "placed")
        now = time.monotonic()
        print(f"{now - began:6.1f}s {dict(states)}", flush=True)
        if all(r.state in ENDED for r in records) and len(records) == len(names):
            break
        if faults and now >= next_at and states["done"] < jobs:
            try:
                killed.append((round(now - began, 1), kill(faults[0], cluster, nodes, audit)))
            except StopIteration:  # nobody holds a lease at this moment
                time.sleep(0.5)
                continue
            print(f"{now - began:6.1f}s killed: {killed[-1][1]}", flush=True)
            faults.pop(0)
            next_at = now + EVERY
        if now > began + LIMIT:
            raise SystemExit(f"not all have ended within {LIMIT:.0f} s: {states}")
        time.sleep(1.0)
    took = time.monotonic() - began
    time.sleep(1.0)
    left = [lease.job for k in audit.alive for lease in ask(nodes.sockets[k]).leases]
    audit.stopped = True
    audit.join()
    result = told(records, files, never, killed, audit, took, submitted, left)
    result["replayed"] = replayed(files)
    nodes.close()
    return result


def told(
    records: Any, files: Any, never: str, killed: Any, audit: Audit, took: float, submitted: float, left: list[str]
) -> dict[str, Any]:
    refused = next(r for r in records if r.spec.job == never)
    mine = [r for r in records if r.spec.job != never]
    ends = {r.spec.job: [line.split()[1] for line in files[r.spec.job][0].read_text().splitlines()] for r in mine}
    return {
        "machine": describe(),
        "commit": commit(),
        "jobs": len(mine),
        "nodes MiB": NODES,
        "seconds": took,
        "submit seconds": submitted,
        "states": dict(Counter(r.state for r in mine)),
        "refused": refused.reason,
        "failed": [r.reason for r in mine if r.state != "done"],
        "killed": killed,
        "moves": sum(r.moves for r in mine),
        "failures": sum(r.failures for r in mine),
        "attempts": sum(r.attempt for r in mine),
        "starts": sum(e.count("start") for e in ends.values()),
        "ends": sum(e.count("end") for e in ends.values()),
        "jobs that ended more than once": sum(e.count("end") > 1 for e in ends.values()),
        "overcommits": len(audit.over),
        "looks that counted turns twice": len(audit.twice),
        "overcommitted": audit.over,
        "looks": dict(audit.looks),
        "most charged": {k: format_bytes(v) for k, v in audit.most.items()},
        "leases left": left,
        "utilisation placed": audit.area["placed"] / audit.area["room"],
        "utilisation": audit.area["floors"] / audit.area["room"],
        "utilisation charged": audit.area["charged"] / audit.area["room"],
    }


def replayed(files: dict[str, tuple[Path, int]]) -> dict[str, float]:
    """Utilisation until the last job has ended, on three nodes that are never lost, with the times of the last
    attempts; the mean of twenty orders."""
    took: list[tuple[int, float]] = []
    for file, floor in files.values():
        lines = [line.split() for line in file.read_text().splitlines()]
        end = max(float(at) for at, what, _ in lines if what == "end")
        took.append((floor, end - max(float(at) for at, what, _ in lines if what == "start" and float(at) < end)))
    nodes = {f"node{k}": [mib * MIB] for k, mib in enumerate(NODES)}
    used = sum(floor * seconds for floor, seconds in took)
    found: dict[str, float] = {}
    for name, policy in {"ours": Ours, "first-fit": FirstFit, "in order": lambda: FirstFit(strict=True)}.items():
        hours = []
        for seed in range(20):
            order = Random(seed).sample(took, len(took))
            jobs = [Job(n, 1e-3 * n, seconds, floor, 1, 1) for n, (floor, seconds) in enumerate(order)]
            hours.append(simulate(policy(), nodes, jobs, 0, 0)["makespan_hours"])
        found[name] = used / (sum(NODES) * MIB * 3600 * sum(hours) / len(hours))
    return found


def table(result: dict[str, Any]) -> str:
    m = result["machine"]
    lines = [
        f"# {result['jobs']} JAX jobs on three Ray nodes, some of which are killed",
        "",
        f"jax {m['jax']}, Ray {result['ray']}, Python {m['python']}, {m['cpus']} cores, {m['date']}, commit "
        f"{result['commit']}: `python -m benchmarks.concurrent.ray_faults` makes it again.",
        "",
        "| after | killed |",
        "|---|---|",
        *[f"| {at:.0f} s | {what} |" for at, what in result["killed"]],
        "",
        "| quantity | value |",
        "|---|---|",
    ]
    shown = ("states", "seconds", "submit seconds", "attempts", "moves", "failures", "starts", "ends",
             "jobs that ended more than once", "overcommits", "looks that counted turns twice", "looks", "most charged",
             "leases left")  # fmt: skip
    for name in shown:
        value = result[name]
        text = f"{value:.1f}" if isinstance(value, float) else value
        if isinstance(value, dict):
            text = ", ".join(f"{k}: {v}" for k, v in value.items())
        lines.append(f"| {name} | {text if text != [] else 'none'} |")
    lines += [
        f"| floors of placed jobs, of the nodes' bytes, while jobs wait | {result['utilisation placed']:.1%} |",
        f"| floors of admitted jobs, likewise | {result['utilisation']:.1%} |",
        f"| bytes charged, likewise | {result['utilisation charged']:.1%} |",
        *[
            f"| floors of running jobs until the last has ended, simulated without faults, {name} | {value:.1%} |"
            for name, value in result["replayed"].items()
        ],
        f"| refused, as it should be | {result['refused']} |",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.concurrent.ray_faults", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--jobs", type=int, default=50)
    options = parser.parse_args()
    import ray

    with tempfile.TemporaryDirectory(prefix="jt-ray-") as folder:
        result = {**run(options.jobs, Path(folder)), "ray": ray.__version__}
    print(table(result))
    if options.jobs == 50:
        save(HERE / "ray_faults.json", result, table)
    return int(bool(result["overcommits"] or result["failed"] or result["leases left"]))


if __name__ == "__main__":
    sys.exit(main())
