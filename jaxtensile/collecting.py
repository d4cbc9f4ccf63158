"""Rarer garbage collection during planning.

Planning makes millions of objects that stay. The collector would scan them, and all of JAX's, again and again: a fifth
of the time.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

SELDOM: Final = (100_000, 20, 100)
"""Thresholds of Python's garbage collector: new objects, and collections of each younger generation, between two
collections (default 700, 10, 10). Guesses."""
_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []
"""The thresholds found by each present user; the first entry is the original."""


@contextmanager
def seldom() -> Iterator[None]:
    """Collect garbage rarely inside, in any thread. The last to leave restores the first thresholds, unless they were
    changed."""
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
