"""GPT-2 small with Adam's moments on the host between steps, for an H200 that is not here: what that is worth.

    python -m benchmarks.state.run [BUDGET ...]

The whole step by ``jaxtensile.jit`` with and without ``offload_state=True``: at equal budgets, and the smallest bytes
reached when asked for less than any plan can need. Every case runs in a fresh process; results go to
``results-jax<version>.json`` and the table to ``results-jax<version>.md``. FLOPs are matrix FLOPs of the planned
program; device bytes are XLA's argument + output + temp - alias; times are predicted.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.fit.run import TARGET, plain
from benchmarks.isolate import command, isolated, save

HERE = Path(__file__).parent
MODULE = "state.run"
BUDGETS = (9_289_800_000, 6_873_900_000)
"""What ``jax.checkpoint`` policies on every block need: dots_with_no_batch_dims_saveable, nothing_saveable."""
SMALLEST = 1 << 30
"""Less than any plan can need: the error names the smallest that is predicted, with a margin."""


def fit(workload: Any, budget: int, offload_state: bool) -> dict[str, Any]:
    """What ``jaxtensile.jit`` makes of the budget."""
    import jaxtensile
    from jaxtensile.program.trace import jaxpr_flops

    step = jaxtensile.jit(
        workload.fun, budget=budget, target=TARGET, offload_state=offload_state, **workload.jit_options
    )
    started = time.perf_counter()
    try:
        report = step._planned(workload.args, {})[0].fitted.report  # plan() would compile the plain program as well
    except jaxtensile.BudgetError as error:
        return {"budget": error.has, "fits": False, "needs": error.needs, "error": str(error)}
    wall = time.perf_counter() - started
    compiling = sum(s for name, s in report.seconds.items() if name.startswith("compile"))
    return {
        "budget": report.budget,
        "fits": report.fits,
        "device": report.compiled.device,
        "predicted": report.predicted.device,
        "host": report.compiled.host,
        "moved": report.offload_bytes,
        "leaves": len(report.state),
        "wait": report.wait,
        "flops": jaxpr_flops(step.trace(*workload.args).jaxpr),
        "overhead": report.overhead,
        "overhead_ratio": report.overhead_ratio,
        "rounds": report.rounds,
        "planning_seconds": wall - compiling,
        "compile_seconds": compiling,
        "wall_seconds": wall,
    }


def case(name: str) -> dict[str, Any]:
    """One case, in this process: ``plain``, ``without@BYTES`` or ``with@BYTES``; ``@smallest``: what can be reached."""
    from benchmarks import workloads
    from jaxtensile.planner.build_report import MARGIN

    workload = workloads.workload("gpt2_small")
    way, _, budget = name.partition("@")
    if way == "plain":
        return plain(workload)
    if budget != "smallest":
        return fit(workload, int(budget), way == "with")
    hopeless = fit(workload, SMALLEST, way == "with")
    found = fit(workload, int(hopeless["needs"] / (1 + MARGIN)), way == "with")
    if not found["fits"]:
        # Now XLA was asked, and the error names the least that it has allocated.
        found = fit(workload, int(found["needs"]), way == "with")
    return found


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    m, free = result["machine"], result["plain"]
    lines = [
        f"# State on the host, deviceless H200, jax {m['jax']}, Python {m['python']}, {m['cpus']} cores, {m['date']}",
        "",
        "GPT-2 small, batch 16 x 1024, bf16, Adam. MB (10^6 bytes) of argument + output + temp - alias as XLA "
        f"allocates them; FLOPs relative to the plain step, which needs {free['device'] / 1e6:,.1f} MB. "
        "Times are predicted.",
        "",
        "| budget MB | `offload_state` | MB | predicted | on the host | FLOPs | predicted step time | waiting ms "
        "| rounds | planning s | XLA s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["cases"]:
        asked = row["asked"] if row["asked"] == "smallest" else f"{int(row['asked']) / 1e6:,.1f}"
        on = "yes" if row["way"] == "with" else "no"
        if not row.get("fits"):
            lines.append(f"| {asked} | {on} | **failed**, needs {row.get('needs', 0) / 1e6:,.1f} | | | | | | | | |")
            continue
        lines.append(
            f"| {asked} | {on} | {row['device'] / 1e6:,.1f} | {row['predicted'] / 1e6:,.1f} | {row['host'] / 1e6:,.1f} "
            f"| {row['flops'] / free['flops']:.4f} | {row['overhead_ratio']:+.1%} | {1e3 * row['wait']:.1f} "
            f"| {row['rounds']} | {row['planning_seconds']:.2f} | {row['compile_seconds']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = command(__doc__, case)
    parser.add_argument("budgets", nargs="*", help="bytes, or smallest; default: all")
    options = parser.parse_args()
    from benchmarks.machine import describe

    machine = describe()
    path = HERE / f"results-jax{machine['jax']}.json"
    every = [*map(str, BUDGETS), "smallest"]
    asked = options.budgets or every
    # A run of some budgets renews those and keeps the others; nothing is lost when it is interrupted.
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cases": []}
    rows = {(row["asked"], row["way"]): row for row in known["cases"] if row["asked"] not in asked}
    result: dict[str, Any] = {"machine": machine, "target": TARGET, "plain": isolated(MODULE, "plain", "case")}
    order = list(dict.fromkeys([*every, *(budget for budget, _ in rows), *asked]))
    for budget in asked:
        for way in ("without", "with"):
            rows[budget, way] = {"asked": budget, "way": way, **isolated(MODULE, f"{way}@{budget}", "case")}
            result["cases"] = sorted(rows.values(), key=lambda row: order.index(row["asked"]))
            save(path, result, table)
    print(table(result))


if __name__ == "__main__":
    main()
