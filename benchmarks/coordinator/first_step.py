"""How long until the first step of each job, when several start at once and there is not room for all as they are?

    python -m benchmarks.coordinator.first_step [--jobs N ...] [--rounds N] [--timeline]

Training steps of a small GPT in processes of their own, under ``jaxtensile serve`` with room for one and a half of the
program as it is. Beside them as many plain programs that start at once, without a coordinator and with room for all:
the target is 1.3 times what the last of those takes. Losses are compared. Times are wall times of calls from the first
to the end of the first step, compiles included, on a machine that does nothing else. What a job takes of the CPUs until
then says the same where the machine does something else: all cores are at work until all have had their first step.
Both are started in turn, so many rounds, the one that goes first changing; judged is the median of the rounds' ratios.

Results go to ``first_step.json`` and ``first_step.md``; ``--timeline`` prints what each job did when, only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.isolate import ROOT, heading, save

HERE = Path(__file__).parent
MODULE = "benchmarks.coordinator.first_step"
ROOM = 1.5
JOBS = (1, 3, 6)
STEPS = 12
TARGET = 1.3
ROUNDS = 3
LIMIT = 900.0
WHY = (
    "Jobs take turns with their steps, so that each runs its first step as it is. Of six jobs five are there as they "
    "are, with their states and the temporaries of one; the sixth waits until these have run a step, one after another,"
    " and have gone to smaller plans. The steps of all take longer than plain ones, which have room for all: one runs "
    "at a time, and beside it others compile the plans that they may have to go to. What it took, from 107 s for three "
    "jobs and 4.1 times for six: the first plan that fits by the model is taken where somebody waits, without a second "
    "round and without the plain program; a job is admitted with two predictions, and what was predicted is not "
    "searched for again; a job that compiles goes where it is told to be, and runs what is compiled meanwhile; in two "
    "cores one job at a time compiles ahead; turns (to 2.5 times for six); a job that waits for its first turn stays "
    "where its plan is compiled (to 1.6), and sleeps meanwhile: four that waited took two cores from the one that ran "
    "(to 1.3 and less); smaller plans are predicted once the first step has run, beside compiles only after 20 s (on "
    "one machine from 1.40 to 1.18 for three, from 1.32 to 1.27 for six)."
)
"""Of what the figures say, and how they came about."""
CONFIG = """[device]
capacity = {capacity}
reserve = 0
[coordinator]
on_overdue = "terminate"
"""


def one(name: str, coordinated: bool, timed: bool) -> dict[str, Any]:
    """Train in this process: seconds of the first step and of all, and losses."""
    import jax

    import jaxtensile
    from benchmarks.workloads import gpt2

    config = gpt2.Config(layers=4, width=256, heads=4, vocab=2048, context=256, batch=8, compute=jax.numpy.float32)
    state, tokens = gpt2.init_args(config, jax.random.key(0))
    jax.block_until_ready(state)
    losses: list[float] = []
    took = cpu = 0.0
    lines: list[Any] = []
    if timed:  # else what it imports would not be counted
        from benchmarks.coordinator.timeline import record

        lines = record()

    def train(step: Any, state: Any) -> None:
        nonlocal took, cpu
        began = time.monotonic()
        for _ in range(STEPS):
            state, loss = step(state, tokens)
            losses.append(float(loss))
            took = took or time.monotonic() - began
            cpu = cpu or time.process_time() - before

    began, before = time.monotonic(), time.process_time()
    if coordinated:
        with jaxtensile.job(name) as job:
            train(jaxtensile.jit(gpt2.step(config), job=job, donate_argnums=0), state)
    else:
        train(jax.jit(gpt2.step(config), donate_argnums=0), state)
    found = {"first": round(took, 1), "cpu": round(cpu, 1), "all": round(time.monotonic() - began, 1), "losses": losses}
    return {**found, "lines": lines} if timed else found


def needs() -> int:
    """Device bytes of the program as it is."""
    import jax

    import jaxtensile
    from benchmarks.workloads import gpt2

    config = gpt2.Config(layers=4, width=256, heads=4, vocab=2048, context=256, batch=8, compute=jax.numpy.float32)
    work = gpt2.workload(config)
    return jaxtensile.estimate(work.fun, *work.args, exact=True, **work.jit_options).device


def together(count: int, capacity: int | None, *options: str) -> list[dict[str, Any]]:
    """So many at once; ``capacity``: of the device, None without a coordinator."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAXTENSILE_PLAN_CACHE": "off"}
    with tempfile.TemporaryDirectory() as name:
        folder, daemon = Path(name), None
        if capacity is not None:
            config, place = folder / "jaxtensile.toml", folder / "d" / "c.sock"
            config.write_text(CONFIG.format(capacity=capacity))
            serve = ("serve", "--config", str(config), "--socket", str(place))
            daemon = subprocess.Popen([sys.executable, "-m", "jaxtensile", *serve], cwd=ROOT, env=environment)
            environment |= {"JAXTENSILE_SOCKET": str(place), "JAXTENSILE_CONFIG": str(config)}
            while not place.exists():
                time.sleep(0.02)
        kind = "plain" if capacity is None else "job"
        command = [sys.executable, "-m", MODULE, *options, "--one"]
        jobs = [
            subprocess.Popen([*command, f"{kind}{k}"], cwd=ROOT, env=environment, stdout=subprocess.PIPE)
            for k in range(count)
        ]
        out: list[dict[str, Any]] = []
        for job in jobs:
            try:
                told, _ = job.communicate(timeout=LIMIT)
            except subprocess.TimeoutExpired:
                job.kill()
                told, _ = job.communicate()
            lines = [line for line in told.decode().splitlines() if line.startswith("{")]
            out.append(json.loads(lines[-1]) if lines else {"failed": job.returncode})
        if daemon is not None:
            daemon.terminate()
            daemon.wait()
        return out


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        *heading("First steps of jobs that start at once", result["machine"], __doc__),
        f"One program as it is needs {result['needs'] / 1e6:,.0f} MB; there is room for {ROOM} of it. Figures of "
        "several rounds are separated by strokes.",
        "",
        "| jobs | plain: last first step, s | coordinated: last first step, s | coordinated: first steps in the last "
        "round, s | ratios | median | target | CPU, plain | CPU, coordinated | all steps, plain | all steps, "
        "coordinated | losses |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for count, rounds in result["jobs"].items():
        failed = sum("failed" in r for rows in rounds for side in rows.values() for r in side)
        if failed:
            lines.append(f"| {count} | {failed} of the jobs failed |" + " |" * 10)
            continue
        sides = [[rows[side] for rows in rounds] for side in ("plain", "coordinated")]
        last = [[max(r["first"] for r in rows) for rows in side] for side in sides]
        ratios = [b / a for a, b in zip(*last, strict=True)]
        cpu = [statistics.median(r["cpu"] for rows in side for r in rows) for side in sides]
        whole = [statistics.median(max(r["all"] for r in rows) for rows in side) for side in sides]
        worst = max(
            abs(a / b - 1)
            for rows in rounds
            for p, o in zip(rows["plain"], rows["coordinated"], strict=True)
            for a, b in zip(o["losses"], p["losses"], strict=True)
        )
        told = "equal" if not worst else f"within {worst:.0e}"
        cells = [" / ".join(f"{s:.1f}" for s in side) for side in last]
        steps = ", ".join(f"{s:.1f}" for s in sorted(r["first"] for r in sides[1][-1]))
        each = " / ".join(f"{ratio:.2f}" for ratio in ratios)
        lines.append(
            f"| {count} | {cells[0]} | {cells[1]} | {steps} | {each} | {statistics.median(ratios):.2f} × | "
            f"{TARGET} × | {cpu[0]:.1f} s | {cpu[1]:.1f} s | {whole[0]:.0f} s | {whole[1]:.0f} s | {told} |"
        )
    return "\n".join([*lines, "", WHY]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, nargs="*", default=JOBS)
    parser.add_argument("--rounds", type=int, default=ROUNDS, choices=range(1, 100), metavar="N", help="at least 1")
    parser.add_argument("--timeline", action="store_true", help="print what each job did when, only")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options.one.startswith("job"), options.timeline)))
        return
    if options.timeline:
        from benchmarks.coordinator.timeline import merged

        for count in options.jobs:
            rows = together(count, int(ROOM * needs()), "--timeline")
            print(merged({f"job{k}": row["lines"] for k, row in enumerate(rows)}))
        return
    from benchmarks.machine import describe

    path = HERE / "first_step.json"
    known = json.loads(path.read_text())["jobs"] if path.exists() else {}
    size = needs()
    result: dict[str, Any] = {"machine": describe(), "needs": size, "jobs": known}
    for count in options.jobs:
        rounds: list[dict[str, Any]] = []
        for number in range(options.rounds):
            print(f"{count} jobs, round {number + 1} of {options.rounds} …", flush=True)
            sides = {"plain": None, "coordinated": int(ROOM * size)}
            order = list(sides) if number % 2 == 0 else list(sides)[::-1]
            rounds.append({side: together(count, sides[side]) for side in order})
        known[str(count)] = rounds
        save(path, result, table)
    print(table(result))


if __name__ == "__main__":
    main()
