"""Many clients of one server as one process, and a server that only sends bytes back.

Every client asks for a lease, and as soon as it is granted gives it back and asks for the next one, in one write: one
round trip a grant. The bare server reads what a client sends and answers with as many bytes as the coordinator would,
without looking at either; a Ray actor is called with nothing and answers with nothing.

    python -m benchmarks.coordinator.load PATH SIZE      the bare server
"""

from __future__ import annotations

import os
import select
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jaxtensile.runtime.protocol.messages import VERSION, Admit, Grant, Hello, Release, Released, Rung, Welcome
from jaxtensile.runtime.protocol.wire import REPLIES, frame, take

DEVICE = "cuda:0"
LIMIT = 60.0
RUNGS = 4


class Caller:
    """One client of the coordinator."""

    def __init__(self, path: str, number: int) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        ladder = tuple(Rung(persistent=1 << 20, temp=k << 20, seconds=1.0 - k / 10) for k in range(RUNGS))
        self._admit = frame(Admit(job=f"job {number}", devices=(DEVICE,), ladder=ladder))
        self._rest = b""
        self.asked = 0.0
        self.socket.sendall(frame(Hello(version=VERSION)))
        while not self._heard(Welcome):
            pass
        self._lease: Grant | None = None

    def ask(self) -> None:
        """Give back what it has, and ask again."""
        back = frame(Release(lease=self._lease.lease, token=self._lease.token)) if self._lease is not None else b""
        self.asked = time.perf_counter()
        self.socket.sendall(back + self._admit)
        self._lease = None

    def back(self) -> None:
        """Give back what it has."""
        assert self._lease is not None
        self.socket.sendall(frame(Release(lease=self._lease.lease, token=self._lease.token)))
        self._lease = None
        while not self._heard(Released):
            pass

    def answered(self) -> bool:
        """Whether it was granted what it asked for; where it may wait, that is on its way."""
        found = self._heard(Grant)
        if found is not None and self._lease is None:
            self._lease = found
            return True
        return False

    def _heard(self, kind: type) -> Any:
        data = self.socket.recv(1 << 16)
        assert data, "the coordinator has gone"
        taken = take(self._rest + data, REPLIES)
        self._rest = taken.rest
        return next((m for m in taken.messages if isinstance(m, kind)), None)


class Echoed:
    """One client of the bare server: as many bytes each way."""

    def __init__(self, path: str, ask: int, answer: int) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self._ask, self._answer, self._left = b"x" * ask, answer, 0
        self.asked = 0.0

    def ask(self) -> None:
        self.asked = time.perf_counter()
        self._left = self._answer
        self.socket.sendall(self._ask)

    def answered(self) -> bool:
        self._left -= len(self.socket.recv(1 << 16))
        return self._left <= 0


def load(callers: list[Any], seconds: float) -> dict[str, float]:
    """Round trips of all for so long: microseconds and how many a second."""
    epoll = select.epoll()
    by = {c.socket.fileno(): c for c in callers}
    for descriptor in by:
        epoll.register(descriptor, select.EPOLLIN)
    for caller in callers:
        caller.ask()
    took: list[float] = []
    warm = time.perf_counter() + min(seconds / 4, 1.0)
    began, ends = warm, warm + seconds
    while (now := time.perf_counter()) < ends:
        for descriptor, _ in epoll.poll(LIMIT):
            caller = by[descriptor]
            if caller.answered():
                at = time.perf_counter()
                if caller.asked >= began:
                    took.append(at - caller.asked)
                caller.ask()
    epoll.close()
    done = now - began
    for caller in callers:
        caller.socket.close()
    return row(took, done)


def row(took: list[float], seconds: float) -> dict[str, float]:
    """What is told of round trips."""
    cuts = statistics.quantiles(took, n=100)
    return {"p50_us": cuts[49] * 1e6, "p99_us": cuts[98] * 1e6, "per_second": len(took) / seconds}


def bare(path: str, size: int) -> None:
    """Answer whatever comes with ``size`` bytes, until stdin ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(4096)
    epoll = select.epoll()
    epoll.register(listener, select.EPOLLIN)
    epoll.register(0, select.EPOLLIN)
    links: dict[int, socket.socket] = {}
    answer = b"x" * size
    print("ready", flush=True)
    while True:
        for descriptor, _ in epoll.poll():
            if descriptor == 0:
                return
            if descriptor == listener.fileno():
                link, _ = listener.accept()
                link.setblocking(False)
                links[link.fileno()] = link
                epoll.register(link, select.EPOLLIN)
            else:
                try:
                    if links[descriptor].recv(1 << 16):
                        links[descriptor].send(answer)
                        continue
                except ConnectionError:
                    pass
                links.pop(descriptor).close()


def start_bare(path: Path, size: int) -> subprocess.Popen[str]:
    """The bare server, which answers."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.coordinator.load", str(path), str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent.parent,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def ray_actor(seconds: float) -> dict[str, float] | None:
    """Calls of a Ray actor, one after another; None where Ray is not installed."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    @ray.remote
    class Actor:
        def call(self) -> None:
            pass

    actor: Any = Actor.remote()
    took: list[float] = []
    for _ in range(100):
        ray.get(actor.call.remote())
    began = time.perf_counter()
    while time.perf_counter() < began + seconds:
        asked = time.perf_counter()
        ray.get(actor.call.remote())
        took.append(time.perf_counter() - asked)
    found = row(took, time.perf_counter() - began)
    ray.shutdown()
    return {**found, "version": ray.__version__}


if __name__ == "__main__":
    bare(sys.argv[1], int(sys.argv[2]))
