"""Does the coordinator keep every invariant over ten million random events?

    python -m benchmarks.coordinator.soak [--quick] [--events N]

Random walks of the model of the tests (``tests/coordinator_model.py``), each checked after every event: daemons and
jobs are killed, connections lost, jobs fork, are interrupted, compile for long, are suspended, ask for more, on up to
three devices whose limits bind together with that of the host. At the end of each walk everybody does what is asked,
and nobody is left behind; then all jobs end, and all is free.
Results go to ``soak.json`` and ``soak.md`` as it goes, and a further call goes on where the last one stopped, unless
the code has changed. ``--quick`` prints only, of 10^5 events.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import threading
import time
from collections import Counter
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.isolate import ROOT, save
from benchmarks.machine import describe

sys.path.insert(0, str(ROOT / "tests"))
MODEL: Any = import_module("coordinator_model")
HERE = Path(__file__).parent
EVENTS = 10_000_000
STEPS = 2_000
"""Of one walk, before all settles."""
FIRST = 100_000_000
"""The first seed: none that the tests have."""
TOLD = 20
"""Violations whose seeds are kept."""
SAVED_EVERY = 200


def code() -> str:
    """What is walked over, and by what."""
    files = [*sorted((ROOT / "runtime").rglob("*.py")), ROOT / "tests/coordinator_model.py"]
    return sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:16]


def walk(result: dict[str, Any], events: int, path: Path | None) -> None:
    """Walk until there were so many events in all."""
    counted = Counter(result["counted"])
    while counted["events"] < events:
        seed = FIRST + result["walks"]
        world = MODEL.World(seed, text=seed % 8 == 0)
        began = time.process_time()
        try:
            world.walk(STEPS).settle_down().everybody_goes()
        except MODEL.Violation as broken:
            result["violations"] += 1
            result["broken"] = [*result["broken"], {"seed": seed, "violation": str(broken)}][:TOLD]
            print(f"seed {seed}, event {world.counted['events']}: {broken}", flush=True)
        result["cpu_seconds"] += time.process_time() - began
        counted.update(world.counted)
        result["walks"] += 1
        result["counted"] = dict(counted)
        if result["walks"] % SAVED_EVERY == 0:
            rate = counted["events"] / result["cpu_seconds"]
            print(f"{counted['events']:,} events, {result['violations']} violations, {rate:,.0f} a second", flush=True)
            if path is not None:
                save(path, result, table)
    if path is not None:
        save(path, result, table)


def table(result: dict[str, Any]) -> str:
    m, counted = result["machine"], result["counted"]
    rate = counted["events"] / result["cpu_seconds"]
    lines = [
        f"# Random walks over the coordinator, Python {m['python']}, {m['cpus']} cores, {m['date']}",
        "",
        f"{result['walks']:,} walks, {rate:,.0f} events a CPU second. A violation is any of: more held or charged than "
        "there is, bytes held that are not charged, a lease that is lost or that nobody knows of, somebody ended or "
        "left waiting without need.",
        "",
        "| what happened | how often |",
        "|---|---|",
        *(f"| {what} | {n:,} |" for what, n in sorted(counted.items(), key=lambda row: -row[1])),
        f"| **violations** | **{result['violations']}** |",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--events", type=int, default=EVENTS, help="how many in all; default: %(default)s")
    options = parser.parse_args()
    result = {"machine": describe(), "code": code(), "walks": 0, "cpu_seconds": 0.0, "counted": {}, "violations": 0}
    result["broken"] = []
    path = None if options.quick else HERE / "soak.json"
    if path is not None and path.is_file() and (before := json.loads(path.read_text()))["code"] == result["code"]:
        result = {**before, "machine": result["machine"]}
    gc.freeze()  # a coordinator has no JAX for the collector to go through
    # In a thread: there a client's changes need no other one, as those of the main thread do for the sake of Ctrl-C.
    walker = threading.Thread(
        target=walk, args=(result, 100_000 if options.quick else options.events, path), daemon=True
    )
    walker.start()
    walker.join()
    print(table(result))
    return int(bool(result["violations"]))


if __name__ == "__main__":
    sys.exit(main())
