"""Static estimates beside what XLA allocates, for every row of the truth (``truth.py``).

    python -m benchmarks.estimate.run [--again]

The static figure is made from the jaxpr alone. ``low`` and ``high`` of ``jaxtensile.xla.compilers`` come from the
calibration half of these models and from that of small programs on each kind of device (``targets.py``); the errors are
those of the other half. Seconds are the processor's. Beside them what
xMem publishes: median relative error, PEF (share of runs whose running out of memory is mispredicted, or that would run
out in a process capped at the estimate) and MCP (bytes of the device that capped runs leave, less the device for a
failure). A run is capped at ``Estimate.high``; the truth is XLA's allocation for an H200, held against the memory of
each card.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.estimate.truth import Case
from benchmarks.isolate import heading, save, streamed

HERE = Path(__file__).parent
MODULE = "estimate.run"
CARDS = ("nvidia-rtx-3060", "nvidia-a100-40gb", "nvidia-h200")
XMEM = {"median": 3.66, "pef": 9.46, "mcp": 9.38}
"""xMem's own figures: per cent, per cent, GB per run, on its 25 models and cards of 12 and 8 GB."""
WITHIN = (0.05, 0.95)
"""Quantiles of the calibration half between which ``low`` and ``high`` are to lie."""


def estimated(name: str, batch: int, optimizer: str) -> dict[str, Any]:
    """The static figures of one case, in this process."""
    import jax

    from benchmarks.estimate import zoo
    from jaxtensile.devices.profiles import profile
    from jaxtensile.estimation.estimate import program_of, static_estimate

    workload = zoo.workload(name, batch, optimizer)
    started = time.process_time()
    traced = jax.jit(workload.fun, **workload.jit_options).trace(*workload.args)
    traced_at = time.process_time()
    program = program_of(traced)
    found = static_estimate(program, profile("nvidia-h200"), name=name, seconds={})
    done = time.process_time()
    return {
        **{key: getattr(found, key) for key in ("device", "argument", "output", "temp", "alias", "low", "high")},
        "least": found.room.least,
        "largest": found.room.largest,
        "process": found.process,
        "equations": len(program.equations),
        "trace_seconds": round(traced_at - started, 3),
        "seconds": round(done - traced_at, 3),
    }


def child(name: str, cases: Iterable[Case]) -> None:
    """Print the row of each case."""
    import jax

    for batch, optimizer in cases:
        print(json.dumps(estimated(name, batch, optimizer)), flush=True)
        jax.clear_caches()


def error(row: dict[str, Any]) -> float:
    """Relative, with its sign: above zero where the static figure is too large."""
    return row["static"]["device"] / row["device"] - 1


def missed(row: dict[str, Any]) -> float:
    """What the truth lies above the static figure, as a share of its temporaries."""
    return (row["device"] - row["static"]["device"]) / max(row["static"]["temp"], 1)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def on_card(rows: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    """PEF in per cent and MCP in GB per run on one card."""
    from jaxtensile.devices.profiles import profile

    capacity = profile(name).capacity
    failures, conserved = 0, 0.0
    for row in rows:
        fits, cap = row["device"] <= capacity, row["static"]["high"]
        said = row["static"]["device"] <= capacity
        if said != fits or (fits and cap < row["device"]):
            failures += 1
            conserved -= capacity
        elif fits:
            conserved += max(capacity - cap, 0)
    return {
        "pef": 100 * failures / len(rows),
        "mcp": conserved / len(rows) / 1e9,
        "fit": sum(row["device"] <= capacity for row in rows),
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one half."""
    errors = [abs(error(row)) for row in rows]
    return {
        "runs": len(rows),
        "models": len({row["model"] for row in rows}),
        "packages": len({row["package"] for row in rows}),
        "median": 100 * statistics.median(errors),
        "p90": 100 * quantile(errors, 0.9),
        "worst": 100 * max(errors),
        "signed": 100 * statistics.median(map(error, rows)),
        "outside": 100 * sum(not r["static"]["low"] <= r["device"] <= r["static"]["high"] for r in rows) / len(rows),
        "missed": [round(quantile([missed(r) for r in rows], share), 4) for share in WITHIN],
        "cards": {name: on_card(rows, name) for name in CARDS},
        "seconds_per_1000_equations": max(
            1000 * r["static"]["seconds"] / max(r["static"]["equations"], 1000) for r in rows
        ),
        "slowest": max(r["static"]["seconds"] for r in rows),
    }


def table(result: dict[str, Any]) -> str:
    out = heading("Static estimates", result["machine"], __doc__)
    halves = result["halves"]
    out += ["| | " + " | ".join(halves) + " | xMem |", "|---|" + "---|" * (len(halves) + 1)]
    rows: list[tuple[str, str, str]] = [
        ("runs", "runs", ".0f"),
        ("models", "models", ".0f"),
        ("packages", "packages", ".0f"),
        ("median error, %", "median", ".2f"),
        ("90th percentile, %", "p90", ".2f"),
        ("worst, %", "worst", ".1f"),
        ("outside low..high, %", "outside", ".1f"),
        ("slowest estimate, s", "slowest", ".2f"),
    ]
    for what, key, form in rows:
        cells = [format(half[key], form) for half in halves.values()]
        out.append(f"| {what} | {' | '.join(cells)} | {XMEM.get(key, '')} |")
    for card in CARDS:
        for what, key, form in (("PEF, %", "pef", ".2f"), ("MCP, GB", "mcp", ".2f"), ("runs that fit", "fit", ".0f")):
            cells = [format(half["cards"][card][key], form) for half in halves.values()]
            out.append(f"| {card}: {what} | {' | '.join(cells)} | {XMEM.get(key, '')} |")
    out += ["", "| model | half | runs | median error % | from | to |", "|---|---|---|---|---|---|"]
    by_model: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        by_model.setdefault(row["model"], []).append(row)
    for name, own in by_model.items():
        errors = [100 * error(row) for row in own]
        middle = statistics.median(map(abs, errors))
        out.append(
            f"| {name} | {own[0]['half']} | {len(own)} | {middle:.2f} | {min(errors):+.2f} | {max(errors):+.2f} |"
        )
    return "\n".join(out) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="estimate rows again that have been estimated")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        child(options.case, [(int(b), o) for b, _, o in (c.partition(":") for c in options.cases.split(","))])
        return
    from benchmarks.machine import describe

    machine = describe()
    truth = json.loads((HERE / f"truth-jax{machine['jax']}.json").read_text())
    path = HERE / f"results-jax{machine['jax']}.json"
    head = {"machine": machine, "truth": truth["machine"]}
    known = {} if options.again or not path.exists() else json.loads(path.read_text())
    before = {(r["model"], r["batch"], r["optimizer"]): r["static"] for r in known.get("rows", ())}
    rows = [row for row in truth["rows"] if "crash" not in row]
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [r for r in rows if r["model"] == name and (name, r["batch"], r["optimizer"]) not in before]
        if not own:
            continue
        found = streamed(MODULE, name, ("--cases", ",".join(f"{r['batch']}:{r['optimizer']}" for r in own)))
        for row, static in zip(own, found, strict=False):
            if "crash" in static:
                print(static["crash"], flush=True)
                break
            before[name, row["batch"], row["optimizer"]] = static
            new = {**row, "static": static}
            print(f"  {row['batch']} {row['optimizer']}: {100 * error(new):+.2f} %", flush=True)
        keep(path, head, rows, before)
    keep(path, head, rows, before)
    print(path.with_suffix(".md").read_text())


def keep(path: Path, head: dict[str, Any], rows: list[dict[str, Any]], static: dict[tuple[str, int, str], Any]) -> None:
    """Write what is known so far; ``rows``: the truth, of which those with a ``static`` estimate are shown."""
    done = [
        {**row, "static": found}
        for row in rows
        if (found := static.get((row["model"], row["batch"], row["optimizer"]))) is not None
    ]
    halves = {half: [row for row in done if row["half"] == half] for half in ("report", "calibration")}
    save(path, {**head, "halves": {half: summary(own) for half, own in halves.items() if own}, "rows": done}, table)


if __name__ == "__main__":
    main()
