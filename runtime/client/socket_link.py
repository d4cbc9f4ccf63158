"""A client's link to a coordinator behind a Unix socket, with reconnection.

Invariant: one thread per link connects, hears and beats. The job's thread only hands bytes to the kernel, and never
waits for a coordinator that does not read. A lost connection is renewed while the client has something to say, each
time after a random part of a doubling delay: clients do not all return to a restarted coordinator at once.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Final

from jaxtensile.runtime.client.client import Client
from jaxtensile.runtime.client.forks import abandoned_in_children
from jaxtensile.runtime.daemon.peers import foreign
from jaxtensile.runtime.protocol.messages import Error, Reply, Request, Welcome
from jaxtensile.runtime.protocol.wire import REPLIES, frame, take
from jaxtensile.units import KIB, Seconds

FIRST_DELAY: Final = 0.05
"""Seconds, the first delay of reconnecting, doubled each time; the wait is a random part of it. A guess."""
LONGEST_DELAY: Final = 1.0
"""Seconds, the longest delay: a restarted coordinator hears of its leases within the two that it waits."""
BEATS: Final = 4
"""Beats in the time within which one must be heard: three may be late. A guess."""
_CHUNK: Final = 64 * KIB
"""Bytes read at once: a message at most (``wire.LIMIT``)."""
_AROUND: Final = (0.5, 1.5)
"""Random factors, from and to, on the wait that a coordinator asks for: clients told at once do not return at once."""
_CONNECTING: Final = 5.0
"""Seconds in which a connection is made: a coordinator whose backlog is full accepts none. A guess."""
_LINGER: Final = 2.0
"""Seconds for a coordinator's last messages after the client has closed. A guess."""


class SocketLine:
    """One connection."""

    __slots__ = ("__weakref__", "_lock", "stream")

    def __init__(self, link: socket.socket) -> None:
        self.stream = link
        self._lock = threading.Lock()
        """Guards against writing to a closed descriptor, which may be another file by then."""
        abandoned_in_children(self)

    def abandon(self) -> None:
        """In a child: close the descriptor; the connection goes on."""
        self.stream.close()

    def send(self, requests: Sequence[Request]) -> None:
        """Hand the requests to the kernel. If they do not fit, the coordinator has not read for long: give the
        connection up."""
        data = b"".join(map(frame, requests))
        with self._lock:
            try:
                if self.stream.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) == len(data):
                    return
            except OSError:
                pass
        self.end(socket.SHUT_RDWR)  # its thread sees that

    def end(self, how: int = socket.SHUT_WR) -> None:
        """Stop sending; by default the coordinator still may send."""
        with self._lock, suppress(OSError):  # it may have ended already
            self.stream.shutdown(how)

    def close(self) -> None:
        with self._lock:
            self.stream.close()


class SocketLink:
    """A client's connections to the coordinator at ``path``, one after another."""

    def __init__(self, path: str, client: Client) -> None:
        frame(client.admit)  # a ladder that is too long is the caller's mistake, and told to him
        self._path, self._client = path, client
        self._random = Random()
        self._line: SocketLine | None = None
        self._closing = threading.Event()
        self._beat_every: Seconds = 1.0
        self._not_before: Seconds = 0.0
        threading.Thread(target=self._run, name=f"jaxtensile {client.admit.job}", daemon=True).start()

    @classmethod
    def to(cls, path: str) -> Callable[[Client], SocketLink]:
        """The ``connect`` argument of ``Client``."""
        return lambda client: cls(path, client)

    def close(self) -> None:
        """Stop sending, and hear the coordinator out."""
        self._closing.set()
        line = self._line
        if line is not None:
            line.end()

    # The thread.

    def _run(self) -> None:
        delay, client = FIRST_DELAY, self._client
        try:
            while not client.done:
                began = time.monotonic()
                why = self._connection()
                if client.done:
                    break
                if time.monotonic() > began + LONGEST_DELAY:
                    delay = FIRST_DELAY  # it had worked
                pause = max(self._random.uniform(0.0, delay), self._not_before - time.monotonic())
                delay = min(2 * delay, LONGEST_DELAY)
                client.unreachable(why)
                if self._closing.is_set():
                    time.sleep(pause)
                else:
                    self._closing.wait(pause)
        except Exception as error:  # whatever it is, the job must not wait for words that never come
            client.failed(f"the connection to the coordinator ended by {type(error).__name__}: {error}")
            raise

    def _connection(self) -> str:
        """Run one connection from start to end; return why it ended."""
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.settimeout(_CONNECTING)
            link.connect(self._path)
            link.setblocking(False)
            if other := foreign(link):
                link.close()
                self._client.failed(f"the coordinator at {self._path} is not spoken to: {other}")
                return other
        except OSError as error:
            link.close()
            return f"{self._path}: {error.strerror or error}"
        line = self._line = SocketLine(link)
        self._client.connected(line)
        if self._closing.is_set() and self._client.done:
            line.end()  # it was closed while there was no connection
        why = self._listen(line)
        self._line = None
        line.close()
        self._client.disconnected(why)
        return why

    def _listen(self, line: SocketLine) -> str:
        """Hear and beat until the connection ends; return why it ended."""
        poll = select.poll()
        poll.register(line.stream, select.POLLIN)
        rest, beat = b"", time.monotonic() + self._beat_every
        linger: Seconds | None = None
        while True:
            now = time.monotonic()
            if now >= beat:
                self._client.pulse()
                beat = now + self._beat_every
            if self._closing.is_set():
                linger = linger or now + _LINGER
                if now >= linger:
                    return "closed"
            if not poll.poll(max(min(beat, linger or beat) - now, 0.0) * 1e3 + 1.0):
                continue
            try:
                data = line.stream.recv(_CHUNK)
            except BlockingIOError:
                continue
            except OSError as error:
                return f"{self._path}: {error.strerror or error}"
            if not data:
                return "the coordinator has closed the connection"
            taken = take(rest + data, REPLIES)
            rest = taken.rest
            for reply in taken.messages:
                if isinstance(reply, Welcome):
                    self._beat_every = reply.beat_within / BEATS
                    beat = time.monotonic() + self._beat_every
                self._hear(line, reply)
            if taken.error is not None:
                return f"what answers at {self._path} is no coordinator of this version: {taken.error}"

    def _hear(self, line: SocketLine, reply: Reply) -> None:
        if isinstance(reply, Error) and reply.retry_after is not None:
            self._not_before = time.monotonic() + reply.retry_after * self._random.uniform(*_AROUND)
        self._client.heard(reply)
        if self._client.done:  # nothing more is to be said, or heard
            line.end()
