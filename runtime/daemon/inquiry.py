"""The state of the coordinator at a path, by asking it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final, TypeVar

from msgspec import structs

from jaxtensile.errors import CoordinatorError, UnreachableError
from jaxtensile.runtime.daemon.peers import foreign
from jaxtensile.runtime.protocol.messages import (
    VERSION,
    Error,
    Hello,
    LeaseView,
    Reply,
    Request,
    Snapshot,
    Status,
    Welcome,
)
from jaxtensile.runtime.protocol.wire import REPLIES, frame, take
from jaxtensile.units import KIB, Seconds

ANSWERS: Final[Seconds] = 5.0
"""Seconds in which even a busy coordinator answers. A guess."""
_CHUNK: Final = 64 * KIB
"""Bytes read at once: a message at most (``wire.LIMIT``)."""

R = TypeVar("R", Welcome, Snapshot)


class Inquirer:
    """A connection that only asks. Raises ``UnreachableError`` if nobody answers within ``timeout`` seconds."""

    def __init__(self, path: Path, timeout: Seconds = ANSWERS) -> None:
        self._path, self._timeout = path, timeout
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._link.settimeout(timeout)
        try:
            self._link.connect(os.fspath(path))
            if other := foreign(self._link):
                raise UnreachableError(f"the coordinator at {path} is not spoken to: {other}")
            self._replies = self._read()
            self._ask(Hello(version=VERSION), Welcome)
        except OSError as error:
            self.close()
            raise UnreachableError(
                f"no coordinator answers at {path} ({error.strerror or error}): start one with 'jaxtensile serve', or "
                "name another --socket"
            ) from None
        except CoordinatorError:
            self.close()
            raise

    def snapshot(self) -> Snapshot:
        """The whole state, from one or more messages. Raises ``UnreachableError``."""
        leases: list[LeaseView] = []
        first: Snapshot | None = None
        while True:
            try:
                page = self._ask(Status(after=leases[-1].lease if leases else 0), Snapshot)
            except OSError as error:
                raise UnreachableError(
                    f"the coordinator at {self._path} has gone ({error.strerror or error})"
                ) from None
            first = first or page
            leases += page.leases
            if not page.more or not page.leases:
                return structs.replace(first, leases=tuple(leases), more=False)

    def close(self) -> None:
        """End the connection."""
        self._link.close()

    def _ask(self, request: Request, kind: type[R]) -> R:
        self._link.sendall(frame(request))
        for reply in self._replies:
            if isinstance(reply, kind):
                return reply
            if isinstance(reply, Error):
                raise CoordinatorError(f"the coordinator at {self._path} refuses: {reply.detail}")
        raise AssertionError

    def _read(self) -> Iterator[Reply]:
        rest, ends = b"", time.monotonic() + self._timeout
        while True:
            if not (data := self._link.recv(_CHUNK)):
                raise ConnectionResetError(0, "it has closed the connection")
            taken = take(rest + data, REPLIES)
            rest = taken.rest
            for reply in taken.messages:
                ends = time.monotonic() + self._timeout
                yield reply
            if taken.error is not None:
                raise CoordinatorError(f"what answers at {self._path} is no coordinator: {taken.error}")
            if time.monotonic() > ends:
                raise TimeoutError(0, "it says nothing that was asked for")


def ask(path: Path, timeout: Seconds = ANSWERS) -> Snapshot:
    """The state of the coordinator at ``path``. Raises ``UnreachableError``."""
    with closing(Inquirer(path, timeout)) as inquirer:
        return inquirer.snapshot()
