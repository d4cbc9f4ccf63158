"""Lines that a library prints although it was told not to: dropped, and nothing else that is printed meanwhile.

HiGHS (1.8 to 1.12 at least) says where it repairs a solution, whatever its options (jump-dev/HiGHS.jl, issue 312). It
does so in C, so the file behind descriptor 1 is another one meanwhile; what other threads printed comes out after.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def hushed(line: bytes) -> Iterator[None]:
    """Drop lines that begin with ``line`` from what is printed to the standard output inside.

    Where the process has none, nothing is done.
    """
    with _ONE_AT_A_TIME:
        try:
            _flush()
            kept = os.dup(1)
        except OSError:
            kept = None
        if kept is None:
            yield
            return
        with tempfile.TemporaryFile() as aside:
            os.dup2(aside.fileno(), 1)
            try:
                yield
            finally:
                _flush()
                os.dup2(kept, 1)
                os.close(kept)
                aside.seek(0)
                told = b"".join(said for said in aside if not said.startswith(line))
                while told:
                    told = told[os.write(1, told) :]


def _flush() -> None:
    """What Python and C have not written yet."""
    with suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).fflush(None)
