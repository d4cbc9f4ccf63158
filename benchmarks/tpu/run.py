"""Steps that a TPU v5e refuses, and what becomes of them: no TPU needed.

    python -m benchmarks.tpu.run [WORKLOAD ...]

Every workload of the suite is compiled for a v5e by libtpu. Those that it refuses (out of memory:
16 GiB, 15.75 of them for programs) are planned for the device's capacity less 1 GiB and compiled
again. Every case runs in a fresh process; results go to ``results-jax<version>.json`` and ``.md``.
FLOPs are matrix and convolution FLOPs of the traced program.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TARGET = "tpu-v5e"


def case(name: str) -> dict[str, Any]:
    """One workload, in this process."""
    import jax
    from jax.sharding import SingleDeviceSharding

    import jaxtensile
    from benchmarks import workloads
    from jaxtensile.compile import compile_program
    from jaxtensile.target import compiler_options, resolve
    from jaxtensile.trace import jaxpr_flops

    work = workloads.workload(name)
    sharding = SingleDeviceSharding(resolve(TARGET))
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), work.args)

    def make(options: Any) -> Any:
        return jax.jit(work.fun, **work.jit_options, compiler_options=dict(options) or None)

    plain = compile_program(make, args, {}, compiler_options(TARGET))
    flops = jaxpr_flops(jax.jit(work.fun, **work.jit_options).trace(*work.args).jaxpr)
    row: dict[str, Any] = {"workload": name, "plain_seconds": plain.seconds, "refusal": plain.refusal}
    if plain.memory is not None:
        return {**row, "plain": plain.device}
    step = jaxtensile.jit(work.fun, target=TARGET, **work.jit_options)
    started = time.perf_counter()
    try:
        report = step.plan(*work.args)
    except jaxtensile.BudgetError as error:
        return {**row, "error": str(error), "needs": error.needs}
    return {
        **row,
        "budget": report.budget,
        "predicted_plain": report.baseline.device,
        "device": report.compiled.device,
        "flops": jaxpr_flops(step.trace(*work.args).jaxpr) / flops if flops else 1.0,
        "rounds": report.rounds,
        "wall_seconds": time.perf_counter() - started,
    }


def isolated(name: str) -> dict[str, Any]:
    """The case in a fresh process; a crash is a result too."""
    print(f"{name} …", flush=True)
    command = [sys.executable, "-m", "benchmarks.tpu.run", "--case", name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent.parent)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"workload": name, "crash": (done.stderr or done.stdout)[-2000:]}
    return json.loads(lines[-1])


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    m = result["machine"]
    lines = [
        f"# Steps for a TPU v5e that is not here, jax {m['jax']}, Python {m['python']}, {m['cpus']} cores, {m['date']}",
        "",
        "MB (10^6 bytes) of argument + output + temp - alias; FLOPs relative to the plain step.",
        "",
        "| workload | plain | budget MB | planned MB | FLOPs | rounds |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if "crash" in row:
            lines.append(f"| {row['workload']} | crashed | | | | |")
        elif not row["refusal"]:
            lines.append(f"| {row['workload']} | fits: {row['plain'] / 1e6:,.0f} | | | | |")
        elif "error" in row:
            lines.append(f"| {row['workload']} | refused | | does not fit, needs {row['needs'] / 1e6:,.0f} | | |")
        else:
            lines.append(
                f"| {row['workload']} | refused | {row['budget'] / 1e6:,.0f} | {row['device'] / 1e6:,.0f} "
                f"| {row['flops']:.4f} | {row['rounds']} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="workloads; default: all")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(options.case)))
        return
    from benchmarks import workloads
    from benchmarks.machine import describe

    machine = describe()
    path = HERE / f"results-jax{machine['jax']}.json"
    known = json.loads(path.read_text()) if path.exists() else {"rows": []}
    rows = {row["workload"]: row for row in known["rows"]}
    for name in options.names or workloads.NAMES:
        rows[name] = isolated(name)
        result = {
            "machine": machine,
            "target": TARGET,
            "rows": [rows[n] for n in workloads.NAMES if n in rows],
        }
        path.write_text(json.dumps(result, indent=1) + "\n")
        path.with_suffix(".md").write_text(table(result))
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
