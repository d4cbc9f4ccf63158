"""The memory saved and the time paid, as TENSILE and AutoSwap report them, on the networks that TENSILE reports.

    python -m benchmarks.papers.run [--again] [--target T ...] [NETWORK ...]

Whole training steps at batch 16, float32. MSR = 1 - peak / peak0, EOR = t / t0 - 1, CBR = MSR / EOR
(TENSILE, arXiv 2105.13336; its authors' data name neither card nor optimizer: SGD with momentum here). AutoSwap
(arXiv 1903.06631) asks for the largest MSR without overhead, here EOR <= 1 %. What can be copied without overhead
depends on how long a step takes beside its copies, so there are two cards: an H200, whose steps are some 15 times as
short as those of cards of the papers' time and whose link is twice as fast, and a V100, which is such a card. Peaks are
XLA's argument + output + temp - alias, compiled for cards that are not here; times are predicted, and plans are asked
for the shortest step (``objective="time"``). Each network is planned with recomputation alone and with copies to the
host: a sweep of the model over budgets, and three points of it compiled: the authors' MSR, the largest MSR at
EOR <= 1 %, and the smallest that is reached.
Every case runs in a fresh process; results go to ``results-jax<version>.json``
and ``.md``, and a run goes on from there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.isolate import isolated, save

HERE = Path(__file__).parent
MODULE = "papers.run"
TARGETS = ("nvidia-h200", "nvidia-v100-16gb")
BATCH, OBJECTIVE = 16, "time"
NETWORKS = ("vgg16", "inception_v3", "resnet50", "densenet121")
TENSILE = {
    "vgg16": (0.326, 0.263),
    "inception_v3": (0.590, 0.296),
    "resnet50": (0.671, 0.609),
    "densenet121": (0.760, 0.164),
}
"""MSR and EOR of TENSILE alone on the GPU at batch 16, from the data its authors publish with their code."""
AUTOSWAP = 0.342
"""The most that AutoSwap saves without communication overhead, from its abstract."""
FREE = 0.01
"""Overhead that counts as none."""
SHARES = tuple(s / 10 for s in range(9, 0, -1))
"""Of the temporaries that the model predicts for the plain program."""
SHARES_HOST = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""The same where copies to the host are planned too, which takes the solver some ten times as long."""
HALVINGS = 3
"""Steps of a search between the smallest of these shares without overhead and the next."""
HOST = {"recompute": 0, "recompute + host": 64 << 30}
"""Host bytes that a plan may use, by what it may do."""
TRIES, PROBES = 3, 5
LIMIT = 1200.0
"""Seconds for one plan."""


def workload(name: str) -> Any:
    """The training step of a network as measured here."""
    from benchmarks import workloads

    return workloads.workload(name, batch=BATCH, dtype="float32")


def sweep(name: str, target: str, host_budget: int) -> dict[str, Any]:
    """What the model says of every share, and the fewest bytes it can reach; nothing is compiled."""
    from dataclasses import replace

    import jax

    from jaxtensile.devices.profiles import WEIGHTS, profile
    from jaxtensile.ir.plan import Link, Problem
    from jaxtensile.passes.lifetimes.liveness import live_ranges
    from jaxtensile.passes.seconds.cost import op_costs
    from jaxtensile.passes.solvers import by_name as solvers
    from jaxtensile.program.trace import trace_jaxpr
    from jaxtensile.search.request import LINK_SHARE

    work, device = workload(name), replace(profile(target), traffic_weight=WEIGHTS[OBJECTIVE])
    made = jax.jit(work.fun, **work.jit_options).trace(*work.args)
    graph = trace_jaxpr(made.jaxpr, tuple(bool(a.donated) for a in jax.tree.leaves(made.args_info))).graph
    live, costs = live_ranges(graph), op_costs(graph, device)
    link = Link(bandwidth=device.link_bandwidth * LINK_SHARE, latency=device.link_latency) if host_budget else None
    problem = Problem(graph=graph, costs=costs, budget=0, link=link, host_budget=host_budget)
    solver = solvers.named("auto")
    solve = solver(problem)
    step = sum(costs.seconds)

    def at(share: float) -> dict[str, Any]:
        budget = live.device - int((1 - share) * live.temp)
        plan = solvers.finished(solver, problem, budget, solve(budget))
        row = {"share": share, "budget": budget, "predicted": plan.predicted.device, "eor": plan.overhead / step}
        return {**row, "fits": plan.predicted.device <= budget, "offload": plan.offload_bytes}

    rows = [at(share) for share in (SHARES_HOST if host_budget else SHARES)]
    high = min((r["share"] for r in rows if is_free(r)), default=1.0)
    low = max((r["share"] for r in rows if r["share"] < high), default=high)
    between = []
    for _ in range(HALVINGS):
        between.append(at((low + high) / 2))
        low, high = (low, between[-1]["share"]) if is_free(between[-1]) else (between[-1]["share"], high)
    return {"predicted": live.device, "step": step, "ops": len(graph.ops), "rows": rows, "between": between}


def is_free(row: dict[str, Any]) -> bool:
    """Whether a budget is met without overhead."""
    return row["fits"] and row["eor"] <= FREE


def fit(name: str, target: str, budget: int, host_budget: int) -> dict[str, Any]:
    """The plan for a budget, compiled; the plain program is not compiled again for it."""
    import jaxtensile

    work = workload(name)
    given: dict[str, Any] = {"budget": budget, "host_budget": host_budget or None, "target": target}
    step = jaxtensile.jit(work.fun, objective=OBJECTIVE, **given, **work.jit_options)
    try:
        report = step._planned(work.args, {})[0].fitted.report
    except jaxtensile.BudgetError as error:
        return {"budget": budget, "fits": False, "needs": error.needs, "error": str(error)}
    return {
        "budget": budget,
        "fits": report.fits,
        "device": report.compiled.device,
        "predicted": report.predicted.device,
        "argument": report.compiled.argument,
        "host": report.compiled.host,
        "eor": report.overhead_ratio,
        "flops": report.flops + report.recompute_flops,
        "rounds": report.rounds,
        "seconds": dict(report.seconds),
        "notes": list(report.notes),
    }


def case(name: str) -> dict[str, Any]:
    """One case, in this process: ``plain:NETWORK:TARGET``, ``sweep:NETWORK:TARGET:HOST`` or
    ``fit:NETWORK:TARGET:HOST:BYTES``."""
    from benchmarks.fit.run import plain

    kind, network, target, *numbers = name.split(":")
    if kind == "plain":
        return plain(workload(network), target)
    return (sweep if kind == "sweep" else fit)(network, target, *map(int, reversed(numbers)))


def msr(point: dict[str, Any], base: dict[str, Any], above: int = 0) -> float:
    """Memory saved, as a share of what the plain program has above ``above`` bytes."""
    return 1 - (point["device"] - above) / (base["device"] - above)


def free_budget(rows: list[dict[str, Any]], base: int, predicted: int) -> int | None:
    """Bytes of XLA's that the model's smallest budget without overhead stands for; None where there is none."""
    free = [row["budget"] for row in rows if is_free(row)]
    return int(min(free) * base / predicted) if free else None


def at_authors(network: str, host: int, row: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """At the bytes that the authors' MSR leaves."""
    budget = int((1 - TENSILE[network][0]) * row["plain"]["device"])
    return isolated(MODULE, f"fit:{network}:{row['target']}:{host}:{budget}", limit=LIMIT)


def free(network: str, host: int, row: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The smallest program found without overhead: bisection, from the model's guess at its budget."""
    plain, known = row["plain"]["device"], found["sweep"]
    # Without overhead there is always the plain program; the model's least is never free.
    low = int(min(r["predicted"] for r in known["rows"]) * plain / known["predicted"])
    high, smallest = plain, None
    budget = free_budget([*known["rows"], *known["between"]], plain, known["predicted"]) or (low + high) // 2
    for _ in range(PROBES):
        if not low < budget < high:
            break
        point = isolated(MODULE, f"fit:{network}:{row['target']}:{host}:{budget}", limit=LIMIT)
        if "crash" in point:
            return smallest or point
        if is_free(point):
            high, smallest = min(budget, point["device"]), point
        else:
            low = budget
        budget = (low + high) // 2
    return smallest or {"none": True}


def best(network: str, host: int, row: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The smallest budget that fits: what XLA gave a plan that missed the authors' MSR, else the model's least."""
    swept = row["ways"]["recompute"]["sweep"]
    least = int(min(r["predicted"] for r in swept["rows"]) * row["plain"]["device"] / swept["predicted"])
    point = {"needs": found.get("authors", {}).get("needs", least)}
    for _ in range(TRIES):
        point = isolated(MODULE, f"fit:{network}:{row['target']}:{host}:{point['needs']}", limit=LIMIT)
        if "crash" in point or point["fits"]:
            break
    return point


def by_model(network: str, host: int, row: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The model over all budgets; the points below rest on it."""
    return isolated(MODULE, f"sweep:{network}:{row['target']}:{host}")


POINTS = {"authors": at_authors, "sweep": by_model, "free": free, "best": best}


def measure(target: str, networks: list[str], known: dict[str, dict[str, Any]], keep: Any) -> None:
    """What is not known yet of ``networks``, a point of all before the next; ``keep`` takes a row after each case."""
    for network in networks:
        row = {"network": network, "target": target, "objective": OBJECTIVE, "ways": {way: {} for way in HOST}}
        row = known.setdefault(network, row)
        if "plain" not in row:
            row["plain"] = isolated(MODULE, f"plain:{network}:{target}")
            keep(row)
    for key, point in POINTS.items():
        for network in networks:
            for way, host in HOST.items():
                row, found = known[network], known[network]["ways"][way]
                ready = key in ("authors", "sweep") or "rows" in found["sweep"]
                if key not in found and "device" in row["plain"] and ready:
                    found[key] = point(network, host, row, found)
                    keep(row)


def figures(point: dict[str, Any] | None, base: dict[str, Any]) -> str:
    """The three columns of a point: MSR, MSR above the arguments, EOR."""
    if not point:
        return "not compiled yet | | "
    if "none" in point:
        return "none at these steps | | "
    if "crash" in point:
        return "crashed | | "
    if not point["fits"]:
        return f"not reached: {1 - point['needs'] / base['device']:.3f} | | "
    return f"{msr(point, base):.3f} | {msr(point, base, base['argument']):.3f} | {point['eor']:+.3f} "


def ratio(saved: float, paid: float) -> str:
    """CBR; saving for nothing has no finite one."""
    return f"{saved / paid:.2f}" if paid > 0 else "free"


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    m = result["machine"]
    lines = [
        f"# MSR, EOR, CBR beside the authors', jax {m['jax']}, Python {m['python']}, {m['date']}",
        "",
        f"Training steps at batch {BATCH}, float32, SGD with momentum. Peaks: XLA's argument + "
        "output + temp - alias, deviceless. **Our times are predicted, the authors' are measured**, on their own "
        "card and framework (card and optimizer are not in their data). MSR: of all bytes; above arguments: of those "
        "that are no argument (weights, momentum and batch are arguments, and stay on the device).",
    ]
    for target, networks in result["targets"].items():
        lines += ["", *_card(target, networks)]
    lines += ["", "Columns: share of the plain program's temporaries saved, by the model; - where it finds no plan."]
    lines += [
        "",
        "*not reached: x*: no plan at these bytes; of those compiled for them the smallest has an MSR of x. *none at "
        "these steps*: no budget of the last table is without overhead, or none whose compiled plan is.",
    ]
    return "\n".join(lines) + "\n"


def _card(target: str, networks: list[dict[str, Any]]) -> list[str]:
    """The tables of one card."""
    rows = [row for row in networks if "device" in row["plain"]]
    asked = ", ".join(dict.fromkeys(f"`{row['objective']}`" for row in networks))
    lines = [
        f"Plans on `{target}` were asked for by `objective` {asked}.",
        "",
        f"## {target}: at the authors' MSR (TENSILE alone on the GPU)",
        "",
        "| network | plain MB | arguments MB | their MSR | their EOR | their CBR | by | our MSR | above arguments "
        "| our EOR (predicted) | our CBR |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        base, (saved, paid) = row["plain"], TENSILE[row["network"]]
        for way, found in row["ways"].items():
            point = found.get("authors")
            cbr = ratio(msr(point, base), point["eor"]) if point and point.get("fits") else ""
            lines.append(
                f"| {row['network']} | {base['device'] / 1e6:,.0f} | {base['argument'] / 1e6:,.0f} | {saved:.3f} "
                f"| {paid:.3f} | {saved / paid:.2f} | {way} | {figures(point, base)}| {cbr} |"
            )
    titles = (f"## {target}: largest MSR at EOR <= {FREE:.0%}", "free"), (f"## {target}: largest MSR reached", "best")
    for title, key in titles:
        note = f" (AutoSwap: up to {AUTOSWAP:.3f} without overhead, over its own networks)" if key == "free" else ""
        lines += [
            "",
            title + note,
            "",
            "| network | by | MSR | above arguments | EOR (predicted) | MB | on the host MB | matrix FLOPs |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            for way, found in row["ways"].items():
                point, base = found.get(key), row["plain"]
                rest = "| | | |"
                if point and point.get("fits"):
                    flops = point["flops"] / base["flops"]
                    rest = f"| {point['device'] / 1e6:,.0f} | {point['host'] / 1e6:,.0f} | {flops:.3f} |"
                lines.append(f"| {row['network']} | {way} | {figures(point, base)}{rest}")
    lines += [
        "",
        f"## {target}: the model over all budgets (nothing compiled): EOR at MSR",
        "",
        "| network | by | " + " | ".join(f"{1 - s:.0%}" for s in SHARES) + " |",
        "|---|---|" + "---|" * len(SHARES),
    ]
    for row in rows:
        for way, found in row["ways"].items():
            if "rows" not in found.get("sweep", {}):
                continue
            swept = {r["share"]: f"{r['eor']:+.3f}" if r["fits"] else "-" for r in found["sweep"]["rows"]}
            cells = [swept.get(share, "") for share in SHARES]
            lines.append(f"| {row['network']} | {way} | " + " | ".join(cells) + " |")
    missing = [name for name in NETWORKS if name not in {row["network"] for row in rows}]
    lines += ["", f"Not yet measured: {', '.join(missing)}."] if missing else []
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(NETWORKS)}; default: all")
    parser.add_argument("--target", action="append", choices=TARGETS, help="a card; may be given twice; default: both")
    parser.add_argument("--again", action="store_true", help="measure anew what is recorded already")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(options.case)))
        return
    unknown = [name for name in options.networks if name not in NETWORKS]
    if unknown:
        parser.error(f"no network {unknown[0]!r}: there are {', '.join(NETWORKS)}")
    from benchmarks.machine import describe

    machine = describe()
    path = HERE / f"results-jax{machine['jax']}.json"
    networks, targets = options.networks or list(NETWORKS), options.target or list(TARGETS)
    known: dict[str, dict[str, dict[str, Any]]] = {target: {} for target in TARGETS}
    if path.exists():
        for target, rows in json.loads(path.read_text())["targets"].items():
            again = networks if options.again and target in targets else ()
            known[target] = {row["network"]: row for row in rows if row["network"] not in again}

    def keep(row: dict[str, Any]) -> None:
        row["date"] = machine["date"]
        cards = {t: [known[t][name] for name in NETWORKS if name in known[t]] for t in TARGETS if known[t]}
        save(path, {"machine": machine, "batch": BATCH, "targets": cards}, table)

    for target in targets:
        measure(target, networks, known[target], keep)
    print(path.with_suffix(".md").read_text(), file=sys.stdout)


if __name__ == "__main__":
    main()
