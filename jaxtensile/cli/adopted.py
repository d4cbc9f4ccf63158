"""Processes left behind by those that this one started.

Invariant: only processes that became children of this one are touched. Linux gives orphans of any session to the next
*subreaper* above; other systems give none.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final

from jaxtensile.units import Seconds

PATIENCE: Final[Seconds] = 3.0
"""Seconds for a job to end on a signal, before a harsher one. A guess."""
SIGNALLED: Final = 128
"""What shells add to the number of the signal that ended a process."""
_SET_CHILD_SUBREAPER: Final = 36
"""``PR_SET_CHILD_SUBREAPER`` of Linux (``linux/prctl.h``)."""
_GET_CHILD_SUBREAPER: Final = 37
"""``PR_GET_CHILD_SUBREAPER`` of Linux (``linux/prctl.h``)."""


class Adopted(AbstractContextManager["Adopted", None]):
    """While open, this process adopts what its descendants leave behind."""

    def __init__(self) -> None:
        self._prctl = getattr(ctypes.CDLL(None), "prctl", None)
        self._own: frozenset[int] = frozenset()
        self._before = ctypes.c_int(0)

    def __enter__(self) -> Adopted:
        self._own = frozenset(_children())
        if self._prctl is not None:
            self._prctl(_GET_CHILD_SUBREAPER, ctypes.byref(self._before), 0, 0, 0)
            self._prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._prctl is not None:
            self._prctl(_SET_CHILD_SUBREAPER, self._before.value, 0, 0, 0)

    def end(self, started: Collection[int], said: Collection[bytes] | None = None) -> bool:
        """Kill orphans whose environment has one of the settings ``said`` (None: all), and reap the ended ones.

        ``started``: children that are no orphans. True if there were orphans: what they started follows.
        """
        orphans = set(_children()) - self._own - set(started)
        for pid in orphans:
            with suppress(ProcessLookupError, ChildProcessError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0) and (said is None or _environment(pid).intersection(said)):
                    os.kill(pid, signal.SIGKILL)
        return bool(orphans)

    def end_all(self, started: Collection[int], within: Seconds) -> None:
        """Kill all orphans, and what those leave behind."""
        ends = time.monotonic() + within
        while self.end(started) and time.monotonic() < ends:
            time.sleep(0.01)


def _environment(pid: int) -> set[bytes]:
    """The process's initial environment, as ``NAME=value``."""
    with suppress(OSError):
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    return set()


def _children() -> list[int]:
    with suppress(OSError):
        return [int(pid) for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]
    return []
