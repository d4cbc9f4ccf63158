"""The daemon's log.

Invariant: one line per event: a time, a word, then ``key=value`` pairs. The log never waits for its descriptor: if
nobody reads, lines are dropped and counted.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable
from typing import Final

from jaxtensile.runtime.coordinate.chronicle import Entry
from jaxtensile.units import Seconds

_AT_ONCE: Final = 4096
"""Bytes that a writable pipe takes whole: ``PIPE_BUF`` of Linux."""


class Log:
    """Lines on a descriptor."""

    def __init__(self, descriptor: int = 2, clock: Callable[[], float] = time.time) -> None:
        self._descriptor, self._clock = descriptor, clock
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self.dropped = 0

    def tell(self, what: str, **facts: object) -> None:
        """Write one line."""
        self._write(self._line(what, facts))

    def entries(self, entries: list[Entry], missed: int = 0) -> None:
        """Write chronicle entries as lines; ``missed``: how many were lost before."""
        self.dropped += missed
        lines = ""
        for e in entries:
            facts = {"job": e.job, "lease": e.lease, "pid": e.pid, "detail": e.detail}
            given: dict[str, object] = {key: value for key, value in facts.items() if value}
            if e.rung >= 0:
                given["rung"] = e.rung
            line = self._line(e.what.replace(" ", "_"), given, time.monotonic() - e.at)
            if lines and len(lines) + len(line) > _AT_ONCE:
                self._write(lines)
                lines = ""
            lines += line
        if lines:
            self._write(lines)

    def _line(self, what: str, facts: dict[str, object], ago: Seconds = 0.0) -> str:
        now = self._clock() - ago
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1e3) % 1000:03d}Z"
        return f"{stamp} {what}" + "".join(f" {key}={_value(value)}" for key, value in facts.items()) + "\n"

    def _write(self, lines: str) -> None:
        count = lines.count("\n")
        try:
            if self._poll.poll(0)[0][1] & select.POLLOUT:
                os.write(self._descriptor, lines.encode(errors="replace")[:_AT_ONCE])
                return
        except (OSError, IndexError):
            pass
        self.dropped += count


def _value(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if text and text.isascii() and not set(' "=\\\n\t') & set(text) else json.dumps(text)
