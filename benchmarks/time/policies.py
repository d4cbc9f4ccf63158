"""At the bytes of hand-written policies: seconds of their steps and of ours, by the kernels that XLA compiled.

    python -m benchmarks.time.policies [--target TARGET] [--again] [WORKLOAD ...]

Each ``jax.checkpoint`` policy on every block is compiled for a card that is not here, and so is what ``jaxtensile.jit``
plans for as many bytes: for the fewest FLOPs, for the shortest step, and for that with work in parts allowed. Seconds
are predictions, of the same kernels that ``benchmarks/time/run.py`` holds against a card's. Results go to
``policies.json`` and ``policies.md`` row by row; rows that are there are not measured again without ``--again``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

from benchmarks.isolate import heading, save
from benchmarks.machine import describe

RESULT: Final = Path(__file__).parent / "policies.json"
TARGET: Final = "nvidia-h100-80gb"
WAYS: Final = {
    "flops": {"objective": "flops"},
    "time": {"objective": "time"},
    "time, in parts": {"objective": "time", "chunk": True},
}


def by_hand(name: str, policy: str | None, target: str) -> dict[str, Any]:
    """The step with a policy on every block, or as it is."""
    import jax

    from benchmarks import workloads
    from benchmarks.fit.run import plain
    from jaxtensile.devices.profiles import profile
    from jaxtensile.xla.kernel_time import timed

    def look(executable: Any) -> dict[str, Any]:
        took = timed(executable.as_text(), profile(target))
        assert took is not None
        return {"step": took.seconds, "kernels": took.kernels}

    remat = getattr(jax.checkpoint_policies, policy) if policy else None
    row = plain(workloads.workload(name, remat=remat), target, look=look)
    return {key: row.get(key) for key in ("device", "flops", "step", "kernels")}


def ours(name: str, budget: int, target: str, **options: Any) -> dict[str, Any]:
    """What is planned for as many bytes."""
    import jaxtensile
    from benchmarks import workloads

    given = workloads.workload(name)
    step = jaxtensile.jit(given.fun, budget=budget, target=target, **options, **given.jit_options)
    try:
        report = step.plan(*given.args)
    except jaxtensile.BudgetError as error:
        return {"refused": str(error)[:200]}
    assert report.kernels is not None
    return {
        "device": report.compiled.device,
        "flops": report.flops + report.recompute_flops,
        "step": report.kernels.seconds,
        "kernels": report.kernels.kernels,
        "predicted": report.step,
    }


def table(result: dict[str, Any]) -> str:
    lines = heading("Seconds at the bytes of policies", result["machine"], __doc__)
    lines += [
        "| workload | at the bytes of | MB | FLOPs | step ms | over plain % | "
        + " | ".join(f"ours, {w}: FLOPs, over %" for w in WAYS)
        + " |",
        "|" + "---|" * (6 + len(WAYS)),
    ]
    better = points = 0
    for row in result["rows"]:
        plain, hand = row["plain"], row["policy"]
        cells = []
        for way in WAYS:
            made = row["ours"].get(way, {})
            over = 100 * (made["step"] / plain["step"] - 1) if "step" in made else None
            cells.append("refused" if over is None else f"{made['flops'] / plain['flops']:.3f}, {over:+.1f}")
        best = min((m["step"] for m in row["ours"].values() if "step" in m), default=None)
        points += 1
        better += best is not None and best <= hand["step"]
        lines.append(
            f"| {row['workload']} | {row['at']} | {hand['device'] / 1e6:,.0f} | {hand['flops'] / plain['flops']:.3f} "
            f"| {1e3 * hand['step']:.1f} | {100 * (hand['step'] / plain['step'] - 1):+.1f} | {' | '.join(cells)} |"
        )
    lines += ["", f"The best of ours takes no longer than the policy in {better} of {points} points."]
    return "\n".join(lines) + "\n"


def main() -> None:
    from benchmarks import workloads
    from benchmarks.fit.run import POLICIES

    parser = argparse.ArgumentParser(description="Seconds at the bytes of policies, by compiled kernels.")
    parser.add_argument("workloads", nargs="*", default=list(workloads.NAMES))
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    rows = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    known = {(row["workload"], row["at"], row["target"]): row for row in rows}
    for name in asked.workloads:
        plain: dict[str, Any] | None = None
        for policy in POLICIES:
            key = name, policy, asked.target
            if key in known and not asked.again:
                continue
            plain = plain or by_hand(name, None, asked.target)
            hand = by_hand(name, policy, asked.target)
            if hand["device"] is None or plain["device"] is None:
                continue
            made = {way: ours(name, hand["device"], asked.target, **options) for way, options in WAYS.items()}
            known[key] = dict(zip(("workload", "at", "target"), key, strict=True)) | {
                "plain": plain,
                "policy": hand,
                "ours": made,
            }
            result = {"machine": describe(), "rows": list(known.values())}
            save(RESULT, result, table)
            print(table(result).splitlines()[-3], flush=True)


if __name__ == "__main__":
    main()
