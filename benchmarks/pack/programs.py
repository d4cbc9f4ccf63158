"""Does the fast packer ever take more than XLA's own heap, for the temporaries of real programs?

    python -m benchmarks.pack.programs [WORKLOAD ...]

The suite's train steps for an H200 as the static estimate sees them: what XLA adds, fused, in XLA's order. Their
temporaries are packed as XLA does it (``passes.heap``: best fit by descending size) and by ``passes.pack``; beside both
the most bytes that are live at once, which no packing is below. CPU seconds of one run each.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.isolate import command, heading, isolated, save

HERE = Path(__file__).parent
MODULE = "pack.programs"


def case(name: str) -> dict[str, Any]:
    """One program, in this process."""
    import jax

    from benchmarks import workloads
    from jaxtensile.estimation.estimate import program_of
    from jaxtensile.passes.lowering.lowered import lowered
    from jaxtensile.passes.order.reorder import as_scheduled
    from jaxtensile.passes.pack.best_fit import best_fit
    from jaxtensile.passes.pack.buffers import max_load
    from jaxtensile.passes.pack.heap import temporaries
    from jaxtensile.passes.pack.pack import pack
    from jaxtensile.passes.verify.pack_check import faults

    module = workloads.load(name)
    workload = module.workload(module.Config())
    traced = jax.jit(workload.fun, **workload.jit_options).trace(*workload.args)
    buffers = temporaries(as_scheduled(lowered(program_of(traced).graph).graph)[0].live)
    row: dict[str, Any] = {"workload": name, "buffers": len(buffers), "load": max_load(buffers)}
    for packer in (best_fit, pack):
        started = time.process_time()
        packed = packer(buffers)
        row[packer.__name__] = {"height": packed.height, "seconds": time.process_time() - started}
        assert not faults(buffers, packed)
    return row


def table(result: dict[str, Any]) -> str:
    out = [
        *heading("The temporaries of programs, packed", result["machine"], __doc__),
        "| program | buffers | load, MB | XLA's heap / load | s | packed / load | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if "crash" in row:
            out.append(f"| {row['workload']} | {row['crash'][-80:]} | | | | | |")
            continue
        cells = " | ".join(
            f"{row[by]['height'] / row['load']:.4f} | {row[by]['seconds']:.2f}" for by in ("best_fit", "pack")
        )
        out.append(f"| {row['workload']} | {row['buffers']:,} | {row['load'] / 1e6:,.1f} | {cells} |")
    known = [row for row in result["rows"] if "crash" not in row]
    worse = [row["workload"] for row in known if row["pack"]["height"] > row["best_fit"]["height"]]
    out += ["", f"Above XLA's heap in {len(worse)} of {len(known)}{': ' + ', '.join(worse) if worse else ''}."]
    return "\n".join(out) + "\n"


def main() -> None:
    parser = command(__doc__, case)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD")
    options = parser.parse_args()
    from benchmarks import workloads
    from benchmarks.machine import describe

    machine = describe()
    names = options.workloads or list(workloads.NAMES)
    result = {"machine": machine, "rows": [isolated(MODULE, name) for name in names]}
    if not options.workloads:
        save(HERE / f"programs-jax{machine['jax']}.json", result, table)
    print(table(result))


if __name__ == "__main__":
    main()
