"""Is an exact estimate what XLA allocates? One step of each model of the zoo, for an H200 that is not there.

    python -m benchmarks.estimate.exact [MODEL ...]

The step of a model at its smallest batch with its first optimizer is compiled by JAX alone, and asked of
``jaxtensile.estimate(..., exact=True)``, which compiles it again. Bytes are argument + output + temp - alias of XLA's
``memory_analysis``. Rows are written as they come; those that are there are kept.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.estimate.truth import TARGET
from benchmarks.isolate import command, heading, isolated, save
from jaxtensile.ir.plan import MemoryUse

HERE = Path(__file__).parent
MODULE = "estimate.exact"
PARTS = ("argument", "output", "temp", "alias")


def case(name: str) -> dict[str, Any]:
    """One model, in this process."""
    import jax

    import jaxtensile
    from benchmarks.estimate import zoo
    from benchmarks.machine import placed
    from jaxtensile.xla.target import compiler_options

    model = zoo.models()[name]
    batch, optimizer = model.batches[0], model.optimizers[0]
    workload = zoo.workload(name, batch, optimizer)
    args = placed(workload.args, TARGET)
    step = jax.jit(workload.fun, **workload.jit_options, compiler_options=compiler_options(TARGET))
    row = {"model": name, "batch": batch, "optimizer": optimizer}
    told = step.lower(*args).compile().memory_analysis()
    xla = {part: int(getattr(told, f"{part}_size_in_bytes")) for part in PARTS}
    started = time.process_time()
    exact = jaxtensile.estimate(workload.fun, *workload.args, target=TARGET, exact=True, **workload.jit_options)
    row["cpu_seconds"] = round(time.process_time() - started, 1)
    return {**row, "xla": xla, "exact": {part: int(getattr(exact, part)) for part in PARTS}}


def table(result: dict[str, Any]) -> str:
    out = heading("Exact estimates", result["machine"], __doc__)
    out += ["| model | batch | optimizer | XLA, bytes | exact, bytes | |", "|---|---|---|---|---|---|"]
    rows = [row for row in result["rows"] if "xla" in row]
    for row in rows:
        xla, exact = (MemoryUse(**row[key]).device for key in ("xla", "exact"))
        verdict = "" if row["xla"] == row["exact"] else "**differs**"
        out.append(f"| {row['model']} | {row['batch']} | {row['optimizer']} | {xla:,} | {exact:,} | {verdict} |")
    equal = sum(row["xla"] == row["exact"] for row in rows)
    out += ["", f"Equal in {equal} of {len(rows)}, part by part."]
    out += [f"Without a program: {row['model']}: {row['crash'][-200:]}" for row in result["rows"] if "crash" in row]
    return "\n".join(out) + "\n"


def main() -> None:
    parser = command(__doc__, case)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all")
    options = parser.parse_args()
    from benchmarks.estimate import zoo
    from benchmarks.machine import describe

    machine = describe()
    path = HERE / f"exact-jax{machine['jax']}.json"
    known: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    for name in options.models or [name for name, model in zoo.models().items() if zoo.available(model)]:
        if any(row["model"] == name for row in known):
            continue
        known.append({"model": name, **isolated(MODULE, name, "model")})
        save(path, {"machine": machine, "target": TARGET, "rows": known}, table)
    print(table({"machine": machine, "target": TARGET, "rows": known}))


if __name__ == "__main__":
    main()
