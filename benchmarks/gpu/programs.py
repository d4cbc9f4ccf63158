"""The programs that a card measures, made where there is none: ``python -m benchmarks.gpu.programs FOLDER [SPEC ...]``.

A spec is ``WORKLOAD:HOW[:BYTES]``: the step of a workload as it is (``plain``), under a ``jax.checkpoint`` policy on
every block (``policy=NAME``), or as ``jaxtensile.jit`` plans it (``ours[,time|flops][,parts][,host][,state]``) for so
many bytes: a number, the name of a policy at whose bytes, or ``60%`` of what the plain step needs above its
arguments. Each becomes two files: ``SPEC.mlir.xz``, the lowered module, and ``SPEC.json``, what its compile without a
card says: bytes, options, seconds by its kernels and by the model. What is there already is not made again.
"""

from __future__ import annotations

import argparse
import json
import lzma
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.machine import commit, describe, placed

TARGET: Final = "nvidia-h100-80gb"
HOST_BUDGET: Final = "48GiB"
SHARE: Final = 0.6
"""Of the plain step's bytes above its arguments."""
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "time": {"objective": "time"},
    "flops": {"objective": "flops"},
    "parts": {"chunk": True},
    "host": {"host_budget": HOST_BUDGET},
    "state": {"host_budget": HOST_BUDGET, "offload_state": True},
}
POLICIES: Final = ("dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")


def known_specs(spec: str) -> bool:
    """Whether a spec can be read."""
    from benchmarks import workloads

    name, _, rest = spec.partition(":")
    how, _, of = rest.partition(":")
    known = name in {*workloads.MODULES, *workloads.ON_NVIDIA, *workloads.IN_PAPERS}
    if how == "plain" or how.partition("=")[0] == "policy":
        return known and not of and how.partition("=")[2] in ("", *POLICIES)
    kind, *options = how.split(",")
    return known and kind == "ours" and {*options} <= {*OPTIONS} and bool(of)


def file_of(folder: Path, spec: str, suffix: str) -> Path:
    """Where something of a program is kept."""
    return folder / (spec.translate(str.maketrans(":=,%", "_-+p")) + suffix)


def told(folder: Path, spec: str) -> dict[str, Any]:
    """What is known of a program that was made."""
    path = file_of(folder, spec, ".json")
    return json.loads(path.read_text()) if path.exists() else {}


def given(name: str, *, tiny: bool, policy: str = "") -> Any:
    """A workload at its published sizes, or at those that a CPU can run; ``policy``: on every block."""
    import jax

    from benchmarks import workloads

    remat = {"remat": getattr(jax.checkpoint_policies, policy)} if policy else {}
    return workloads.load(name).workload(config(name, tiny=tiny), **remat)


def config(name: str, *, tiny: bool) -> Any:
    """Its sizes."""
    from benchmarks import workloads

    kind = workloads.load(name).Config
    if not tiny:
        return kind()
    # Of GPT-2 as small, but with something to recompute.
    more = {"layers": 4, "width": 64, "context": 64, "batch": 8} if name == "gpt2_small" else {}
    return replace(kind.tiny(), **more)


def made(folder: Path, spec: str, *, text: bool = False, target: str = TARGET, tiny: bool = False) -> dict[str, Any]:
    """Make one program; ``text``: also keep what XLA scheduled for it here."""
    if known := told(folder, spec):
        return known
    import jax

    from jaxtensile import _compat
    from jaxtensile.devices.profiles import profile
    from jaxtensile.xla.compile import compile_program, memory_of
    from jaxtensile.xla.kernel_time import timed
    from jaxtensile.xla.target import compiler_options, tracing_for

    name, how, *rest = spec.split(":")
    began = time.perf_counter()
    row: dict[str, Any] = {"spec": spec, "workload": name, "tiny": tiny, "target": target}
    row |= {"machine": describe(), "commit": commit()}
    with tracing_for(target):
        if how.startswith("ours"):
            budget = _bytes(name, rest[0], partial(made, folder, text=text, target=target, tiny=tiny))
            jitted, args, kwargs, options, more = _planned(given(name, tiny=tiny), how, budget, target)
            row |= more
            if jitted is None:
                return _keep(folder, row)
        else:
            step = given(name, tiny=tiny, policy=how.partition("=")[2])
            args, kwargs = placed(step.args, target), {}

            def make(options: Any) -> Any:
                return jax.jit(step.fun, **step.jit_options, compiler_options=dict(options) or None)

            compiled = compile_program(make, args, {}, compiler_options(target))
            jitted, options = compiled.jitted, compiled.options
        lowered = _compat.lower(jitted, args, kwargs)
        executable = lowered.compile()
    memory, hlo = memory_of(executable), executable.as_text()
    took = timed(hlo, profile(target))
    from jax._src.interpreters import mlir  # no public way to a module as bytes

    module = mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
    file_of(folder, spec, ".mlir.xz").write_bytes(lzma.compress(module))
    if text:
        file_of(folder, spec, ".hlo.xz").write_bytes(lzma.compress(hlo.encode()))
    own = compiler_options(target)
    row |= {
        "bytes": memory.device,
        "argument": memory.argument,
        "host": memory.host,
        "kernels_seconds": took.seconds if took else None,
        "kernels": took.kernels if took else None,
        "options": {key: value for key, value in options.items() if own.get(key) != value},
        "kept": sorted(lowered._lowering.compile_args["kept_var_idx"]),
        "seconds": time.perf_counter() - began,
    }
    return _keep(folder, row)


def _keep(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    file_of(folder, row["spec"], ".json").write_text(json.dumps(row, indent=1) + "\n")
    return row


def _bytes(name: str, of: str, made: Callable[[str], dict[str, Any]]) -> int:
    """The budget that is meant."""
    if of.isdigit():
        return int(of)
    if of.endswith("%"):
        plain = made(f"{name}:plain")
        return plain["argument"] + int(float(of[:-1]) / 100 * (plain["bytes"] - plain["argument"]))
    return made(f"{name}:policy={of}")["bytes"]


def _planned(work: Any, how: str, budget: int, target: str) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """What is planned: its jit object, what that is lowered with, and what the report says."""
    import jaxtensile

    options: dict[str, Any] = {}
    for option in how.split(",")[1:]:
        options |= OPTIONS[option]
    step = jaxtensile.jit(work.fun, budget=budget, target=target, **options, **work.jit_options)
    try:
        # Not plan(): it would compile the plain program once more.
        entry, args, kwargs = step._planned(work.args, {})
    except jaxtensile.BudgetError as error:
        return None, (), {}, {}, {"budget": budget, "refused": str(error), "needs": error.needs}
    fitted = entry.fitted
    if fitted.state:
        args, kwargs = step._placement.abstract(entry.device, fitted.state, args, kwargs)
    report = fitted.report
    more = {
        "budget": budget,
        "unchanged": report.unchanged,
        "model_overhead": report.overhead_ratio,
        "model_step": report.step,
        "flops_ratio": 1 + report.recompute_flops / report.flops if report.flops else None,
        "report": str(report),
    }
    return fitted.jitted, args, kwargs, fitted.options, more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("specs", nargs="+", metavar="SPEC")
    parser.add_argument("--text", action="store_true", help="keep the scheduled HLO too")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the CPU that is here")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    for spec in asked.specs:
        row = made(asked.folder, spec, text=asked.text, target="cpu" if asked.tiny else TARGET, tiny=asked.tiny)
        seconds = row.get("kernels_seconds")
        what = f"{row['bytes'] / 1e6:,.0f} MB, {1e3 * seconds:.1f} ms" if seconds else row.get("refused", "no seconds")
        print(f"{spec}: {what} ({row.get('seconds', 0):.0f} s)", flush=True)


if __name__ == "__main__":
    main()
