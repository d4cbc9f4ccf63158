"""Several processes run one plan, or all raise one error, and nothing hangs: ``python -m benchmarks.processes.run``.

Random sharded steps, budgets and measured rates, in 2 and 4 processes (CPU, gloo). In a quarter of the cases one
process asks for something else, calls in another order, comes late or never, or is interrupted; in a fifth one is
killed at a random time. Each case has to end within 60 s, in every process that lives, with the values of ``jax.jit``
or with one error of ours, the same text in all. ``--cases`` is how many there are.

*planned*: all ran one rewritten program; *as it is*: all ran the user's; *ended by JAX*: process 0, which holds JAX's
coordination service, was killed, and JAX ends the others at once; *not ours*: killed after all had agreed, while the
program ran: what follows is JAX's own error, as with ``jax.jit``.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from benchmarks.isolate import ROOT, heading, save

LIMIT: Final = 60.0
"""Seconds for a case, from when all have called; building the program and comparing values have as many again."""
SIDE_BY_SIDE: Final = 4
"""Groups in which somebody is killed: what they do most is wait."""


class Group:
    """Processes of one program."""

    def __init__(self, count: int) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{s.getsockname()[1]}"
        self.folder = tempfile.TemporaryDirectory()
        self.members = [self._started(address, count, me) for me in range(count)]
        self.lines: list[queue.Queue[str]] = [queue.Queue() for _ in self.members]
        for member, lines in zip(self.members, self.lines, strict=True):
            threading.Thread(target=_read, args=(member, lines), daemon=True).start()
        for me in range(count):
            self.line(me, 4 * LIMIT)

    def _started(self, address: str, count: int, me: int) -> subprocess.Popen[str]:
        from benchmarks.processes.cases import DEVICES

        home = Path(self.folder.name) / str(me)
        home.mkdir()
        env = {
            **os.environ,
            "XDG_CACHE_HOME": str(home),  # as on different hosts
            "JAXTENSILE_PLAN_CACHE": "",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES // count}",
        }
        command = [sys.executable, "-m", "benchmarks.processes.member", address, str(count), str(me)]
        log = (home / "log").open("w")
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=env
        )

    def line(self, me: int, wait: float) -> dict[str, Any] | None:
        """What a member prints next; None if it ends, or prints nothing for so long."""
        try:
            text = self.lines[me].get(timeout=wait)
        except queue.Empty:
            return None
        return json.loads(text) if text else None

    def end(self) -> None:
        """End all of them."""
        for member in self.members:
            member.kill()
            member.wait()
        self.folder.cleanup()

    def run(self, case: Any) -> dict[str, Any]:
        """The outcome of one case."""
        line = json.dumps(case.to_dict()) + "\n"
        for member in self.members:
            assert member.stdin is not None
            member.stdin.write(line)
            member.stdin.flush()
        called = 0.0
        if case.fault == "kill":
            for me in range(case.processes):
                self.line(me, 2 * LIMIT)
            called = time.time()  # the last one, which may be the one that is killed
            time.sleep(case.after)
            self.members[case.victim].kill()
        started = time.monotonic()
        found = [
            self.line(me, max(2 * LIMIT - (time.monotonic() - started), 1)) if not self._killed(case, me) else None
            for me in range(case.processes)
        ]
        return {**case.to_dict(), **_judged(case, found, self.members, called)}

    def _killed(self, case: Any, me: int) -> bool:
        return case.fault == "kill" and me == case.victim


def _read(member: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert member.stdout is not None
    for line in member.stdout:
        if line.startswith("{"):
            lines.put(line)
    lines.put("")


def _judged(case: Any, found: Sequence[dict[str, Any] | None], members: Sequence[Any], called: float) -> dict[str, Any]:
    """``verdict`` of a case, whether it is ``good``, and what each process told."""
    killed = case.fault == "kill"
    alive = [f for me, f in enumerate(found) if not (killed and me == case.victim)]
    hidden = "program", "called", "ended"
    told = {"told": [f and {k: v for k, v in f.items() if k not in hidden} for f in found]}
    if any(f is None for f in alive):
        time.sleep(2)
        ended = all(f is not None or m.poll() is not None for f, m in zip(found, members, strict=True))
        by_jax = killed and case.victim == 0 and ended
        return {**told, "verdict": "ended by JAX" if by_jax else "crash" if ended else "HANG", "good": by_jax}
    # From when all had called that were to call.
    called = max([called, *(f["called"] for me, f in enumerate(found) if f and me != case.victim)])
    seconds = round(max(f["ended"] for f in alive if f) - called, 1)
    outcomes = {f["outcome"] for f in alive if f}
    texts = {(f["error"], f["text"]) for f in alive if f and f["outcome"] == "error"}
    if outcomes == {"values"}:
        one = len({f["program"] for f in alive if f}) == 1
        word = "planned" if any(f["planned"] for f in alive if f) else "as it is"
        verdict, good = (word, True) if one else ("different programs", False)
    elif outcomes - {"interrupted"} == {"error"} and len(texts) == 1:
        verdict, good = next(iter(texts))[0], True
    elif killed and outcomes <= {"failed", "values"}:
        verdict, good = "not ours", True
    else:
        verdict, good = "NOT THE SAME", False
    return {**told, "verdict": verdict, "seconds": seconds, "good": good and seconds <= LIMIT}


def cases(count: int) -> list[Any]:
    """A fifth of them with a process that is killed; of each kind two thirds in two processes, a third in four."""
    from benchmarks.processes.cases import case

    return [case(i, 4 if i % 3 == 2 else 2, killed=i % 5 == 4) for i in range(count)]


def several(count: int, given: Sequence[Any], keep: Callable[[dict[str, Any]], None]) -> None:
    """Cases of one number of processes, one after the other in one group, in another one after a bad one."""
    group = Group(count)
    for case in given:
        row = group.run(case)
        keep(row)
        if not row["good"]:
            group.end()
            group = Group(count)
    group.end()


def alone(case: Any) -> dict[str, Any]:
    """A case in a group of its own."""
    group = Group(case.processes)
    try:
        return group.run(case)
    finally:
        group.end()


def _say(row: dict[str, Any]) -> None:
    what = f"{row['processes']} processes, {row['program']}, {row['share']}, {row['fault'] or 'no fault'}"
    what = f"{row['number']:3} {what}"
    print(f"{what}: {row['verdict']}, {row.get('seconds', '-')} s{'' if row['good'] else '   BAD'}", flush=True)
    if not row["good"]:
        print(json.dumps(row["told"])[:3000], flush=True)


def table(result: dict[str, Any]) -> str:
    """Verdicts by fault."""
    rows = result["cases"]
    lines = heading("Several processes, one plan", result["machine"], __doc__)
    verdicts = list(dict.fromkeys(r["verdict"] for r in sorted(rows, key=lambda r: r["verdict"])))
    lines += [
        f"| one process … | cases | {' | '.join(verdicts)} | longest s |",
        "|---|---|" + "---|" * (len(verdicts) + 1),
    ]
    for fault in sorted({r["fault"] for r in rows}):
        mine = [r for r in rows if r["fault"] == fault]
        counts = Counter(r["verdict"] for r in mine)
        longest = max((r["seconds"] for r in mine if "seconds" in r), default=0)
        cells = " | ".join(str(counts[v]) for v in verdicts)
        lines.append(f"| {fault or '(no fault)'} | {len(mine)} | {cells} | {longest} |")
    good = sum(r["good"] for r in rows)
    lines += ["", f"{good} of {len(rows)} cases good, {sum(r['verdict'] == 'HANG' for r in rows)} hangs."]
    return "\n".join(lines) + "\n"


def main() -> int:
    import argparse

    from benchmarks.machine import describe

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases; nothing is saved")
    parser.add_argument("--fresh", action="store_true", help="leave out nothing that was done before")
    options = parser.parse_args()
    machine = describe()
    file = Path(__file__).with_name(f"results-jax{machine['jax']}.json")
    before = file.exists() and not options.fresh and not options.only
    done: list[dict[str, Any]] = json.loads(file.read_text())["cases"] if before else []
    known = {row["number"] for row in done}
    given = [c for c in cases(options.cases) if c.number not in known]
    given = [c for c in given if not options.only or c.number in options.only]

    def keep(row: dict[str, Any]) -> None:
        _say(row)
        done.append(row)
        done.sort(key=lambda r: r["number"])
        if not options.only:
            save(file, {"machine": machine, "cases": done}, table)

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        for row in pool.map(alone, [c for c in given if c.fault == "kill"]):
            keep(row)
    for count in (2, 4):
        together = [c for c in given if c.processes == count and c.fault != "kill"]
        if together:
            several(count, together, keep)
    print(table({"machine": machine, "cases": done}))
    return int(not all(r["good"] for r in done))


if __name__ == "__main__":
    sys.exit(main())
