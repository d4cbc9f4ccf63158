"""How much more than the least does the default solver recompute, and what does that cost a step?

    python -m benchmarks.optimality.run [--quick] [--limit SECONDS] [NAME ...]

Dense chains, GPT-2 steps and ResNets of published widths, few layers, for an H200, each at several
shares of the temporary bytes that the model predicts for the plain program. ``greedy`` is compared
with ``exact``, an integer programme around one turn that stops after ``--limit`` seconds per case. Its
bound holds whether it has finished or not: no plan around that turn costs less (greedy may use several turns).
``proven`` says that bound and exact's plan are less than 0.1 % of a step's charge apart. Nothing is compiled: bytes,
charge and seconds are the model's. Results go to ``results-jax<version>.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.isolate import save

HERE = Path(__file__).parent
TARGET = "nvidia-h200"
SHARES = (0.5, 0.65, 0.8)
LIMIT = 60.0
PROVEN = 1e-3
"""A bound this close to the plan, as a share of the step's charge, is a proof."""
QUICK = ("dense-8", "resnet-1-1")


def dense(layers: int) -> Callable[[], Any]:
    """A train step of gated dense layers in plain JAX, SGD."""

    def workload() -> Any:
        import jax
        import jax.numpy as jnp

        from jaxtensile.workload import Workload

        def loss(ws: Any, x: Any) -> Any:
            for w in ws:
                x = jax.nn.silu(x @ w)
            return jnp.mean(x**2)

        def step(ws: Any, x: Any) -> Any:
            return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))

        weight = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
        args = ([weight] * layers, jax.ShapeDtypeStruct((16384, 1024), jnp.bfloat16))
        return Workload(fun=step, args=args, jit_options={"donate_argnums": (0,)}, name=f"dense-{layers}")

    return workload


def gpt2(layers: int) -> Callable[[], Any]:
    def workload() -> Any:
        from benchmarks.workloads import gpt2 as model

        return model.workload(model.Config(layers=layers))

    return workload


def resnet(*stages: int) -> Callable[[], Any]:
    def workload() -> Any:
        from benchmarks.workloads import resnet as model

        return model.workload(model.Config(stages=stages))

    return workload


CASES: dict[str, Callable[[], Any]] = {
    **{f"dense-{n}": dense(n) for n in (8, 16, 32)},
    **{f"gpt2-{n}": gpt2(n) for n in (2, 4, 6)},
    "resnet-1-1": resnet(1, 1),
    "resnet-2-2": resnet(2, 2),
}


def case(name: str, limit: float) -> list[dict[str, Any]]:
    """One program at every share: what both solvers say."""
    import jax

    from jaxtensile.device import profile
    from jaxtensile.passes import exact, greedy
    from jaxtensile.passes.check import check
    from jaxtensile.passes.cost import op_costs
    from jaxtensile.passes.liveness import live_ranges
    from jaxtensile.plan import Problem
    from jaxtensile.trace import trace_jaxpr

    workload = CASES[name]()
    made = jax.jit(workload.fun, **workload.jit_options).trace(*workload.args)
    graph = trace_jaxpr(made.jaxpr, tuple(bool(a.donated) for a in jax.tree.leaves(made.args_info))).graph
    live, costs = live_ranges(graph), op_costs(graph, profile(TARGET))
    whole, step = sum(costs.charge), sum(costs.seconds)
    problem = Problem(graph=graph, costs=costs, budget=0)
    solvers = {"greedy": greedy.prepare(problem), "exact": exact.prepare(problem, limit)}
    rows: list[dict[str, Any]] = []
    for share in SHARES:
        budget = live.device - int((1 - share) * live.temp)
        row: dict[str, Any] = {"name": name, "equations": len(graph.ops), "share": share, "budget": budget}
        for solver, at in solvers.items():
            started = time.perf_counter()
            plan = at(budget)
            took = time.perf_counter() - started
            check(graph, plan.program)
            charge = sum(costs.charge[plan.program.origin[op.id]] for op in plan.program.clones())
            row[solver] = {
                "fits": plan.predicted.device <= budget,
                "charge": charge / whole,
                "step": 1 + plan.overhead / step,
                "took": took,
            }
            if plan.bound is not None:
                row["bound"], row["gap"] = plan.bound / whole, plan.gap
        row["proven"] = "bound" in row and row["exact"]["fits"] and row["exact"]["charge"] - row["bound"] <= PROVEN
        rows.append(row)
    return rows


def above(row: dict[str, Any], what: str) -> float | None:
    """By how much greedy's step is longer than exact's, in charge or in seconds; None where one does not fit."""
    greedy, exact = row["greedy"], row["exact"]
    if not (greedy["fits"] and exact["fits"]):
        return None
    more = 1.0 if what == "charge" else 0.0
    return (greedy[what] + more) / (exact[what] + more) - 1


def above_bound(row: dict[str, Any]) -> float | None:
    """By how much greedy's step is at most longer than the least there is, in charge; None where nothing is known."""
    if not row["greedy"]["fits"] or "bound" not in row:
        return None
    return (1 + row["greedy"]["charge"]) / (1 + row["bound"]) - 1


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    m = result["machine"]
    lines = [
        f"# Greedy against the optimum around one turn, H200, jax {m['jax']}, {m['date']}",
        "",
        f"Budget: a share of the plain program's predicted temporaries, and its arguments. Charge: of what runs again, "
        f"in % of the step's own; seconds: predicted step, plain is 1. Exact stops after {result['limit']:g} s. "
        f"Above: greedy's step over exact's, and over the bound. A case is proven when exact's charge and its bound "
        f"are less than {PROVEN:.1%} of the step apart.",
        "",
        "| program | equations | share | greedy charge | exact charge | bound | proven | above in charge "
        "| above the bound | greedy seconds | exact seconds | above in seconds | exact took |",
        "|" + "---|" * 13,
    ]
    for row in result["rows"]:
        charges = [f"{row[s]['charge']:.2%}" if row[s]["fits"] else "does not fit" for s in ("greedy", "exact")]
        bound = f"{row['bound']:.2%}" if "bound" in row else ""
        more = ["" if (a := above(row, what)) is None else f"{a:+.2%}" for what in ("charge", "step")]
        proof = "yes" if row["proven"] else "no"
        over = "" if (b := above_bound(row)) is None else f"{b:+.2%}"
        lines.append(
            f"| {row['name']} | {row['equations']:,} | {row['share']:.0%} | {charges[0]} | {charges[1]} | {bound} "
            f"| {proof} | {more[0]} | {over} | {row['greedy']['step']:.3f} | {row['exact']['step']:.3f} "
            f"| {more[1]} | {row['exact']['took']:.1f} s |"
        )
    proven = [row for row in result["rows"] if row["proven"] and row["greedy"]["fits"]]
    told: list[str] = []
    if proven:
        worst = max(above(row, "charge") or 0.0 for row in proven)
        near = sum((above(row, "charge") or 0.0) <= 0.02 for row in proven)
        told.append(
            f"Proven: {len(proven)} of {len(result['rows'])}; there greedy is at most {worst:.1%} above in the "
            f"charge of a step, and within 2 % in {near}."
        )
    bounds = [b for row in result["rows"] if (b := above_bound(row)) is not None]
    if bounds:
        told.append(
            f"At most 2 % above the bound, finished or not: {sum(b <= 0.02 for b in bounds)} of {len(bounds)}, the "
            f"worst {max(bounds):.1%}."
        )
    lines += ["", " ".join(told)] if told else []
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which; default: {' '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="two small programs, ten seconds each; write nothing")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that exact may take for one budget")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in CASES]
    if unknown:
        parser.error(f"no program {unknown[0]!r}: there are {', '.join(CASES)}")
    from benchmarks.machine import describe

    limit = min(options.limit, 10.0) if options.quick else options.limit
    rows: list[dict[str, Any]] = []
    for name in options.names or (QUICK if options.quick else CASES):
        print(f"{name} …", flush=True)
        rows += case(name, limit)
    result = {"machine": describe(), "target": TARGET, "limit": limit, "rows": rows}
    text = table(result)
    print(text)
    if not options.quick and not options.names:
        stem = f"results-jax{result['machine']['jax']}"
        save(HERE / f"{stem}.json", result, table)
        print(f"written: {HERE.name}/{stem}.json and .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
