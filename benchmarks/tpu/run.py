"""Steps that a TPU v5e refuses, and what becomes of them: no TPU needed.

    python -m benchmarks.tpu.run [WORKLOAD ...]

Every workload of the suite is compiled for a v5e by libtpu; where it fits, with twice and four
times the batch too. What is refused (out of memory: 16 GiB, 15.75 of them for programs) is planned
for the device's capacity less 1 GiB and compiled again, and where that does not fit with ``HOST`` bytes of the host as
well. Every case runs in a fresh process; results
go to ``results-jax<version>.json`` and ``.md``. FLOPs are matrix and convolution FLOPs of the
traced program.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.fit.run import HOST, fit, plain
from benchmarks.isolate import command, isolated, save

HERE = Path(__file__).parent
MODULE = "tpu.run"
TARGET = "tpu-v5e"
TIMES = (1, 2, 4)


def case(name: str) -> dict[str, Any]:
    """One workload, in this process."""
    from benchmarks import workloads

    batch = workloads.load(name).Config().batch
    fitting: dict[str, Any] | None = None
    for times in TIMES:
        workload = workloads.workload(name, batch=times * batch)
        as_it_is = {"batch": times * batch, **plain(workload, TARGET)}
        if as_it_is["refusal"]:
            planned = fit(workload, None, TARGET)
            hosted = None if planned["fits"] else fit(workload, None, TARGET, HOST, offload_state=True)
            return {"workload": name, "fitting": fitting, "plain": as_it_is, "fit": planned, "hosted": hosted}
        fitting = as_it_is
    return {"workload": name, "fitting": fitting, "plain": fitting, "fit": None}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    m = result["machine"]
    lines = [
        f"# Steps for a TPU v5e that is not here, jax {m['jax']}, Python {m['python']}, {m['cpus']} cores, {m['date']}",
        "",
        "MB (10^6 bytes) of argument + output + temp - alias; FLOPs of the traced program relative to the plain step: "
        "what XLA:TPU computes again by itself is not among them.",
        "",
        f"Where no plan fits: with a `host_budget` of {HOST >> 30} GiB and `offload_state=True`.",
        "",
        "| workload | fits as it is, MB (batch) | refused at | budget MB | planned MB | host MB | FLOPs | rounds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if "crash" in row:
            lines.append(f"| {row['workload']} | crashed | | | | | | |")
            continue
        known, alone = row["fitting"], row["fit"]
        fits = f"{known['device'] / 1e6:,.0f} ({known['batch']:,})" if known else ""
        head = f"| {row['workload']} | {fits} "
        if alone is None:
            lines.append(head + "| none tried | | | | | |")
            continue
        head += f"| {row['plain']['batch']:,} | {alone['budget'] / 1e6:,.0f} "
        hosted = row.get("hosted")
        short = "" if alone["fits"] else f"does not fit, needs {alone['needs'] / 1e6:,.0f}"
        ours = hosted if hosted is not None and hosted["fits"] else alone
        if ours["fits"]:
            share = ours["flops"] / row["plain"]["flops"] if row["plain"]["flops"] else 1.0
            there = f"{ours['host'] / 1e6:,.0f}" + (f" (else {short})" if short else "")
            lines.append(head + f"| {ours['device'] / 1e6:,.0f} | {there} | {share:.4f} | {ours['rounds']} |")
        else:
            with_host = "not measured" if hosted is None else f"needs {hosted['needs'] / 1e6:,.0f}"
            lines.append(head + f"| {short}, with the host: {with_host} | | | |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = command(__doc__, case)
    parser.add_argument("names", nargs="*", help="workloads; default: all")
    options = parser.parse_args()
    from benchmarks import workloads
    from benchmarks.machine import describe

    machine = describe()
    path = HERE / f"results-jax{machine['jax']}.json"
    known = json.loads(path.read_text()) if path.exists() else {"rows": []}
    rows = {row["workload"]: row for row in known["rows"]}
    for name in options.names or workloads.NAMES:
        rows[name] = isolated(MODULE, name)
        result = {
            "machine": machine,
            "target": TARGET,
            "rows": [rows[n] for n in workloads.NAMES if n in rows],
        }
        save(path, result, table)
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
