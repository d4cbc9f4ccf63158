"""The process at the other end of a socket, and its death, after which the coordinator frees its leases.

Invariant: a process is its pid and start time from the kernel. Its death is told once, by a pidfd, readable when the
process has ended and its memory is free. From Linux 6.5 the pidfd comes from the socket, so a process that reuses the
pid is not mistaken for it.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

from jaxtensile.runtime.decide.leases import Process

SO_PEERPIDFD: Final = 77
"""Number of the Linux socket option (``asm-generic/socket.h``, since 6.5), which Python does not name."""
_UNKNOWN: Final = (errno.ENOPROTOOPT, errno.EINVAL)
"""Errors of a kernel without the option."""
_CREDENTIALS: Final = struct.Struct("3i")
_START_TIME: Final = 19
"""Index of the start time in ``/proc/PID/stat`` after the bracketed name, which may contain anything (proc(5): field
22, from 1)."""


class Dead(Exception):
    """The process has ended."""


def credentials(link: socket.socket) -> tuple[int, int]:
    """Pid and user id of the peer. Pid 0: a process that cannot be seen from here."""
    pid, uid, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def foreign(link: socket.socket) -> str:
    """The owner of the other end, for an error, if it is neither this user nor root; else empty."""
    _, uid = credentials(link)
    mine = os.geteuid()
    return "" if uid in (mine, 0) else f"it is user {uid}'s, not user {mine}'s: name a socket of your own"


def started(pid: int) -> int:
    """A process's start time in clock ticks after boot. Raises ``Dead``."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        raise Dead(pid) from None
    return int(stat[stat.rindex(b")") + 2 :].split()[_START_TIME])


def peer_pidfd(link: socket.socket, pid: int, option: int = SO_PEERPIDFD) -> int:
    """A pidfd of the peer. Raises ``Dead``, or ``OSError`` if no descriptors are left."""
    try:
        return link.getsockopt(socket.SOL_SOCKET, option)
    except OSError as error:
        if isinstance(error, ProcessLookupError):
            raise Dead(pid) from None
        if error.errno not in _UNKNOWN:
            raise
    return open_pidfd(pid)


def open_pidfd(pid: int) -> int:
    """A pidfd of the process that has that pid now. Raises ``Dead``."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise Dead(pid) from None


def has_died(pidfd: int) -> bool:
    """Whether the process of a pidfd has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


class Watched:
    """Processes whose death is to be reported, each by its pidfd in an epoll."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._pidfds: dict[Process, int] = {}
        self._processes: dict[int, Process] = {}

    def __len__(self) -> int:
        return len(self._pidfds)

    def met(self, link: socket.socket, pid: int) -> Process:
        """The process that connected, watched from now on. Raises ``Dead`` or ``OSError``."""
        pidfd = peer_pidfd(link, pid)
        try:
            process = Process(pid, started(pid))
            if has_died(pidfd):  # the start time may be that of another process that got the pid
                raise Dead(pid)
            if process not in self._pidfds:
                self._add(process, pidfd)
                pidfd = -1
            return process
        finally:
            if pidfd >= 0:
                os.close(pidfd)

    def watch(self, process: Process) -> bool:
        """Watch a known process; False if it has ended. Raises ``OSError``."""
        if process in self._pidfds:
            return True
        try:
            pidfd = open_pidfd(process.pid)
        except Dead:
            return False
        try:
            if started(process.pid) == process.started:
                self._add(process, pidfd)
                pidfd = -1
                return True
        except Dead:
            pass
        finally:
            if pidfd >= 0:
                os.close(pidfd)
        return False

    def _add(self, process: Process, pidfd: int) -> None:
        self._epoll.register(pidfd, select.EPOLLIN)
        self._pidfds[process] = pidfd
        self._processes[pidfd] = process

    def fired(self, pidfd: int) -> Process | None:
        """The process that has ended, if the descriptor is a watched pidfd; reported once."""
        process = self._processes.pop(pidfd, None)
        if process is not None:
            del self._pidfds[process]
            self._epoll.unregister(pidfd)
            os.close(pidfd)
        return process

    def send(self, process: Process, number: signal.Signals) -> None:
        """Send a signal to a process, never to another one that got its pid."""
        pidfd = self._pidfds.get(process)
        if pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)

    def close(self) -> None:
        """Stop watching."""
        for pidfd in self._processes:
            os.close(pidfd)
        self._pidfds, self._processes = {}, {}
