"""Plans of programs over eight devices, beside what a ``jax.checkpoint`` policy on every layer reaches by hand.

    python -m benchmarks.spmd.plans [--only WORD ...] [--again]

The programs are those of ``programs.py`` without a policy. The budget of each row is what XLA allocates on one device
for the same program with a policy: ``dots_saveable`` or ``nothing_saveable``. "Least": a budget that nothing meets; the
error's ``needs`` is the smallest program found. FLOPs are of products, in the jaxpr, over those of the plain program.
Collectives are instructions of the compiled program: all-reduce (ar), all-gather (ag), reduce-scatter (rs), all-to-all
(a2a), collective-permute (cp); one in a loop counts once. Seconds are wall clock: of the whole call of ``.plan()``, its
compiles included, and of one compile of the plain program; where other work ran beside it, compare those of one row.

Rows are kept in ``plans-jax<version>.json``; a run takes what is missing, with ``--again`` everything.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.isolate import command, heading, run_missing

HERE = Path(__file__).parent
MODULE = "spmd.plans"
COUNT = 8
POLICIES = ("dots", "nothing")
ENVIRONMENT = {
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={COUNT}",
    "JAX_PLATFORMS": "cpu",
    "JAXTENSILE_PLAN_CACHE": "off",
}
KINDS = {
    "all-reduce": "ar",
    "all-gather": "ag",
    "reduce-scatter": "rs",
    "all-to-all": "a2a",
    "collective-permute": "cp",
}
_CALL = re.compile(rf"= .*? ({'|'.join(KINDS)})(?:-start)?\(")


def bytes_of(executable: Any) -> int:
    """XLA's bytes of one device."""
    m = executable.memory_analysis()
    temp, alias = m.temp_size_in_bytes, m.alias_size_in_bytes
    return m.argument_size_in_bytes + m.output_size_in_bytes + temp - alias


def collectives(executable: Any) -> dict[str, int]:
    """Number of collectives by kind."""
    found = Counter(_CALL.findall(executable.as_text()))
    return {short: found[name] for name, short in KINDS.items() if found[name]}


def filled(args: Any) -> Any:
    """Arrays for abstract arguments, the same at each call."""
    import jax
    import numpy as np

    rng = np.random.default_rng(0)

    def array(x: Any) -> Any:
        integers = np.issubdtype(x.dtype, np.integer)
        made = rng.integers(0, 100, x.shape) if integers else rng.normal(size=x.shape) * 0.02
        return jax.device_put(made.astype(x.dtype), x.sharding)

    return jax.tree.map(array, args)


def apart(expected: Any, got: Any) -> float:
    """The largest difference of two results, relative to the largest number of their array."""
    import jax
    import numpy as np

    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True)
    return max(float(np.abs(np.asarray(a) - b).max() / max(np.abs(a).max(), 1e-30)) for a, b in pairs)


def case(name: str) -> dict[str, Any]:
    """``policy:program``."""
    policy, of = name.split(":", 1)
    import jax

    import jaxtensile
    from benchmarks.spmd.programs import Sizes, programs
    from jaxtensile.program.trace import jaxpr_flops

    known = programs(jax.devices()[:COUNT], Sizes())
    plain = known[of]()
    row: dict[str, Any] = {"program": of, "policy": policy}
    with plain.within():
        traced = jax.jit(plain.step, **plain.options).trace(*plain.args)
        flops = jaxpr_flops(traced.jaxpr)
        started = time.perf_counter()
        made = traced.lower().compile()
        row["plain"] = {"bytes": bytes_of(made), "collectives": collectives(made)}
        row["compile"] = round(time.perf_counter() - started, 1)
        if policy == "least":
            budget = 1
        else:
            hand = known[f"{of}, {policy}"]()
            other = jax.jit(hand.step, **hand.options).trace(*hand.args)
            compiled = other.lower().compile()
            budget = bytes_of(compiled)
            ratio = jaxpr_flops(other.jaxpr) / flops
            row["hand"] = {"bytes": budget, "flops": round(ratio, 4), "collectives": collectives(compiled)}
        step = jaxtensile.jit(plain.step, budget=budget, **plain.options)
        started = time.perf_counter()
        try:
            report = step.plan(*plain.args)
        except jaxtensile.BudgetError as error:
            seconds = round(time.perf_counter() - started, 1)
            return row | {"ours": {"refused": str(error), "needs": error.needs, "seconds": seconds}}
        row["ours"] = {
            "bytes": report.compiled.device,
            "predicted": report.predicted.device,
            "flops": round((report.flops + report.recompute_flops) / report.flops, 4),
            "seconds": round(time.perf_counter() - started, 1),
            "rounds": report.rounds,
            "unchanged": report.unchanged,
            "collectives": collectives(step.lower(*plain.args).compile()),
            "apart": apart(made(*filled(plain.args)), step(*filled(plain.args))),
            "notes": list(report.notes),
        }
    return row


def told(counts: dict[str, int]) -> str:
    return " ".join(f"{kind} {count}" for kind, count in counts.items())


def good(row: dict[str, Any]) -> bool:
    """Whether it fits with no more FLOPs than by hand."""
    return "bytes" in row["ours"] and row["ours"]["flops"] <= row["hand"]["flops"] + 5e-4


def summary(rows: list[dict[str, Any]]) -> list[str]:
    asked = [row for row in rows if "hand" in row]
    best = sum(map(good, asked))
    times = sorted(row["ours"]["seconds"] / row["compile"] for row in asked)
    out = [f"Of {len(asked)} budgets, {best} are met with no more FLOPs than by hand."]
    if times:
        out.append(
            f"The whole call takes {times[len(times) // 2]:.1f} plain compiles in the median, {times[-1]:.1f} at most."
        )
    return out


def table(result: dict[str, Any]) -> str:
    rows = [row for row in result["rows"].values() if "crash" not in row]
    out = heading("Sharded programs: plans of one device", result["machine"], __doc__)
    out += [f"Commit {result['commit']}.", "", *summary(rows), ""]
    worst = max((row["ours"]["apart"] for row in rows if "apart" in row["ours"]), default=0.0)
    out += [f"Results of planned steps are those of ``jax.jit``, to {worst:.0e} of the largest number in an array.", ""]
    out += ["MB are 10^6 bytes of one device.", ""]
    out += [
        "| program | at the bytes of | plain MB | by hand MB, FLOPs | ours MB, FLOPs | plan s | compile s "
        "| collectives: plain; hand; ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        if "crash" in row:
            out.append(f"| {name} | crashed: {row['crash'].splitlines()[-1][:100]} | | | | | | |")
            continue
        ours, plain = row["ours"], row["plain"]
        hand = row.get("hand")
        by_hand = f"{hand['bytes'] / 1e6:.2f}, {hand['flops']:.3f}" if hand else ""
        counts = [told(plain["collectives"]), told(hand["collectives"]) if hand else ""]
        if "needs" in ours:
            here = f"**refused**, needs {ours['needs'] / 1e6:.2f}" if hand else f"needs {ours['needs'] / 1e6:.2f}"
        else:
            here = f"{ours['bytes'] / 1e6:.2f}, {ours['flops']:.3f}"
            here = here if good(row) else f"**{here}**"
            counts.append(told(ours["collectives"]))
        out.append(
            f"| {row['program']} | {row['policy']} | {plain['bytes'] / 1e6:.2f} | {by_hand} | {here} "
            f"| {ours['seconds']} | {row['compile']} | {'; '.join(counts)} |"
        )
    return "\n".join(out) + "\n"


def wanted(only: list[str] | None) -> list[str]:
    """The names of the cases to run."""
    import jax

    from benchmarks.spmd.programs import programs

    names = list(programs(jax.devices()[:COUNT]))
    bases = [name for name in names if all(f"{name}, {policy}" in names for policy in POLICIES)]
    found = [f"{policy}:{name}" for name in bases for policy in (*POLICIES, "least")]
    return [name for name in found if not only or any(word in name for word in only)]


def main() -> None:
    parser = command(__doc__, case)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases with one of these in policy:program")
    parser.add_argument("--again", action="store_true", help="known rows too")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    made = run_missing(
        MODULE, HERE / "plans", wanted(options.only), table, again=options.again, limit=900, environment=ENVIRONMENT
    )
    print(table(made))


if __name__ == "__main__":
    main()
