"""Train steps on a real GPU: measured peaks, step times and losses of plans beside the peers'.

    benchmarks/gpu/run.sh [--dry-run] [--seconds S] [CASE ...]

GPT-2 small as it is, under per-block ``jax.checkpoint`` policies, and by ``jaxtensile.jit`` at their bytes with and
without host memory; the rate of the host link; then workloads of the suite at 60 % of their bytes above the arguments.
The most important cases come first, each in its own process; what no longer fits the time is skipped, and the
result is saved after each. It goes to ``$OUT``, else to ``benchmarks/gpu/``, as ``results.json`` and ``.md``; that
of a dry run (tiny sizes, any device) to ``$OUT`` or a temporary folder as ``dry-run.json``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.summary import table
from benchmarks.isolate import isolated, save

HERE = Path(__file__).parent
MODULE = "gpu.run"
PLAIN = "gpt2:none"
HOST_AFTER = "gpt2:dots_with_no_batch_dims_saveable"
"""The policy at whose bytes host memory is tried."""
CASES = (
    "link", PLAIN, HOST_AFTER, "host", "gpt2:nothing_saveable", "gpt2:dots_saveable", "suite:resnet50",
    "suite:bert_base", "suite:mixer", "suite:lstm", "suite:vit_b", "suite:moe", "suite:llama", "suite:ode",
    "suite:dlrm", "suite:unet",
)  # fmt: skip
DRY = ("link", PLAIN, HOST_AFTER, "host", "suite:mixer")
SECONDS, EACH, LEAST = 450.0, 120.0, 20.0
"""Wall-clock limits: of all cases, of one, and what must be left for one to be begun."""
WANTED = ("flax", "optax")
"""What the suite's workloads need beside JAX."""


def environment(folder: Path, *, dry: bool) -> dict[str, str]:
    """Of a case: memory taken as it is needed, and one autotuning for all (executables are never reused)."""
    if dry:  # nothing is measured: compile fast
        return {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    (folder / "xla_gpu_per_fusion_autotune_cache_dir").mkdir(exist_ok=True)  # JAX names it, XLA wants it to exist
    return {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9",
    }


def ready(name: str, rows: list[dict[str, Any]]) -> str | None:
    """The case with its numbers filled in; None where what it rests on was not measured."""
    if name != "host":
        return name
    peer = next((row.get("peer", {}) for row in rows if row["case"] == HOST_AFTER), {})
    return f"host:{peer['xla_bytes']}" if "xla_bytes" in peer else None


def measure(names: list[str], seconds: float, keep: Any, *, dry: bool) -> list[dict[str, Any]]:
    """All cases in turn while there is time; ``keep`` takes the rows after each."""
    options = ("--dry-run",) if dry else ()
    begun, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            left = seconds - (time.monotonic() - begun)
            full = ready(name, rows)
            if full is None:
                rows.append({"case": name, "skipped": f"needs {HOST_AFTER}"})
            elif left < LEAST:
                rows.append({"case": name, "skipped": "no time left"})
            else:
                limit = min(EACH, left)
                began = time.monotonic()
                row = isolated(MODULE, full, "case", options, limit, environment(Path(folder), dry=dry))
                rows.append({**row, "case": name, "wall_seconds": time.monotonic() - began})
                if "crash" in row:
                    print(row["crash"], file=sys.stderr)
            keep(rows, time.monotonic() - begun)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes and few cases, on whatever is here")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"wall-clock limit (default {SECONDS:.0f})")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        from benchmarks.gpu.cases import case

        case(options.case, tiny=options.dry_run)
        return 0
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]!r}: there are {', '.join(CASES)}")
    from benchmarks.machine import describe
    from jaxtensile.devices.hardware import has_nvidia_driver

    if not options.dry_run and not has_nvidia_driver():
        print("no NVIDIA GPU here: nothing is measured; --dry-run tries the script without", file=sys.stderr)
        return 2
    out = Path(os.environ.get("OUT") or (tempfile.mkdtemp() if options.dry_run else HERE))
    path = out / ("dry-run.json" if options.dry_run else "results.json")
    missing = [name for name in WANTED if find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}; cases that need them will fail", file=sys.stderr)
    result: dict[str, Any] = {"machine": describe(), "dry_run": options.dry_run, "missing": missing}

    def keep(rows: list[dict[str, Any]], seconds: float) -> None:
        known = next((row["device"] for row in rows if "device" in row), None)
        result.update(device=known or "unknown device", seconds=seconds, cases=rows)
        save(path, result, table)

    names = options.cases or list(DRY if options.dry_run else CASES)
    rows = measure(names, options.seconds, keep, dry=options.dry_run)
    print(f"{table(result)}\n{path}")
    return int(all("crash" in row or "skipped" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
