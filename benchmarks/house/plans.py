"""The plans of the workloads by the model, so that a change that is to change none can show it.

    python -m benchmarks.house.plans [--keep] [WORKLOAD ...]

For each workload of the suite at its published sizes, on an H200 that is not there, and for shares of its temporaries:
the cheapest plan within them by the model, as its predicted bytes, its predicted extra seconds, and a digest of the
rewritten program with every op of its schedule. Nothing is compiled. They are compared with those in ``plans.json``,
which ``--keep`` writes; a difference is told and is exit status 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import workloads

KNOWN = Path(__file__).parent / "plans.json"
TARGET = "nvidia-h200"
SHARES = (0.8, 0.5, 0.3)


class _Asked(BaseException):
    """The request of a call, instead of its plan."""


def request_of(given: Any, **asked: Any) -> Any:
    """What a workload's call asks of the planner; ``asked``: options of ``jaxtensile.jit``."""
    import jaxtensile
    from jaxtensile.spmd.processes import one_plan

    def stop(request: Any, *_: Any, **__: Any) -> None:
        raise _Asked(request)

    step = jaxtensile.jit(given.fun, budget="1GiB", target=TARGET, **asked, **given.jit_options)
    fit, one_plan.fit = one_plan.fit, stop
    ours, one_plan.pipeline.fit = one_plan.pipeline.fit, stop
    try:
        step.plan(*given.args)
    except _Asked as stopped:
        return stopped.args[0]
    finally:
        one_plan.fit, one_plan.pipeline.fit = fit, ours
    raise AssertionError("no plan was asked for")


def digest(variant: Any, plan: Any) -> str:
    """Of the rewritten program and of every op of its schedule."""

    def told(variant: Any, plan: Any) -> Any:
        ops = [(op.primitive, op.operands, op.results) for op in plan.program.graph.ops]
        inside = [(i.key, told(i.variant, i.plan)) for i in variant.inside]
        return variant.undone is not None, repr(variant.loops), inside, plan.program.origin, ops

    return hashlib.sha256(repr(told(variant, plan)).encode()).hexdigest()[:16]


def plans(name: str, chunks: Sequence[bool] = (False, True)) -> Iterator[dict[str, Any]]:
    """``chunks``: whether work may be done in parts of the batch. ``step``: the charge of the whole program."""
    from dataclasses import replace

    from jaxtensile.planner.page import opened
    from jaxtensile.search.variant import charge_of

    for chunk in chunks:
        request = request_of(workloads.workload(name), chunk=chunk)
        live = opened(request).program.predicted
        for share in SHARES:
            budget = live.device - int((1 - share) * live.temp)
            page = opened(replace(request, budget=budget))
            start, _ = page.lightest()
            written = page.written()
            candidates = page.candidates(start, [written] if start is not written else [])
            variant, plan = candidates.cheapest(budget)
            yield {
                "workload": name,
                "chunk": chunk,
                "share": share,
                "device": plan.predicted.device,
                "charge": charge_of(variant, plan),
                "digest": digest(variant, plan),
                "step": sum(page.costs().charge),
            }


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the plans of the workloads with those that are known.")
    parser.add_argument("workloads", nargs="*", default=list(workloads.NAMES))
    parser.add_argument("--keep", action="store_true", help="keep them as those to compare with")
    asked = parser.parse_args()
    known = (
        {(r["workload"], r["chunk"], r["share"]): r for r in json.loads(KNOWN.read_text())} if KNOWN.exists() else {}
    )
    unlike = 0
    for name in asked.workloads:
        for found in plans(name):
            row = {k: v for k, v in found.items() if k != "step"}
            key = row["workload"], row["chunk"], row["share"]
            same = known.get(key) == row
            unlike += not same
            print(
                "the same" if same else "UNLIKE", json.dumps(row), "" if same else f"was {known.get(key)}", flush=True
            )
            if asked.keep:
                known[key] = row
                KNOWN.write_text(json.dumps(list(known.values()), indent=0) + "\n")
    return 0 if asked.keep else min(unlike, 1)


if __name__ == "__main__":
    sys.exit(main())
