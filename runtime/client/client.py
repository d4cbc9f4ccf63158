"""How does a job of a process speak to its coordinator, from whatever thread?

Invariant: what is said leaves in the order in which it was decided, and no lock is held while it does. So a link may
answer from within ``send``, and a coordinator in the same process needs no thread. No change of state is cut in two by
Ctrl-C (``runtime.uninterrupted``), nor is a lock left taken. What a connection loses is said
again on the next one, in the words that ``Holder`` finds for where the job is by then.

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
"""Seconds without a coordinator after which a job that waits, also one that was in its queue, gives up waiting: several
restarts of one. A guess."""
ANSWER: Final = 5.0
"""Seconds in which a coordinator that is there says that what is given back is free. A guess."""
_FATAL: Final = ("version", "protocol")
_LARGEST: Final = (1 << 62) - 1
"""Of a count that is sent: below ``messages.MOST_COUNT``."""
_NUMBERS: Final = itertools.count(1)


class Line(Protocol):
    """One connection to a coordinator."""

    def send(self, requests: Sequence[Request]) -> None:
        """Say something; called by one thread at a time. What cannot be sent is lost with the connection: it does not
        raise, and after the end of the connection it does nothing."""
        ...


class Link(Protocol):
    """What makes connections to a coordinator for one client, one after another.

    It calls ``connected``, ``heard``, ``disconnected`` and ``unreachable`` of the client, in their order, from any
    thread, but never while it holds a lock that ``Line.send`` takes.
    """

    def close(self) -> None:
        """End the connection, after all that was said on it before has been heard. While the client is not ``done``
        then, one more is needed, on which it gives back what it has, or may have been granted."""
        ...


class Client(Owned):
    """One job of a process. In a forked child it says nothing.

    ``connect`` makes the link and is given the client; ``changed`` is called, from any thread, whenever something was
    heard that ``boundary`` or ``wait`` answers. ``boundary``, ``moved``, ``beat`` and ``release`` are the job's own
    thread's; the rest may be called from any.
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
        """Why the coordinator does not speak with this client."""
        self._line: Line | None = None
        self._away: Seconds | None = time.monotonic()
        """Since when there is no connection."""
        self._why = "no connection was tried yet"
        self._link = connect(self)

    # The job's thread.

    def wait(self, timeout: Seconds | None = None) -> int:
        """The rung that the job may use, once it is admitted.

        Raises ``RejectedError`` if it never will be, ``UnreachableError`` if nobody answers for ``patience`` seconds,
        and after ``timeout`` seconds ``NotAdmittedError``: it still waits in its place, until ``close``.
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
        """Whether there is nothing to wait for any more."""
        return self._holder.phase != "waiting" or bool(self._failed) or self._closed

    def boundary(self) -> int | None:
        """Between two steps: the rung to move to, or None. Then say ``moved``.

        Raises ``LostLeaseError`` when the coordinator does not know the lease any more."""
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
        """The job is on the rung that ``boundary`` told, and has given back what only the other one needs.

        ``in_use``: bytes that were measured on each device, then of pinned host memory; empty: not known."""
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
        """Between two steps: the job has another ladder, ``rung`` of which covers what it holds. False where it is to
        move first. ``admit`` is another one when that counts; not so once ``renewing`` is over: ask again."""
        self.require_mine()
        return uninterrupted(self._renew, admit, rung, in_use)

    def _renew(self, admit: Admit, rung: int, in_use: Sequence[Bytes]) -> bool:
        with self._lock:
            said = self._holder.renew(admit, rung, in_use)
            self._outbox += said
        self._flush()
        return bool(said)

    def beat(self, step: int, seconds: Seconds, in_use: Sequence[Bytes] = (), peak: Bytes = 0) -> None:
        """What a step took. It is told with the next ``pulse``, so this costs nothing."""
        self._measured = step, seconds, in_use, peak

    def release(self, in_use: Sequence[Bytes] = (), timeout: Seconds = ANSWER) -> bool:
        """The job is done with its lease: it holds nothing, or ``in_use`` of what its allocator keeps. Then ``close``.

        True when the coordinator has said that the lease is free; False when it keeps charging what is still in use,
        or did not answer within ``timeout`` seconds, and frees the lease when the process ends.
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
        """Say that the job is done with its lease, and do not wait for the answer: ``release`` does, afterwards."""
        if self.mine:
            uninterrupted(self._give_back, in_use)

    def _give_back(self, in_use: Sequence[Bytes]) -> None:
        with self._lock:
            if self._holder.phase == "holding":
                self._measured = *self._measured[:2], in_use, self._measured[3]  # said again on the next connection
            self._outbox += self._holder.release(in_use)
        self._flush()

    def close(self) -> None:
        """End the connection. A job that waits does so no more; a lease that was not released stays charged until the
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
        """The rung the job is on; -1 before it is admitted and after its end."""
        return self._holder.held

    @property
    def admit(self) -> Admit:
        """What was asked for: the ladder that rungs are of."""
        return self._holder.admit

    @property
    def renewing(self) -> bool:
        """Whether the answer to ``renew`` is to come."""
        return self._holder.renewing

    @property
    def target(self) -> int:
        """The rung it was told last: where it is to go at its next boundary, if that is another one."""
        return self._holder.target

    @property
    def halfway(self) -> Seconds | None:
        """When half of the time has passed in which it is to go where a REVOKE told, by ``time.monotonic``; None: it is
        there, or none did."""
        return self._halfway if self._holder.target != self._holder.held else None

    @property
    def due(self) -> bool:
        """Whether ``boundary`` has something to say."""
        return self._due

    @property
    def admitted(self) -> bool:
        """Whether it has a lease."""
        return self._holder.phase == "holding"

    @property
    def connected_now(self) -> bool:
        """Whether a coordinator is there."""
        return self._line is not None

    @property
    def reason(self) -> str:
        """Why it has no lease, or what the coordinator had to complain of; empty: nothing."""
        return self._failed or self._holder.reason

    @property
    def done(self) -> bool:
        """Whether there is nothing more to say: its link needs no further connection."""
        phase = self._holder.phase
        return bool(self._failed) or phase == "ended" or (self._closed and phase == "holding")

    # The link's calls.

    def connected(self, line: Line) -> None:
        """There is a connection, and nothing was said on it yet."""
        with self._lock:
            self._line, self._away = line, None
            self._outbox = self._holder.connected(self._measured[2])
        self._flush()

    def heard(self, reply: Reply) -> None:
        """The coordinator has said something."""
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
        """The connection has ended."""
        with self._lock:
            self._holder.disconnected()
            self._outbox = []
            self._line, self._away, self._why = None, time.monotonic(), why
        self._news.ring()
        if self._changed is not None:
            self._changed()

    def unreachable(self, why: str) -> None:
        """There was no connection, and there still is none."""
        with self._lock:
            self._why = why

    def failed(self, why: str) -> None:
        """There never will be a connection again."""
        with self._lock:
            self._failed, self._due = why, True
        self._news.ring()

    def pulse(self) -> None:
        """Tell what the job measured last: well within ``Welcome.beat_within`` seconds of the last time."""
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
        """Send what is to be said, in its order. Whoever finds another thread at it leaves it to that."""
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
        """Raise what there is to raise; under the lock."""
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
