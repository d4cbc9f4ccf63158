"""Will it fit? Answers before anything runs, for devices that are not here.

1. whether a batch fits a budget, as it is or with a plan, by the target's own compiler and without the target;
2. a budget that cannot be met: the error says what is needed, by which ops, and that amount then works.

``python examples/will_it_fit.py --targets cpu,nvidia-h200``; GPU targets need the extra that the error names.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from itertools import product

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import gpt
import jaxtensile
from jaxtensile.units import format_bytes, parse_bytes

LITTLE = gpt.GPTConfig(layers=2, width=128, heads=4, context=128, vocab=256)
BUDGET = "48MiB"


def workload(config: gpt.GPTConfig, batch: int) -> jaxtensile.Workload:
    """A GPT's train step with abstract arguments: nothing is allocated to ask about it."""
    state = jax.eval_shape(partial(gpt.start, config), jax.random.key(0))
    return jaxtensile.Workload(
        fun=gpt.make_step(config, 3e-4),
        args=(state, gpt.tokens_like(config, batch)),
        jit_options={"donate_argnums": (0,)},
        name=f"GPT, {config.layers} layers, width {config.width}, batch {batch} x {config.context}",
    )


def gpt2_small() -> jaxtensile.Workload:
    """For the command line: ``jaxtensile plan examples/will_it_fit.py:gpt2_small --budget 8GiB``."""
    return workload(gpt.GPTConfig.small(), batch=16)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--targets", default="cpu", help="where section 1 plans, separated by commas")
    targets = parser.parse_args().targets.split(",")

    print(f"1. Which batch fits into {BUDGET}?")
    for target, batch in product(targets, (4, 16)):
        job = workload(LITTLE, batch)
        try:
            report = jaxtensile.jit(job.fun, budget=BUDGET, target=target, **job.jit_options).plan(*job.args)
        except jaxtensile.JaxtensileError as error:  # a missing plugin, an unknown name, an impossible budget
            print(f"{target}, batch {batch}: {error}")
            continue
        plain, planned = format_bytes(report.baseline.device), format_bytes(report.compiled.device)
        how = "as it is" if report.unchanged else f"planned in {planned}, about {report.overhead_ratio:.0%} slower"
        print(f"{target}, batch {batch}: needs {plain}; fits {how}")

    print("\n2. A budget that cannot be met")
    job = workload(LITTLE, batch=16)
    budget = parse_bytes("1MiB")
    for _ in range(4):  # far below, the answer is predicted; closer to it, XLA is asked
        try:
            report = jaxtensile.jit(job.fun, budget=budget, target="cpu", **job.jit_options).plan(*job.args)
        except jaxtensile.BudgetError as error:
            print(error)
            budget = error.needs
        else:
            print(f"with {format_bytes(budget)} it fits: {format_bytes(report.compiled.device)}")
            break


if __name__ == "__main__":
    main()
