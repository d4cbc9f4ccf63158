"""Do real processes order the ways to share a device as the simulator does?

    python -m benchmarks.concurrent.real_mixes

Two mixes of training steps on this CPU, each job a process. *Ours*: under ``jaxtensile serve``, in turns, with room for
all states and the temporaries of the largest. *Equal split*: each with its part of the same bytes as its budget, at
once. A job's steps are counted once all plans are compiled. What is compared is the CPU time of all steps, since the
machine does other things: work that is done again shows in it, and waiting does not. The simulator is given the bytes
and CPU seconds of each plan, measured alone, and says the same of it: the seconds in steps. Of two strategies the one
under which more jobs run is ahead, then the one with less; within 5 % they are equal. Results go to
``real_mixes.json`` and ``real_mixes.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.concurrent.mixes import run
from benchmarks.isolate import ROOT, heading, save
from jaxtensile.runtime.protocol.messages import Rung
from jaxtensile.runtime.simulate.jobs import Job

HERE = Path(__file__).parent
MODULE = "benchmarks.concurrent.real_mixes"
MIXES: Final = {"2 equal": (10, 10), "3 different": (8, 10, 12)}
"""Layers of each job's MLP."""
STEPS: Final = 12
ROUNDS: Final = 2
LIMIT: Final = 500.0
STRATEGIES: Final = ("ours", "equal split")
SAME: Final = 0.05
"""Relative difference of CPU times below which they are equal: what they differ by from round to round here."""


def program(layers: int) -> tuple[Any, Any, Any]:
    """A step, its state and the rest of its arguments."""
    import jax
    import jax.numpy as jnp

    def loss(weights: Any, x: Any, y: Any) -> Any:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - y) ** 2)

    def step(weights: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x, y)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    keys = jax.random.split(jax.random.key(0), layers)
    x = jax.random.normal(jax.random.key(1), (4096, 256))
    return step, [0.02 * jax.random.normal(key, (256, 256)) for key in keys], (x, jnp.sin(x))


def told(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def work(layers: int, name: str, budget: int | None) -> None:
    """One job's process: says when it is ready, begins when it is told to, says what its steps took."""
    import jax

    import jaxtensile

    fun, state, rest = program(layers)

    def steps(step: Any, state: Any) -> None:
        told(ready=True)
        sys.stdin.readline()
        began = time.process_time()
        for _ in range(STEPS):
            state, value = step(state, *rest)
            jax.block_until_ready(value)
        told(cpu=time.process_time() - began)
        sys.stdin.readline()

    if budget is not None:
        step = jaxtensile.jit(fun, budget=budget, donate_argnums=0, chunk=False)
        try:
            report = step.plan(state, *rest)
        except jaxtensile.BudgetError:
            told(refused=True)
            return
        use = report.compiled
        told(persistent=use.argument + use.output - use.alias, temp=use.temp)
        state, _ = step(state, *rest)
        steps(step, state)
        return
    with jaxtensile.job(name) as job:
        step = jaxtensile.jit(fun, job=job, donate_argnums=0, chunk=False)
        state, _ = step(state, *rest)
        job.wait()
        state, _ = step(state, *rest)
        steps(step, state)


def together(jobs: list[tuple[int, int | None]], capacity: int | None = None) -> list[dict[str, Any]]:
    """Jobs at once: layers and budget of each, None under a coordinator of ``capacity``."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        daemon = None
        if capacity is not None:
            config, place = Path(folder) / "jaxtensile.toml", Path(folder) / "d" / "c.sock"
            config.write_text(f"[device]\ncapacity = {capacity}\nreserve = 0\n[coordinator]\nmin_hold = '1s'\n")
            serve = ("serve", "--config", str(config), "--socket", str(place))
            daemon = subprocess.Popen([sys.executable, "-m", "jaxtensile", *serve], cwd=ROOT, env=environment)
            environment |= {"JAXTENSILE_SOCKET": str(place), "JAXTENSILE_CONFIG": str(config)}
            while not place.exists():
                time.sleep(0.02)
        try:
            processes = [
                subprocess.Popen(
                    [sys.executable, "-m", MODULE, "--work", str(layers), f"job{k}", str(budget or 0)],
                    cwd=ROOT,
                    env=environment,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
                for k, (layers, budget) in enumerate(jobs)
            ]
            found = [_until(p, "ready", "refused") for p in processes]
            for p in processes:
                _go(p)
            found = [f if "refused" in f else f | _until(p, "cpu") for f, p in zip(found, processes, strict=True)]
            for p in processes:
                _go(p)
                p.wait(LIMIT)
            return found
        finally:
            if daemon is not None:
                daemon.terminate()
                daemon.wait()


def _go(process: Any) -> None:
    try:
        process.stdin.write("\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it was refused, and has ended


def _until(process: Any, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in process.stdout:
        if line.startswith("{"):
            found |= json.loads(line)
            if any(word in found for word in words):
                return found
    raise SystemExit(f"a job ended early, status {process.wait()}")


def simulated(ladders: list[tuple[Rung, ...]], room: int, strategy: str) -> tuple[int, float]:
    """How many jobs run, and the seconds in steps of all."""
    jobs = [Job(name=f"job{k}", ladder=ladder, steps=STEPS) for k, ladder in enumerate(ladders)]
    outcomes, _ = run(jobs, room, strategy, 1.0)
    return len(outcomes), sum(n * o.job.ladder[k].seconds for o in outcomes for k, n in o.rungs.items())


def order(ours: tuple[int, float], split: tuple[int, float]) -> int:
    """-1: ours is ahead, 1: the other is, 0: they are equal."""
    if ours[0] != split[0]:
        return -1 if ours[0] > split[0] else 1
    if abs(ours[1] - split[1]) <= SAME * max(ours[1], split[1]):
        return 0
    return -1 if ours[1] < split[1] else 1


def mix(layers: tuple[int, ...]) -> dict[str, Any]:
    """One mix, measured and simulated."""
    plain = {n: together([(n, 1 << 40)])[0] for n in sorted({*layers})}
    room = int(sum(plain[n]["persistent"] for n in layers) + 1.05 * max(p["temp"] for p in plain.values()))
    part = room // len(layers)
    split = {n: together([(n, part)])[0] for n in sorted({*layers})}
    ladders: list[tuple[Rung, ...]] = []
    for n in layers:
        plans = {p["persistent"] + p["temp"]: p for p in (split[n], plain[n]) if "cpu" in p}
        ladders.append(
            tuple(
                Rung(persistent=plans[k]["persistent"], temp=plans[k]["temp"], seconds=plans[k]["cpu"] / STEPS)
                for k in sorted(plans)
            )
        )
    row: dict[str, Any] = {"room": room, "plain": plain, "split": split}
    for strategy in STRATEGIES:
        cpus: list[float] = []
        for _ in range(ROUNDS):
            ours = strategy == "ours"
            found = together([(n, None if ours else part) for n in layers], room if ours else None)
            cpus.append(sum(f.get("cpu", 0.0) for f in found))
            row[f"{strategy}: ran"] = sum("cpu" in f for f in found)
        row[strategy] = {"measured": sorted(cpus), "simulated": simulated(ladders, room, strategy)}
    return row


def table(result: dict[str, Any]) -> str:
    lines = [
        *heading("Real processes and the simulator", result["machine"], __doc__),
        f"Commit {result['commit']}.",
        "",
    ]
    lines += [
        "CPU seconds of all steps: median of the rounds (least, most), and simulated. In brackets, how many jobs ran.",
        "",
        "| mix | bytes | ours, measured | simulated | equal split, measured | simulated | same order |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in result["mixes"].items():
        cells: list[str] = []
        for s in STRATEGIES:
            low, middle, high = (row[s]["measured"][k] for k in (0, ROUNDS // 2, -1))
            cells.append(f"{middle:.1f} s ({low:.1f}, {high:.1f}) [{row[f'{s}: ran']}]")
            cells.append("{1:.1f} s [{0}]".format(*row[s]["simulated"]))
        real = order(*((row[f"{s}: ran"], row[s]["measured"][ROUNDS // 2]) for s in STRATEGIES))
        same = real == order(*(tuple(row[s]["simulated"]) for s in STRATEGIES))
        lines.append(f"| {name} | {row['room'] / 1e6:.0f} MB | {' | '.join(cells)} | {'yes' if same else 'no'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        layers, name, budget = options.work
        work(int(layers), name, int(budget) or None)
        return
    from benchmarks.machine import commit, describe

    result: dict[str, Any] = {"machine": describe(), "commit": commit(), "mixes": {}}
    for name, layers in MIXES.items():
        result["mixes"][name] = mix(layers)
        save(HERE / "real_mixes.json", result, table)
    print(table(result))


if __name__ == "__main__":
    main()
