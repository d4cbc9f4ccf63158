"""How large a batch can jobs have that take turns on one device?

    python -m benchmarks.coordinator.batch

Whole training steps, compiled for an H200 that is not here. One job alone fills the device with its largest batch.
Jobs that take turns at the step gate hold their arguments and results each, and the temporaries of one step at a time;
jobs without turns hold all of theirs. Waterwave (IEEE TC 2023) reports up to 96.8 % of the largest batch of one alone.

Every size that is told was compiled, and fits. Results go to ``batch.json`` and ``batch.md``.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.isolate import heading, isolated, save

HERE = Path(__file__).parent
MODULE = "coordinator.batch"
COMPILED_FOR = "nvidia-h200"
DEVICES = ("nvidia-h100-80gb", "nvidia-a100-40gb", "nvidia-rtx-3060")
"""Whose bytes there are to fill; the H200 has more than any, so that XLA does not begin to recompute on its own."""
WORKLOADS = ("gpt2_small", "resnet50")
JOBS = (2, 4)
FIRST = (4, 8)
"""The first two batches that are compiled; the others are where the line through the last two meets the capacity."""
TRIES = 6


def case(name: str) -> dict[str, Any]:
    """The largest batches of one workload, in this process."""
    import jaxtensile
    from benchmarks import workloads
    from jaxtensile.devices.profiles import profile

    @cache
    def needs(batch: int) -> tuple[int, int]:
        """Bytes that stay between steps, and temporaries."""
        work = workloads.workload(name, batch=batch)
        use = jaxtensile.estimate(work.fun, *work.args, target=COMPILED_FOR, exact=True, **work.jit_options).use
        return use.device - use.temp, use.temp

    def largest(capacity: int, stay: int, run: int) -> int:
        """The largest batch at which ``stay`` jobs hold what stays, and ``run`` of them temporaries; 0: none found."""

        def total(batch: int) -> int:
            stays, temp = needs(batch)
            return stay * stays + run * temp

        low, high = FIRST
        known = {batch: total(batch) for batch in FIRST}
        for _ in range(TRIES):
            slope = max((known[high] - known[low]) / (high - low), 1.0)
            ahead = max(int(high + (capacity - known[high]) / slope), 1)
            if ahead in known:
                break
            known[ahead] = total(ahead)
            low, high = sorted(sorted(known, key=lambda b: abs(known[b] - capacity))[:2])
        return max((b for b, nbytes in known.items() if nbytes <= capacity), default=0)

    rows: dict[str, Any] = {}
    for device in DEVICES:
        capacity = profile(device).capacity
        alone = largest(capacity, 1, 1)
        row = rows[device] = {"capacity": capacity, "alone": alone, "gated": {}, "ungated": {}}
        if alone:
            row["stays"], row["temp"] = needs(alone)
        for jobs in JOBS:
            row["gated"][jobs] = largest(capacity, jobs, 1)
            row["ungated"][jobs] = largest(capacity, jobs, jobs)
    return {"workload": name, "devices": rows}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        *heading("Batches of jobs that take turns", result["machine"], __doc__),
        "Shares are of the largest batch of one job alone.",
        "",
        "| workload | device, GB | alone | MB that stay | temporaries | "
        + " | ".join(f"{j} jobs | | without turns" for j in JOBS)
        + " |",
        "|---" * (5 + 3 * len(JOBS)) + "|",
    ]
    best = 0.0
    for name, row in result["workloads"].items():
        if "crash" in row:
            lines.append(f"| {name} | crashed" + " |" * (4 + 3 * len(JOBS)))
            continue
        for device, found in row["devices"].items():
            line = f"| {name} | {device}, {found['capacity'] / 1e9:.1f} "
            if not found["alone"]:
                lines.append(line + "| none fits" + " |" * (3 + 3 * len(JOBS)))
                continue
            line += f"| {found['alone']:,} | {found['stays'] / 1e6:,.0f} | {found['temp'] / 1e6:,.0f} |"
            for jobs in JOBS:
                gated, ungated = (found[kind][str(jobs)] for kind in ("gated", "ungated"))
                best = max(best, gated / found["alone"])
                line += f" {gated:,} | {gated / found['alone']:.1%} | {ungated / found['alone']:.1%} |"
            lines.append(line)
    lines += ["", f"Up to {best:.1%}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(options.case)))
        return
    from benchmarks.machine import describe

    result: dict[str, Any] = {"machine": describe(), "workloads": {}}
    for name in WORKLOADS:
        result["workloads"][name] = isolated(MODULE, name)
        save(HERE / "batch.json", result, table)
    print(table(result))


if __name__ == "__main__":
    main()
