"""What XLA allocates for the models of the zoo, for an H200 that is not there.

    python -m benchmarks.estimate.truth [--models NAME ...] [--only N] [--workers N] [--retry]

One row for every model, batch size and optimizer, in ``truth-jax<version>.json``, written as soon as it is known;
rows that are there are kept, so a run goes on where the last one stopped. A case that crashes or takes more than five
minutes of processor time is a row too, with ``crash``; ``--retry`` takes those again. Each model has a process of its
own for all its rows, and XLA keeps the kernels it has compiled in between: memory is assigned before there are
kernels, and nine tenths of the time are theirs. Bytes are those of ``jaxtensile.ir.plan.MemoryUse``: device = argument
+ output + temp - alias; ``equations`` counts the flat trace; ``trace_seconds`` is JAX's trace, ``seconds`` the
lowering and the compile by the clock, ``cpu_seconds`` by the processor, which other work does not stretch.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.isolate import streamed

HERE = Path(__file__).parent
MODULE = "estimate.truth"
TARGET = "nvidia-h200"
LIMIT_SECONDS = 300
DISTRIBUTIONS = ("transformers", "keras", "dm-haiku", "equimo", "flax", "equinox", "optax")

Case = tuple[int, str]
"""Batch size and optimizer."""


def measured(name: str, batch: int, optimizer: str, kernels: Path) -> dict[str, Any]:
    """The row of one case, in this process; ``kernels``: where compiled kernels are kept for the next case."""
    import jax

    from benchmarks.estimate import zoo
    from benchmarks.machine import kernel_cache, placed
    from jaxtensile.estimation.estimate import program_of
    from jaxtensile.xla.compile import compile_program
    from jaxtensile.xla.target import compiler_options

    workload = zoo.workload(name, batch, optimizer)
    args = placed(workload.args, TARGET)
    usual = {**compiler_options(TARGET), **kernel_cache(kernels)}
    step = jax.jit(workload.fun, **workload.jit_options, compiler_options=usual)
    started = time.perf_counter()
    traced = step.trace(*args)
    trace_seconds = time.perf_counter() - started
    equations = len(program_of(traced).equations)

    def make(options: Any) -> Any:
        # The first try is the object that was traced, which has its trace already.
        return step if options == usual else jax.jit(workload.fun, **workload.jit_options, compiler_options=options)

    before = processor_seconds()
    made = compile_program(make, args, {}, usual)
    row: dict[str, Any] = {"equations": equations, "trace_seconds": round(trace_seconds, 2)}
    row |= {"seconds": round(made.seconds, 2), "cpu_seconds": round(processor_seconds() - before, 2)}
    if made.notes:
        row["notes"] = list(made.notes)
    if made.memory is None:
        return {**row, "crash": made.refusal}
    m = made.memory
    sizes = {"argument": m.argument, "output": m.output, "temp": m.temp, "alias": m.alias, "host": m.host}
    return {"device": m.device, **sizes, **row}


def processor_seconds() -> float:
    """Of this process, with all its threads, and of the assemblers it has started."""
    done = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + done.ru_utime + done.ru_stime


def child(name: str, cases: Iterable[Case]) -> None:
    """Print the row of each case; the timer kills the process when one takes too long."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        for batch, optimizer in cases:
            signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)
            try:
                row = measured(name, batch, optimizer, Path(folder, "kernels"))
            except Exception as error:
                row = {"crash": f"{type(error).__name__}: {error}"[:600]}
            signal.setitimer(signal.ITIMER_PROF, 0)
            print(json.dumps(row), flush=True)
            jax.clear_caches()


class Store:
    """The rows of the result file, by model, batch size and optimizer."""

    def __init__(self, path: Path) -> None:
        from benchmarks.estimate import zoo
        from benchmarks.machine import describe

        self.path, self.lock = path, threading.Lock()
        self.models = zoo.models()
        self.halves = {name: zoo.half(model) for name, model in self.models.items()}
        self.rows = self.written()
        self.machine = {**describe(), "packages": {name: v for name in DISTRIBUTIONS if (v := installed(name))}}

    def written(self) -> dict[tuple[str, int, str], dict[str, Any]]:
        known = json.loads(self.path.read_text()) if self.path.exists() else {"rows": []}
        return {(r["model"], r["batch"], r["optimizer"]): r for r in known["rows"]}

    def put(self, name: str, case: Case, row: dict[str, Any]) -> None:
        """Keep a row, beside those that other runs have written meanwhile."""
        with self.lock:
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                self.rows |= self.written()
                self.rows[name, *case] = {**row, "date": self.machine["date"]}
                self.save()
            finally:
                os.close(folder)

    def save(self) -> None:
        """One row a line, in the order of the zoo; what the zoo no longer has is dropped."""
        head = json.dumps({"machine": self.machine, "target": TARGET, "limit_seconds": LIMIT_SECONDS}, indent=1)
        lines = [
            json.dumps({**self.about(name, case), **self.rows[name, *case], "half": self.halves[name]})
            for name, model in self.models.items()
            for case in cases_of(model)
            if (name, *case) in self.rows
        ]
        new = self.path.with_suffix(".new")
        new.write_text(head.rstrip("}\n") + ',\n "rows": [\n' + ",\n".join(lines) + "\n ]\n}\n")
        os.replace(new, self.path)

    def about(self, name: str, case: Case) -> dict[str, Any]:
        model = self.models[name]
        return {
            "model": name,
            "package": model.package,
            "family": model.family,
            "half": self.halves[name],
            "dtype": model.dtype,
            "batch": case[0],
            "optimizer": case[1],
        }


def installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def cases_of(model: Any) -> list[Case]:
    return [(batch, optimizer) for batch in model.batches for optimizer in model.optimizers]


def take(store: Store, name: str, cases: list[Case], told: Any) -> None:
    """All these cases of one model; after a crash, a new process goes on with the next case."""
    left = list(cases)
    while left:
        wanted = ",".join(f"{batch}:{optimizer}" for batch, optimizer in left)
        for row in streamed(MODULE, name, ("--cases", wanted)):
            if not left:  # a crash on the way out
                break
            if row.get("crash") == f"status {-signal.SIGPROF}":
                row = {"crash": f"not done in {LIMIT_SECONDS} s of processor time"}
            case = left.pop(0)
            store.put(name, case, row)
            told(name, case, row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these, or those of these packages")
    parser.add_argument("--only", type=int, metavar="N", help="stop after N cases")
    parser.add_argument("--workers", type=int, default=1, help="models at a time")
    parser.add_argument("--retry", action="store_true", help="take cases that crashed again")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        child(options.case, [(int(b), o) for b, _, o in (c.partition(":") for c in options.cases.split(","))])
        return
    from benchmarks.estimate import zoo
    from benchmarks.machine import describe

    store = Store(HERE / f"truth-jax{describe()['jax']}.json")
    chosen = options.models or list(store.models)
    names = [n for want in chosen for n, model in store.models.items() if want in (n, model.package)]
    todo = {}
    for name in names:
        if not zoo.available(store.models[name]):
            print(f"{name}: {store.models[name].requires} is not installed")
            continue
        rows = {case: store.rows.get((name, *case)) for case in cases_of(store.models[name])}
        todo[name] = [c for c, row in rows.items() if row is None or (options.retry and "crash" in row)]
    wanted = list(itertools.islice(((n, c) for n, cases in todo.items() for c in cases), options.only))
    started, done, lock = time.perf_counter(), itertools.count(1), threading.Lock()

    def told(name: str, case: Case, row: dict[str, Any]) -> None:
        with lock:
            number, spent = next(done), time.perf_counter() - started
            result = row.get("crash", "").strip().split("\n")[-1][:100] or f"{row['device'] / 2**20:,.0f} MiB"
            print(
                f"{number}/{len(wanted)} {name} {case[0]} {case[1]}: {result}, {row.get('seconds', 0):.0f} s; "
                f"{spent / 60:.0f} min, {spent / number * (len(wanted) - number) / 60:.0f} to go",
                flush=True,
            )

    with ThreadPoolExecutor(options.workers) as pool:
        grouped = itertools.groupby(wanted, key=lambda pair: pair[0])
        each = [pool.submit(take, store, name, [c for _, c in cases], told) for name, cases in grouped]
        for one in each:
            one.result()
    crashed = sum("crash" in row for row in store.rows.values())
    print(f"{len(store.rows)} rows, {crashed} of them crashes, in {store.path.name}")


if __name__ == "__main__":
    main()
