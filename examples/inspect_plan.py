"""A walk through a report: what XLA needed before, what was promised, what it needs now, and why.

The plan is made for a small GPT on the CPU and runs nothing: its arguments are abstract.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import partial

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import gpt
import jaxtensile
from jaxtensile.units import format_bytes, format_seconds


def main() -> None:
    config = gpt.GPTConfig(layers=2, width=128, heads=4, context=128, vocab=256)
    state = jax.eval_shape(partial(gpt.start, config), jax.random.key(0))
    step = jaxtensile.jit(gpt.make_step(config, 1e-3), budget="56MiB", target="cpu", donate_argnums=(0,))
    report = step.plan(state, gpt.tokens_like(config, batch=16))

    # Three accounts of the same step. What must fit is argument + output + temp - alias: "device".
    print(f"{'':<12}{'argument':>12}{'output':>12}{'temp':>12}{'alias':>12}{'device':>12}")
    for name in ("baseline", "predicted", "compiled"):  # plain by XLA, promised by the plan, kept by XLA
        use = getattr(report, name)
        cells = (use.argument, use.output, use.temp, use.alias, use.device)
        print(f"{name:<12}" + "".join(f"{format_bytes(cell):>12}" for cell in cells))
        assert use.device == use.argument + use.output + use.temp - use.alias

    # XLA's account of the compiled program is the one that counts, and it is within the budget.
    assert report.compiled.device <= report.budget < report.baseline.device
    print(f"{format_bytes(report.budget - report.compiled.device)} of the {format_bytes(report.budget)} are left over")

    # One action per value that the backward pass reads again: kept, or dropped and computed a second time.
    count, size = Counter[str](), Counter[str]()
    for action in report.actions:
        kind = type(action).__name__
        count[kind] += 1
        size[kind] += action.nbytes
    for kind in sorted(count):
        print(f"{kind}: {count[kind]} values, {format_bytes(size[kind])}")

    # The price, and what the planner tried: a round is one program given to XLA.
    print(f"recomputed: {report.recompute_flops / 1e9:.2f} GFLOP of matrix products")
    print(f"rounds: {report.rounds}; primitives without a rule: {', '.join(report.unknown_primitives) or 'none'}")
    print(", ".join(f"{name} {format_seconds(spent)}" for name, spent in report.seconds.items()))


if __name__ == "__main__":
    main()
