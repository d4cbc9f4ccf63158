"""Is what is returned within its budget, and is the budget used? Many budgets, for an H200 that is not there.

    python -m benchmarks.promise.run [--quick] [--again] [--turns N] [NAME ...]

The workloads of benchmarks/workloads with fewer layers, smaller batches or shorter loops, so that one compile
takes seconds; each at 20 budgets, evenly from the smallest that is reached to just below the plain bytes. A budget
is kept when XLA's argument + output + temp - alias is not above it. What is used of it counts where using more
could save FLOPs: where the planned step has more matrix FLOPs than the plain one. It is a missed chance where another
of these programs fits as well and has fewer. All budgets of one workload run in
one process, which compiles the plain step once. Results go to ``results-jax<version>.json`` and ``.md`` row by
row; rows that are there are not measured again without ``--again``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.fit.run import TARGET, fit, plain
from benchmarks.isolate import save, streamed

HERE = Path(__file__).parent
MODULE = "promise.run"
STEPS = 20
SHARES = tuple(n / STEPS for n in range(STEPS))
"""Of the way from the smallest reachable to the plain bytes."""
TURNS = 4
"""Shares are gone through in so many turns, each over the whole range."""
SIZES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "gpt2-3": ("gpt2_small", {"layers": 3}),
    "llama-3": ("llama", {"layers": 3}),
    "vit-3": ("vit_b", {"layers": 3}),
    "resnet-1-1-1-1": ("resnet50", {"stages": (1, 1, 1, 1)}),
    "unet-2-levels": ("unet", {"multipliers": (1, 2), "res_blocks": 1}),
    "bert-3": ("bert_base", {"layers": 3}),
    "moe-4": ("moe", {"layers": 4}),
    "lstm-128": ("lstm", {"seq": 128}),
    "mixer-4": ("mixer", {"layers": 4}),
    "dlrm": ("dlrm", {}),
    "ode-200": ("ode", {}),
}
"""Workload and the sizes that differ from the published ones."""
QUICK = ("lstm-128", "ode-200")


def case(name: str, known: list[float], turns: int) -> Iterator[dict[str, Any]]:
    """One workload, in this process: the smallest reachable, then every share of these turns that is not ``known``."""
    from benchmarks import workloads
    from benchmarks.machine import kernel_cache

    model, sizes = SIZES[name]
    workload = workloads.workload(model, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        flags = kernel_cache(Path(folder, "kernels"))
        yield from _answers(workload, known, turns, flags)


def _answers(workload: Any, known: list[float], turns: int, flags: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    base = plain(workload, flags=flags)
    bound = fit(workload, base["device"], flags=flags)["bound"]
    smallest = fit(workload, bound, flags=flags)
    least = smallest["device"] if smallest["fits"] else smallest["needs"]
    yield {"plain": base, "bound": bound, "least": least}
    for share in (s for turn in range(turns) for s in SHARES[turn::TURNS] if s not in known):
        budget = least + round(share * (base["device"] - least))
        try:
            answer = fit(workload, budget, flags=flags)
        except Exception as error:
            answer = {"budget": budget, "crash": f"{type(error).__name__}: {error}"[-2000:]}
        yield {"share": share, **answer}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    m, rows = result["machine"], result["workloads"]
    lines = [
        f"# Promise, deviceless H200, jax {m['jax']}, Python {m['python']}, {m['cpus']} cores, {m['date']}",
        "",
        f"Workloads made small (fewer layers, shorter loops), each at {STEPS} budgets from the smallest that is "
        "reached up to 95 % of the way to the plain bytes. MB (10^6 bytes) of argument + output + temp - alias as XLA "
        "allocates them. *kept*: compiled within the budget, of those returned; *refused*: `BudgetError`, or a crash; "
        "*used*: compiled / budget, over budgets at which the planned step has more matrix FLOPs than the plain one; "
        "*missed*: budgets at which another program of the same row fits with fewer matrix FLOPs.",
        "",
        "| workload | changed | plain MB | smallest MB | bound MB | budgets | kept | refused | used, median "
        "| used, least | missed | rounds, mean |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    missing: list[str] = []
    returned = kept = refused = 0
    used: list[float] = []
    broken: list[str] = []
    for name, (model, sizes) in SIZES.items():
        row = rows.get(name)
        if not row or "plain" not in row:
            missing.append(name)
            continue
        base, answers = row["plain"], list(row["answers"].values())
        if len(answers) < STEPS:
            missing.append(f"{name} at {STEPS - len(answers)} budgets")
        given = [a for a in answers if a.get("fits")]
        within = [a for a in given if a["device"] <= a["budget"]]
        share = [a["device"] / a["budget"] for a in given if a["flops"] > base["flops"]]
        late = missed(given)
        broken += [f"- {name} at {a['budget']} ({a['share']:.0%}): {_better(a, b, base)}" for a, b in late]
        for a in answers:
            if not a.get("fits") or a["device"] > a["budget"]:
                said = f"needs {a['needs'] / 1e6:,.1f}" if "needs" in a else a.get("crash", "over the budget")[:120]
                broken.append(f"- {name} at {a['budget']} ({a['share']:.0%}): {said}")
        returned, kept, refused = returned + len(given), kept + len(within), refused + len(answers) - len(given)
        used += share
        change = ", ".join(f"{k}={v}" for k, v in sizes.items()) or "nothing"
        lines.append(
            f"| {name} | {model}: {change} | {base['device'] / 1e6:,.1f} | {row['least'] / 1e6:,.1f} "
            f"| {row['bound'] / 1e6:,.1f} | {len(answers)} | {len(within)} of {len(given)} "
            f"| {len(answers) - len(given)} | {_share(statistics.median, share)} | {_share(min, share)} | {len(late)} "
            f"| {statistics.mean(a['rounds'] for a in given) if given else 0:.1f} |"
        )
    if returned:
        lines += [
            "",
            f"Kept {kept} of {returned} returned, refused {refused}; used, median over the {len(used)} budgets at "
            f"which using more could save FLOPs: {_share(statistics.median, used)}.",
        ]
    if broken:
        lines += ["", "Refused, not kept or missed:", "", *broken]
    if missing:
        lines += ["", f"**Partial**: not measured yet are {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def missed(given: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each program for which another fits into its budget with fewer FLOPs, and the one with the fewest."""
    best = (
        (a, min((b for b in given if b["device"] <= a["budget"]), key=lambda b: b["flops"], default=a)) for a in given
    )
    return [(a, b) for a, b in best if b["flops"] < a["flops"] * (1 - 1e-6)]


def _better(a: dict[str, Any], b: dict[str, Any], base: dict[str, Any]) -> str:
    return f"FLOPs {a['flops'] / base['flops']:.4f}, but {b['device']} bytes at {b['flops'] / base['flops']:.4f}"


def _share(of: Callable[[list[float]], float], values: list[float]) -> str:
    return f"{of(values):.4f}" if values else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SIZES)}; default: all")
    parser.add_argument(
        "--quick", action="store_true", help=f"{' and '.join(QUICK)} alone, recorded results left alone"
    )
    parser.add_argument("--again", action="store_true", help="measure rows that are there as well")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"{STEPS // TURNS} budgets each; default: {TURNS}")
    parser.add_argument("--table", action="store_true", help="write the table anew from the recorded rows")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--known", nargs="*", type=float, default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        for row in case(options.case, options.known, options.turns):
            print(json.dumps(row), flush=True)
        return
    from benchmarks.machine import describe

    machine = describe()
    path = HERE / f"results-jax{machine['jax']}.json"
    result: dict[str, Any] = {"machine": machine, "target": TARGET, "workloads": {}}
    if path.exists() and not options.quick:
        result["workloads"] = (known := json.loads(path.read_text()))["workloads"]
        result["machine"] = known["machine"] if options.table else machine
    for name in [] if options.table else options.names or (QUICK if options.quick else SIZES):
        if options.again:
            result["workloads"].pop(name, None)
        measure(name, result, path, options.turns, recorded=not options.quick)
    if not options.quick:
        save(path, result, table)
    print(table(result))


def measure(name: str, result: dict[str, Any], path: Path, turns: int, *, recorded: bool) -> None:
    """What is missing of one workload, saved as it comes."""
    row = result["workloads"].setdefault(name, {"answers": {}, "date": result["machine"]["date"]})
    known = list(row["answers"])
    if all(str(s) in known for turn in range(turns) for s in SHARES[turn::TURNS]):
        return
    for answer in streamed(MODULE, name, ("--turns", str(turns), "--known", *known)):
        if "share" in answer:
            row["answers"][str(answer["share"])] = answer
        elif "plain" in answer:
            row.update(answer)
        else:
            print(answer["crash"], file=sys.stderr)
        if recorded:
            save(path, result, table)


if __name__ == "__main__":
    main()
