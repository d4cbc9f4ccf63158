"""Drop a library's unwanted output lines, and nothing else.

HiGHS (at least 1.8 to 1.12) prints when it repairs a solution, whatever its options (jump-dev/HiGHS.jl, issue 312). It
prints from C, so C's ``stdout`` becomes a stream in memory; other threads' C output appears afterwards. Descriptor 1
stays, since processes started meanwhile inherit it.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_ONE_AT_A_TIME = threading.Lock()


class _Aside:
    """A stream in memory. There is only one, never freed: a C thread may still write to it."""

    def __init__(self, libc: Any) -> None:
        self._text, self._size = ctypes.c_char_p(), ctypes.c_size_t()
        libc.open_memstream.restype = ctypes.c_void_p
        self._libc = libc
        self.stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(self._text), ctypes.byref(self._size)))

    def empty(self) -> None:
        self._libc.rewind(self.stream)

    def content(self) -> bytes:
        self._libc.fflush(self.stream)
        return ctypes.string_at(self._text, self._size.value)


@cache
def _libc() -> tuple[Any, _Aside] | None:
    """The C library, if its ``stdout`` can be replaced (glibc)."""
    libc = ctypes.CDLL(None)
    return (libc, _Aside(libc)) if platform.libc_ver()[0] == "glibc" else None


@contextmanager
def hushed(line: bytes) -> Iterator[None]:
    """Drop lines that begin with ``line`` from the standard output of C code inside the context."""
    with _ONE_AT_A_TIME:
        if (found := _libc()) is None:
            yield
            return
        libc, aside = found
        stdout = ctypes.c_void_p.in_dll(libc, "stdout")
        before = ctypes.c_void_p(stdout.value)
        aside.empty()
        stdout.value = aside.stream.value
        try:
            yield
        finally:
            stdout.value = before.value
            for said in aside.content().splitlines(keepends=True):
                if not said.startswith(line):
                    libc.fwrite(said, 1, len(said), before)
