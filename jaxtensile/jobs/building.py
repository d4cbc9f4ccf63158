"""How many jobs compile in the background at once.

Plans compiled ahead speed up nothing while the steps that run wait for a core: of six jobs on two cores that take turns
the one that steps had a third of a core. So one job in two cores compiles at a time, of a process or of all that share
a coordinator's socket.

Invariant: a place is free again when its thread or its process ends: between processes it is a lock of the kernel.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from jaxtensile.clock import Watch
from jaxtensile.runtime.client.holds import LOOK

CORES: Final = 2
"""Cores for each job that compiles: one for its planner and XLA, one for the steps of others. A guess."""


def _places() -> int:
    """How many may compile at once."""
    return max(len(os.sched_getaffinity(0)) // CORES, 1)


_here = threading.BoundedSemaphore(_places())


def _in_child() -> None:
    global _here
    _here = threading.BoundedSemaphore(_places())


os.register_at_fork(after_in_child=_in_child)


@contextmanager
def place(socket: Path | None, watch: Watch) -> Generator[None]:
    """Wait for a place among those who compile: of this process, or of all who ask the coordinator at ``socket``."""
    while not _here.acquire(timeout=LOOK):
        watch("place")
    try:
        file = None if socket is None else _locked(socket, watch)
        try:
            yield
        finally:
            if file is not None:
                os.close(file)
    finally:
        _here.release()


def _locked(socket: Path, watch: Watch) -> int | None:
    """A locked file beside the socket; None if none can be made there."""
    while True:
        for k in range(_places()):
            try:
                file = os.open(f"{socket}.compiling{k}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError:
                return None
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(file)
            else:
                return file
        watch("place")
        time.sleep(LOOK)
