"""What long work has done and how long it still takes, on standard error.

One line that is written anew on a terminal; elsewhere nothing, until it takes long.
"""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import Final

from jaxtensile.units import Seconds, format_seconds

QUIET: Final[Seconds] = 10.0
"""Seconds between two lines without a terminal. A guess."""


class Progress:
    """A context manager: its line is gone at the end."""

    def __init__(self) -> None:
        self._began = self._told = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._shown:
            self._write("\r" + " " * (self._columns() - 1) + "\r")

    def tell(self, text: str, share: float | None = None) -> None:
        """``text``: what begins now. ``share``: of all the work, what is done."""
        now = time.monotonic()
        if share:
            left = (now - self._began) * (1 - share) / share
            text = f"{text} {share:.0%}, about {format_seconds(max(round(left), 1))} left"
        if self._terminal:
            self._shown = True
            width = self._columns() - 1
            self._write("\r" + text[:width].ljust(width))
        elif now - self._told >= QUIET:
            self._told = now
            self._write(text + "\n")

    def _columns(self) -> int:
        return shutil.get_terminal_size().columns

    def _write(self, text: str) -> None:
        print(text, end="", file=sys.stderr, flush=True)


__all__ = ["Progress"]
