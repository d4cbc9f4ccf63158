"""Does anything stay taken, or hang, after Ctrl-C at any moment of a job?

    python -m benchmarks.coordinator.interrupts [--quick] [--only PART ...]

Lines: an interrupt at each line of the package that the main thread runs in a step, the first step, ``suspend``,
``resume``, the end of a job and its begin, or at 400 of them, one run for each. Random: signals at random moments of a
main thread that steps, suspends, resumes and begins and ends jobs, while a thread steps another job of the device.
Turns: the same, where both jobs ask a daemon that has room for the temporaries of one.
After each: can the other job step, can the same job, does it end, is a value wrong, and are the coordinator's books
empty afterwards?
Results go to ``interrupts.json`` and ``interrupts.md``, beside those of parts that did not run; ``--quick`` prints
only, of 40 lines each and 200 signals.
"""

from __future__ import annotations

import argparse
import dis
import functools
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAXTENSILE_PLAN_CACHE", "off")

import jax.numpy as jnp

import jaxtensile
from benchmarks.isolate import save
from benchmarks.machine import describe
from jaxtensile.jobs import arbitration
from jaxtensile.runtime.daemon.inquiry import ask

HERE = Path(__file__).parent
PACKAGE = str(Path(jaxtensile.__file__).parent)
CONFIG = {"device": {"capacity": "64MiB", "reserve": 0}}
ROWS = 64
"""Of a step's temporaries: 2 MiB."""
ROOM = """[device]
capacity = "3MiB"
reserve = 0
"""
"""For the states of two jobs, 16 KiB each, and the temporaries of one."""
LINES = ("begin", "step", "first", "suspend", "resume", "close")
PARTS = (*LINES, "random", "turns")
SIGNALS = 5000
MOST = 400
"""Lines of one part that are tried, evenly among all of them."""
AGAIN = 0.5
"""Seconds after which a signal comes again: Python ignores what is raised while it collects."""
LIMIT = 10.0
"""Seconds after which something hangs."""


_socket: Path | None = None
"""Of the daemon that the jobs ask; None: they ask their own process."""


def step(x: Any, k: Any) -> tuple[Any, Any]:
    return x + k, jnp.sum(jnp.sort(jnp.tile(x, (ROWS, 1)), axis=0))


def ours(frame: FrameType) -> bool:
    """Whether a frame is of the package, or of what it has from the standard library to take and to wait."""
    name = frame.f_code.co_filename
    if name.startswith(PACKAGE) or "/runtime/" in name:
        return True
    caller = frame.f_back
    return name.endswith(("contextlib.py", "threading.py")) and caller is not None and ours(caller)


@functools.cache
def _exits(code: CodeType) -> frozenset[int]:
    """Where the body of a ``with`` has ended well, and its ``__exit__`` is about to be called."""
    found = [i for i in dis.get_instructions(code) if i.opname != "PRECALL"]
    exits = [
        k
        for k, (a, b, c, call) in enumerate(zip(found, found[1:], found[2:], found[3:], strict=False))
        if {a.opname, b.opname, c.opname} == {"LOAD_CONST"} and call.opname == "CALL" and a.argval is b.argval is None
    ]
    swapped = [k - 1 for k in exits if k and found[k - 1].opname == "SWAP"]  # a result waits meanwhile
    return frozenset(found[k].offset for k in exits + swapped)


def leaves_with(frame: FrameType) -> bool:
    """Whether the next instructions call ``__exit__``. A trace function may raise there; CPython raises for a signal
    after calls, jumps back and at the begin of functions alone, and so a lock that it leaves by ``with`` is free."""
    return frame.f_lasti in _exits(frame.f_code)


class Injector:
    """Raises ``KeyboardInterrupt`` at the n-th line of ours that the thread runs."""

    def __init__(self, at: int) -> None:
        self.left, self.where = at, ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self.line if ours(frame) else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not leaves_with(frame):
            self.left -= 1
            if self.left == 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.line


def within(call: Callable[[], object]) -> str:
    """What became of a call in another thread: "" where it was well."""
    told: list[str] = []

    def go() -> None:
        try:
            call()
            told.append("")
        except BaseException as error:
            told.append(f"{type(error).__name__}: {error}"[:200])

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    thread.join(LIMIT)
    return told[0] if told else "hangs"


def left() -> list[str]:
    """Leases and names that nobody has any more, once what was dropped is collected."""
    end = time.monotonic() + LIMIT
    while True:
        gc.collect()
        local = arbitration._local
        leases = ask(_socket).leases if _socket else local[1].status().leases if local else ()
        found = [lease.job for lease in leases]
        found += sorted(arbitration._jobs)
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.01)


def job(name: str) -> tuple[Any, Any, Any]:
    """A job that has begun, its step and its state."""
    one = jaxtensile.job(name, config=None if _socket else CONFIG)
    return one.__enter__(), jaxtensile.jit(step, job=one), jnp.ones((64, 64))


def same(x: Any, wanted: float) -> None:
    if float(x[0, 0]) != wanted:
        raise AssertionError(f"{float(x[0, 0])} instead of {wanted}")


def at_line(what: str, at: int) -> tuple[Injector, dict[str, str]]:
    """One run with an interrupt at a line; what was not well afterwards."""
    injector = Injector(at)
    a, fa, x = job("a")
    b, fb, y = job("b")
    y, _ = fb(y, 1.0)
    if what != "first":
        x, _ = fa(x, 1.0)
    a.wait(), b.wait()
    value = float(x[0, 0])
    kept = a.suspend(x) if what == "resume" else x
    calls: dict[str, Callable[[], object]] = {
        "begin": lambda: begin_and_end(kept),
        "step": lambda: fa(kept, 2.0),
        "first": lambda: fa(kept, 2.0),
        "suspend": lambda: a.suspend(kept),
        "resume": lambda: a.resume(kept),
        "close": a.close,
    }
    sys.settrace(injector)
    try:
        calls[what]()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)

    def go_on() -> None:
        z = a.resume() if a.suspended is not None or what == "resume" else kept
        same(z, value)
        same(fa(z, 3.0)[0], value + 3)

    told = {"the other job": within(lambda: fb(y, 3.0))}
    if what != "close":
        told["the same job"] = within(go_on)
    told["their end"] = within(lambda: (a.close(), b.close()))
    a = b = fa = fb = None
    calls.clear()
    told["left"] = " ".join(left())
    arbitration._jobs.clear()
    arbitration._local = None
    return injector, {key: value for key, value in told.items() if value}


def begin_and_end(x: Any) -> None:
    with jaxtensile.job("c", config=None if _socket else CONFIG) as c:
        jaxtensile.jit(step, job=c)(x, 1.0)
        c.wait()


def lines(what: str, most: int) -> dict[str, Any]:
    """An interrupt at each line of ``what``, or at so many of them."""
    never, wrong = at_line(what, sys.maxsize)
    total, bad = sys.maxsize - never.left, [f"without an interrupt: {wrong}"] if wrong else []
    stride = max(total // most, 1)
    tried = range(1, total + 1, stride)
    for at in tried:
        injector, wrong = at_line(what, at)
        if wrong:
            bad.append(f"{injector.where}: {wrong}")
            print(f"{what} {bad[-1]}", flush=True)
    print(f"{what}: {total} lines, {len(tried)} tried, {len(bad)} with a consequence", flush=True)
    return {"what": what, "lines": total, "tried": len(tried), "bad": bad}


class Signals:
    """Signals at random moments, one at a time, that raise ``KeyboardInterrupt`` in the main thread."""

    def __init__(self) -> None:
        self.armed = False
        self.hit: Counter[str] = Counter()
        signal.signal(signal.SIGALRM, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if not self.armed:
            return
        while frame is not None and not ours(frame):
            frame = frame.f_back
        where = "elsewhere" if frame is None else f"{Path(frame.f_code.co_filename).stem}"
        self.hit[where] += 1
        raise KeyboardInterrupt

    def during(self, call: Callable[[], object], seconds: float) -> bool:
        """Whether the call was interrupted, after so long."""
        try:
            self.armed = True
            signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
            call()
            self.armed = False
        except KeyboardInterrupt:
            return True
        except Exception as error:
            # ``jax.jit`` makes a ValueError of an interrupt that comes while it compares options.
            if KeyboardInterrupt.__name__ not in str(error):
                raise
            return True
        finally:
            self.armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        return False


def at_random(wanted: int, seed: int = 0) -> dict[str, Any]:
    """That many interrupts of a main thread, beside another job's thread."""
    rng, signals, bad = random.Random(seed), Signals(), list[str]()
    began, count, rounds = time.perf_counter(), 0, 0
    while count < wanted:
        rounds += 1
        state = {"beats": 0}
        stop = threading.Event()
        a, fa, x = job("a")
        x, _ = fa(x, 1.0)
        a.wait()

        def other(state: dict[str, int] = state, stop: threading.Event = stop) -> None:
            b, fb, y = job("b")
            while not stop.is_set():
                y, _ = fb(y, 1.0)
                state["beats"] += 1
            same(y, 1.0 + state["beats"])
            b.close()

        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        for _ in range(50):
            what = rng.choice(["step"] * 6 + ["away"] * 3 + ["begin"])
            value, has = float(x[0, 0]), [x]

            def steps(fa: Any = fa, has: list[Any] = has) -> None:
                while True:
                    fa(has[0], 1.0)

            def away(a: Any = a, has: list[Any] = has) -> None:
                while True:
                    has[0] = a.resume(a.suspend(has[0]))

            def begins(has: list[Any] = has) -> None:
                while True:
                    begin_and_end(has[0])

            long = {"step": 3e-3, "away": 1e-2, "begin": 0.2}[what]
            call = {"step": steps, "away": away, "begin": begins}[what]
            count += signals.during(call, rng.uniform(1e-4, long))
            before, end = state["beats"], time.monotonic() + LIMIT
            while state["beats"] <= before + 1 and time.monotonic() < end and thread.is_alive():
                time.sleep(1e-3)
            wrong = "" if state["beats"] > before + 1 else "the other job hangs"

            def go_on(a: Any = a, fa: Any = fa, has: list[Any] = has, value: float = value) -> None:
                nonlocal x
                x = a.resume() if a.suspended is not None or has[0].is_deleted() else has[0]
                same(x, value)
                same(fa(x, 1.0)[0], value + 1)

            wrong = wrong or within(go_on)
            if wrong:
                bad.append(f"{what}: {wrong}")
                print(bad[-1], flush=True)
                break
        stop.set()
        thread.join(LIMIT)
        hangs = within(a.close) or ("the other thread hangs" if thread.is_alive() else "")
        del a, fa
        found = hangs or " ".join(left())
        if found:
            bad.append(f"left: {found}")
            print(bad[-1], flush=True)
            arbitration._jobs.clear()
            arbitration._local = None
        if count % 500 < 50:
            print(f"{count} interrupts, {len(bad)} with a consequence, {time.perf_counter() - began:.0f} s", flush=True)
    return {
        "interrupts": count,
        "rounds": rounds,
        "bad": bad,
        "hit": dict(signals.hit.most_common()),
        "seconds": round(time.perf_counter() - began),
    }


def at_random_through_a_daemon(wanted: int) -> dict[str, Any]:
    """The same, where the jobs take turns by messages."""
    global _socket
    with tempfile.TemporaryDirectory() as folder:
        config, _socket = Path(folder, "jaxtensile.toml"), Path(folder, "d", "s")
        config.write_text(ROOM)
        command = [sys.executable, "-m", "jaxtensile", "serve", "--config", str(config), "--socket", str(_socket)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as daemon:
            while not _socket.exists():
                time.sleep(0.02)
            os.environ["JAXTENSILE_SOCKET"] = str(_socket)
            try:
                found = at_random(wanted)
                return {**found, "turns": ask(_socket).counters.get("turns", 0)}
            finally:
                del os.environ["JAXTENSILE_SOCKET"]
                daemon.terminate()
                _socket = None


def table(result: dict[str, Any]) -> str:
    m = result["machine"]
    rows = [
        f"# Ctrl-C at any moment of a job, Python {m['python']}, jax {m['jax']}, {m['cpus']} cores, {m['date']}",
        "",
        "| | lines | tried | with a consequence |",
        "|---|---|---|---|",
        *(f"| each line of: {r['what']} | {r['lines']} | {r['tried']} | {len(r['bad'])} |" for r in result["lines"]),
    ]
    if result.get("random"):
        r = result["random"]
        inside = sum(n for where, n in r["hit"].items() if where != "elsewhere")
        rows += [f"| random signals | {inside} of them inside the package | {r['interrupts']} | {len(r['bad'])} |"]
    if result.get("turns"):
        r = result["turns"]
        inside = sum(n for where, n in r["hit"].items() if where != "elsewhere")
        what = f"random signals beside {r['turns']:,} turns of a daemon"
        rows += [f"| {what} | {inside} of them inside the package | {r['interrupts']} | {len(r['bad'])} |"]
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    path = HERE / "interrupts.json"
    known: dict[str, Any] = {} if options.quick or not path.exists() else json.loads(path.read_text())
    result: dict[str, Any] = {**known, "machine": describe()}
    before = {row["what"]: row for row in known.get("lines", ())}
    for what in LINES:
        if what in options.only:
            before[what] = lines(what, 40 if options.quick else MOST)
    result["lines"] = [before[what] for what in LINES if what in before]
    keep = functools.partial(save, path, result, table) if not options.quick else lambda: None
    keep()
    if "random" in options.only:
        result["random"] = at_random(200 if options.quick else SIGNALS)
        keep()
    if "turns" in options.only:
        result["turns"] = at_random_through_a_daemon(200 if options.quick else SIGNALS)
        keep()
    print(table(result))
    sys.stdout.flush()
    parts = [*result["lines"], *(result[part] for part in ("random", "turns") if part in result)]
    os._exit(any(r["bad"] for r in parts))


if __name__ == "__main__":
    main()
