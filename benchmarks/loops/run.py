"""Programs whose layers or time steps are loops, for an H200 and a TPU v5e that are not here.

    python -m benchmarks.loops.run [layers | STEPS-WORKLOAD ...] [--again]

``layers``: GPT-2 small with its twelve blocks in a ``lax.scan``, as a whole training step and as the blocks alone
(the gradient of their sum of squares): at the bytes of ``nothing_saveable`` on every block, at 200 MB less with
host memory, and for a v5e, which refuses the plain step.

``ode`` and ``lstm`` over 1,000 to 64,000 steps: the budget grows with the square root of the steps, from the
smallest that 1,000 steps are planned for at no more than twice the FLOPs. The LSTM's loss is taken step by step, so
that nothing but what loops stack grows with the steps.

Every case runs in a fresh process; results go to ``results-jax<version>.json`` and ``.md`` row by row; rows that
are there are not measured again without ``--again``. FLOPs are matrix and convolution FLOPs of the traced program;
device bytes are XLA's argument + output + temp - alias.
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.fit.run import HOST, TARGET, fit, plain
from benchmarks.isolate import command, isolated, save

HERE = Path(__file__).parent
MODULE = "loops.run"
TPU = "tpu-v5e"
LESS = 200_000_000
STEPS = (1000, 4000, 16000, 64000)
LONG: dict[str, tuple[str, dict[str, Any]]] = {"ode": ("steps", {}), "lstm": ("seq", {"loss_in_loop": True})}
"""The field of the config that holds the steps, and what else to set."""
SMALLER = 0.8
"""From budget to budget on the way down to the smallest of 1,000 steps."""
MOST = 2.0
"""FLOPs over those of the plain step."""


def blocks(remat: Any = None) -> Any:
    """The twelve scanned blocks of GPT-2 small alone, with the gradient of the sum of squares of what they make."""
    import jax
    import jax.numpy as jnp

    from benchmarks.workloads import gpt2
    from benchmarks.workloads.remat import checkpointed
    from jaxtensile.program.workload import Workload

    config = gpt2.Config(scan=True)
    block = checkpointed(partial(gpt2.block, heads=config.heads), remat, loop=True)

    def loss(params: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params)
        return (x.astype(jnp.float32) ** 2).sum()

    params = jax.eval_shape(partial(gpt2.init_params, config), jax.random.key(0))["blocks"]
    x = jax.ShapeDtypeStruct((config.batch, config.context, config.width), config.compute)
    return Workload(fun=jax.value_and_grad(loss), args=(params, x), jit_options={}, name="blocks")


def layered(name: str, remat: Any = None) -> Any:
    """``step``: the training step; ``blocks``."""
    from benchmarks import workloads

    return blocks(remat) if name == "blocks" else workloads.workload("gpt2_small", remat=remat, scan=True)


def layers(name: str) -> dict[str, Any]:
    """One program with scanned layers, in this process."""
    import jax

    as_it_is = plain(layered(name))
    by_hand = plain(layered(name, jax.checkpoint_policies.nothing_saveable))
    row = {"plain": as_it_is, "policy": by_hand, "ours": fit(layered(name), by_hand["device"])}
    row["less"] = fit(layered(name), by_hand["device"] - LESS, TARGET, HOST)
    return {**row, "tpu_plain": plain(layered(name), TPU), "tpu": fit(layered(name), None, TPU)}


def long(name: str, steps: int, budget: int | None) -> dict[str, Any]:
    """One workload over so many steps, in this process; without a budget the smallest that keeps to ``MOST``."""
    import jax

    from benchmarks import workloads

    field, others = LONG[name]
    sizes = {field: steps, **others}
    workload = workloads.workload(name, **sizes)
    as_it_is = plain(workload)
    by_hand = plain(workloads.workload(name, remat=jax.checkpoint_policies.nothing_saveable, **sizes))
    row = {"plain": as_it_is, "policy": by_hand}
    if budget is not None:
        return {**row, "ours": fit(workload, budget)}
    found, budget = None, by_hand["device"]
    while True:
        answer = fit(workload, budget)
        if not answer["fits"] or answer["flops"] > MOST * as_it_is["flops"]:
            return {**row, "ours": found or answer}
        found, budget = answer, int(SMALLER * answer["device"])


def case(name: str) -> dict[str, Any]:
    """``layers:NAME`` or ``WORKLOAD:STEPS:BUDGET``, in this process."""
    first, *rest = name.split(":")
    if first == "layers":
        return layers(rest[0])
    return long(first, int(rest[0]), int(rest[1]) if rest[1] else None)


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    m = result["machine"]
    lines = [
        f"# Loops, deviceless H200 and TPU v5e, jax {m['jax']}, Python {m['python']}, {m['cpus']} cores, {m['date']}",
        "",
        "MB (10^6 bytes) of argument + output + temp - alias as XLA allocates them; FLOPs relative to the plain one.",
        "",
        "## GPT-2 small, twelve scanned layers, batch 16 x 1024, bf16",
        "",
        "`step`: loss, gradients and Adam; `blocks`: the blocks alone and their gradient. No annotation in ours.",
        "",
        "| program | | MB | host MB | FLOPs |",
        "|---|---|---|---|---|",
    ]
    for name, row in result["layers"].items():
        if "crash" in row:
            lines.append(f"| {name} | crashed | | | |")
            continue
        base = row["plain"]
        lines.append(_line(name, "plain", base, base))
        lines.append(_line("", "`nothing_saveable` on every layer", row["policy"], base))
        lines.append(_line("", "`jaxtensile.jit` at its bytes", row["ours"], base))
        lines.append(_line("", "at 200 MB less, with host memory", row["less"], base))
        lines.append(_line("", "plain, TPU v5e", row["tpu_plain"], base))
        lines.append(_line("", "`jaxtensile.jit`, TPU v5e", row["tpu"], base))
    lines += [
        "",
        "## Steps",
        "",
        "Budgets from 4,000 steps on are that of 1,000 steps times the square root of the ratio; `growth`: compiled "
        "bytes over those of 1,000 steps, relative to that root (1 or less: as the square root or better).",
        "",
        "| workload | steps | plain MB | `nothing_saveable` MB | its FLOPs | our MB | our FLOPs | growth |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in result["steps"].items():
        first = rows.get(str(STEPS[0]), {}).get("ours", {})
        for steps, row in rows.items():
            if "crash" in row:
                lines.append(f"| {name} | {int(steps):,} | crashed | | | | | |")
                continue
            base, policy, ours = row["plain"], row["policy"], row["ours"]
            head = f"| {name} | {int(steps):,} | {_mb(base)} | {_mb(policy)} | {policy['flops'] / base['flops']:.4f} "
            if not ours["fits"]:
                lines.append(head + f"| **does not fit** {ours['budget'] / 1e6:,.1f}, needs {_mb(ours)} | | |")
                continue
            growth = ours["device"] / first["device"] / math.sqrt(int(steps) / STEPS[0])
            lines.append(head + f"| {_mb(ours)} | {ours['flops'] / base['flops']:.4f} | {growth:.2f} |")
    return "\n".join(lines) + "\n"


def _mb(row: dict[str, Any]) -> str:
    return (
        f"{row['device'] / 1e6:,.1f}"
        if "device" in row
        else f"{row['needs'] / 1e6:,.1f}"
        if "needs" in row
        else "refused"
    )


def _line(name: str, what: str, row: dict[str, Any], base: dict[str, Any]) -> str:
    if row.get("refusal"):
        return f"| {name} | {what} | refused: {row['refusal'].partition(':')[0]} | | |"
    if row.get("fits") is False:
        return f"| {name} | {what} | **does not fit** {row['budget'] / 1e6:,.1f}, needs {_mb(row)} | | |"
    return f"| {name} | {what} | {_mb(row)} | {row['host'] / 1e6:,.1f} | {row['flops'] / base['flops']:.4f} |"


def main() -> None:
    parser = command(__doc__, case)
    parser.add_argument("names", nargs="*", help=f"layers, {', '.join(LONG)}; default: all")
    parser.add_argument("--again", action="store_true", help="measure what is there already")
    options = parser.parse_args()
    from benchmarks.machine import describe

    machine = describe()
    path = HERE / f"results-jax{machine['jax']}.json"
    result: dict[str, Any] = {"layers": {}, "steps": {}, **(json.loads(path.read_text()) if path.exists() else {})}
    result["machine"] = machine

    def run(rows: dict[str, Any], key: str, name: str) -> None:
        if options.again or "crash" in rows.get(key, {"crash": ""}):
            rows[key] = {**isolated(MODULE, name), "date": machine["date"]}
            save(path, result, table)

    names = options.names or ["layers", *LONG]
    for name in ("step", "blocks") if "layers" in names else ():
        run(result["layers"], name, f"layers:{name}")
    for name in [n for n in names if n in LONG]:
        rows = result["steps"].setdefault(name, {})
        run(rows, str(STEPS[0]), f"{name}:{STEPS[0]}:")
        first = rows[str(STEPS[0])].get("ours", {}).get("device")
        for steps in STEPS[1:] if first else ():
            run(rows, str(steps), f"{name}:{steps}:{int(first * math.sqrt(steps / STEPS[0]))}")
    print(table(result))


if __name__ == "__main__":
    main()
