"""Python's garbage is looked for less often while a program is planned.

Planning makes millions of objects that stay, and the collector, which counts objects, goes through all of them, and
all of JAX's, again and again: a fifth of the time.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

SELDOM: Final = (100_000, 20, 100)
"""Thresholds of Python's garbage collector: new objects, and collections of each younger generation, between two
collections (by default 700, 10, 10). A planner makes millions of objects and little garbage. Guesses."""
_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []
"""The thresholds of whoever was here first, and one entry for each that came while he was."""


@contextmanager
def seldom() -> Iterator[None]:
    """Within it, of whatever threads, garbage is looked for seldom; behind the last, as often as before the first."""
    with _lock:
        _before.append(gc.get_threshold())
        gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        with _lock:
            first = _before[0]
            _before.pop()
            if not _before and gc.get_threshold() == SELDOM:  # else somebody has said otherwise meanwhile
                gc.set_threshold(*first)
