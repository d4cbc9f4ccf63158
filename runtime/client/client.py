"""A job's connection to its coordinator, usable from any thread.

Invariant: messages leave in the order of their decisions, and no lock is held during a send. A link may therefore
answer within ``send``, and a coordinator in the same process needs no thread. Ctrl-C neither splits a state change nor
leaves a lock taken (``runtime.uninterrupted``). A new connection repeats what the last one lost, as ``Holder`` words it
by then.

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
"""Seconds without a coordinator after which a waiting or queued job gives up: several restarts of one. A guess."""
ANSWER: Final = 5.0
"""Seconds for a running coordinator to confirm a release. A guess."""
_FATAL: Final = ("version", "protocol")
_LARGEST: Final = (1 << 62) - 1
"""Largest count that is sent: below ``messages.MOST_COUNT``."""
_NUMBERS: Final = itertools.count(1)


class Line(Protocol):
    """One connection to a coordinator."""

    def send(self, requests: Sequence[Request]) -> None:
        """Send requests, from one thread at a time. Never raises: unsent requests are lost with the connection, and a
        closed line does nothing."""
        ...


class Link(Protocol):
    """Makes a client's connections to a coordinator, one after another.

    Calls the client's ``connected``, ``heard``, ``disconnected`` and ``unreachable`` in order, from any thread, but not
    under a lock that ``Line.send`` takes.
    """

    def close(self) -> None:
        """End the connection after everything sent on it was heard. If the client is not ``done`` then, connect once
        more: the client gives back what it has or may have been granted."""
        ...


class Client(Owned):
    """One job of a process; silent in a forked child.

    ``connect`` makes the link. ``changed`` is called, from any thread, on news for ``boundary`` or ``wait``. Only the
    job's own thread calls ``boundary``, ``moved``, ``beat`` and ``release``; any thread may call the rest.
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
        """The job's rung, once admitted.

        Raises ``RejectedError`` if it never will be, ``UnreachableError`` if nobody answers for ``patience`` seconds,
        and ``NotAdmittedError`` after ``timeout`` seconds; the job then keeps its place in the queue until ``close``.
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
        """The rung to move to between two steps, or None. Call ``moved`` after it.

        Raises ``LostLeaseError`` if the coordinator no longer knows the lease.
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
        """The job is on the rung from ``boundary``, without bytes that only the other one needs.

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
        """Ask for another ladder between two steps; ``rung`` of it covers the bytes held.

        False if not asked: the job must move first, awaits an answer, or is not connected. Success changes ``admit``.
        If ``renewing`` ends without that, ask again.
        """
        self.require_mine()
        return uninterrupted(self._renew, admit, rung, in_use)

    def _renew(self, admit: Admit, rung: int, in_use: Sequence[Bytes]) -> bool:
        with self._lock:
            said = self._holder.renew(admit, rung, in_use)
            self._outbox += said
        self._flush()
        return bool(said)

    def turn(self, timeout: Seconds, *, moves: bool = True) -> bool:
        """Ask for a turn, if a step needs one; whether the job has it, within ``timeout`` seconds.

        It is kept until ``end_turn``, over any number of steps; while ``turn_ends``, others wait for it. ``moves``: the
        job goes where it is told to be while it waits, so the wait ends as soon as it is told. Raises as ``boundary``.
        """
        if not self._holder.turns:
            return True
        if self._holder.turn < 0 or self._holder.ending:
            self.require_mine()
            uninterrupted(self._ask_turn)
            until(lambda: self._holder.turn >= 0 or (moves and self._due), self._news, timeout)
        return self._holder.turn >= 0

    def _ask_turn(self) -> None:
        with self._lock:
            self._complain()
            self._outbox += self._holder.ask_turn()
        self._flush()

    def end_turn(self, cost: Seconds = 0.0, in_use: Sequence[Bytes] = ()) -> None:
        """The bytes of a step are given back; ``cost``: seconds that it takes others and the job that they were.
        ``in_use``: as of ``moved``."""
        if self.mine and (self._holder.turn >= 0 or self._holder.asks >= 0):
            uninterrupted(self._end_turn, cost, in_use)

    def _end_turn(self, cost: Seconds, in_use: Sequence[Bytes]) -> None:
        with self._lock:
            self._outbox += self._holder.end_turn(cost, in_use)
        self._flush()

    @property
    def has_turn(self) -> bool:
        """Whether it is the job's turn."""
        return self._holder.turn >= 0

    @property
    def takes_turns(self) -> bool:
        """Whether a step needs a turn: jobs of other processes share the device."""
        return self._holder.turns

    @property
    def turn_ends(self) -> bool:
        """Whether others wait for the job's turn."""
        return self._holder.ending

    def beat(self, step: int, seconds: Seconds, in_use: Sequence[Bytes] = (), peak: Bytes = 0) -> None:
        """Store what a step took. The next ``pulse`` sends it, so this costs nothing."""
        self._measured = step, seconds, in_use, peak

    def release(self, in_use: Sequence[Bytes] = (), timeout: Seconds = ANSWER) -> bool:
        """Give the lease back; then ``close``. ``in_use``: bytes that the allocator keeps.

        True if the coordinator confirms that the lease is free. False if bytes in use stay charged, or no answer comes
        within ``timeout`` seconds; the process's end then frees it.
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
        """Give the lease back without waiting for the answer; ``release`` waits, afterwards."""
        if self.mine:
            uninterrupted(self._give_back, in_use)

    def _give_back(self, in_use: Sequence[Bytes]) -> None:
        with self._lock:
            if self._holder.phase == "holding":
                self._measured = *self._measured[:2], in_use, self._measured[3]  # said again on the next connection
            self._outbox += self._holder.release(in_use)
        self._flush()

    def close(self) -> None:
        """End the connection. A waiting job leaves the queue; an unreleased lease stays charged until the process
        ends."""
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
        """The job's rung; -1 before admission and after the end."""
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
        """The rung told last; the job moves there at its next boundary."""
        return self._holder.target

    @property
    def halfway(self) -> Seconds | None:
        """Half-time of a REVOKE by ``time.monotonic``. None: the job is there, or was told none."""
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
        """From the link: a new connection, nothing said on it yet."""
        with self._lock:
            self._line, self._away = line, None
            self._outbox = self._holder.connected(self._measured[2])
        self._flush()

    def heard(self, reply: Reply) -> None:
        """From the link: a message."""
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
        """From the link: the connection ended."""
        with self._lock:
            self._holder.disconnected()
            self._outbox = []
            self._line, self._away, self._why = None, time.monotonic(), why
        self._news.ring()
        if self._changed is not None:
            self._changed()

    def unreachable(self, why: str) -> None:
        """From the link: an attempt to connect failed."""
        with self._lock:
            self._why = why

    def failed(self, why: str) -> None:
        """From the link: there will be no further connection."""
        with self._lock:
            self._failed, self._due = why, True
        self._news.ring()

    def pulse(self) -> None:
        """Send the last measurement, well within ``Welcome.beat_within`` seconds of the one before."""
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
        """Send the outbox in order, unless another thread does."""
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
        """Raise the pending error, if any; under the lock."""
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
