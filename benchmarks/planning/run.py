"""How long does planning take, against the size of the program, and against one XLA compile of it?

    python -m benchmarks.planning.run [--quick] [--profile LAYERS] [LAYERS ...]

GPT-2 train steps of 3 to 244 layers (batch 16 x 1024, bf16, Adam) for an H200, at 60 % of the
temporary bytes that the model predicts for the plain program. Measured is everything that
``jaxtensile.jit`` does beyond ``jax.jit`` except XLA's compiles: the graph, its liveness and lower
bound, costs, loops, solving, checking, and tracing the rewritten program. JAX's own trace of the
function is shown beside it. Every size runs in a fresh process; seconds are CPU seconds of that
process, the median of three runs (one above 10,000 equations); up to 6,000 equations the same
process then compiles the plain step once. Results go to ``results-jax<version>.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import math
import pstats
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.isolate import isolated, save

HERE = Path(__file__).parent
MODULE = "planning.run"
TARGET = "nvidia-h200"
SHARE = 0.6
LAYERS = (3, 6, 9, 12, 24, 48, 96, 244)
QUICK = (3, 6, 12)
REPEATED_UP_TO = 10_000
COMPILED_UP_TO = 6_000
PLANNING = ("graph", "costs", "loops", "solve", "check", "rewrite")
"""The parts of planning; ``trace`` is JAX's own."""


class Clock:
    """CPU and wall seconds by name."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = {}
        self.wall: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.cpu[name] = time.process_time() - cpu
        self.wall[name] = time.perf_counter() - wall


def gpt2(layers: int) -> Any:
    from benchmarks.workloads import gpt2 as model

    return model.workload(model.Config(layers=layers))


def plan_once(workload: Any) -> tuple[Clock, dict[str, Any]]:
    """One pass over the page without the compiles: seconds of each part, and what came out."""
    import jax

    from jaxtensile.devices.profiles import profile
    from jaxtensile.ir.plan import Problem
    from jaxtensile.passes.lifetimes.liveness import live_ranges
    from jaxtensile.passes.offload.loops import LoopLadder
    from jaxtensile.passes.recompute.lowerbound import lower_bound
    from jaxtensile.passes.seconds.cost import op_costs
    from jaxtensile.passes.solvers.by_name import finished, named
    from jaxtensile.passes.verify.check import check
    from jaxtensile.program.emit import emit
    from jaxtensile.program.trace import trace_jaxpr

    device = profile(TARGET)
    clock = Clock()
    with clock("trace"):
        made = jax.jit(workload.fun, **workload.jit_options).trace(*workload.args)
    donated = tuple(bool(a.donated) for a in jax.tree.leaves(made.args_info))
    with clock("graph"):
        traced = trace_jaxpr(made.jaxpr, donated)
        live = live_ranges(traced.graph)
        lower_bound(traced.graph)
    budget = live.device - live.temp + int(SHARE * live.temp)
    with clock("costs"):
        costs = op_costs(traced.graph, device)
    with clock("loops"):
        LoopLadder(traced.graph, lambda body: op_costs(body, device).charge)
    with clock("solve"):
        problem = Problem(graph=traced.graph, costs=costs, budget=budget)
        solver = named("auto")
        plan = finished(solver, problem, budget, solver(problem)(budget))
    with clock("check"):
        check(traced.graph, plan.program)
    flat = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jax.tree.leaves(workload.args)]
    with clock("rewrite"):
        jax.make_jaxpr(lambda *xs: emit(traced, plan.program)(xs))(*flat)
    return clock, {
        "equations": len(traced.graph.ops),
        "planned_equations": len(plan.program.graph.ops),
        "budget": budget,
        "plain": live.device,
        "planned": plan.predicted.device,
        "flops": 1 + plan.recompute_flops / traced.graph.flops,
    }


def compile_once(workload: Any) -> tuple[float, float]:
    """CPU and wall seconds of one XLA compile of the plain step."""
    import jax

    from benchmarks.machine import placed

    args = placed(workload.args, TARGET)
    lowered = jax.jit(workload.fun, **workload.jit_options).lower(*args)
    clock = Clock()
    with clock("compile"):
        lowered.compile()
    return clock.cpu["compile"], clock.wall["compile"]


def case(layers: int, *, with_compile: bool) -> dict[str, Any]:
    """One size, in this process."""
    from jaxtensile.collecting import seldom

    workload = gpt2(layers)
    plan_once(gpt2(1))  # imports and first uses are not planning
    with seldom():  # as in the pipeline
        clock, found = plan_once(workload)
        clocks = [clock]
        if found["equations"] <= REPEATED_UP_TO:
            clocks += [plan_once(gpt2(layers))[0] for _ in range(2)]
    row = {
        "layers": layers,
        **found,
        "cpu_seconds": {name: statistics.median(c.cpu[name] for c in clocks) for name in ("trace", *PLANNING)},
        "wall_seconds": {name: statistics.median(c.wall[name] for c in clocks) for name in ("trace", *PLANNING)},
    }
    row["planning_cpu_seconds"] = sum(row["cpu_seconds"][name] for name in PLANNING)
    row["planning_wall_seconds"] = sum(row["wall_seconds"][name] for name in PLANNING)
    if with_compile and found["equations"] <= COMPILED_UP_TO:
        row["compile_cpu_seconds"], row["compile_wall_seconds"] = compile_once(workload)
    return row


def profiled(layers: int) -> str:
    """The functions that planning spends its time in, for one size."""
    plan_once(gpt2(1))
    workload = gpt2(layers)
    profile = cProfile.Profile()
    profile.enable()
    plan_once(workload)
    profile.disable()
    out = io.StringIO()
    pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(25)
    return out.getvalue()


def exponents(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The slope of log time over log(n log n), least squares, of each part: 1 is n log n."""
    rows = [row for row in rows if "crash" not in row]
    if len(rows) < 2:
        return {}
    x = [math.log(row["equations"] * math.log(row["equations"])) for row in rows]

    def slope(times: list[float]) -> float:
        return statistics.linear_regression(x, [math.log(max(t, 1e-6)) for t in times]).slope

    found = {"planning": slope([row["planning_cpu_seconds"] for row in rows])}
    for name in ("trace", *PLANNING):
        found[name] = slope([row["cpu_seconds"][name] for row in rows])
    return found


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    m = result["machine"]
    parts = ("trace", *PLANNING)
    lines = [
        f"# Planning time, GPT-2 steps, H200, jax {m['jax']}, Python {m['python']}, {m['cpus']} cores, {m['date']}",
        "",
        f"CPU seconds. Budget: {SHARE:.0%} of the predicted temporary bytes of the plain program, and its arguments. "
        "`trace` is JAX's own and not part of planning; `rewrite` includes JAX's trace of the rewritten program.",
        "",
        f"| layers | equations | planned | {' | '.join(parts)} | **planning** | one XLA compile | ratio |",
        "|" + "---|" * (len(parts) + 6),
    ]
    for row in result["rows"]:
        if "crash" in row:
            lines.append(f"| {row['layers']} | crashed |" + " |" * (len(parts) + 4))
            continue
        cells = " | ".join(f"{row['cpu_seconds'][name]:.2f}" for name in parts)
        compiling = row.get("compile_cpu_seconds")
        ratio = f"{compiling:.1f} | {row['planning_cpu_seconds'] / compiling:.2f}" if compiling else " | "
        lines.append(
            f"| {row['layers']} | {row['equations']:,} | {row['planned_equations']:,} | {cells} "
            f"| **{row['planning_cpu_seconds']:.2f}** | {ratio} |"
        )
    if result["exponents"]:
        told = ", ".join(f"{name} {value:.2f}" for name, value in result["exponents"].items())
        lines += ["", f"Exponent of n log n (1 is n log n): {told}."]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", type=int, help=f"sizes; default: {' '.join(map(str, LAYERS))}")
    parser.add_argument("--quick", action="store_true", help="small sizes, no compile; print, write nothing")
    parser.add_argument("--no-compile", action="store_true", help="leave XLA's compile out")
    parser.add_argument("--profile", type=int, metavar="LAYERS", help="print where the time goes, and stop")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(options.case, with_compile=not options.no_compile)))
        return 0
    if options.profile:
        print(profiled(options.profile))
        return 0
    from benchmarks.machine import describe

    sizes = options.layers or (QUICK if options.quick else LAYERS)
    with_compile = not (options.quick or options.no_compile)
    extra = () if with_compile else ("--no-compile",)
    rows = [isolated(MODULE, str(layers), "layers", extra) for layers in sizes]
    result = {"machine": describe(), "target": TARGET, "share": SHARE, "rows": rows, "exponents": exponents(rows)}
    text = table(result)
    print(text)
    for row in rows:
        if "crash" in row:
            print(row["layers"], "layers:", row["crash"], file=sys.stderr)
    if not options.quick and not options.layers:
        stem = f"results-jax{result['machine']['jax']}"
        save(HERE / f"{stem}.json", result, table)
        print(f"written: {HERE.name}/{stem}.json and .md")
    return int(any("crash" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
