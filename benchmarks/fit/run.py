"""Fit every workload for an H200 that is not there, and say what XLA allocates.

    python -m benchmarks.fit.run [policies] [tight] [host] [WORKLOAD ...]

``policies``: GPT-2 small at the bytes that per-block ``jax.checkpoint`` reaches by hand, each policy
compiled on the same step in the same run. ``suite``: every workload at 60 % of its plain bytes
above its arguments. ``tight``: the named workloads, or all, at the bytes that the error names when they are given
room for their arguments alone, planning beside the compiles of the same call; ``host``: the same with the state and
``HOST`` bytes of temporaries allowed on the host. Every case runs in a fresh process;
results go to ``results-jax<version>.json`` and the table to ``results-jax<version>.md``. FLOPs are matrix and
convolution FLOPs of the traced program; device bytes are XLA's argument + output + temp - alias.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.summary import line
from benchmarks.isolate import isolated, save

HERE = Path(__file__).parent
MODULE = "fit.run"
TARGET = "nvidia-h200"
SHARE = 0.6
HOST = 64 << 30
"""Host bytes allowed in the ``host`` section: XLA's own cap on pinned memory."""
TIGHT = {"tight": 0, "host": HOST}
"""The sections of tight budgets and the host bytes that each allows."""
WHY_SLOW = (
    "Each of three to five starts for copies is a search of its own, near the least by recomputation alone of 60 to 90 "
    "schedules, and to lay out and fuse a schedule takes some 10 µs of Python an op. Tried: searches that end after 96 "
    "ops laid out for each of the program (192 before; after 32, plans of ResNet-50 become twelve times as dear), that "
    "end at the price of the best plan, that are not begun where others are known to lead lower, and free time of the "
    "link found by bisection (all four in; the last takes Llama's copies from 5.4 to 1.2 s); starts on a grid that the "
    "budgets of one call share (dropped: 2.6 times as quick for Mixer, plans of ResNet-50 and ViT 5 to 70 times as "
    "dear), and no more trials around a turn once four need the same bytes (dropped: a quarter of Mixer's time, 5 % "
    "over 23 budgets, one of whose plans becomes dearer)."
)
"""Of programs that are planned for longer than they are compiled."""
ASKED = 4
"""Budgets that errors name and that are asked for until one is met."""
POLICIES = ("dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")


def measure_policy(policy: str | None) -> dict[str, Any]:
    """XLA's bytes and the FLOPs of the GPT-2 step with one policy on every block."""
    import jax

    from benchmarks.workloads import gpt2

    workload = gpt2.workload(remat=getattr(jax.checkpoint_policies, policy) if policy else None)
    return {"policy": policy or "none", **plain(workload)}


def plain(
    workload: Any,
    target: str = TARGET,
    flags: Mapping[str, Any] | None = None,
    look: Callable[[Any], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """The program as it is: compiled by the target's compiler, through the same known failures.

    No ``device``, ``argument``, ``temp`` and ``host`` when the compiler refuses; ``refusal`` is then what it said.
    ``flags``: compiler options; ``look``: what else to say of the executable.
    """
    import jax

    from benchmarks.machine import placed
    from jaxtensile.program.trace import jaxpr_flops
    from jaxtensile.xla.compile import compile_program
    from jaxtensile.xla.target import compiler_options

    args = placed(workload.args, target)

    def make(options: Any) -> Any:
        return jax.jit(workload.fun, **workload.jit_options, compiler_options=dict(options) or None)

    made = compile_program(make, args, {}, {**compiler_options(target), **(flags or {})})
    jaxpr = jax.jit(workload.fun, **workload.jit_options).trace(*workload.args).jaxpr
    row = {"flops": jaxpr_flops(jaxpr), "seconds": made.seconds, "notes": list(made.notes), "refusal": made.refusal}
    if made.memory is None:
        return row
    memory = made.memory
    return {
        **row,
        "device": made.device,
        "argument": memory.argument,
        "temp": memory.temp,
        "host": memory.host,
        **(look(made.jitted.lower(*args).compile()) if look else {}),  # JAX keeps the executable: no second compile
    }


def fit(
    workload: Any,
    budget: int | None,
    target: str = TARGET,
    host_budget: int = 0,
    flags: Mapping[str, Any] | None = None,
    chunk: bool = False,
    offload_state: bool = False,
) -> dict[str, Any]:
    """What ``jaxtensile.jit`` makes of the budget; None: what the target has; ``flags``: compiler options; ``chunk``
    and ``offload_state``: the options of these names."""
    import jaxtensile
    from jaxtensile.program.trace import jaxpr_flops

    options = {**workload.jit_options, "compiler_options": dict(flags) if flags else None}
    given = {"budget": budget, "host_budget": host_budget, "target": target}
    given |= {"chunk": chunk, "offload_state": offload_state, "objective": "flops"}
    step = jaxtensile.jit(workload.fun, **given, **options)
    started = time.perf_counter()
    try:
        report = step.plan(*workload.args)
    except jaxtensile.BudgetError as error:
        return {"budget": error.has, "fits": False, "error": str(error), "needs": error.needs}
    wall = time.perf_counter() - started
    compiling = sum(s for name, s in report.seconds.items() if name.startswith("compile"))
    return {
        "budget": report.budget,
        "fits": report.fits,
        "device": report.compiled.device,
        "host": report.compiled.host,
        "bound": report.lower_bound,
        "predicted": report.predicted.device,
        "flops": jaxpr_flops(step.trace(*workload.args).jaxpr),
        "overhead_ratio": report.overhead_ratio,
        "rounds": report.rounds,
        "stages": report.stages,
        "planning_seconds": wall - compiling,
        "compile_seconds": compiling,
        "wall_seconds": wall,
        "notes": list(report.notes),
    }


def case(name: str) -> dict[str, Any]:
    """One case, in this process: ``policy:NAME``, ``gpt2@BYTES``, ``NAME`` or ``SECTION:NAME`` of ``TIGHT``."""
    from benchmarks import workloads

    if name.startswith("policy:"):
        policy = name.removeprefix("policy:")
        return measure_policy(None if policy == "none" else policy)
    if name.startswith("gpt2@"):
        return fit(workloads.workload("gpt2_small"), int(name.removeprefix("gpt2@")))
    section, _, own = name.rpartition(":")
    workload = workloads.workload(own)
    base = plain(workload)
    if section:
        host = TIGHT[section]
        answer = {"fits": False, "needs": base["argument"]}
        for _ in range(1 + ASKED):
            if not answer["fits"]:
                answer = fit(workload, answer["needs"], host_budget=host, offload_state=host > 0)
        return {"workload": own, "plain": base, "fit": answer}
    budget = int(base["argument"] + SHARE * (base["device"] - base["argument"]))
    return {"workload": name, "plain": base, "fit": fit(workload, budget)}


def policies() -> list[dict[str, Any]]:
    """Each policy and our plan at its bytes."""
    rows = [isolated(MODULE, "policy:none", "policy")]
    for policy in POLICIES:
        peer = isolated(MODULE, f"policy:{policy}", "policy")
        rows.append({**peer, "ours": isolated(MODULE, f"gpt2@{peer['device']}", "policy")})
    return rows


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    m = result["machine"]
    lines = [
        f"# Fit, deviceless H200, jax {m['jax']}, Python {m['python']}, {m['cpus']} cores, {m['date']}",
        "",
        "MB (10^6 bytes) of argument + output + temp - alias as XLA allocates them; FLOPs relative to the plain step.",
        "",
    ]
    if result.get("policies"):
        base = result["policies"][0]
        lines += [
            "## GPT-2 small, batch 16 x 1024, bf16, Adam: at the bytes of per-block `jax.checkpoint`",
            "",
            "| policy | its MB | its FLOPs | our MB | our FLOPs | rounds | planning s | one plain compile s |",
            "|---|---|---|---|---|---|---|---|",
            f"| none | {base['device'] / 1e6:,.1f} | 1.0000 | | | | | {base['seconds']:.1f} |",
        ]
        for row in result["policies"][1:]:
            ours = row["ours"]
            lines.append(
                f"| {row['policy']} | {row['device'] / 1e6:,.1f} | {row['flops'] / base['flops']:.4f} "
                f"| {ours['device'] / 1e6:,.1f} | {ours['flops'] / base['flops']:.4f} | {ours['rounds']} "
                f"| {ours['planning_seconds']:.2f} | {base['seconds']:.1f} |"
                if ours.get("fits")
                else f"| {row['policy']} | {row['device'] / 1e6:,.1f} | {row['flops'] / base['flops']:.4f} "
                f"| does not fit: {ours.get('needs', 0) / 1e6:,.1f} | | | | |"
            )
        lines.append("")
    lines += [
        f"## Every workload at {SHARE:.0%} of its plain bytes above its arguments",
        "",
        "| workload | plain MB | arguments MB | budget MB | compiled MB | predicted MB | FLOPs | step time (model) "
        "| rounds | planning s | plain compile s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["suite"]:
        if "crash" in row:
            lines.append(f"| {row['workload']} | crashed | | | | | | | | | |")
            continue
        p, f = row["plain"], row["fit"]
        head = (
            f"| {row['workload']} | {p['device'] / 1e6:,.0f} | {p['argument'] / 1e6:,.0f} | {f['budget'] / 1e6:,.0f} "
        )
        if f["fits"]:
            ratio = f["flops"] / p["flops"] if p["flops"] else 1.0
            lines.append(
                head + f"| {f['device'] / 1e6:,.0f} | {f['predicted'] / 1e6:,.0f} | {ratio:.4f} "
                f"| +{f['overhead_ratio']:.1%} | {f['rounds']} | {f['planning_seconds']:.2f} | {p['seconds']:.1f} |"
            )
        else:
            lines.append(head + f"| **does not fit**, needs {f['needs'] / 1e6:,.0f}: {f['error']} | | | | | | |")
    for section, host in TIGHT.items():
        lines += _tight(result.get(section, []), host)
    lines += ["", line()]
    return "\n".join(lines) + "\n"


def _tight(rows: list[dict[str, Any]], host: int) -> list[str]:
    """Small programs, and the seconds of the call that met their budgets."""
    more = f", with `host_budget` of {host >> 30} GiB and `offload_state=True`" if host else ""
    columns = 9 if host else 8
    lines = [
        "",
        f"## Every workload at the bytes that the error names when it is given room for its arguments alone{more}",
        "",
        "Far below what can be reached that is predicted, with a margin: less may be reached. Seconds of the call that "
        "met it: planning, and all its compiles together.",
        "",
        f"| workload | plain MB | compiled MB | {'host MB | ' if host else ''}FLOPs | step time (model) "
        "| plans compiled | planning s | compiling s |",
        "|---" * columns + "|",
    ]
    for row in rows:
        if "crash" in row or not row["fit"]["fits"]:
            lines.append(f"| {row['workload']} | {'crashed' if 'crash' in row else 'not met'} {'| ' * (columns - 2)}|")
            continue
        p, f = row["plain"], row["fit"]
        lines.append(
            f"| {row['workload']} | {p['device'] / 1e6:,.0f} | {f['device'] / 1e6:,.0f} "
            + (f"| {f['host'] / 1e6:,.0f} " if host else "")
            + f"| {f['flops'] / p['flops'] if p['flops'] else 1.0:.4f} | +{f['overhead_ratio']:.1%} | {f['rounds']} "
            f"| {f['planning_seconds']:.1f} | {f['compile_seconds']:.1f} |"
        )
    slower = [
        f"{row['workload']} ({row['fit']['planning_seconds']:.1f} s beside {row['fit']['compile_seconds']:.1f})"
        for row in rows
        if "crash" not in row and row["fit"]["fits"] and row["fit"]["planning_seconds"] > row["fit"]["compile_seconds"]
    ]
    if host and slower:
        lines += ["", f"Planned for longer than compiled: {', '.join(slower)}. {WHY_SLOW}"]
    return lines if rows else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="workloads, 'policies', 'tight' or 'host'; default: everything")
    parser.add_argument("--print-only", action="store_true", help="leave the recorded results alone")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(options.case)))
        return
    from benchmarks import workloads
    from benchmarks.machine import describe

    every, asked = list(workloads.NAMES), options.cases or ["policies", *TIGHT, *workloads.NAMES]
    named = [n for n in asked if n in every]
    machine = describe()
    path = HERE / f"results-jax{machine['jax']}.json"
    # A run of some cases renews those and keeps the others; nothing is lost when it is interrupted.
    known: dict[str, Any] = {"policies": [], "suite": []}
    if path.exists() and not options.print_only:
        known = json.loads(path.read_text())
    rows = {row["workload"]: row for row in known["suite"]}
    tight = {section: {row["workload"]: row for row in known.get(section, [])} for section in TIGHT}
    result: dict[str, Any] = {"machine": machine, "target": TARGET, "share": SHARE, "policies": known["policies"]}

    def keep() -> None:
        result["suite"] = [rows[name] for name in every if name in rows]
        for section, kept in tight.items():
            result[section] = [kept[name] for name in every if name in kept]
        if not options.print_only:
            save(path, result, table)

    if "policies" in asked:
        result["policies"] = policies()
        keep()
    sections = [section for section in TIGHT if section in asked]
    suite = named if not options.cases or not sections else []
    for kept, name, question in (
        *((rows, name, name) for name in suite),
        *((tight[s], name, f"{s}:{name}") for s in sections for name in (named or every)),
    ):
        kept[name] = {"workload": name, **isolated(MODULE, question), "date": machine["date"]}
        if "crash" in kept[name]:
            print(kept[name]["crash"], file=sys.stderr)
        keep()
    print(table(result))


if __name__ == "__main__":
    main()
