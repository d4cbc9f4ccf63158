"""Are sums over rows that are worked on in parts as good as those of the whole?

    python -m benchmarks.parts.run [WORKLOAD ...]

Small sizes of the suite on a CPU. The loss and the optimizer's moments, which are sums of gradients over the batch, of
one step as it is and of the step in parts, against the step in float64: relative norm of the error, of the loss over
``SEEDS`` batches, of the moments over all of their leaves too. Results go to ``results.json`` and ``results.md``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import workloads
from benchmarks.isolate import heading, save
from benchmarks.machine import describe

HERE: Final = Path(__file__).parent
SEEDS: Final = 8
DTYPES: Final = ("float32", "bfloat16")
SHARES: Final = (0.4, 0.2, 0.1, 0.05)
"""Of what the step needs above its arguments: budgets that are tried until one is met in parts."""


def configs(name: str) -> dict[str, Any]:
    """The small sizes of a workload by what it computes in; one where it has no choice."""
    config = workloads.load(name).Config.tiny()
    if "batch" in {f.name for f in fields(config)}:
        config = replace(config, batch=max(config.batch, 8))
    if "compute" not in {f.name for f in fields(config)}:
        return {"as written": config}
    return {dtype: replace(config, compute=jnp.dtype(dtype)) for dtype in DTYPES}


@contextmanager
def float64() -> Iterator[None]:
    """While a step is traced: it computes in float64 where the model asks for less by name, too."""
    named = {name: getattr(jnp, name) for name in DTYPES}
    try:
        for name in named:
            setattr(jnp, name, jnp.float64)
        with jax.enable_x64(True):
            yield
    finally:
        for name, dtype in named.items():
            setattr(jnp, name, dtype)


def wide(x: Any) -> Any:
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def moments(out: Any) -> list[np.ndarray[Any, Any]]:
    """The loss, and what of the new state are sums of gradients."""
    state, loss = out
    rest = {key: value for key, value in state.items() if key not in ("params", "ema", "key", "batch_stats", "carry")}
    leaves = [x for x in jax.tree.leaves(rest) if jnp.issubdtype(x.dtype, jnp.floating) and x.size > 1]
    return [np.asarray(x, np.float64) for x in (loss, *leaves)]


def errors(name: str, dtype: str, config: Any) -> dict[str, Any] | None:
    """Of one workload; None where no rows are found."""
    import jaxtensile
    from jaxtensile.xla.compile import memory_of

    module = workloads.load(name)
    step = module.step(config)
    args = module.init_args(config, jax.random.key(0))
    plain = jax.jit(step)
    memory = memory_of(plain.lower(*args).compile())
    parted, parts = None, 0
    for share in SHARES:
        budget = int(memory.device - (1 - share) * memory.temp)
        tried = jaxtensile.jit(step, budget=budget, chunk=True, objective="flops")
        try:
            notes = tried.plan(*args).notes
        except jaxtensile.BudgetError:
            continue
        told = next((note for note in notes if " parts, " in note), None)
        if told is not None:
            parted, parts = tried, int(told.split(" parts, ")[0].rsplit(" ", 1)[1])
            break
    if parted is None:
        return None
    with float64():
        exact_config = replace(config, compute=jnp.dtype("float64")) if "compute" in vars(config) else config
        exact = jax.jit(module.step(exact_config))
    sums = {"loss": [0.0, 0.0], "gradients": [0.0, 0.0]}
    for seed in range(SEEDS):
        given = module.init_args(config, jax.random.key(seed))
        ours = [moments(plain(*given)), moments(parted(*given))]
        with float64():
            reference = moments(exact(*jax.tree.map(wide, given)))
        for i, found in enumerate(ours):
            for k, (a, b) in enumerate(zip(found, reference, strict=True)):
                size = float(np.linalg.norm(b))
                if size:
                    sums["gradients" if k else "loss"][i] += (float(np.linalg.norm(a - b)) / size) ** 2
    row: dict[str, Any] = {"workload": name, "dtype": dtype, "parts": parts}
    return row | {key: [math.sqrt(x / SEEDS) for x in both] for key, both in sums.items()}


def table(result: dict[str, Any]) -> str:
    lines = heading("Sums of parts", result["machine"], __doc__)
    lines += [
        "| workload | computes in | parts | loss: whole | in parts | gradients: whole | in parts | ratio |",
        "|" + "---|" * 8,
    ]
    for row in result["rows"]:
        (a, b), (c, d) = row["loss"], row["gradients"]
        cells = f"{a:.1e} | {b:.1e} | " + (f"{c:.2e} | {d:.2e} | {d / c:.2f}" if c else "no moments | | ")
        lines.append(f"| {row['workload']} | {row['dtype']} | {row['parts']} | {cells} |")
    lines += ["", f"No rows to work on in parts: {', '.join(result['none']) or 'none'}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Errors of sums over parts of the rows.")
    parser.add_argument("workloads", nargs="*", default=list(workloads.NAMES))
    rows, none = [], []
    for name in parser.parse_args().workloads:
        for dtype, config in configs(name).items():
            row = errors(name, dtype, config)
            print(row or f"{name}: no rows", flush=True)
            rows += [row] if row else []
            none += [] if row else [f"{name} ({dtype})"]
    result = {"machine": describe(), "rows": rows, "none": none}
    save(HERE / "results.json", result, table)
    print(table(result))


if __name__ == "__main__":
    main()
