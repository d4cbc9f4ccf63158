"""Detect Ctrl-C, for programs that end on it with one line.

JAX may turn an interrupt into another error, such as ``ValueError: Cache keys should be comparable``.
"""

from __future__ import annotations

import signal
import threading
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any


class Interrupts(AbstractContextManager["Interrupts", None]):
    """While open, ``pressed`` records Ctrl-C; ``KeyboardInterrupt`` is raised as usual."""

    def __init__(self) -> None:
        self.pressed = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        # Other threads may set no handlers; a process in the background that ignores Ctrl-C goes on doing so.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGINT)
            if self._before is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        signal.default_int_handler(number, frame)
