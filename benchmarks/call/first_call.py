"""How long does the first call take, beside the first call of ``jax.jit``?

    python -m benchmarks.call.first_call [--rounds 5] [--case cpu|h200 ...]

Two programs, each measured in fresh processes, the sides in rotation, medians over rounds:

``cpu``: a GPT-2 of 6 layers, width 256, on the CPU; the clock runs from the call to its results.
``h200``: GPT-2 small for an H200 that is not there; the clock runs over ``lower(...).compile()``.

Sides: ``jax`` is ``jax.jit``; ``fits`` is ``jaxtensile.jit`` with a budget that the program meets as
it is (promised: at most 1.2 times jax); ``planned`` is a budget that needs a plan, chosen so that
the first plan holds (at most 2.2 times jax). Results go to ``first_call-jax<version>.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SHARES = (0.7, 0.6, 0.8, 0.5)
LIMITS = {"fits": 1.2, "planned": 2.2}
TARGET = "nvidia-h200"


def subject(case: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The step, its arguments (arrays on the CPU), and the options beside the budget."""
    import jax

    from benchmarks.workloads import gpt2

    if case == "h200":
        work = gpt2.workload()
        return work.fun, work.args, dict(work.jit_options)
    config = gpt2.Config(layers=6, width=256, heads=8, vocab=2048, context=128, batch=4, compute=jax.numpy.float32)
    return gpt2.step(config), gpt2.init_args(config, jax.random.key(0)), {"donate_argnums": (0,)}


def measure(case: str, side: str, budget: int) -> dict[str, Any]:
    """One first call in this process; the compiler's own start-up is paid before the clock."""
    import jax
    import jax.numpy as jnp

    import jaxtensile
    from benchmarks.machine import placed

    fun, args, options = subject(case)
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.ones(3)))
    if case == "h200":
        args = placed(args, TARGET)
    jitted = jax.jit(fun, **options) if side == "jax" else jaxtensile.jit(fun, budget=budget, **options)
    started = time.perf_counter()
    if case == "h200":
        jitted.lower(*args).compile()
    else:
        jax.block_until_ready(jitted(*args))
    seconds = time.perf_counter() - started
    if side == "jax":
        return {"seconds": seconds}
    report = jitted.plan(*(placed(subject(case)[1], TARGET) if case == "h200" else subject(case)[1]))
    return {"seconds": seconds, "rounds": report.rounds, "unchanged": report.unchanged, "steps": dict(report.seconds)}


def choose_budget(case: str) -> int:
    """The first budget of the ladder whose first plan holds, else the one with the fewest rounds."""
    import jaxtensile

    fun, args, options = subject(case)
    target = TARGET if case == "h200" else None
    plain = jaxtensile.jit(fun, budget="10TiB", target=target, **options).plan(*args).compiled
    found: dict[int, int] = {}
    for share in SHARES:
        budget = int(plain.device - (1 - share) * plain.temp)
        try:
            report = jaxtensile.jit(fun, budget=budget, target=target, **options).plan(*args)
        except jaxtensile.BudgetError as error:
            print(case, share, error, file=sys.stderr)
            continue
        print(case, share, report.rounds, dict(report.seconds), file=sys.stderr)
        if report.rounds <= 1:
            return budget
        found[budget] = report.rounds
    if not found:
        raise SystemExit(f"{case}: no budget of {SHARES} has a plan")
    return min(found, key=lambda b: found[b])


def in_fresh_process(*arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.call.first_call", "--worker", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    if done.returncode:
        raise SystemExit(f"{arguments} exited with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(case: str, rounds: int) -> dict[str, Any]:
    budget = in_fresh_process(case, "budget")
    sides: dict[str, list[dict[str, Any]]] = {"jax": [], "fits": [], "planned": []}
    for i in range(rounds):
        order = list(sides)[i % 3 :] + list(sides)[: i % 3]
        for side in order:
            made = in_fresh_process(case, side, str(budget if side == "planned" else 1 << 45))
            sides[side].append(made)
            print(f"{case} {side}: {made['seconds']:.2f} s", file=sys.stderr)
    medians = {side: statistics.median(r["seconds"] for r in runs) for side, runs in sides.items()}
    return {
        "budget": budget,
        "median_s": medians,
        "ratio": {side: medians[side] / medians["jax"] for side in LIMITS},
        "limit": LIMITS,
        "runs": sides,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", action="append", choices=("cpu", "h200"))
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        case, side, *rest = given.worker
        print(json.dumps(choose_budget(case) if side == "budget" else measure(case, side, int(rest[0]))))
        return
    import jax

    from benchmarks.machine import describe

    cases = {case: compare(case, given.rounds) for case in given.case or ("cpu", "h200")}
    print(f"| first call, jax {jax.__version__} | jax.jit s | fits as it is | planned | its rounds |")
    print("| --- | --- | --- | --- | --- |")
    for case, result in cases.items():
        ratio = result["ratio"]
        rounds = result["runs"]["planned"][0]["rounds"]
        cells = [case, f"{result['median_s']['jax']:.2f}", *(f"{ratio[side]:.2f} x" for side in LIMITS), str(rounds)]
        print("|", " | ".join(cells), "|")
        late = [side for side, limit in LIMITS.items() if ratio[side] > limit and (side == "fits" or rounds == 1)]
        if late:
            print(f"ABOVE the promised ratio in {case}: {', '.join(late)}")
    path = HERE / f"first_call-jax{jax.__version__}.json"
    path.write_text(json.dumps({"machine": describe(), "rounds": given.rounds, "cases": cases}, indent=1) + "\n")
    print(f"written: {path.name}")


if __name__ == "__main__":
    main()
