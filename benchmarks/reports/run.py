"""Programs after public reports of JAX users: as written, as a person would mend them by hand, and planned.

    python -m benchmarks.reports.run [--label NAME] [CASE ...]

``cases/*.py`` each have a step, one or more ways to mend it by hand, and where it was reported. For an H200 that is not
there, each in a process of its own:

* ``plain`` and ``hand``: XLA's bytes and the predicted seconds of a step;
* ``at hand``: ours at the bytes of each way by hand, with ``chunk=True`` where the case has an axis to split;
* ``needs``: the budget that an error names when it is asked for the arguments alone, and whether asked for it is met;
* ``values``: the small size on a CPU beside ``jax.jit``, at 0.7, 0.5 and nothing of the temporaries: the largest
  difference, as a share of the largest number of that result.

Results go to ``results-jax<version>.json``, where ``--label`` keeps runs of several versions side by side (default
"now"), and to a table.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.isolate import command, heading, isolated, save

HERE = Path(__file__).parent
MODULE = "reports.run"
TARGET = "nvidia-h200"
LIMIT = 1500.0
SHARES = (0.7, 0.5, 0.0)
SAME = 1.002
"""Predicted times this near count as one: the default objective counts products, which may be this much dearer."""
WHY = {
    "lm_head_step": "sums over parts are kept in float32, 1,050 MB of gradients that by hand are summed in bfloat16 "
    "(525 MB, rounded once a part), so that less is left for a part and there are twice as many",
    "variational_monte_carlo": "the 32 parts of the hand version need some kilobytes at most more here than there "
    "(with 269.2 MB: 3.64 ms), so that something is made again; the model is 72 % too low, and compiles find the plan",
    "contrastive_pairs": "what is charged is matrix FLOPs first (1.19 of the step's, by hand 1.25), and what is "
    "recomputed in their place are softmaxes of the matrix of pairs, which take longer",
    "clipped_gradients": "the same 32 parts in the same bytes; the loop has 0.8 % more seconds of small kernels",
    "nearest_neighbours": "the 32 parts of the hand version need 0.2 % more bytes here: there are 64, in 58 % of "
    "them, and what it takes to start their kernels is 0.6 % more",
}
"""What keeps ours from being as good, where it is not."""
EPSILON = 1e-30


def cases() -> list[str]:
    return sorted(path.stem for path in (HERE / "cases").glob("*.py") if path.stem != "__init__")


def loaded(name: str, size: str) -> dict[str, Any]:
    return importlib.import_module(f"benchmarks.reports.cases.{name}").case(size)


def as_written(fun: Callable[..., Any], case: dict[str, Any]) -> dict[str, Any]:
    """XLA's bytes of a function that nothing is changed in, what a step is predicted to take, and its products."""
    import jaxtensile

    options, args = case.get("jit", {}), case["args"]
    exact = jaxtensile.estimate(fun, *args, target=TARGET, exact=True, **options)
    report = jaxtensile.jit(fun, budget=1 << 60, undo=False, target=TARGET, **options).plan(*args)
    return {"device": exact.device, "argument": exact.argument, "step": report.step}


def planned(case: dict[str, Any], budget: int, chunk: bool) -> dict[str, Any]:
    import jaxtensile

    step = jaxtensile.jit(case["fun"], budget=budget, target=TARGET, chunk=chunk, **case.get("jit", {}))
    began = time.perf_counter()
    try:
        report = step.plan(*case["args"])
    except jaxtensile.BudgetError as error:
        return {"budget": budget, "needs": error.needs, "error": str(error), "seconds": time.perf_counter() - began}
    except Exception as error:
        return {"budget": budget, "crash": f"{type(error).__name__}: {error}"[:600]}
    return {
        "budget": budget,
        "device": report.compiled.device,
        "step": report.step,
        "flops": 1 + report.recompute_flops / report.flops if report.flops else 1.0,
        "unchanged": report.unchanged,
        "notes": list(report.notes),
        "seconds": time.perf_counter() - began,
    }


def least(case: dict[str, Any], argument: int, chunk: bool) -> dict[str, Any]:
    """What an error asks for, and whether that is met."""
    asked = planned(case, argument, chunk)
    if asked.get("needs") is None:
        return asked
    found = planned(case, asked["needs"], chunk)
    return {**found, "asked": asked["needs"], "met": "device" in found, "asking": asked["seconds"]}


def differences(case: dict[str, Any], chunk: bool) -> Iterator[dict[str, Any]]:
    """The planned function beside the plain one, on this machine."""
    import jax
    import numpy as np

    import jaxtensile

    options = {key: value for key, value in case.get("jit", {}).items() if key != "donate_argnums"}
    plain = jax.jit(case["fun"], **options)
    memory = plain.lower(*case["args"]).compile().memory_analysis()
    fixed = memory.argument_size_in_bytes + memory.output_size_in_bytes
    want = jax.device_get(plain(*case["args"]))
    for share in SHARES:
        budget = int(fixed + share * memory.temp_size_in_bytes)
        try:
            step = jaxtensile.jit(case["fun"], budget=budget, chunk=chunk, **options)
            try:
                report = step.plan(*case["args"])
            except jaxtensile.BudgetError as error:
                step = jaxtensile.jit(case["fun"], budget=error.needs, chunk=chunk, **options)
                report = step.plan(*case["args"])
            got = jax.device_get(step(*case["args"]))
        except Exception as error:
            yield {"share": share, "crash": f"{type(error).__name__}: {error}"[:600]}
            continue
        worst = 0.0
        for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            w, g = np.asarray(w), np.asarray(g)
            assert w.shape == g.shape and w.dtype == g.dtype
            if w.size:
                worst = max(worst, float(np.max(np.abs(w - g)) / (np.max(np.abs(w)) + EPSILON)))
        yield {"share": share, "unchanged": report.unchanged, "worst": worst}


def case(name: str) -> dict[str, Any]:
    """All that is measured of one case; what is known so far is printed after each step."""
    row: dict[str, Any] = {"case": name}

    def say(key: str, value: Any) -> None:
        row[key] = value
        print(json.dumps(row), flush=True)

    small = loaded(name, "small")
    say("values", [r for chunk in chunks(small) for r in differences(small, chunk)])
    big = loaded(name, "big")
    say("plain", as_written(big["fun"], big))
    say("hand", {})
    for way, fun in big["hand"].items():
        hand = as_written(fun, big)
        say("hand", {**row["hand"], way: hand | {"ours": [planned(big, hand["device"], c) for c in chunks(big)]}})
    say("least", [least(big, row["plain"]["argument"], c) for c in chunks(big)])
    return row


def chunks(case: dict[str, Any]) -> tuple[bool, ...]:
    return (False, True) if case.get("chunk") else (False,)


def best(found: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Of several plans within the budget, the one of the least predicted seconds."""
    return min((r for r in found if "device" in r), key=lambda r: r["step"], default=None)


def ours(found: list[dict[str, Any]]) -> str:
    one = best(found)
    if not found:
        return ""
    if one is None:
        needs = min((r["needs"] for r in found if r.get("needs")), default=None)
        return f"needs {needs / 1e6:,.0f}" if needs else "crash"
    return f"{one['device'] / 1e6:,.0f} · {1e3 * one['step']:.3g}"


def table(result: dict[str, Any]) -> str:
    labels = list(result["runs"])
    out = heading("Programs after public reports", result["runs"][labels[-1]]["machine"], __doc__)
    out += [
        "MB by XLA's account · milliseconds of a step as predicted by that version, which has prices of its own.",
        "",
    ]
    out += ["**Bold**: no more of either than by hand (0.2 %).", ""]
    out += ["| case | as written | by hand | " + " | ".join(f"ours, {name}" for name in labels) + " |"]
    out += ["|---|---|---|" + "---|" * len(labels)]
    rows = {label: {r["case"]: r for r in result["runs"][label]["rows"]} for label in labels}
    for name, last in rows[labels[-1]].items():
        for way, hand in last.get("hand", {}).items():
            cells = []
            for label in labels:
                own = rows[label].get(name, {}).get("hand", {}).get(way, {})
                one, text = best(own.get("ours", [])), ours(own.get("ours", []))
                good = one and one["device"] <= own["device"] and one["step"] <= own["step"] * SAME
                cells.append(f"**{text}**" if good else text)
            plain = f"{last['plain']['device'] / 1e6:,.0f} · {1e3 * last['plain']['step']:.3g}"
            by_hand = f"{way}: {hand['device'] / 1e6:,.0f} · {1e3 * hand['step']:.3g}"
            out.append(f"| {name} | {plain} | {by_hand} | {' | '.join(cells)} |")
    out += ["", "Where it is not as good:", ""] + [
        f"* {name}: {why}." for name, why in WHY.items() if name in rows[labels[-1]]
    ]
    out += ["", "Asked for the arguments alone, MB that the error names, and whether those are met:", ""]
    out += ["| case | " + " | ".join(f"{label}: {what}" for label in labels for what in ("names", "met")) + " |"]
    out += ["|---|" + "---|---|" * len(labels)]
    for name in rows[labels[-1]]:
        cells = []
        for label in labels:
            found = [r for r in rows[label].get(name, {}).get("least", []) if "asked" in r]
            cells += [" / ".join(f"{r['asked'] / 1e6:,.0f}" for r in found)]
            cells += [" / ".join("yes" if r["met"] else f"no: {r.get('needs', 0) / 1e6:,.0f}" for r in found)]
        out.append(f"| {name} | {' | '.join(cells)} |")
    out += ["", "Values on a CPU beside plain ``jax.jit``, the largest difference:", ""]
    for label in labels:
        told = [
            f"{name} {max((r.get('worst', 1.0) for r in row.get('values', [])), default=1.0):.1g}"
            for name, row in rows[label].items()
        ]
        out.append(f"* {label} ({result['runs'][label]['commit']}): {', '.join(told)}")
    crashes = [
        f"* {label}, {n}: {r['crash'][-200:]}" for label in labels for n, r in rows[label].items() if "crash" in r
    ]
    out += ["", *crashes] if crashes else []
    return "\n".join(out) + "\n"


def main() -> None:
    parser = command(__doc__, case)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all without them")
    parser.add_argument("--label", default="now")
    options = parser.parse_args()
    from benchmarks.machine import commit, describe

    path = HERE / f"results-jax{describe()['jax']}.json"
    result = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    kept = result["runs"].get(options.label, {}).get("rows", [])
    known = {row["case"]: row for row in kept}
    for name in options.cases or cases():
        known[name] = isolated(MODULE, name, key="case", limit=LIMIT, environment={"JAXTENSILE_PLAN_CACHE": "off"})
        rows = [known[n] for n in cases() if n in known]
        result["runs"][options.label] = {"machine": describe(), "commit": commit(), "rows": rows}
        save(path, result, table)


if __name__ == "__main__":
    main()
