"""Estimates of programs over eight devices beside what XLA allocates on one of them.

    python -m benchmarks.spmd.run [--only WORD ...] [--targets NAME ...] [--static]

The programs are those of ``programs.py``: a training step of a small decoder, divided in the ways that people divide
them, with and without ``jax.checkpoint`` around its layers. ``before`` is what was estimated before sizes were of one
device: of all together. The compiled XLA's figures are kept in ``results-jax<version>.json``, a row for each program
and target; a run takes what is missing (``--static``: nothing) and makes all estimates again. Seconds are of the whole
call of ``jaxtensile.estimate``, the second of two in one process, tracing included.

The last rows are steps of many layers, of which XLA is not asked: for the seconds alone.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.isolate import command, heading, isolated, save

HERE = Path(__file__).parent
MODULE = "spmd.run"
COUNT = 8
TARGETS = ("cpu", "nvidia-h200")
ON_H200 = ("DP", "FSDP", "FSDP, nothing", "FSDP, constrained", "FSDP, scan", "TP", "FSDP+TP", "FSDP, shard_map")
LONG = {"FSDP, constrained": (12, 24), "FSDP+TP": (24,), "FSDP, scan": (24,)}
ENVIRONMENT = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={COUNT}", "JAX_PLATFORMS": "cpu"}
PARTS = ("argument", "output", "temp", "alias")


def sizes_on(target: str, layers: int) -> Any:
    """Small on a CPU, which compiles it in seconds; Llama-like in 16 bits on a GPU."""
    import jax.numpy as jnp

    from benchmarks.spmd.programs import Sizes

    if target == "cpu":
        return Sizes(layers=layers)
    return Sizes(
        width=512,
        hidden=2048,
        layers=layers,
        vocab=4096,
        batch=32,
        length=512,
        dtype=jnp.bfloat16,
        gated=True,
    )


def case(name: str) -> dict[str, Any]:
    """``target:layers:compiled:program``; ``compiled``: 1 if XLA is asked."""
    target, layers, compiled, of = name.split(":", 3)
    import jax

    import jaxtensile
    from benchmarks.spmd.programs import programs
    from jaxtensile.devices.profiles import profile
    from jaxtensile.estimation.estimate import program_of, static_estimate
    from jaxtensile.xla.target import compiler_options, resolve_all

    program = programs(resolve_all(target, COUNT), sizes_on(target, int(layers)))[of]()
    row: dict[str, Any] = {"program": of, "target": target, "layers": int(layers)}
    with program.within():
        for _ in range(2):
            started = time.perf_counter()
            found = jaxtensile.estimate(program.step, *program.args, **program.options)
            row["seconds"] = round(time.perf_counter() - started, 2)
        traced = jax.jit(program.step, **program.options).trace(*program.args)
        before = static_estimate(program_of(traced), profile(target), name=of, seconds={})
        row |= {
            "equations": len(program_of(traced).equations),
            "ours": {part: getattr(found, part) for part in ("device", "low", "high", *PARTS)},
            "before": before.device,
            "notes": found.notes,
        }
        if int(compiled):
            fast = {"xla_backend_optimization_level": 0}
            if profile(target).platform != "cpu":
                fast["xla_gpu_disable_gpuasm_optimizations"] = True
            started = time.perf_counter()
            use = traced.lower().compile(compiler_options={**compiler_options(target), **fast}).memory_analysis()
            row["compile"] = round(time.perf_counter() - started, 1)
            row["xla"] = {part: getattr(use, f"{part}_size_in_bytes") for part in PARTS}
    return row


def device(xla: dict[str, int]) -> int:
    """Bytes of one device."""
    return xla["argument"] + xla["output"] + xla["temp"] - xla["alias"]


def off(row: dict[str, Any], now: bool = True) -> float:
    """An estimate's error in per cent of XLA's bytes."""
    return 100 * ((row["ours"]["device"] if now else row["before"]) / device(row["xla"]) - 1)


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """The errors of all rows with figures of XLA."""
    lines = [
        "| target | programs | | median error, % | mean, % | worst, % | inside low..high |",
        "|---|---|---|---|---|---|---|",
    ]
    for target in TARGETS:
        mine = [row for row in rows if row.get("target") == target and "xla" in row]
        for said, now in (("before", False), ("now", True)):
            if mine:
                errors = [abs(off(row, now)) for row in mine]
                inside = sum(row["ours"]["low"] <= device(row["xla"]) <= row["ours"]["high"] for row in mine)
                figures = f"{statistics.median(errors):.1f} | {statistics.mean(errors):.1f} | {max(errors):.1f}"
                lines.append(f"| {target} | {len(mine)} | {said} | {figures} | {inside if now else ''} |")
    return lines


def table(result: dict[str, Any]) -> str:
    rows = list(result["rows"].values())
    out = heading("Sharded programs: the estimate of one device", result["machine"], __doc__)
    out += [
        f"Commit {result['commit']}.",
        "",
        *summary(rows),
        "",
        "MB are 10^6 bytes of one device; **bold**: not between",
    ]
    out[-1] += " low and high."
    out += ["", "| target | program | equations | XLA, MB | before | now | low..high, MB | estimate, s | compile, s |"]
    out += ["|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        if "crash" in row:
            out.append(f"| | {row['workload']} | crashed: {row['crash'].splitlines()[-1][:100]} | | | | | | |")
            continue
        ours = row["ours"]
        between = f"{ours['low'] / 1e6:,.1f}..{ours['high'] / 1e6:,.1f}"
        name = row["program"] if "xla" in row else f"{row['program']}, {row['layers']} layers"
        head = f"| {row['target']} | {name} | {row['equations']:,} "
        if "xla" not in row:
            out.append(head + f"| | | {ours['device'] / 1e6:,.1f} MB | {between} | {row['seconds']} | |")
            continue
        needs = device(row["xla"])
        now = f"{off(row):+.1f} %"
        now = now if ours["low"] <= needs <= ours["high"] else f"**{now}**"
        figures = f"{needs / 1e6:,.1f} | {off(row, False):+.0f} % | {now} | {between}"
        out.append(head + f"| {figures} | {row['seconds']} | {row['compile']} |")
    return "\n".join(out) + "\n"


def wanted(only: list[str] | None, targets: list[str] | None) -> list[str]:
    """The names of the cases to run."""
    from benchmarks.spmd.programs import programs
    from jaxtensile.xla.target import resolve_all

    names = list(programs(resolve_all("cpu", COUNT)))
    found = [f"cpu:3:1:{name}" for name in names]
    found += [f"nvidia-h200:3:1:{name}" for name in ON_H200]
    found += [f"cpu:{layers}:0:{name}" for name, each in LONG.items() for layers in each]
    return [
        name
        for name in found
        if name.partition(":")[0] in (targets or TARGETS) and (not only or any(w in name for w in only))
    ]


def main() -> None:
    parser = command(__doc__, case)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="programs with one of these in their names")
    parser.add_argument("--targets", nargs="+", metavar="NAME", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--static", action="store_true", help="compile nothing")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    from benchmarks.machine import commit, describe

    machine = describe()
    path = HERE / f"results-jax{machine['jax']}.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    result |= {"machine": machine, "commit": commit()}
    for name in wanted(options.only, options.targets):
        known = result["rows"].get(name, {})
        asked = name
        if options.static or "xla" in known:
            target, layers, _, of = name.split(":", 3)
            asked = f"{target}:{layers}:0:{of}"
        row = isolated(MODULE, asked, environment=ENVIRONMENT)
        result["rows"][name] = {
            **{k: known[k] for k in ("xla", "compile") if k in known},
            **row,
            "date": machine["date"],
        }
        save(path, result, table)
    print(table(result))


if __name__ == "__main__":
    main()
