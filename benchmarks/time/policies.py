"""At the bytes of hand-written policies: seconds of their steps and of ours, by the kernels that XLA compiled.

    python -m benchmarks.time.policies [--target TARGET] [--again | --ours] [WORKLOAD ...]

Each ``jax.checkpoint`` policy on every block is compiled for a card that is not here, and so is what ``jaxtensile.jit``
plans by itself for as many bytes, and for 60 % of the bytes above the arguments, beside the quickest policy that fits
there. Seconds are predictions, of the same kernels that ``benchmarks/time/run.py`` holds against a card's. Results go
to ``policies-jax<version>.json`` and ``.md`` row by row; rows that are there are not measured again without
``--again``, and with ``--ours`` only what we plan.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.isolate import heading, save
from benchmarks.machine import describe

RESULTS: Final = Path(__file__).parent
TARGET: Final = "nvidia-h100-80gb"
SHARE: Final = 0.6
"""Of what the plain step needs above its arguments."""


def by_hand(name: str, policy: str | None, target: str) -> dict[str, Any]:
    """The step with a policy on every block, or as it is."""
    import jax

    from benchmarks import workloads
    from benchmarks.fit.run import plain
    from jaxtensile.devices.profiles import profile
    from jaxtensile.xla.kernel_time import timed
    from jaxtensile.xla.target import tracing_for

    def look(executable: Any) -> dict[str, Any]:
        took = timed(executable.as_text(), profile(target))
        assert took is not None
        return {"step": took.seconds, "kernels": took.kernels}

    remat = getattr(jax.checkpoint_policies, policy) if policy else None
    with tracing_for(target):
        row = plain(workloads.workload(name, remat=remat), target, look=look)
    return {key: row.get(key) for key in ("device", "argument", "flops", "step", "kernels")}


def ours(name: str, budget: int, target: str) -> dict[str, Any]:
    """What is planned for as many bytes."""
    import jaxtensile
    from benchmarks import workloads

    given = workloads.workload(name)
    step = jaxtensile.jit(given.fun, budget=budget, target=target, **given.jit_options)
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
        "notes": [note for note in report.notes if " parts, " in note or " pieces" in note],
    }


def table(result: dict[str, Any]) -> str:
    lines = heading("Seconds at the bytes of policies", result["machine"], __doc__)
    lines += [
        "| workload | at the bytes of | MB | by hand: FLOPs | over plain % | ours: FLOPs | over plain % | how |",
        "|" + "---|" * 8,
    ]
    better, apart, at_share = [], list[float](), list[float]()
    for row in result["rows"]:
        plain, hand, made = row["plain"], row["policy"], row["ours"]

        def over(it: Any, plain: Any = plain) -> float:
            return 100 * (it["step"] / plain["step"] - 1)

        cells = ["refused", "", ""]
        if "step" in made:
            cells = [f"{made['flops'] / plain['flops']:.3f}", f"{over(made):+.1f}", "; ".join(made["notes"])]
        cells = [
            f"{hand['flops'] / plain['flops']:.3f}" if hand else "none fits",
            f"{over(hand):+.1f}" if hand else "",
            *cells,
        ]
        lines.append(f"| {row['workload']} | {row['at']} | {row['budget'] / 1e6:,.0f} | {' | '.join(cells)} |")
        if hand:
            better.append("step" in made and made["step"] <= hand["step"])
            apart += [over(hand) - over(made)] if "step" in made else []
        if row["at"].endswith("%") and "step" in made:
            at_share.append(over(made))
    lines += ["", f"Ours takes no longer than the policy in {sum(better)} of {len(better)} points"]
    lines[-1] += f", in the median {median(apart):.1f} points of the plain step less." if apart else "."
    if at_share:
        lines += [f"At {SHARE:.0%}: {median(at_share):+.1f} % in the median, {max(at_share):+.1f} % at most."]
    return "\n".join(lines) + "\n"


def main() -> None:
    from benchmarks import workloads
    from benchmarks.fit.run import POLICIES

    parser = argparse.ArgumentParser(description="Seconds at the bytes of policies, by compiled kernels.")
    names = [*workloads.NAMES, *workloads.ON_NVIDIA]
    parser.add_argument("workloads", nargs="*", default=names)
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--ours", action="store_true", help="plan again for the bytes of rows that are there")
    asked = parser.parse_args()
    os.environ["JAXTENSILE_PLAN_CACHE"] = "off"
    result = RESULTS / f"policies-jax{describe()['jax']}.json"
    rows = json.loads(result.read_text())["rows"] if result.exists() else []
    known = {(row["workload"], row["at"], row["target"]): row for row in rows}
    share = f"{SHARE:.0%}"
    for name in asked.workloads if not asked.ours else ():
        if not asked.again and all((name, at, asked.target) in known for at in (*POLICIES, share)):
            continue
        plain = by_hand(name, None, asked.target)
        hands = {policy: by_hand(name, policy, asked.target) for policy in POLICIES}
        hands = {policy: hand for policy, hand in hands.items() if hand["device"] is not None}
        budget = plain["argument"] + int(SHARE * (plain["device"] - plain["argument"]))
        inside = [hand for hand in hands.values() if hand["device"] <= budget]
        points: dict[str, tuple[int, Any]] = {policy: (hand["device"], hand) for policy, hand in hands.items()}
        points[share] = budget, min(inside, key=lambda hand: hand["step"], default=None)
        for at, (nbytes, hand) in points.items():
            key = name, at, asked.target
            if key in known and not asked.again:
                continue
            row = {"plain": plain, "policy": hand, "budget": nbytes, "ours": ours(name, nbytes, asked.target)}
            known[key] = dict(zip(("workload", "at", "target"), key, strict=True)) | row
            keep(result, known, key)
    for key, row in known.items() if asked.ours else ():
        if key[0] in asked.workloads and key[2] == asked.target:
            row["ours"] = ours(key[0], row["budget"], asked.target)
            keep(result, known, key)


def keep(path: Path, known: dict[tuple[str, str, str], Any], key: tuple[str, str, str]) -> None:
    """Save all rows, and print that one."""
    result = {"machine": describe(), "rows": list(known.values())}
    save(path, result, table)
    begins = f"| {key[0]} | {key[1]} "
    print(next(line for line in table(result).splitlines() if line.startswith(begins)), flush=True)


if __name__ == "__main__":
    main()
