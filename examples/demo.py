"""The same training twice, plain and within a byte budget, and a plan for a GPU that is not here.

1. asks XLA what the train step of a small GPT needs on this machine's CPU under ``jax.jit``;
2. fits it into a budget below that with ``jaxtensile.jit``, and asks XLA again;
3. trains both from the same start on this project's own text, taking turns: losses, bytes and times side by side;
4. fits GPT-2 small, batch 16 x 1024, into 8 GiB of an H200 with that GPU's own compiler and no GPU.

Run it with ``make demo`` or ``python examples/demo.py``; ``--help`` lists the sizes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

# Sections 1 to 3 are about this machine's CPU; on a machine with a GPU, leave the GPU alone.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import gpt
import jaxtensile
import text
from jaxtensile.cli.interrupts import Interrupts
from jaxtensile.units import format_bytes, format_seconds

CONSOLE = Console(highlight=False, soft_wrap=True)


@dataclass
class Run:
    """One training: its step, its state, what XLA allocates for the step, and what each step gave and took."""

    label: str
    step: Callable[..., Any]
    state: gpt.State
    device: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def advance(self, tokens: np.ndarray) -> None:
        began = time.perf_counter()
        self.state, loss = self.step(self.state, tokens)
        self.losses.append(float(loss))
        self.seconds.append(time.perf_counter() - began)


def main(argv: list[str] | None = None) -> int:
    options = _options().parse_args(argv)
    config = gpt.GPTConfig(
        layers=options.layers, width=options.width, heads=options.heads, context=options.context, vocab=text.VOCAB
    )
    train_step = gpt.make_step(config, options.learning_rate)
    begin = jax.jit(partial(gpt.start, config))
    corpus = text.corpus()
    data = list(text.batches(corpus, batch=options.batch, context=config.context, steps=options.steps))
    state = begin(jax.random.key(0))
    _say(
        f"A GPT of {gpt.parameters(state) / 1e6:.1f} M parameters ({config.layers} layers, width {config.width}, "
        f"context {config.context}, batch {options.batch}) learns {len(corpus):,} bytes of this project's text in "
        f"{options.steps} steps,\non {jax.devices()[0].platform}, {os.cpu_count()} cores, jax {jax.__version__}."
    )

    _head("1. jax.jit")
    plain_step = jax.jit(train_step, donate_argnums=(0,))
    argument, device = _xla_bytes(plain_step, state, data[0])
    _say(f"XLA allocates {format_bytes(device)} for the step, {format_bytes(argument)} of them for its arguments.")

    _head("2. jaxtensile.jit")
    budget = argument + (device - argument) * options.share // 100
    _say(
        f"Budget: {format_bytes(budget)} ({budget} bytes), the arguments and {options.share} % of what the plain "
        "program needs above them."
    )
    fitted_step = jaxtensile.jit(train_step, budget=budget, donate_argnums=(0,))
    began = time.perf_counter()
    try:
        with CONSOLE.status("planning, compiling, verifying"):
            report = fitted_step.plan(state, data[0])
    except jaxtensile.BudgetError as error:
        _say(f"{error}\nTry a larger --share.")
        return 1
    _say(
        f"Planned, compiled and verified in {format_seconds(time.perf_counter() - began)}: "
        f"{format_bytes(report.predicted.device)} predicted, {format_bytes(report.compiled.device)} compiled, "
        f"{_more(report)}."
    )

    _head("3. Side by side")
    plain = Run("jax.jit", plain_step, state, device)
    fitted = Run("jaxtensile.jit", fitted_step, begin(jax.random.key(0)), _xla_bytes(fitted_step, state, data[0])[1])
    _train(plain, fitted, data)
    _side_by_side(plain, fitted)

    planned = None
    if not options.no_gpu_plan:
        _head(f"4. GPT-2 small, batch 16 x 1024, in {options.gpu_budget} of an {options.target}")
        planned = _plan_gpt2(options.target, options.gpu_budget)

    _head("Summary")
    _say(_summary(plain, fitted, budget, planned, options))
    return 0 if fitted.device <= budget else 1


# ---- training ---------------------------------------------------------------------------------


def _train(plain: Run, fitted: Run, data: list[np.ndarray]) -> None:
    """Both runs over ``data``, one step each in turn, so that what else the machine does slows both alike."""
    with _progress() as bar:
        task = bar.add_task("training", total=len(data))
        for done, tokens in enumerate(data, 1):
            for run in (plain, fitted) if done % 2 else (fitted, plain):
                run.advance(tokens)
            told = ", ".join(f"{run.label} loss {run.losses[-1]:.4f}" for run in (plain, fitted))
            bar.update(task, completed=done, description=told)
            if bar.disable and (done in (1, len(data)) or done % 10 == 0):
                took = format_seconds(plain.seconds[-1] + fitted.seconds[-1])
                _say(f"step {done} of {len(data)}: {told}, {took} together")


def _xla_bytes(step: Any, *args: Any) -> tuple[int, int]:
    """What XLA allocates for a jitted step, read the same way for both: bytes of its arguments, bytes in all."""
    memory = step.lower(*args).compile().memory_analysis()
    argument = memory.argument_size_in_bytes
    return argument, argument + memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes


# ---- the plan for an absent GPU ---------------------------------------------------------------


def _plan_gpt2(target: str, budget: str) -> Any | None:
    """The report of a plan made from abstract arguments, or None where it cannot be made here."""
    config = gpt.GPTConfig.small()
    state = jax.eval_shape(partial(gpt.start, config), jax.random.key(0))
    _say(f"Tracing, planning and compiling for {target}; this takes a minute or two ...")
    try:
        step = jaxtensile.jit(gpt.make_step(config, 3e-4), budget=budget, target=target, donate_argnums=(0,))
        with CONSOLE.status(f"compiling for {target}"):
            report = step.plan(state, gpt.tokens_like(config, batch=16))
    except (jaxtensile.TargetError, jaxtensile.BudgetError) as error:  # its text says which extra to install
        _say(f"No plan: {error}")
        return None
    _say(str(report))
    return report


# ---- telling ----------------------------------------------------------------------------------


def _side_by_side(plain: Run, fitted: Run) -> None:
    _say(f"{'step':>6}{'jax.jit':>12}{'jaxtensile':>12}{'difference':>13}")
    for at in _shown(len(plain.losses)):
        one, two = plain.losses[at], fitted.losses[at]
        _say(f"{at + 1:>6}{one:>12.6f}{two:>12.6f}{two - one:>+13.1e}")
    _say(f"Losses: {_equality(plain, fitted)}.")
    _say(f"\n{'':>16}{'jax.jit':>12}{'jaxtensile':>12}{'ratio':>10}")
    one, two = plain.device, fitted.device
    _say(f"{'bytes by XLA':>16}{format_bytes(one):>12}{format_bytes(two):>12}{two / one:>10.3f}")
    one, two = _typical(plain), _typical(fitted)
    _say(f"{'time per step':>16}{format_seconds(one):>12}{format_seconds(two):>12}{two / one:>10.3f}")


def _summary(plain: Run, fitted: Run, budget: int, planned: Any | None, options: argparse.Namespace) -> str:
    one, two = _typical(plain), _typical(fitted)
    verdict = "within" if fitted.device <= budget else "NOT within"
    lines = (
        f"With no change to the model the train step went from {format_bytes(plain.device)} to "
        f"{format_bytes(fitted.device)} on this CPU ({plain.device} to {fitted.device} bytes by XLA's own account), "
        f"{verdict} its budget of {format_bytes(budget)} ({budget} bytes), at {two / one:.2f} times the time per "
        f"step ({format_seconds(one)} to {format_seconds(two)}, medians). "
        f"Over {len(plain.losses)} steps the loss fell from {plain.losses[0]:.3f} to {plain.losses[-1]:.3f}; "
        f"the two runs' losses were {_equality(plain, fitted)}."
    )
    if planned is not None:
        lines += (
            f" GPT-2 small at batch 16 x 1024 went from {format_bytes(planned.baseline.device)} to "
            f"{format_bytes(planned.compiled.device)} for {options.target} (budget {options.gpu_budget}, "
            f"{_more(planned)}), by that target's own compiler and without the GPU."
        )
    return lines


def _equality(plain: Run, fitted: Run) -> str:
    one, two = np.array(plain.losses), np.array(fitted.losses)
    difference = np.abs(one - two)
    if not difference.any():
        return f"equal to the last bit at all {len(one)} steps (largest difference 0)"
    at = int(difference.argmax())
    same = int((difference != 0).argmax())
    return (
        f"equal to the last bit for the first {same} of {len(one)} steps, largest difference {difference[at]:.1e} "
        f"(a share of {difference[at] / abs(one[at]):.0e}) at step {at + 1}"
    )


def _typical(run: Run) -> float:
    """The median time of a step, without the first."""
    return median(run.seconds[1:] or run.seconds)


def _more(report: Any) -> str:
    return f"{100 * report.recompute_flops / report.flops:.1f} % more matrix FLOPs"


def _shown(steps: int) -> Iterable[int]:
    """Indices of about ten steps, first and last included."""
    return sorted({*range(0, steps, max(1, steps // 10)), steps - 1})


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=CONSOLE, transient=True, disable=not CONSOLE.is_terminal)


def _say(line: str) -> None:
    CONSOLE.print(line, markup=False)


def _head(line: str) -> None:
    CONSOLE.print(f"\n{line}\n{'-' * len(line)}", markup=False, style="bold")


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=_positive, default=30)
    parser.add_argument("--layers", type=_positive, default=6)
    parser.add_argument("--width", type=_positive, default=256)
    parser.add_argument("--heads", type=_positive, default=8)
    parser.add_argument("--context", type=_positive, default=256)
    parser.add_argument("--batch", type=_positive, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--share", type=_positive, default=60, help="budget, as %% of the plain bytes above arguments")
    parser.add_argument("--no-gpu-plan", action="store_true", help="leave section 4 out")
    parser.add_argument("--target", default="nvidia-h200", help="the GPU of section 4")
    parser.add_argument("--gpu-budget", default="8GiB", help="the budget of section 4")
    return parser


def _positive(word: str) -> int:
    if (number := int(word)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


if __name__ == "__main__":
    with Interrupts() as interrupts:
        try:
            sys.exit(main())
        except (KeyboardInterrupt, Exception):
            if not interrupts.pressed:
                raise
            print("\nStopped by Ctrl-C; nothing was written.", file=sys.stderr)
            sys.exit(130)
