"""What does ``jaxtensile exec`` cost a program that fits?

    python -m benchmarks.call.under_exec [--rounds 9]

A GPT-2 of 2 layers, width 128, in fresh processes on the CPU, with and without ``exec`` in turns. Seconds of CPU time,
of which a busy machine gives about as many as a quiet one: ``start`` is what the command takes until Python starts the
script, ``first`` from there to the results of the first step, imports of JAX included, and ``call`` what a later call
of a tiny function takes (best of many). All are medians of the rounds. Results go to ``under_exec-jax<version>.json``
and ``.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SCRIPT = """
import json, os, resource, time
began = sum(os.times()[:2])
import jax
import jax.numpy as jnp
from benchmarks.workloads import gpt2

config = gpt2.Config(layers=2, width=128, heads=4, vocab=512, context=64, batch=4, compute=jnp.float32)
step = jax.jit(gpt2.step(config), donate_argnums=0)
jax.block_until_ready(step(*gpt2.init_args(config, jax.random.key(0))))
first = sum(os.times()[:2])

@jax.jit
def tiny(x):
    return x + 1

x, best = tiny(jnp.ones(3)), float("inf")
for _ in range(50):
    a = time.perf_counter()
    for _ in range(100):
        tiny(x)
    best = min(best, (time.perf_counter() - a) / 100)
print(json.dumps({"began": began, "first": first - began, "call": best}))
"""


def measure(script: Path, ours: bool) -> dict[str, float]:
    """One process."""
    before = [sys.executable, "-m", "jaxtensile", "exec", "--budget", "1TiB", "--"] if ours else []
    done = subprocess.run(
        [*before, sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    found = json.loads(done.stdout)
    return {"start": found["began"], "first": found["first"], "call": found["call"]}


def table(result: dict) -> str:
    """The figures and their ratios."""
    lines = ["| | as it is | under exec | ratio |", "|---|---|---|---|"]
    for what, unit, scale in (("start", "s", 1.0), ("first", "s", 1.0), ("call", "us", 1e6)):
        plain, ours = (result[side][what] * scale for side in ("plain", "exec"))
        lines.append(f"| {what} | {plain:.3f} {unit} | {ours:.3f} {unit} | {ours / plain:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    from benchmarks.machine import describe

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    sides: dict[str, list[dict[str, float]]] = {"plain": [], "exec": []}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        for _ in range(rounds):
            for side, found in sides.items():
                found.append(measure(script, side == "exec"))
    middle = {
        side: {what: statistics.median(f[what] for f in found) for what in found[0]} for side, found in sides.items()
    }
    machine = describe()
    file = HERE / f"under_exec-jax{machine['jax']}"
    file.with_name(f"{file.name}.json").write_text(
        json.dumps({"machine": machine, "rounds": rounds, **middle, "all": sides}, indent=1) + "\n"
    )
    file.with_name(f"{file.name}.md").write_text(table(middle))
    print(table(middle))


if __name__ == "__main__":
    main()
