"""All benchmarks, one after another: ``python -m benchmarks [--quick] [NAME ...]``.

Each runs in a process of its own, tells its cases as they begin, and writes its results into
its folder. ``--quick`` is a subset that takes minutes and leaves the recorded results alone where
the benchmark can.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
RUNS: Final[dict[str, tuple[list[str], list[str] | None]]] = {
    "fit": (["fit.run"], ["fit.run", "--print-only", "lstm", "ode"]),
    "dominance": (["dominance.run"], None),
    "promise": (["promise.run"], ["promise.run", "--quick", "--turns", "1"]),
    "undo": (["undo.run"], None),
    "state": (["state.run"], None),
    "loops": (["loops.run"], None),
    "tpu": (["tpu.run"], None),
    "spmd": (["spmd.run"], None),
    "processes": (["processes.run"], ["processes.run", "--only", *map(str, range(6))]),
    "call": (["call.overhead"], ["call.overhead"]),
    "first-call": (["call.first_call"], None),
    "under-exec": (["call.under_exec"], None),
    "planning": (["planning.run"], ["planning.run", "--quick"]),
    "ablation": (["ablation.run"], None),
    "optimality": (["optimality.run"], ["optimality.run", "--quick"]),
    "papers": (["papers.run"], None),
    "reports": (["reports.run"], None),
    "first-hour": (["reports.hour"], None),
    "estimate": (["estimate.run"], None),
    "rss": (["estimate.rss"], None),
    "estimate-speed": (["estimate.speed"], ["estimate.speed", "--quick"]),
    "pack": (["pack.run"], ["pack.run", "--quick"]),
    "pack-programs": (["pack.programs"], ["pack.programs", "lstm", "dlrm"]),
    "mutation": (["mutation.run"], ["mutation.run", "--print-only", "--sample", "3", "runtime/leases"]),
    "coordinator-policy": (["coordinator.policy"], ["coordinator.policy", "--quick"]),
    "coordinator-daemon": (["coordinator.daemon"], ["coordinator.daemon", "--quick"]),
    "coordinator-batch": (["coordinator.batch"], None),
    "coordinator-first-step": (["coordinator.first_step"], ["coordinator.first_step", "--jobs", "1"]),
    "coordinator-soak": (["coordinator.soak"], ["coordinator.soak", "--quick"]),
    "concurrent-fleet": (["concurrent.fleet"], ["concurrent.fleet", "--quick"]),
    "concurrent-ray": (["concurrent.ray_faults"], None),
    "concurrent-groups": (["concurrent.groups"], ["concurrent.groups", "--quick"]),
    "concurrent-ladders": (["concurrent.ladders"], None),
    "concurrent-mixes": (["concurrent.mixes"], ["concurrent.mixes", "--quick"]),
    "concurrent-link": (["concurrent.link"], None),
    "concurrent-simulated": (["concurrent.simulated"], ["concurrent.simulated", "--quick"]),
    "concurrent-tensile": (["concurrent.tensile"], None),
    "concurrent-real-mixes": (["concurrent.real_mixes"], None),
    "coordinator-local": (["coordinator.local"], ["coordinator.local", "--quick"]),
}
"""Module and arguments of each benchmark: all of it, and the quick subset (None: not in it)."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(RUNS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="a subset that takes minutes")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in RUNS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}: there are {', '.join(RUNS)}")
    names = options.names or list(RUNS)
    failed: list[str] = []
    for number, name in enumerate(names, 1):
        print(f"==== {number} of {len(names)}: {name}", flush=True)
        started = time.perf_counter()
        chosen = RUNS[name][1 if options.quick else 0]
        if chosen is None:
            print(f"==== {name}: not in the quick subset\n")
            continue
        module, *arguments = chosen
        status = subprocess.run([sys.executable, "-m", f"benchmarks.{module}", *arguments], cwd=ROOT).returncode
        print(f"==== {name}: {'done' if not status else f'status {status}'} in {time.perf_counter() - started:.0f} s\n")
        if status:
            failed.append(name)
    if failed:
        print(f"FAILED: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
