"""How long does a static estimate take, against the size of the program?

    python -m benchmarks.estimate.speed [--quick] [LAYERS ...]

GPT-2 train steps of 3 to 122 layers (batch 16 x 1024, bf16, Adam) for an H200, with and without donation. Everything
between JAX's own trace and the figure: the flat program, what XLA adds to it, fusion, three schedules, the memory of
results, and the heap. Every size runs in a fresh process; CPU seconds of that process, the least of three runs. JAX's
trace is shown beside it. Targets: 1 s for 4,000 equations, 10 s for 50,000.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.isolate import heading, isolated, save

HERE = Path(__file__).parent
MODULE = "estimate.speed"
LAYERS = (3, 9, 30, 122)
QUICK = (3, 9)
RUNS = 3


def case(layers: int) -> dict[str, Any]:
    """One size, in this process."""
    import jax

    from benchmarks.workloads import gpt2
    from jaxtensile.devices.profiles import profile
    from jaxtensile.estimation.estimate import program_of, static_estimate

    device = profile("nvidia-h200")

    def once(layers: int, donated: bool) -> tuple[float, float, int]:
        workload = gpt2.workload(gpt2.Config(layers=layers))
        options = workload.jit_options if donated else {}
        start = time.process_time()
        traced = jax.jit(workload.fun, **options).trace(*workload.args)
        trace = time.process_time()
        program = program_of(traced)
        static_estimate(program, device, name="gpt2", seconds={})
        return trace - start, time.process_time() - trace, len(program.equations)

    once(1, True)  # imports and first uses
    row: dict[str, Any] = {"layers": layers}
    for name, donated in (("donated", True), ("kept", False)):
        runs = [once(layers, donated) for _ in range(RUNS)]
        row |= {"equations": runs[0][2], "trace": min(r[0] for r in runs), name: min(r[1] for r in runs)}
    return row


def table(result: dict[str, Any]) -> str:
    out = [
        *heading("How long a static estimate takes", result["machine"], __doc__),
        "| layers | equations | JAX's trace, s | estimate, s | without donation, s |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if "crash" in row:
            out.append(f"| {row['layers']} | {row['crash'][-80:]} | | | |")
            continue
        times = " | ".join(f"{row[key]:.2f}" for key in ("trace", "donated", "kept"))
        out.append(f"| {row['layers']} | {row['equations']:,} | {times} |")
    return "\n".join(out) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", type=int, metavar="LAYERS")
    parser.add_argument("--quick", action="store_true", help="up to 9 layers, printed only")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(options.case)))
        return
    from benchmarks.machine import describe

    machine = describe()
    rows = [isolated(MODULE, str(n), "layers") for n in options.layers or (QUICK if options.quick else LAYERS)]
    result = {"machine": machine, "rows": rows}
    if not (options.quick or options.layers):
        save(HERE / f"speed-jax{machine['jax']}.json", result, table)
    print(table(result))


if __name__ == "__main__":
    main()
