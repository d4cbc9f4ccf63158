"""Byte streams to peers that may be slow.

Invariant: reads and writes never wait, and the bytes kept for a peer that does not read are bounded. Beyond
``ENOUGH_UNREAD`` bytes the peer is not heard until it has read. It is given up after ``READ_WITHIN`` seconds of that,
or beyond ``MOST_UNREAD`` bytes.
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
"""Messages of one peer that are answered at once, before more are heard: without it 8,000 pipelined requests took 22 s.
The number is a guess."""
ENOUGH_UNREAD: Final[Bytes] = 256 * KIB
"""Bytes of unread answers beyond which a peer is not heard. A guess."""
MOST_UNREAD: Final[Bytes] = ENOUGH_UNREAD + (TAKEN + 1) * LIMIT
"""Bytes of unread answers beyond which a peer is given up: ``ENOUGH_UNREAD``, the answers to ``TAKEN`` messages, and
what else it is told meanwhile."""
READ_WITHIN: Final[Seconds] = 10.0
"""Seconds in which a peer that is no longer heard must read, or is given up. A guess, as ``server.HELLO_WITHIN``."""


class Stream:
    """One connection, with bytes of an incomplete message (``rest``) and bytes to write (``out``)."""

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
        """``rest`` may have whole messages that were not heard yet."""
        self.full: Seconds | None = None
        """Since when it is not heard because too much is unread; None: it is heard."""
        self.awaited = select.EPOLLIN
        """The epoll events that are awaited."""

    def read(self) -> bytes | None:
        """The bytes that have come; empty at the end, None if there are none yet."""
        try:
            return self.socket.recv(CHUNK)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return b""

    def write(self) -> Literal["gone", "slow"] | None:
        """Write as much as possible; why the peer is given up, if it is."""
        try:
            sent = self.socket.send(self.out, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            return "gone"
        del self.out[:sent]
        return "slow" if len(self.out) > MOST_UNREAD else None
