"""What do jobs that share a device lose by the way it is divided, and how long does dividing take?

    python -m benchmarks.coordinator.policy [--quick]

Mixes of jobs on one 80 GiB device. A job is a ladder of eight plans between its plain bytes and the fewest it runs
with; both are the workloads' of ``benchmarks/fit``, and the slowdown falls from a worst one to 1 along a bent and
slightly noisy curve, as recomputation and copies give. Each division guarantees every job its floor where all floors
fit; the sum of weight × slowdown is compared. *Equal split*: every job the fastest plan within an equal share, what a
floor or a top leaves being shared again. *First come*: the policy ``fcfs``. Then the time of one division, in CPU
seconds, and how far from the optimum it is proved to be. Results go to ``policy.json`` and ``policy.md``; ``--quick``
prints only.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.isolate import save
from jaxtensile.runtime.decide.events import OBJECTIVES
from jaxtensile.runtime.decide.knapsack import Row, cheapest
from jaxtensile.runtime.decide.leases import Charge
from jaxtensile.runtime.decide.policy import EXACT, WITHIN, Claim, Option, Room, divide
from jaxtensile.units import GIB

HERE = Path(__file__).parent
RUNGS = 8
DEVICE = "gpu"
WORKLOADS = {
    # 10^9 bytes plain, fewest; slowdown with the fewest; bend of the curve, 1 is straight
    "gpt2": (22.5, 6.9, 1.33, 1.8),
    "llama": (57.1, 24.0, 1.30, 1.6),
    "vit": (14.9, 4.1, 1.28, 1.7),
    "resnet": (12.0, 3.6, 1.25, 1.4),
    "bert": (18.0, 5.2, 1.31, 1.9),
    "dlrm": (8.7, 6.9, 1.05, 1.1),
    "ode": (34.5, 1.2, 1.95, 2.6),
    "moe": (28.0, 9.5, 1.40, 1.5),
    "unet": (20.0, 5.0, 1.36, 1.3),
}
MIXES = {"few": (3, 0.35), "few, tight": (3, 0.1), "some": (6, 0.3), "some, tight": (6, 0.08), "many": (12, 0.25)}
SEEDS = 6


def ladder(random: Random, scale: float) -> list[tuple[int, float]]:
    """Bytes and slowdown of a job's plans, by ascending bytes."""
    plain, fewest, worst, bend = WORKLOADS[random.choice(sorted(WORKLOADS))]
    plain, fewest = plain * scale, fewest * scale
    found: list[tuple[int, float]] = []
    for n in range(RUNGS):
        share = n / (RUNGS - 1)
        noise = random.uniform(0.9, 1.1) if 0 < n < RUNGS - 1 else 1.0
        slowdown = 1 + (worst - 1) * (1 - share) ** bend * noise
        found.append((int((fewest + (plain - fewest) * share) * 1e9), min(slowdown, found[-1][1] if found else 9.0)))
    return found


def claims(random: Random, jobs: int, scale: float = 1.0) -> list[Claim]:
    """Jobs in the order of their arrival, a few of them heavier."""
    made: list[Claim] = []
    for k in range(jobs):
        plans = ladder(random, scale)
        options = tuple(Option(n, (Charge(size),), slowdown, size) for n, (size, slowdown) in enumerate(plans))
        weight = random.choice((1.0, 1.0, 1.0, 2.0))
        made.append(
            Claim(id=k, priority=0, weight=weight, arrived=k, resources=(DEVICE,), options=options, floor=plans[0][0])
        )
    return made


def equal_split(jobs: list[Claim], room: int) -> dict[int, int]:
    """The fastest plan within an equal share; who cannot go below it or needs less leaves the others their shares."""
    shares: dict[int, int] = {}
    left, open_jobs = room, list(jobs)
    while open_jobs:
        share = left // len(open_jobs)
        settled = [c for c in open_jobs if c.options[0].level >= share]
        settled = settled or [c for c in open_jobs if c.options[-1].level <= share] or open_jobs
        for c in settled:
            shares[c.id] = max((n for n, o in enumerate(c.options) if o.level <= share), default=0)
            left -= c.options[shares[c.id]].level
            open_jobs.remove(c) if settled is not open_jobs else None
        if settled is open_jobs:
            break
    return shares


def slowdown(jobs: list[Claim], shares: dict[int, int]) -> float:
    """Mean slowdown, by weight."""
    return sum(c.weight * c.options[shares[c.id]].slowdown for c in jobs) / sum(c.weight for c in jobs)


def mix(name: str, seed: int) -> dict[str, Any]:
    """One mix: 80 GiB, and jobs as large as leaves the floors and a share of what they want beyond."""
    jobs_count, surplus = MIXES[name]
    random = Random(seed * 100 + jobs_count)
    jobs = claims(random, jobs_count)
    fewest, most = (sum(c.options[end].level for c in jobs) for end in (0, -1))
    scale = 80 * GIB / (fewest + surplus * (most - fewest))
    random = Random(seed * 100 + jobs_count)
    jobs = claims(random, jobs_count, scale)
    room = 80 * GIB
    row: dict[str, Any] = {"mix": name, "seed": seed, "jobs": jobs_count}
    for objective in OBJECTIVES:
        shares = divide(jobs, {DEVICE: Room(room)}, objective)
        assert shares is not None
        row[objective] = slowdown(jobs, shares)
    split = equal_split(jobs, room)
    assert sum(c.options[split[c.id]].level for c in jobs) <= room
    row["equal split"] = slowdown(jobs, split)
    return row


def timing(jobs: int, runs: int) -> dict[str, Any]:
    """CPU milliseconds of one division, and the gap to the optimum that is left."""
    row: dict[str, Any] = {"jobs": jobs, "rungs": RUNGS}
    cases = [claims(Random(1000 + k), jobs) for k in range(runs)]
    rooms: list[int] = []
    for k, case in enumerate(cases):
        fewest, most = (sum(c.options[end].level for c in case) for end in (0, -1))
        rooms.append(int(fewest + (most - fewest) * (0.1 + 0.8 * k / max(runs - 1, 1))))
    for objective in OBJECTIVES:
        taken: list[float] = []
        for case, room in zip(cases, rooms, strict=True):
            started = time.process_time()
            divide(case, {DEVICE: Room(room)}, objective)
            taken.append((time.process_time() - started) * 1e3)
        row[objective] = statistics.median(taken)
        row[f"{objective} worst"] = max(taken)
    gaps: list[float] = []
    for case, room in zip(cases, rooms, strict=True):
        rows = [[Row(o.level, c.weight * o.slowdown, o.rung) for o in c.options] for c in case]
        found = cheapest(rows, room, 0.0 if jobs <= EXACT else WITHIN)
        assert found is not None
        gaps.append(found.gap)
    row["proved gap"] = max(gaps)
    if jobs <= 100:
        taken = []
        for case, room in zip(cases, rooms, strict=True):
            rows = [[Row(o.level, c.weight * o.slowdown, o.rung) for o in c.options] for c in case]
            started = time.process_time()
            cheapest(rows, room)
            taken.append((time.process_time() - started) * 1e3)
        row["exact"], row["exact worst"] = statistics.median(taken), max(taken)
    return row


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    m = result["machine"]
    names = (*OBJECTIVES, "equal split")
    lines = [
        f"# Dividing a device, Python {m['python']}, {m['cpus']} cores, {m['date']}",
        "",
        "Mean slowdown by weight of the jobs of a mix on 80 GiB; 1.0 is every job with all it wants. What is lost is "
        f"what is above that, beside what `slowdown` loses. {len(result['mixes']) // len(MIXES)} mixes each.",
        "",
        f"| mix | jobs | {' | '.join(names)} | equal split loses | first come loses |",
        "|---|---|" + "---|" * (len(names) + 2),
    ]
    groups = [(name, [r for r in result["mixes"] if r["mix"] == name]) for name in MIXES]
    for name, rows in [*groups, ("all", result["mixes"])]:
        mean = {k: statistics.mean(r[k] for r in rows) for k in names}
        jobs = str(rows[0]["jobs"]) if name != "all" else ""
        more = [f"{(mean[k] - 1) / (mean['slowdown'] - 1):.2f} x" for k in ("equal split", "fcfs")]
        lines.append(f"| {name} | {jobs} | {' | '.join(f'{mean[k]:.4f}' for k in names)} | {' | '.join(more)} |")
    worse = [k for k in names[1:] for r in result["mixes"] if r[k] < r["slowdown"] - 1e-9]
    lines += [
        "",
        f"Of {len(result['mixes'])} mixes, `slowdown` is beaten in {len(worse)}.",
        "",
        "CPU milliseconds of one division, one thread; the machine had other work "
        f"(load {m['load']:.1f} at the start). Worst of {result['runs']} cases in brackets. Up to {EXACT} jobs of a "
        "class the answer is the optimum; *gap* is what is proved to be left at most above that.",
        "",
        f"| jobs | rungs | {' | '.join(OBJECTIVES)} | gap | exact knapsack |",
        "|---|---|" + "---|" * (len(OBJECTIVES) + 2),
    ]
    for row in result["timings"]:
        cells = [f"{row[k]:.2f} ({row[f'{k} worst']:.2f})" for k in OBJECTIVES]
        exact = f"{row['exact']:.2f} ({row['exact worst']:.2f})" if "exact" in row else ""
        lines.append(f"| {row['jobs']} | {row['rungs']} | {' | '.join(cells)} | {row['proved gap']:.1e} | {exact} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases, print only")
    options = parser.parse_args()
    from benchmarks.machine import describe

    runs, seeds = (3, 2) if options.quick else (15, SEEDS)
    result: dict[str, Any] = {"machine": {**describe(), "load": os.getloadavg()[0]}, "runs": runs}
    gc.freeze()  # a coordinator has no JAX for the collector to go through
    result["mixes"] = [mix(name, seed) for name in MIXES for seed in range(seeds)]
    result["timings"] = [timing(jobs, runs) for jobs in (10, 100, 1000)]
    if not options.quick:
        save(HERE / "policy.json", result, table)
    print(table(result))


if __name__ == "__main__":
    main()
