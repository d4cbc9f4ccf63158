"""How are bytes exchanged with somebody who may be slow?

Invariant: neither reading nor writing ever waits, and what is kept for a peer that does not read is bounded. Beyond
``ENOUGH_UNREAD`` bytes it is not heard until it has read; after ``READ_WITHIN`` seconds of that, and beyond
``MOST_UNREAD`` bytes, it is given up.
"""

from __future__ import annotations

import select
import socket
from typing import Final, Literal

from jaxtensile.runtime.decide.leases import Process
from jaxtensile.runtime.protocol.wire import LIMIT
from jaxtensile.units import KIB, Bytes, Seconds

CHUNK: Final = 64 * KIB
"""Bytes read at once: a message at most (``wire.LIMIT``)."""
TAKEN: Final = 4
"""Messages of one peer that are answered at once: it has the answers before more of what it says is heard. 8,000
pipelined requests took 22 s without. The number is a guess."""
ENOUGH_UNREAD: Final[Bytes] = 256 * KIB
"""Bytes of unread answers from which on a peer is not heard. A guess."""
MOST_UNREAD: Final[Bytes] = ENOUGH_UNREAD + (TAKEN + 1) * LIMIT
"""Bytes of unread answers with which a peer is given up: ``ENOUGH_UNREAD``, the answers to as many messages as are
taken at once, and what it is told beside them."""
READ_WITHIN: Final[Seconds] = 10.0
"""Time for a peer to read, once it is not heard for that; then it is given up. A guess, as ``server.HELLO_WITHIN``."""


class Stream:
    """One connection: what was read and is no whole message yet, what was not written yet."""

    __slots__ = (
        "awaited",
        "descriptor",
        "full",
        "heard",
        "more",
        "number",
        "out",
        "process",
        "rest",
        "since",
        "socket",
    )

    def __init__(self, link: socket.socket, number: int, process: Process | None, now: Seconds) -> None:
        self.socket, self.number, self.process, self.since = link, number, process, now
        self.descriptor = link.fileno()
        self.rest = b""
        self.out = bytearray()
        self.heard = False
        """A whole message has come."""
        self.more = False
        """What was read may have whole messages that were not heard yet."""
        self.full: Seconds | None = None
        """Since when so much is unread that it is not heard."""
        self.awaited = select.EPOLLIN
        """What somebody is to tell of it."""

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
        del self.out[:sent]
        return "slow" if len(self.out) > MOST_UNREAD else None
