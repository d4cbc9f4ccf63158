"""How are bytes exchanged with somebody who may be slow?

Invariant: neither reading nor writing ever waits, and what is kept for a peer that does not read is bounded: beyond
``MOST_UNREAD`` bytes it is given up.
"""

from __future__ import annotations

import socket
from typing import Final, Literal

from jaxtensile.runtime.leases import Process
from jaxtensile.units import KIB, Bytes, Seconds

CHUNK: Final = 64 * KIB
MOST_UNREAD: Final[Bytes] = 256 * KIB


class Stream:
    """One connection: what was read and is no whole message yet, what was not written yet."""

    __slots__ = ("descriptor", "heard", "number", "out", "process", "rest", "since", "socket", "waits")

    def __init__(self, link: socket.socket, number: int, process: Process | None, now: Seconds) -> None:
        self.socket, self.number, self.process, self.since = link, number, process, now
        self.descriptor = link.fileno()
        self.rest = b""
        self.out = b""
        self.heard = False
        """A whole message has come."""
        self.waits = False
        """Somebody is to tell when it can be written to."""

    def read(self) -> bytes | None:
        """What has come; empty at the end; None if nothing has."""
        try:
            return self.socket.recv(CHUNK)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return b""

    def write(self) -> Literal["gone", "slow"] | None:
        """Write what can be written; why the peer is given up, if it is."""
        try:
            sent = self.socket.send(self.out, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            return "gone"
        self.out = self.out[sent:]
        return "slow" if len(self.out) > MOST_UNREAD else None
