"""A job's connection to its coordinator, from any thread of its process.

Invariant: messages leave in the order in which they were decided, and no lock is held while one is sent. A link may
therefore answer from within ``send``, and a coordinator in the same process needs no thread. Ctrl-C neither splits a
change of state nor leaves a lock taken (``runtime.uninterrupted``). When a connection is lost, the next one repeats
what ``Holder`` says for the job's state by then.

The job's own thread, at a step boundary::

    client = Client(admit, SocketLink.to(path))
    rung = client.wait(timeout=60)                    # admitted: load the plan of that rung
    while training:
        if (rung := client.boundary()) is not None:   # costs nothing while there is nothing to do
            ...                                       # go to that rung, give the other one's bytes back
            client.moved(bytes_in_use)
        ...                                           # a step
        client.beat(step, seconds, bytes_in_use, peak)
    client.release()
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from jaxtensile.errors import (
    CoordinatorError,
    LostLeaseError,
    NotAdmittedError,
    RejectedError,
    UnreachableError,
)
from jaxtensile.runtime.client.forks import Owned
from jaxtensile.runtime.client.holder import Holder
from jaxtensile.runtime.client.holds import LOOK, Bell, until
from jaxtensile.runtime.client.uninterrupted import uninterrupted
from jaxtensile.runtime.protocol.messages import Admit, Beat, Error, Grant, Queued, Reply, Request, Revoke
from jaxtensile.units import Bytes, Seconds

PATIENCE: Final = 10.0
"""Seconds without a coordinator after which a waiting job gives up, even one that was queued: several restarts of a
coordinator. A guess."""
ANSWER: Final = 5.0
"""Seconds in which a running coordinator confirms that a released lease is free. A guess."""
_FATAL: Final = ("version", "protocol")
_LARGEST: Final = (1 << 62) - 1
"""Largest count that is sent: below ``messages.MOST_COUNT``."""
_NUMBERS: Final = itertools.count(1)


class Line(Protocol):
    """One connection to a coordinator."""

    def send(self, requests: Sequence[Request]) -> None:
        """Send requests; one thread at a time calls it. It never raises: unsent requests are lost with the connection.
        After the connection's end it does nothing."""
        ...


class Link(Protocol):
    """A source of connections to a coordinator for one client, one after another.

    It calls the client's ``connected``, ``heard``, ``disconnected`` and ``unreachable`` in their order, from any
    thread, but never while it holds a lock that ``Line.send`` takes.
    """

    def close(self) -> None:
        """End the connection after everything sent on it was heard. If the client is not ``done`` by then, make one
        more connection, on which the client gives back what it has or may have been granted."""
        ...


class Client(Owned):
    """One job of a process. A forked child says nothing.

    ``connect`` makes the link and gets the client. ``changed`` is called, from any thread, when a message arrives that
    changes what ``boundary`` or ``wait`` answers. Only the job's own thread calls ``boundary``, ``moved``, ``beat`` and
    ``release``; any thread may call the rest.
    """

    def __init__(
        self,
        admit: Admit,
        connect: Callable[[Client], Link],
        *,
        changed: Callable[[], None] | None = None,
        patience: Seconds = PATIENCE,
    ) -> None:
        super().__init__(f"job {admit.job!r}")
        self._holder = Holder(admit, next(_NUMBERS))
        self._lock = threading.Lock()
        self._news = Bell()
        self._changed = changed
        self._patience = patience
        self._outbox: list[Request] = []
        self._sending = False
        self._due = False
        """``boundary`` has something to say: read without the lock."""
        self._measured: tuple[int, Seconds, Sequence[Bytes], Bytes] = (0, 0.0, (), 0)
        self._ahead: int | None = None
        self._halfway: Seconds | None = None
        self._closed = False
        self._failed = ""
        """Why the coordinator refuses this client."""
        self._line: Line | None = None
        self._away: Seconds | None = time.monotonic()
        """When the connection ended; None while connected."""
        self._why = "no connection was tried yet"
        self._link = connect(self)

    # The job's thread.

    def wait(self, timeout: Seconds | None = None) -> int:
        """The rung that the job may use; waits until it is admitted.

        Raises ``RejectedError`` if it never will be, ``UnreachableError`` if nobody answers for ``patience`` seconds,
        and ``NotAdmittedError`` after ``timeout`` seconds. In the last case the job keeps its place in the queue until
        ``close``.
        """
        self.require_mine()
        end = None if timeout is None else time.monotonic() + timeout
        while not self._heard():
            now = time.monotonic()
            away = self._away
            if away is not None and now >= away + self._patience:
                raise UnreachableError(
                    f"no coordinator answers job {self.admit.job!r} for {now - away:.0f} s ({self._why}), and a job "
                    f"without a lease waits {self._patience:g} s at most: start one with 'jaxtensile serve', then the "
                    "job again"
                )
            if end is not None and now >= end:
                place = "" if self._ahead is None else f", {self._ahead} others before it"
                raise NotAdmittedError(
                    f"job {self.admit.job!r} was not admitted within {timeout:g} s{place}: wait longer, or end "
                    "another job"
                )
            ends = [t for t in (end, None if away is None else away + self._patience) if t is not None]
            self._news.wait(self._heard, min(min(ends) - now if ends else LOOK, LOOK))
        self._complain()
        if self._holder.phase != "holding":
            raise CoordinatorError(f"job {self.admit.job!r} has ended: make a new client to ask again")
        return self._holder.held

    def _heard(self) -> bool:
        """Whether the wait is over."""
        return self._holder.phase != "waiting" or bool(self._failed) or self._closed

    def boundary(self) -> int | None:
        """The rung to move to, or None; called between two steps. After the move, call ``moved``.

        Raises ``LostLeaseError`` when the coordinator no longer knows the lease.
        """
        if not self._due:
            return None
        self.require_mine()
        return uninterrupted(self._boundary)

    def _boundary(self) -> int | None:
        with self._lock:
            self._due = False
            self._complain()
            return self._holder.boundary()

    def moved(self, in_use: Sequence[Bytes] = ()) -> None:
        """Report that the job is on the rung from ``boundary`` and has freed the bytes that only the other rung needs.

        ``in_use``: bytes measured on each device, then of pinned host memory; empty: not known.
        """
        self.require_mine()
        uninterrupted(self._moved, in_use)

    def _moved(self, in_use: Sequence[Bytes]) -> None:
        with self._lock:
            step, seconds, _, peak = self._measured
            self._measured = step, seconds, in_use, peak
            self._outbox += self._holder.moved(in_use)
            self._due = self._holder.target != self._holder.held
        self._flush()

    def renew(self, admit: Admit, rung: int, in_use: Sequence[Bytes] = ()) -> bool:
        """Ask for another ladder, between two steps; ``rung`` of it covers what the job holds.

        False if nothing was asked: the job must move first, awaits an earlier answer, or is not connected. Success
        changes the property ``admit``. If ``renewing`` ends and ``admit`` is unchanged, ask again.
        """
        self.require_mine()
        return uninterrupted(self._renew, admit, rung, in_use)

    def _renew(self, admit: Admit, rung: int, in_use: Sequence[Bytes]) -> bool:
        with self._lock:
            said = self._holder.renew(admit, rung, in_use)
            self._outbox += said
        self._flush()
        return bool(said)

    def beat(self, step: int, seconds: Seconds, in_use: Sequence[Bytes] = (), peak: Bytes = 0) -> None:
        """Store what a step took. The next ``pulse`` sends it, so this costs nothing."""
        self._measured = step, seconds, in_use, peak

    def release(self, in_use: Sequence[Bytes] = (), timeout: Seconds = ANSWER) -> bool:
        """Give the lease back, then ``close``. ``in_use``: bytes that the job's allocator keeps; empty: none.

        True when the coordinator confirms that the lease is free. False when it still charges bytes in use, or does not
        answer within ``timeout`` seconds; the lease is then freed when the process ends.
        """
        return self.mine and uninterrupted(self._release, in_use, timeout)

    def _release(self, in_use: Sequence[Bytes], timeout: Seconds) -> bool:
        if self._measured[0]:
            self.pulse()  # its last steps count too
        if self._holder.phase == "waiting":
            self.close()
            if not self.admitted:
                return True  # else it was granted at that moment
        self.give_back(in_use)
        until(lambda: self._holder.phase != "releasing", self._news, timeout)
        freed = self._holder.phase == "ended" and not self._holder.reason
        self.close()
        return freed

    def give_back(self, in_use: Sequence[Bytes] = ()) -> None:
        """Say that the job is done with its lease, without waiting for the answer; ``release`` waits, afterwards."""
        if self.mine:
            uninterrupted(self._give_back, in_use)

    def _give_back(self, in_use: Sequence[Bytes]) -> None:
        with self._lock:
            if self._holder.phase == "holding":
                self._measured = *self._measured[:2], in_use, self._measured[3]  # said again on the next connection
            self._outbox += self._holder.release(in_use)
        self._flush()

    def close(self) -> None:
        """End the connection. A waiting job leaves the queue; a lease that was not released stays charged until the
        process ends."""
        if self.mine:
            uninterrupted(self._close)

    def _close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed, waits = True, self._holder.phase == "waiting"
            if waits:
                self._outbox += self._holder.release(())
        self._news.ring()
        if waits:
            self._flush()
            until(lambda: self._holder.phase != "releasing" or self._line is None, self._news, ANSWER)
        self._link.close()

    # What is known.

    @property
    def rung(self) -> int:
        """The rung that the job is on; -1 before it is admitted and after its end."""
        return self._holder.held

    @property
    def admit(self) -> Admit:
        """The request: rungs are indices of its ladder."""
        return self._holder.admit

    @property
    def renewing(self) -> bool:
        """Whether the answer to ``renew`` is still to come."""
        return self._holder.renewing

    @property
    def target(self) -> int:
        """The rung that the job was told last; it moves there at its next boundary."""
        return self._holder.target

    @property
    def halfway(self) -> Seconds | None:
        """When half of a REVOKE's deadline has passed, by ``time.monotonic``. None: the job is on its target, or the
        last order was no REVOKE."""
        return self._halfway if self._holder.target != self._holder.held else None

    @property
    def due(self) -> bool:
        """Whether ``boundary`` has something to say."""
        return self._due

    @property
    def admitted(self) -> bool:
        """Whether the job has a lease."""
        return self._holder.phase == "holding"

    @property
    def connected_now(self) -> bool:
        """Whether a coordinator is connected."""
        return self._line is not None

    @property
    def reason(self) -> str:
        """Why the job has no lease, or the coordinator's complaint; empty: none."""
        return self._failed or self._holder.reason

    @property
    def done(self) -> bool:
        """Whether nothing is left to say: the link needs no further connection."""
        phase = self._holder.phase
        return bool(self._failed) or phase == "ended" or (self._closed and phase == "holding")

    # The link's calls.

    def connected(self, line: Line) -> None:
        """Called by the link: a connection was made, and nothing was said on it yet."""
        with self._lock:
            self._line, self._away = line, None
            self._outbox = self._holder.connected(self._measured[2])
        self._flush()

    def heard(self, reply: Reply) -> None:
        """Called by the link: the coordinator sent a message."""
        with self._lock:
            holder = self._holder
            self._outbox += holder.received(reply, self._measured[2])
            if isinstance(reply, Queued):
                self._ahead = reply.ahead
            elif isinstance(reply, Grant | Revoke):
                self._halfway = time.monotonic() + reply.deadline / 2 if isinstance(reply, Revoke) else None
            elif isinstance(reply, Error) and reply.code in _FATAL:
                self._failed = f"the coordinator refuses to speak with this client: {reply.detail}"
            self._due = bool(self._failed) or holder.phase == "ended" or holder.target != holder.held
        self._news.ring()
        self._flush()
        if self._changed is not None:
            self._changed()

    def disconnected(self, why: str) -> None:
        """Called by the link: the connection ended."""
        with self._lock:
            self._holder.disconnected()
            self._outbox = []
            self._line, self._away, self._why = None, time.monotonic(), why
        self._news.ring()
        if self._changed is not None:
            self._changed()

    def unreachable(self, why: str) -> None:
        """Called by the link: an attempt to connect failed."""
        with self._lock:
            self._why = why

    def failed(self, why: str) -> None:
        """Called by the link: there will never be a connection again."""
        with self._lock:
            self._failed, self._due = why, True
        self._news.ring()

    def pulse(self) -> None:
        """Send the job's last measurement. Call it well within ``Welcome.beat_within`` seconds of the last time."""
        if self.mine:
            uninterrupted(self._pulse)

    def _pulse(self) -> None:
        with self._lock:
            if self._line is None or self._holder.phase != "holding":
                return
            step, seconds, in_use, peak = self._measured
            self._outbox.append(
                Beat(
                    lease=self._holder.lease,
                    step=min(step, _LARGEST),
                    step_us=min(int(seconds * 1e6), _LARGEST),
                    in_use=tuple(in_use),
                    peak=peak,
                )
            )
        self._flush()

    def _flush(self) -> None:
        """Send the outbox in order. If another thread is sending, leave it to that one."""
        while True:
            with self._lock:
                if self._sending or not self._outbox:
                    return
                requests, self._outbox = self._outbox, []
                line = self._line
                self._sending = True
            try:
                if line is not None:
                    line.send(requests)
            finally:
                with self._lock:
                    self._sending = False

    def _complain(self) -> None:
        """Raise the pending error, if any; call it under the lock."""
        if self._failed:
            raise CoordinatorError(self._failed)
        if self._holder.phase != "ended" or not self._holder.reason:
            return
        if self._holder.lease:
            raise LostLeaseError(
                f"the lease of job {self.admit.job!r} is not known any more ({self._holder.reason}): give up what it "
                "holds, then ask again with a new client"
            )
        raise RejectedError(f"job {self.admit.job!r} was refused: {self._holder.reason}")
