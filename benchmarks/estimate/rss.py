"""Estimates for this machine's CPU beside what a process really took: the growth of its peak resident set in one step.

    python -m benchmarks.estimate.rss

Each step is compiled and its arguments are made first; then the kernel's mark of the highest resident set is reset
(``/proc/self/clear_refs``), the step runs once, and the mark is read. What grew is temporaries and results that
reuse no argument: temp + output - alias, by XLA (``exact=True``) and from the jaxpr. Libraries that XLA calls may take
scratch memory that no analysis counts; pages that are never touched are never resident.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from benchmarks.isolate import command, heading, isolated, save

HERE = Path(__file__).parent
MODULE = "estimate.rss"
SIZES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "gpt2": ("gpt2_small", {"layers": 4, "width": 256, "heads": 4, "vocab": 8192, "context": 256, "batch": 16}),
    "vit": ("vit_b", {"layers": 3, "batch": 8}),
    "mixer": ("mixer", {"layers": 4, "batch": 16}),
    "resnet": ("resnet50", {"stages": (1, 1, 1, 1), "batch": 8}),
    "lstm": ("lstm", {"seq": 64, "batch": 64}),
    "bert": ("bert_base", {"layers": 3, "batch": 4}),
    "ode": ("ode", {"steps": 50}),
}


def case(name: str) -> dict[str, Any]:
    """One step, in this process."""
    import jax

    import jaxtensile
    from benchmarks import workloads

    model, sizes = SIZES[name]
    module = workloads.load(model)
    config = module.Config(**sizes)
    workload = module.workload(config)
    static, exact = (
        jaxtensile.estimate(workload.fun, *workload.args, target="cpu", exact=flag, **workload.jit_options)
        for flag in (False, True)
    )
    args = module.init_args(config, jax.random.key(0))
    step = jax.jit(workload.fun, **workload.jit_options).lower(*args).compile()
    jax.block_until_ready(args)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    jax.block_until_ready(step(*args))
    grown = resident("VmHWM") - before
    return {
        "workload": name,
        "grown": grown,
        "exact": exact.temp + exact.output - exact.alias,
        "static": static.temp + static.output - static.alias,
    }


def resident(what: str) -> int:
    """Bytes of this process, as the kernel counts them: ``VmRSS`` now, ``VmHWM`` at the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def table(result: dict[str, Any]) -> str:
    out = [
        *heading("Estimates and resident memory", result["machine"], __doc__),
        "| step | grown MB | exact MB | of grown | static MB | of grown |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if "crash" in row:
            out.append(f"| {row['workload']} | {row['crash'][-80:]} | | | | |")
            continue
        grown, exact, static = (row[key] / 1e6 for key in ("grown", "exact", "static"))
        out.append(
            f"| {row['workload']} | {grown:,.1f} | {exact:,.1f} | {exact / grown:.3f} | "
            f"{static:,.1f} | {static / grown:.3f} |"
        )
    return "\n".join(out) + "\n"


def main() -> None:
    command(__doc__, case).parse_args()
    from benchmarks.machine import describe

    machine = describe()
    rows = [isolated(MODULE, name) for name in SIZES]
    path = HERE / f"rss-jax{machine['jax']}.json"
    save(path, {"machine": machine, "rows": rows}, table)
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
