"""What does a grant of the daemon cost, beside a socket loop that does nothing?

    python -m benchmarks.coordinator.daemon [--quick]

1, 100 and 1000 clients of ``jaxtensile serve``, each of which asks again as soon as it is answered, and the same bytes
to a loop that only sends bytes back, in turns; a Ray actor where Ray is installed. Then how soon the bytes of a killed
job are another's, and what the daemon takes while it idles. Load generator, daemon and loop share the machine's cores.
Results go to ``daemon.json`` and ``daemon.md``; ``--quick`` prints only.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.coordinator.load import DEVICE, Caller, Echoed, load, ray_actor, row, start_bare
from benchmarks.isolate import ROOT, save
from jaxtensile.runtime.daemon.inquiry import ask
from jaxtensile.runtime.daemon.server import more_descriptors
from jaxtensile.runtime.protocol.messages import Admit, Grant, Release, Released, Rung, Token
from jaxtensile.runtime.protocol.wire import frame

HERE = Path(__file__).parent
CLIENTS = (1, 100, 1000)
TARGETS = {1: "p50 ≤ 150 µs, p99 ≤ 350 µs", 100: "≥ 8000/s, p99 ≤ 10 ms", 1000: "≥ 8000/s, p99 ≤ 75 ms"}
CONFIG = """
[device."cuda:0"]
capacity = "{capacity}"
reserve = 0
[coordinator]
min_hold = "0s"
max_clients = 4096
"""


@contextmanager
def daemon(config_text: str) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A daemon's socket and process."""
    with tempfile.TemporaryDirectory(prefix="jt-") as folder:
        path = Path(folder) / "s"
        (config := Path(folder) / "c.toml").write_text(config_text)
        command = [sys.executable, "-m", "jaxtensile", "serve", "--config", str(config), "--socket", str(path)]
        with (
            open(Path(folder) / "log", "wb") as log,
            subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT) as process,
        ):
            try:
                while not path.exists() and process.poll() is None:
                    time.sleep(0.01)
                ask(path, 10.0)
                yield path, process
            finally:
                process.terminate()


def grants(clients: int, seconds: float) -> dict[str, float]:
    """Of the daemon, with room for all."""
    with daemon(CONFIG.format(capacity="8TiB")) as (path, process):
        before = cpu(process.pid)
        found = load([Caller(str(path), k) for k in range(clients)], seconds)
        return {**found, "cpu_seconds": cpu(process.pid) - before}


def echoes(clients: int, seconds: float) -> dict[str, float]:
    """Of the bare loop, with as many bytes each way."""
    ladder = tuple(Rung(persistent=1 << 20, temp=k << 20, seconds=1.0 - k / 10) for k in range(4))
    asked = frame(Release(lease=1, token=Token(1, 1))) + frame(Admit(job="job 1", devices=(DEVICE,), ladder=ladder))
    answer = frame(Released(lease=1)) + frame(Grant(job="job 1", lease=1, token=Token(1, 1), rung=3))
    with tempfile.TemporaryDirectory(prefix="jt-") as folder:
        path = Path(folder) / "s"
        process = start_bare(path, len(answer))
        try:
            return load([Echoed(str(path), len(asked), len(answer)) for _ in range(clients)], seconds)
        finally:
            process.terminate()
            process.wait()


def compared(clients: int, seconds: float, turns: int) -> dict[str, Any]:
    """Both in turns; of each figure the median of the turns."""
    found: dict[str, list[dict[str, float]]] = {"daemon": [], "bare": []}
    for _ in range(turns):
        found["bare"].append(echoes(clients, seconds))
        found["daemon"].append(grants(clients, seconds))
    medians = {k: {key: statistics.median(r[key] for r in rows) for key in rows[0]} for k, rows in found.items()}
    return {"clients": clients, **medians}


# Deaths.

HOLDS = """
import sys
from benchmarks.coordinator.load import Caller
caller = Caller(sys.argv[1], 0)
caller.ask()
while not caller.answered():
    pass
print("holds", flush=True)
sys.stdin.read()
"""


def freed(kills: int) -> dict[str, float]:
    """From SIGKILL to one job until another has its bytes."""
    took: list[float] = []
    with daemon(CONFIG.format(capacity="4MiB")) as (path, _):  # for one of them
        waiter = Caller(str(path), 1)
        for _ in range(kills):
            with subprocess.Popen(
                [sys.executable, "-c", HOLDS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
            ) as holder:
                assert holder.stdout is not None and holder.stdout.readline() == b"holds\n"
                holder.send_signal(signal.SIGSTOP)  # it neither shrinks nor says anything
                waiter.ask()
                time.sleep(0.02)
                asked = time.perf_counter()
                holder.kill()
                while not waiter.answered():
                    pass
                took.append(time.perf_counter() - asked)
                waiter.back()
    return {"kills": kills, **row(took, sum(took))}


# Rest.


def cpu(pid: int) -> float:
    """CPU seconds that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle(seconds: float) -> dict[str, float]:
    """CPU and memory of a daemon that nobody asks for anything, with leases held."""
    with daemon(CONFIG.format(capacity="8TiB")) as (path, process):
        callers = [Caller(str(path), k) for k in range(8)]
        for caller in callers:
            caller.ask()
            while not caller.answered():
                pass
        time.sleep(1.0)
        before, began = cpu(process.pid), time.perf_counter()
        time.sleep(seconds)
        share = (cpu(process.pid) - before) / (time.perf_counter() - began)
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        resident = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
    return {"leases": len(callers), "cpu_percent": 100 * share, "resident_mb": resident / 1e6}


# What is told.


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    m = result["machine"]
    lines = [
        f"# The daemon, Python {m['python']}, {m['cpus']} cores, {m['date']}",
        "",
        f"Load of the machine {m['load']:.1f} at the start, {m['load_end']:.1f} at the end. "
        f"Medians of {result['turns']} turns of {result['seconds']:g} s each, daemon and bare loop one "
        "after the other. A round trip gives a lease back and asks for the next one.",
        "",
        "| clients | | p50, µs | p99, µs | grants/s | daemon ÷ bare: p50 | grants/s | target |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in result["grants"]:
        for who in ("bare", "daemon"):
            x, bare = r[who], r["bare"]
            ratios = f"{x['p50_us'] / bare['p50_us']:.2f} | {x['per_second'] / bare['per_second']:.2f}"
            more = f"{ratios} | {TARGETS[r['clients']]}" if who == "daemon" else " | | "
            lines.append(
                f"| {r['clients']} | {who} | {x['p50_us']:.0f} | {x['p99_us']:.0f} | {x['per_second']:.0f} | {more} |"
            )
    if ray := result.get("ray"):
        cells = f"{ray['p50_us']:.0f} | {ray['p99_us']:.0f} | {ray['per_second']:.0f}"
        lines.append(f"| 1 | Ray {ray['version']} actor | {cells} | | | |")
    freed_, idle_ = result["freed"], result["idle"]
    lines += [
        "",
        "| | | target |",
        "|---|---|---|",
        f"| freed after a kill, of {freed_['kills']} | p50 {freed_['p50_us'] / 1e3:.1f} ms, p99 "
        f"{freed_['p99_us'] / 1e3:.1f} ms | p99 ≤ 100 ms |",
        f"| idle, {idle_['leases']} leases held | {idle_['cpu_percent']:.2f} % CPU, {idle_['resident_mb']:.0f} MB | "
        "< 1 %, < 50 MB |",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter, print only")
    options = parser.parse_args()
    from benchmarks.machine import describe

    more_descriptors()
    turns, seconds, kills, rest = (1, 1.0, 10, 3.0) if options.quick else (5, 4.0, 200, 20.0)
    result: dict[str, Any] = {"machine": {**describe(), "load": os.getloadavg()[0]}, "turns": turns, "seconds": seconds}
    gc.freeze()
    result["grants"] = [compared(n, seconds, turns) for n in CLIENTS]
    result["ray"] = ray_actor(seconds)
    result["freed"] = freed(kills)
    result["idle"] = idle(rest)
    result["machine"]["load_end"] = os.getloadavg()[0]
    if not options.quick:
        save(HERE / "daemon.json", result, table)
    print(table(result))


if __name__ == "__main__":
    main()
