"""Wall time of each planning step, and a notice when it begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Watch = Callable[[str], None]
"""Called with the name of each step when it begins."""


def nothing(_: str) -> None:
    """The default ``watch``."""


class Clock:
    """Wall seconds per pipeline step, summed over rounds. Calls ``watch`` when a step begins."""

    def __init__(self, watch: Watch) -> None:
        self.seconds: dict[str, float] = {}
        self.watch = watch
        self._within = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.watch(name)
        started = time.perf_counter()
        outer, self._within = self._within, 0.0
        try:
            yield
        finally:
            # What was done meanwhile has a name of its own.
            took = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + took - self._within
            self._within = outer + took
