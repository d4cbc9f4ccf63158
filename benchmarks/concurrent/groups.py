"""What does it cost to run a step in groups, and what does it spare those who wait?

    python -m benchmarks.concurrent.groups [--quick] [CASE ...]

*Cost*: steps of a GPT and of an MLP on this CPU, whole and in 2 to 16 groups that are each waited for, in turns so that
other work of the machine meets all alike; the median of the ratios within a turn. *Waiting*: an answer of some ms,
asked for at random, beside a training of some 500 ms a step in the same process; its wait beside the longest group, and
the training's steps. *GPU*: GPT-2 small compiled for an H200 that is not there: bytes of each group by XLA, and seconds
of the compiled kernels. *Values*: each workload's tiny training step in groups against the same step whole.

Results go to ``groups.json`` and ``groups.md``; ``--quick`` prints only.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.isolate import command, heading, isolated, save

HERE = Path(__file__).parent
MODULE = "concurrent.groups"
COUNTS = (2, 4, 8, 16)
TURNS = 9
"""Turns of each comparison; of each the median is told."""
SECONDS = 30.0
"""Of a training beside answers."""
EVERY = 0.15
"""Mean seconds between two questions."""
TARGET = "nvidia-h200"
LOAD = "Measured while other work kept the load of these 2 cores at 10 to 15."
"""Of what a clock says here."""
KEYS = ("step", "longest", "longest_beside", "answer", "p50", "p99", "worst")
"""Seconds of a case of waiting that are told."""


def mlp(width: int, layers: int, rows: int) -> tuple[Any, Any, Any]:
    """A training step of residual layers, its answers, and its arguments."""
    import jax
    import jax.numpy as jnp

    def predict(weights: Any, x: Any) -> Any:
        for w in weights:
            x = x + jax.nn.gelu(x @ w)
        return x

    def step(weights: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(lambda w: jnp.mean((predict(w, x) - y) ** 2))(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    weights = [jax.random.normal(key, (width, width)) / width for key in jax.random.split(jax.random.key(0), layers)]
    x = jax.random.normal(jax.random.key(1), (rows, width))
    return step, predict, (weights, x, jnp.sin(3 * x))


def gpt() -> tuple[Any, Any]:
    """A training step of a GPT whose step takes some 400 ms here, and its arguments."""
    import jax
    import jax.numpy as jnp

    from benchmarks import workloads

    module = workloads.load("gpt2_small")
    config = module.Config(layers=6, width=256, heads=8, vocab=2048, context=128, batch=8, compute=jnp.float32)
    return module.step(config), module.init_args(config, jax.random.key(0))


def cut(jitted: Any, args: Any, count: int, options: Any = None, room: float = 1.5) -> Any:
    """The step in so many groups; bytes as they come."""
    import jax

    from jaxtensile.groups.grouped import grouped
    from jaxtensile.spmd.location import profile_of
    from jaxtensile.xla.compile import memory_of

    needs = memory_of(jitted.lower(*args).compile()).device
    found = grouped(
        jitted,
        args,
        {},
        device=profile_of(jax.devices()[0]),
        options=options or {},
        count=count,
        needs=needs,
        most=int(room * needs),
    )
    if found.pieces is None:
        raise SystemExit(found.said)
    return found.pieces, needs


def cost(name: str) -> dict[str, Any]:
    """Seconds of a step in groups over those whole."""
    import jax
    import jax.numpy as jnp

    if name == "gpt":
        step, args = gpt()
    else:
        step, _, args = mlp(384, 10, 768)
    jitted = jax.jit(step, donate_argnums=0)
    runs: dict[int, Callable[[Any], Any]] = {1: lambda a: jitted(*a)}
    bytes_of: dict[int, float] = {}
    counts: dict[int, int] = {}
    for count in COUNTS:
        pieces, needs = cut(jitted, args, count)
        runs[count] = lambda a, pieces=pieces: pieces(jax.tree.leaves(a), lambda: None)
        bytes_of[count], counts[count] = pieces.device / needs, len(pieces.pieces)
    states = {count: jax.tree.map(jnp.copy, args) for count in runs}
    took: dict[int, list[float]] = {count: [] for count in runs}
    worked: dict[int, list[float]] = {count: [] for count in runs}
    for turn in range(TURNS + 1):
        for count in sorted(runs, key=lambda c: (c * 7 + turn * 5) % 11):
            began, used = time.perf_counter(), time.process_time()
            made = runs[count](states[count])
            jax.block_until_ready(made)
            if turn:
                took[count].append(time.perf_counter() - began)
                worked[count].append(time.process_time() - used)
            states[count] = (made[0], *args[1:])
    rows = {
        count: {
            "groups": counts[count],
            "clock": statistics.median(a / b for a, b in zip(took[count], took[1], strict=True)),
            "work": statistics.median(a / b for a, b in zip(worked[count], worked[1], strict=True)),
            "bytes": bytes_of[count],
        }
        for count in COUNTS
    }
    return {"case": f"cost-{name}", "step": statistics.median(took[1]), "rows": rows}


def waiting(groups: int) -> dict[str, Any]:
    """Waits of answers beside a training in so many groups, and what becomes of the training."""
    import jax
    import numpy as np

    import jaxtensile

    step, predict, (weights, x, y) = mlp(384, 10, 768)
    few = x[:40]
    stop, waits, done = threading.Event(), list[float](), list[float]()
    config = {"device": {"capacity": "2GiB", "reserve": 0}}
    with (
        jaxtensile.job("train", groups=groups, config=config) as train,
        jaxtensile.job("answer", priority=1, config=config) as answer,
    ):
        run = jaxtensile.jit(step, job=train, donate_argnums=0)
        say = jaxtensile.jit(predict, job=answer)
        mine = jax.tree.map(lambda w: w + 0, weights)
        state, _ = run(mine, x, y)
        say(weights, few)
        train.wait()
        answer.wait()

        def best(call: Callable[[], Any], times: int) -> float:
            found = []
            for _ in range(times):
                began = time.perf_counter()
                call()
                found.append(time.perf_counter() - began)
            return statistics.median(found)

        def once() -> None:
            nonlocal state
            state, _ = run(state, x, y)

        alone, answered = best(once, 8), best(lambda: say(weights, few), 30)
        longest = alone
        plans = [place.fitted for place in train._tenancy.ladders[0].places() if place.fitted is not None]
        pieces = plans[-1].pieces  # with so much room it is the last that runs
        if groups > 1:
            assert pieces is not None
            lengths: list[list[float]] = []
            for _ in range(6):
                marks = [time.perf_counter()]
                now = lambda marks=marks: marks.append(time.perf_counter())  # noqa: E731
                state, _ = pieces(jax.tree.leaves((state, x, y)), now)
                now()
                lengths.append([b - a for a, b in itertools.pairwise(marks)])
            longest = max(statistics.median(column) for column in zip(*lengths, strict=True))

        turn, pause, ran, longests = train._tenancy.turns[0], train._steps.between, list[float](), list[float]()

        def between() -> None:
            ran.append(time.perf_counter() - turn.since)
            pause()

        def training() -> None:
            train._steps.between = between
            while not stop.is_set():
                began = time.perf_counter()
                once()
                done.append(time.perf_counter() - began)
                longests.append(max([*ran, time.perf_counter() - turn.since]))
                ran.clear()

        thread = threading.Thread(target=training)
        random, ends = np.random.default_rng(0), time.perf_counter() + SECONDS
        began = time.perf_counter()
        thread.start()
        while time.perf_counter() < ends:
            time.sleep(float(random.exponential(EVERY)))
            asked = time.perf_counter()
            say(weights, few)
            waits.append(time.perf_counter() - asked - answered)
        stop.set()
        thread.join()
        lasted = time.perf_counter() - began
    ordered = sorted(waits)
    return {
        "case": f"waiting-{groups}",
        "groups": 1 if pieces is None else len(pieces.pieces),
        "step": alone,
        "answer": answered,
        "longest": longest,
        "longest_beside": statistics.median(longests),
        "questions": len(ordered),
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)],
        "worst": ordered[-1],
        "steps_per_second": len(done) / lasted,
        "of_alone": alone * len(done) / lasted,
    }


def gpu(count: int) -> dict[str, Any]:
    """GPT-2 small for a GPU that is not here, in so many groups."""
    import jax

    from benchmarks import machine, workloads
    from jaxtensile.devices.profiles import profile
    from jaxtensile.groups.grouped import compiled_at, table_of
    from jaxtensile.groups.step import step_of
    from jaxtensile.passes.groups.divide import cut as cuts_of
    from jaxtensile.xla.compile import memory_of
    from jaxtensile.xla.kernel_time import timed

    device, work = profile(TARGET), workloads.workload("gpt2_small")
    args = machine.placed(work.args, TARGET)
    jitted = jax.jit(work.fun, **work.jit_options)

    def seconds(executable: Any) -> float:
        found = timed(executable.as_text(), device)
        assert found is not None, "the kernels of this device are known"
        return found.seconds

    if count == 1:
        executable = jitted.lower(*args).compile()
        memory = memory_of(executable)
        return {
            "case": "gpu-1",
            "device": memory.device,
            "held": memory.argument,
            "seconds": seconds(executable),
            "rows": [{**_bytes(memory), "aside": 0, "device": memory.device, "seconds": seconds(executable)}],
        }
    step = step_of(jitted, args, {})
    if isinstance(step, str):
        raise SystemExit(step)
    began = time.perf_counter()
    table, again = table_of(step, device)
    cuts = cuts_of(table, count)
    assert cuts is not None
    decided = time.perf_counter() - began
    pieces = compiled_at(step, again, cuts, {}, count)
    rows = [
        {**_bytes(p.memory), "aside": p.aside, "device": p.device, "seconds": seconds(p.executable)}
        for p in pieces.pieces
    ]
    return {
        "case": f"gpu-{count}",
        "device": pieces.device,
        "predicted": max(table.nbytes[pair] for pair in table.pairs(cuts)),
        "held": pieces.held,
        "seconds": sum(row["seconds"] for row in rows),
        "deciding": decided,
        "compiling": time.perf_counter() - began - decided,
        "rows": rows,
    }


def _bytes(memory: Any) -> dict[str, int]:
    return {name: getattr(memory, name) for name in ("argument", "output", "temp", "alias")}


def values(name: str) -> dict[str, Any]:
    """A workload's tiny training step in four groups, against the same step whole."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks import workloads

    module = workloads.load(name)
    config, options = module.Config.tiny(), {"xla_backend_optimization_level": 0}
    args = module.init_args(config, jax.random.key(0))
    jitted = jax.jit(module.step(config), donate_argnums=0, compiler_options=options)
    pieces, needs = cut(jitted, args, 4, options)
    whole = jitted(*jax.tree.map(jnp.copy, args))
    parts = pieces(jax.tree.leaves(args))
    same, close, count = 0, list[Any](), 0
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            raise SystemExit(f"{a.dtype} {a.shape} became {b.dtype} {b.shape}")
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        same, count = same + bool((a == b).all()), count + 1
        close.append(np.isclose(a, b, rtol=2e-2, atol=2e-3).ravel())
    return {
        "case": f"values-{name}",
        "groups": len(pieces.pieces),
        "bytes": pieces.device / needs,
        "same": same,
        "results": count,
        "close": float(np.concatenate(close).mean()),
        "loss": abs(float(parts[1]) / float(whole[1]) - 1),
    }


def case(name: str) -> dict[str, Any]:
    """One case, in this process."""
    kind, _, what = name.partition("-")
    if kind in ("waiting", "gpu"):
        return (waiting if kind == "waiting" else gpu)(int(what))
    return (cost if kind == "cost" else values)(what)


def cases() -> list[str]:
    from benchmarks import workloads

    found = ["cost-gpt", "cost-mlp", *(f"waiting-{n}" for n in (1, 8, 16)), *(f"gpu-{n}" for n in (1, 4, 8, 16))]
    return found + [f"values-{name}" for name in workloads.NAMES]


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows = result["cases"]
    lines = heading("Steps in groups", result["machine"], __doc__)
    lines += [
        "A step in groups, each waited for, over the same step whole: CPU time, wall time, bytes.",
        "",
    ]
    lines += ["| step | whole | " + " | ".join(f"{n} groups" for n in COUNTS) + " |", "|---" * (2 + len(COUNTS)) + "|"]
    for name in ("gpt", "mlp"):
        if row := rows.get(f"cost-{name}"):
            cells = (
                f"{each['work']:.3f}, {each['clock']:.3f}, {each['bytes']:.2f}"
                for each in (row["rows"][k] for k in map(str, COUNTS))
            ) if "crash" not in row else [row["crash"][-60:]]  # fmt: skip
            lines.append(f"| {name} | {1e3 * row.get('step', 0):.0f} ms | {' | '.join(cells)} |")
    lines += ["", f"An answer beside a training in one process; its wait, without its own time. {LOAD}", ""]
    lines += [
        "| training in | step alone | longest group | beside answers | answer | questions | "
        "wait p50 | p99 | worst | p99 over longest beside answers | "
        "training, of alone | of whole steps |",
        "|---" * 12 + "|",
    ]
    first = rows.get("waiting-1")
    for row in (r for name, r in rows.items() if name.startswith("waiting-") and first and "crash" not in r):
        ms = {k: f"{1e3 * row[k]:.1f} ms" for k in KEYS}
        lines.append(
            f"| {row['groups']} | {ms['step']} | {ms['longest']} | {ms['longest_beside']} | {ms['answer']} | "
            f"{row['questions']} | {ms['p50']} | "
            f"{ms['p99']} | {ms['worst']} | {row['p99'] / row['longest_beside']:.2f} | {row['of_alone']:.3f} | "
            f"{row['of_alone'] / first['of_alone']:.3f} |"
        )
    lines += [
        "",
        f"GPT-2 small, batch 16 x 1024, whole step, compiled for `{TARGET}`; MB and seconds of its kernels.",
        "",
    ]
    lines += [
        "| groups | MB | of whole | predicted | longest group | seconds of all | over whole | between groups |",
        "|---" * 8 + "|",
    ]
    whole = rows.get("gpu-1")
    for row in (r for name, r in rows.items() if name.startswith("gpu-") and whole and "crash" not in r):
        longest = max(each["seconds"] for each in row["rows"])
        predicted = f"{row['predicted'] / 1e6:,.0f}" if "predicted" in row else ""
        lines.append(
            f"| {len(row['rows'])} | {row['device'] / 1e6:,.0f} | {row['device'] / whole['device']:.3f} | "
            f"{predicted} | {1e3 * longest:.1f} ms | {1e3 * row['seconds']:.2f} ms | "
            f"{row['seconds'] / whole['seconds'] - 1:+.1%} | "
            f"{row['held'] / 1e6:,.0f} MB |"
        )
    lines += ["", "Each group, in MB: arguments, results, temporaries, written over, waiting beside it, in use.", ""]
    for row in (r for name, r in rows.items() if name.startswith("gpu-") and name != "gpu-1" and "crash" not in r):
        lines.append(f"{len(row['rows'])} groups:")
        lines.append("")
        lines += ["| argument | output | temp | alias | aside | device | ms |", "|---" * 7 + "|"]
        for each in row["rows"]:
            cells = [f"{each[k] / 1e6:,.0f}" for k in ("argument", "output", "temp", "alias", "aside", "device")]
            lines.append(f"| {' | '.join(cells)} | {1e3 * each['seconds']:.2f} |")
        lines.append("")
    lines += ["Tiny training steps in groups against the same step whole, one step.", ""]
    lines += [
        "| workload | groups | bytes over whole | results equal bit for bit | numbers within 2 % | loss off by |",
        "|---" * 6 + "|",
    ]
    for name, row in rows.items():
        if name.startswith("values-"):
            told = (
                f"{row['groups']} | {row['bytes']:.2f} | {row['same']} of {row['results']} | {row['close']:.2%} | "
                f"{row['loss']:.1e}"
                if "crash" not in row
                else f"{row['crash'][-80:]} | | | |"
            )
            lines.append(f"| {name.removeprefix('values-')} | {told} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = command(__doc__, case)
    parser.add_argument("names", nargs="*", metavar="CASE", help="which; default: all")
    parser.add_argument("--quick", action="store_true", help="a few, printed only")
    options = parser.parse_args()
    chosen = options.names or (["cost-mlp", "values-lstm"] if options.quick else cases())
    path = HERE / "groups.json"
    known = json.loads(path.read_text())["cases"] if path.exists() and options.names else {}
    for name in chosen:
        row = isolated(MODULE, name, "case")
        print(json.dumps(row), flush=True)
        known[name] = row
        if not options.quick:
            from benchmarks.machine import describe

            order = [n for n in cases() if n in known]
            result = {"machine": describe(), "cases": {n: known[n] for n in order}}
            save(path, json.loads(json.dumps(result)), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
