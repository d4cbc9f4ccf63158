"""How much more than the least does the default solver recompute, and what does that cost a step?

    python -m benchmarks.optimality.run [--quick] [--limit SECONDS] [NAME ...]

Dense chains, GPT-2 steps and ResNets of published widths, few layers, for an H200, each at several
shares of the temporary bytes that the model predicts for the plain program. ``auto``, the default solver with what
finishes its plans, is compared with ``exact``, an integer programme around one turn that stops after ``--limit``
seconds per case, both for the same objective: the step's predicted seconds, which ``objective="time"`` minimises, and
the charge, which the default objective does. ``greedy`` is auto unfinished, ``flops`` in the table of seconds auto with
the default objective. The bound holds whether exact has finished or not: no plan around that turn costs less (auto may
use several turns). ``proven`` says that bound and exact's plan are less than 0.1 % of a step apart. Nothing is
compiled: bytes, charge and seconds are the model's. Results go to ``results-jax<version>.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.isolate import save

HERE = Path(__file__).parent
TARGET = "nvidia-h200"
SHARES = (0.5, 0.65, 0.8)
OBJECTIVES = ("seconds", "charge")
LIMIT = 20.0
PROVEN = 1e-3
"""A bound this close to the plan, as a share of the step, is a proof."""
WITHIN = 0.02
QUICK = ("dense-8", "gpt-block-1", "resnet-stage-2")


def dense(layers: int) -> Callable[[], Any]:
    """A train step of gated dense layers in plain JAX, SGD."""

    def workload() -> Any:
        import jax
        import jax.numpy as jnp

        from jaxtensile.program.workload import Workload

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


def gpt_blocks(count: int) -> Callable[[], Any]:
    """A train step of blocks of GPT-2 small between what would feed and what would read them, SGD."""

    def workload() -> Any:
        import jax
        import jax.numpy as jnp

        from benchmarks.workloads import gpt2 as model
        from jaxtensile.program.workload import Workload

        config = model.Config(layers=count)

        def loss(blocks: Any, x: Any) -> Any:
            for p in blocks:
                x = model.block(p, x, config.heads)
            return jnp.mean(jnp.square(x.astype(jnp.float32)))

        def step(blocks: Any, x: Any) -> Any:
            grads, dx = jax.grad(loss, (0, 1))(blocks, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, blocks, grads), dx

        blocks = jax.eval_shape(lambda key: model.init_params(config, key), jax.random.key(0))["blocks"]
        x = jax.ShapeDtypeStruct((config.batch, config.context, config.width), config.compute)
        return Workload(fun=step, args=(blocks, x), jit_options={"donate_argnums": (0,)}, name=f"gpt-block-{count}")

    return workload


def resnet_stage(number: int) -> Callable[[], Any]:
    """A train step of one stage of ResNet-50, conv2_x to conv5_x (He et al., table 1), SGD."""

    def workload() -> Any:
        import flax.linen as nn
        import jax
        import jax.numpy as jnp

        from benchmarks.workloads import resnet as model
        from jaxtensile.program.workload import Workload

        config, k = model.Config(), number - 2
        side = config.image // 4 // 2 ** max(k - 1, 0)
        channels = config.width if k == 0 else 4 * config.width * 2 ** (k - 1)

        class Stage(nn.Module):
            @nn.compact
            def __call__(self, x: Any) -> Any:
                for block in range(config.stages[k]):
                    stride = 2 if k > 0 and block == 0 else 1
                    x = model.Bottleneck(config.width * 2**k, stride, config.dtype)(x)
                return x

        stage = Stage()

        def loss(params: Any, x: Any, stats: Any) -> Any:
            y, updated = stage.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
            return jnp.mean(jnp.square(y.astype(jnp.float32))), updated["batch_stats"]

        def step(params: Any, stats: Any, x: Any) -> Any:
            (grads, dx), stats = jax.grad(loss, (0, 1), has_aux=True)(params, x, stats)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), stats, dx

        x = jax.ShapeDtypeStruct((config.batch, side, side, channels), config.dtype)
        made = jax.eval_shape(stage.init, jax.random.key(0), x)
        args = (made["params"], made["batch_stats"], x)
        return Workload(fun=step, args=args, jit_options={"donate_argnums": (0, 1)}, name=f"resnet-stage-{number}")

    return workload


CASES: dict[str, Callable[[], Any]] = {
    **{f"dense-{n}": dense(n) for n in (8, 16, 32)},
    **{f"gpt-block-{n}": gpt_blocks(n) for n in (1, 2, 4)},
    **{f"resnet-stage-{n}": resnet_stage(n) for n in (2, 3, 4, 5)},
    **{f"gpt2-{n}": gpt2(n) for n in (2, 4)},
    "resnet-1-1": resnet(1, 1),
    "resnet-2-2": resnet(2, 2),
}


def case(name: str, limit: float) -> list[dict[str, Any]]:
    """One program at every share, in both objectives: what both solvers say."""
    import jax

    from jaxtensile.devices.profiles import profile
    from jaxtensile.ir.plan import Costs, Plan, Problem
    from jaxtensile.passes.lifetimes.liveness import live_ranges
    from jaxtensile.passes.recompute.stages import find_boundary
    from jaxtensile.passes.seconds.cost import op_costs
    from jaxtensile.passes.solvers import by_name as solvers
    from jaxtensile.passes.solvers import exact
    from jaxtensile.passes.verify.check import check
    from jaxtensile.program.trace import trace_jaxpr

    workload = CASES[name]()
    made = jax.jit(workload.fun, **workload.jit_options).trace(*workload.args)
    graph = trace_jaxpr(made.jaxpr, tuple(bool(a.donated) for a in jax.tree.leaves(made.args_info))).graph
    live, costs = live_ranges(graph), op_costs(graph, profile(TARGET))
    figures = {"charge": costs.charge, "seconds": costs.seconds}
    problems = {
        objective: Problem(graph=graph, costs=Costs(seconds=costs.seconds, charge=figure), budget=0)
        for objective, figure in figures.items()
    }
    solver = solvers.named("auto")
    greedily = {objective: solver(problem) for objective, problem in problems.items()}

    def auto(objective: str, budget: int) -> Plan:
        return solvers.finished(solver, problems[objective], budget, greedily[objective](budget))

    def clones(plan: Plan, budget: int) -> list[int]:
        """The ops that run again, but for fused ones of the descent: the plain program has them in each reader too."""
        turn = find_boundary(graph, live, max(budget - (live.device - live.temp), 0)) or len(graph.ops)
        origins = [plan.program.origin[op.id] for op in plan.program.clones()]
        return [o for o in origins if o < turn or live.kernels.is_root[o]]

    def timed(solver: Callable[[int], Plan], budget: int) -> tuple[Plan, dict[str, Any]]:
        started = time.perf_counter()
        plan = solver(budget)
        took = time.perf_counter() - started
        check(graph, plan.program)
        again = {
            objective: sum(figure[o] for o in clones(plan, budget)) / sum(figure)
            for objective, figure in figures.items()
        }
        return plan, {"fits": plan.predicted.device <= budget, **again, "took": took}

    rows: list[dict[str, Any]] = []
    for objective in OBJECTIVES:
        whole = sum(figures[objective])
        exactly = exact.prepare(problems[objective], limit)
        for share in SHARES:
            budget = live.device - int((1 - share) * live.temp)
            row: dict[str, Any] = {"name": name, "equations": len(graph.ops), "share": share, "budget": budget}
            row["objective"] = objective
            row["greedy"] = timed(greedily[objective], budget)[1]
            row["auto"] = timed(partial(auto, objective), budget)[1]
            row["flops"] = timed(partial(auto, "charge"), budget)[1] if objective == "seconds" else row["auto"]
            plan, row["exact"] = timed(exactly, budget)
            row["none"] = plan.bound == float("inf")
            if plan.bound is not None and not row["none"]:
                row["bound"] = plan.bound / whole
            row["proven"] = row["none"] or (
                "bound" in row and row["exact"]["fits"] and row["exact"][objective] - row["bound"] <= PROVEN
            )
            rows.append(row)
    return rows


def above(row: dict[str, Any], solver: str = "auto", than: str = "exact") -> float | None:
    """By how much a solver's step is longer than exact's, or than the ``bound``, in the row's objective.

    None where one does not fit, or nothing is known.
    """
    objective = row["objective"]
    if not row[solver]["fits"]:
        return None
    if than == "bound":
        least = row.get("bound")
    elif row[than]["fits"]:
        least = row[than][objective]
    else:
        least = None
    return None if least is None else (1 + row[solver][objective]) / (1 + least) - 1


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    m = result["machine"]
    lines = [
        f"# The default solver against the optimum around one turn, H200, jax {m['jax']}, {m['date']}",
        "",
        f"Budget: a share of the plain program's predicted temporaries, and its arguments. Figures are the model's, of "
        'what runs again, in % of the plain step: in predicted seconds, which `objective="time"` minimises, then in '
        "charge, which the default objective does. Auto, greedy (auto unfinished) and exact minimise the table's "
        f"figure, `flops` is auto with the default objective. Exact stops after {result['limit']:g} s. "
        f"Above: the longer step over the shorter. Proven: no plan of the class is below exact's by more than "
        f"{PROVEN:.1%} of the step, or none fits (`run.py` says which class). Below the bound: by several turns.",
    ]
    for objective in OBJECTIVES:
        rows = [row for row in result["rows"] if row["objective"] == objective]
        if rows:
            lines += ["", f"## In {objective}", "", *_lines(rows, objective), "", _summary(rows)]
    return "\n".join(lines) + "\n"


def _lines(rows: list[dict[str, Any]], objective: str) -> list[str]:
    solvers = ("flops", "greedy", "auto", "exact") if objective == "seconds" else ("greedy", "auto", "exact")
    lines = [
        f"| program | equations | share | {' | '.join(solvers)} | bound | proven | auto above exact "
        "| above the bound | greedy took | auto took | exact took |",
        "|" + "---|" * (10 + len(solvers)),
    ]
    for row in rows:
        figures = [f"{row[s][objective]:.2%}" if row[s]["fits"] else "does not fit" for s in solvers]
        bound = "none fits" if row["none"] else f"{row['bound']:.2%}" if "bound" in row else ""
        more = ["" if (a := above(row, than=than)) is None else f"{a:+.2%}" for than in ("exact", "bound")]
        lines.append(
            f"| {row['name']} | {row['equations']:,} | {row['share']:.0%} | {' | '.join(figures)} | {bound} "
            f"| {'yes' if row['proven'] else 'no'} | {' | '.join(more)} | {row['greedy']['took']:.1f} s "
            f"| {row['greedy']['took'] + row['auto']['took']:.1f} s | {row['exact']['took']:.1f} s |"
        )
    return lines


def _summary(rows: list[dict[str, Any]]) -> str:
    """How many are proven, and by how much the default solver is above what is proven and above the other bounds."""
    proven = [row for row in rows if row["proven"] and not row["none"]]
    over = [(a, row) for row in proven if (a := above(row)) is not None]
    told = [f"Proven: {len(proven)} of {len(rows)} cases, and that none fits: {sum(row['none'] for row in rows)}."]
    if proven:
        near = sum(a <= WITHIN for a, _ in over)
        missed = f"; in {len(proven) - len(over)} it finds nothing that fits" if len(over) < len(proven) else ""
        told.append(f"Of the proven, the default solver is at most {WITHIN:.0%} above the optimum in {near}{missed}.")
    if over:
        worst, row = max(over, key=lambda found: found[0])
        told.append(f"The worst is {worst:.1%} above ({row['name']} at {row['share']:.0%}).")
    others = [a for row in rows if not row["proven"] and (a := above(row, than="bound")) is not None]
    if others:
        told.append(f"Of the others it is at most {max(others):.1%} above the bound.")
    return " ".join(told)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which; default: {' '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="three small programs, ten seconds each; write nothing")
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
