"""The place where a coordinator and its jobs meet.

Invariant: a path has one coordinator, the holder of the lock beside it. Only its user can reach it: the directory is
the user's, and it and the socket are closed to others. Nothing is removed before the lock is held; a socket found then
is nobody's.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from jaxtensile.errors import CoordinatorError
from jaxtensile.runtime.config.config import LONGEST_SOCKET

VARIABLE: Final = "JAXTENSILE_SOCKET"
"""Environment variable with the coordinator's socket, for jobs."""
JOB_VARIABLE: Final = "JAXTENSILE_JOB"
"""Environment variable with a process's job name in the config."""
DEVICES_VARIABLE: Final = "JAXTENSILE_DEVICES"
"""Environment variable with the names of the devices that a process is to use, ``cuda:0,cuda:1``, as its coordinator
names them."""
_NAME: Final = "coordinator.sock"
_BACKLOG: Final = 4096
"""Connections waiting to be accepted, when all jobs return at once: the default limit of Linux
(``net.core.somaxconn``)."""
_PRIVATE: Final = 0o700
"""Mode of the socket's directory: its user alone."""
_SOCKET_MASK: Final = 0o177
"""Mask when the socket is made: only its user may read and write it."""


class PlaceError(CoordinatorError):
    """A coordinator cannot run at a place."""


def socket_path(option: str | None, environment: Mapping[str, str], configured: str | None, uid: int) -> Path:
    """The socket of a user's coordinator: the option, else ``$JAXTENSILE_SOCKET``, else the config, else a place of the
    user's own. Raises ``PlaceError``."""
    if given := option or environment.get(VARIABLE) or configured:
        return checked(Path(given).absolute())
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        return checked(Path(runtime) / "jaxtensile" / _NAME)
    return Path(f"/tmp/jaxtensile-{uid}") / _NAME


def checked(path: Path) -> Path:
    """The same path, if a socket can be there. Raises ``PlaceError``."""
    length = len(os.fsencode(path))
    if length > LONGEST_SOCKET:
        raise PlaceError(
            f"the path of the socket has {length} bytes, {LONGEST_SOCKET} at most are possible: choose a shorter one "
            f"than {path}"
        )
    if not path.is_absolute():
        raise PlaceError(f"the path of the socket must be absolute, not {path}")
    return path


class Endpoint:
    """Directory, lock, socket and journal of one coordinator."""

    def __init__(self, path: Path) -> None:
        self.path = checked(path)
        self.journal = path.with_name(path.name + ".journal")
        self._lock_path = path.with_name(path.name + ".lock")
        self._lock = -1
        self._bound: tuple[int, int] | None = None

    def take(self) -> None:
        """Reserve the place for this process until it ends. Raises ``PlaceError``."""
        self._make_directory()
        lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = os.pread(lock, 32, 0).decode(errors="replace").strip()
            os.close(lock)
            who = f"process {said}" if said.isdigit() else "another process"
            raise PlaceError(
                f"{who} coordinates at {self.path} already: use that one ('jaxtensile status'), end it, or choose "
                "another path with --socket"
            ) from None
        with suppress(OSError):  # who holds it is for people; the disk may be full
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        self._lock = lock

    def _make_directory(self) -> None:
        folder = self.path.parent
        try:
            folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
            found = folder.lstat()
        except OSError as error:
            raise PlaceError(f"{folder} cannot be made: {error.strerror}: choose another path with --socket") from None
        if not stat.S_ISDIR(found.st_mode):
            raise PlaceError(f"{folder} is no directory: choose another path with --socket")
        if found.st_uid != os.geteuid():
            raise PlaceError(f"{folder} belongs to user {found.st_uid}, not to you: choose another path with --socket")
        if found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise PlaceError(
                f"{folder} has mode {mode:04o}, and others could reach the coordinator there: 'chmod 700 {folder}', or "
                "choose another path with --socket"
            )

    def bind(self) -> socket.socket:
        """The listening socket, after ``take``. An earlier coordinator's socket is removed. Raises ``PlaceError``."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        before = os.umask(_SOCKET_MASK)
        try:
            if os.path.lexists(self.path):
                if not stat.S_ISSOCK(self.path.lstat().st_mode):
                    raise PlaceError(f"{self.path} is there and no socket: remove it, or choose another path")
                self.path.unlink()
            listener.bind(os.fspath(self.path))
        except OSError as error:
            listener.close()
            raise PlaceError(f"{self.path} cannot be bound: {error.strerror or error}") from None
        except PlaceError:
            listener.close()
            raise
        finally:
            os.umask(before)
        listener.listen(_BACKLOG)
        self._bound = _identity(self.path)
        return listener

    def lost(self) -> bool:
        """Whether the socket's file is gone or another's."""
        return self._bound is None or _identity(self.path) != self._bound

    def displaced(self) -> bool:
        """Whether another coordinator has the lock, after its file was removed. If nobody has, take it anew."""
        held = os.fstat(self._lock)
        if _identity(self._lock_path) == (held.st_dev, held.st_ino):
            return False
        old, self._lock = self._lock, -1
        try:
            self.take()
        except (PlaceError, OSError):
            self._lock = old
            return True
        os.close(old)
        return False

    def leave(self) -> None:
        """Remove the socket's file, if still this one's. The lock's file stays: waiting processes have it open."""
        if not self.lost():
            with suppress(OSError):
                self.path.unlink()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
