"""How low do buffers pack, how fast: the instances of MiniMalloc, and random ones up to 10^5 buffers.

    python -m benchmarks.pack.run [--quick] [--limit SECONDS]

The fast packer (the least of three runs, wall clock and CPU) beside first-fit and best-fit by descending size and
first-fit in the order of arrival, the exact mode at the published capacity within ``--limit`` CPU seconds each,
and the fast packer on random lifetimes. Every packing is checked. Results go to ``results.json`` and ``results.md``;
``--quick`` prints only: no exact mode, 10^4 buffers at most.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import time
from bisect import insort
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.isolate import isolated, save
from jaxtensile.passes.pack.buffers import Buffer, Packing, aligned, max_load, packing
from jaxtensile.passes.pack.pack import pack
from jaxtensile.passes.pack.pack_exact import pack_exact
from jaxtensile.passes.verify.pack_check import faults

HERE = Path(__file__).parent
MODULE = "pack.run"
CAPACITY = 1_048_576
RUNS = 3
SHAPES = ("uniform", "short", "nested", "bursts")
BASELINES = ("first-fit", "best-fit", "arrival")


def instance(name: str) -> list[Buffer]:
    """A published instance, ``A`` to ``K``."""
    with (HERE / "instances" / f"{name}.{CAPACITY}.csv").open() as file:
        return [Buffer(int(row["lower"]), int(row["upper"]), int(row["size"])) for row in csv.DictReader(file)]


def lifetimes(shape: str, n: int, seed: int = 0) -> list[Buffer]:
    """``n`` random buffers: any two times; short ones; forward and backward of a network; bursts with long tails."""
    random = Random(seed)
    found: list[Buffer] = []
    for _ in range(n):
        match shape:
            case "uniform":
                lower, upper = sorted(random.sample(range(4 * n), 2))
                size = random.randint(1, 1000)
            case "short":
                lower = random.randrange(4 * n)
                upper, size = lower + 1 + int(random.expovariate(1 / 200)), random.randint(1, 1000)
            case "nested" if random.random() < 0.5:
                lower = random.randrange(2 * n)
                upper, size = 4 * n - lower + random.randint(1, 20), 2 ** random.randint(0, 12)
            case "nested":
                lower = random.randrange(4 * n)
                upper, size = lower + random.randint(1, 10), 2 ** random.randint(0, 14)
            case _:
                lower = random.randrange(40) * n // 10 + random.randrange(max(n // 40, 2))
                upper = lower + 1 + int(random.paretovariate(1.1) * 3) % (4 * n)
                size = random.choice([64, 256, 1024, 4096])
        found.append(Buffer(lower, upper, size))
    return found


def by_rule(buffers: Sequence[Buffer], rule: str) -> Packing:
    """By descending size, or in the order of arrival, into the lowest or the tightest gap. Quadratic."""
    every = range(len(buffers))
    if rule == "arrival":
        order = sorted(every, key=lambda k: buffers[k].lower)
    else:
        order = sorted(every, key=lambda k: -buffers[k].size)
    placed: list[tuple[int, int]] = []
    offsets = [0] * len(buffers)
    for k in order:
        b, floor, gaps = buffers[k], 0, list[tuple[int, int]]()
        for o, j in placed:
            other = buffers[j]
            if other.lower < b.upper and b.lower < other.upper:
                at = aligned(floor, b.alignment)
                if o - at >= b.size:
                    gaps.append((o - floor, at))
                floor = max(floor, o + other.size)
        if gaps:
            offsets[k] = min(gaps)[1] if rule == "best-fit" else gaps[0][1]
        else:
            offsets[k] = aligned(floor, b.alignment)
        insort(placed, (offsets[k], k))
    return packing(buffers, offsets)


def timed(packer: Callable[[], Packing], buffers: list[Buffer], runs: int) -> dict[str, Any]:
    """Height over maximum load, and seconds: the least of some runs."""
    wall = cpu = float("inf")
    packed = Packing((), 0)
    for _ in range(runs):
        w, c = time.perf_counter(), time.process_time()
        packed = packer()
        wall, cpu = min(wall, time.perf_counter() - w), min(cpu, time.process_time() - c)
    assert not faults(buffers, packed)
    return {"height": packed.height, "ratio": packed.height / max_load(buffers), "seconds": wall, "cpu_seconds": cpu}


def case(name: str, limit: float) -> dict[str, Any]:
    """``A`` to ``K``, or ``SHAPE@N``."""
    shape, _, n = name.partition("@")
    buffers = lifetimes(shape, int(n)) if n else instance(name)
    runs = RUNS if len(buffers) <= 1000 else 1
    row: dict[str, Any] = {"instance": name, "buffers": len(buffers), "load": max_load(buffers)}
    row["fast"] = timed(lambda: pack(buffers), buffers, runs)
    if len(buffers) <= 1000:
        row |= {rule: timed(lambda rule=rule: by_rule(buffers, rule), buffers, 1) for rule in BASELINES}
    if not n and limit > 0:
        w, c = time.perf_counter(), time.process_time()
        answer = pack_exact(buffers, CAPACITY, limit, time.process_time)
        row["exact"] = {
            "status": answer.status,
            "height": answer.best.height,
            "lower_bound": answer.lower_bound,
            "searches": answer.searches,
            "work": answer.work,
            "seconds": time.perf_counter() - w,
            "cpu_seconds": time.process_time() - c,
        }
        assert not faults(buffers, answer.best)
        assert (answer.best.height <= CAPACITY) == (answer.status == "solved")
    return row


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    m = result["machine"]
    rows = [row for row in result["rows"] if "crash" not in row]
    known = [row for row in rows if "first-fit" in row and "@" not in row["instance"]]
    lines = [
        f"# Pack, Python {m['python']}, {m['cpus']} cores, {m['date']}",
        "",
        "Height of the arena over the maximum load (the most bytes live at once), which no packing is below. One "
        "process, one thread; seconds by the wall clock, and of CPU time: the machine had other work that came first "
        f"(load {m['load']:.1f} at the start). The fast packer's seconds are the least of {RUNS} runs up to 1000 "
        f"buffers. Exact: at {CAPACITY:,} bytes in {result['limit']:.0f} s of CPU time; no searches: the fast fits.",
        "",
        "| instance | buffers | fast | wall s | CPU s | first-fit | best-fit | arrival | exact | wall s | CPU s "
        "| searches |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in known:
        fast, exact = row["fast"], row.get("exact")
        others = " | ".join(f"{row[rule]['ratio']:.3f}" for rule in BASELINES)
        said = "| | | |"
        if exact:
            said = f"| {exact['status']} | {exact['seconds']:.2f} | {exact['cpu_seconds']:.2f} | {exact['searches']} |"
        lines.append(
            f"| {row['instance']} | {row['buffers']} | {fast['ratio']:.3f} | {fast['seconds']:.3f} "
            f"| {fast['cpu_seconds']:.3f} | {others} {said}"
        )
    if known:

        def mean(what: str) -> str:
            return f"{sum(row[what]['ratio'] for row in known) / len(known):.3f}"

        solved = sum(row.get("exact", {}).get("status") == "solved" for row in known)
        lines.append(
            f"| mean | | {mean('fast')} | | | {' | '.join(map(mean, BASELINES))} "
            f"| {solved} of {len(known)} solved | | | |"
        )
    lines += ["", "| lifetimes | buffers | fast | wall s | CPU s |", "|---|---|---|---|---|"]
    for row in rows:
        shape, _, n = row["instance"].partition("@")
        if n:
            fast = row["fast"]
            lines.append(
                f"| {shape} | {row['buffers']:,} | {fast['ratio']:.4f} | {fast['seconds']:.2f} "
                f"| {fast['cpu_seconds']:.2f} |"
            )
    lines += [f"\n{row['instance']}: **failed**" for row in result["rows"] if "crash" in row]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="no exact mode, 10^4 buffers at most, print only")
    parser.add_argument("--limit", type=float, default=60.0, help="CPU seconds of the exact mode")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    limit = 0.0 if options.quick else options.limit
    if options.case:
        print(json.dumps(case(options.case, limit)))
        return
    from benchmarks.machine import describe

    sizes = (1_000, 10_000) if options.quick else (1_000, 10_000, 100_000)
    names = [*"ABCDEFGHIJK", *(f"{shape}@{n}" for shape in SHAPES for n in sizes)]
    machine = {**describe(), "load": os.getloadavg()[0]}
    result: dict[str, Any] = {"machine": machine, "limit": limit, "rows": []}
    for name in names:
        result["rows"].append(isolated(MODULE, name, "instance", ("--limit", str(limit))))
        if not options.quick:
            save(HERE / "results.json", result, table)
    print(table(result))


if __name__ == "__main__":
    main()
