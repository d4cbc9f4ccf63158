"""Whose step runs next, where several jobs of one process share a device?

Invariant: one turn at a time, and it ends however its step ends. XLA allocates the temporaries of a step when the step
is launched and has one compute stream per device, so jobs that take turns need the sum of what stays of each, and the
largest temporaries of one: the peak is Σ persistent + max temp instead of Σ (persistent + temp).

Start-time fair queueing (Goyal, Vin, Cheng 1996): a turn is tagged with the later of the gate's virtual time and the
end of the member's last turn, and the least tag goes first. A turn of t seconds ends t ÷ share after its tag; a share
is ``weight`` × 8 for each class of priority. So a member that asks for less than its share, as one that answers
requests does, waits for the turn that runs and for no other; and nobody waits for ever, however low its class is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from threading import Lock, get_ident
from time import perf_counter
from types import TracebackType
from typing import Final

from jaxtensile.errors import CoordinatorError
from jaxtensile.units import Seconds

CLASS: Final = 8.0
"""By how much larger the share of the next higher class is."""
CLASSES: Final = 8
"""Classes further from 0 than this count as that far, so that the lowest gets a turn within hours."""

KEPT: Final = 0.1
"""Share of its last turn for which the next one is kept for a member that has had less than its share, and comes back
a moment after it was done: whoever waits would else have every second turn, whatever the turns take."""
KEPT_MOST: Final = 2e-3
"""Seconds."""

HANDED_OVER: Final = 1e-3
"""Seconds for which who ends a turn waits until the next one has begun. The device stands still until it has, and its
thread could otherwise not run: Python threads go on until they wait for something."""


class GateError(CoordinatorError):
    """A turn inside a turn: it would wait for itself."""


class Gate:
    """The turns of one device. ``clock`` tells seconds."""

    __slots__ = ("_clock", "_free", "_kept", "_kept_until", "_lock", "_numbers", "_owner", "_waiting", "now")

    def __init__(self, clock: Callable[[], Seconds] = perf_counter) -> None:
        self._clock = clock
        self._lock = Lock()
        self._free = True
        self._owner = 0
        self._waiting: list[_Waiter] = []
        self._numbers = count()
        self._kept: Turns | None = None
        """Whose turn it is though it has not asked yet."""
        self._kept_until: Seconds = 0.0
        self.now = 0.0
        """Virtual: the tag of the turn that runs, or ran last."""

    def member(self, priority: int = 0, weight: float = 1.0) -> Turns:
        """The turns of one more job: a context manager for each of its steps, one at a time."""
        return Turns(self, priority, weight)

    @property
    def waiting(self) -> int:
        """How many members wait for their turn."""
        return len(self._waiting)

    def _take(self, turns: Turns) -> None:
        me = get_ident()
        with self._lock:
            tag = turns.tag = max(self.now, turns.served)
            if self._free and (not self._waiting or self._kept is turns):
                self._free = False
                self._kept = None
                self._owner, self.now = me, tag
                return
            if self._owner == me:
                raise GateError("a step of a job was called inside a step of a job of the same device: call it after")
            waiter = _Waiter((tag, -turns.priority, next(self._numbers)), me, _locked(), _locked())
            heappush(self._waiting, waiter)
        try:
            self._wait(waiter)
        except BaseException:  # Ctrl-C while it waited
            with self._lock:
                if waiter.granted:
                    self._next()
                else:
                    self._waiting.remove(waiter)
                    heapify(self._waiting)
                    if self._free:
                        self._next()
            raise

    def _wait(self, waiter: _Waiter) -> None:
        """Until it is granted. Who is woken and has no turn looks after the time that the turn is kept for another."""
        left = -1.0
        while True:
            woken = waiter.lock.acquire(timeout=left)
            with self._lock:
                if waiter.granted:
                    waiter.begun.release()
                    return
                if self._free and (not woken or self._clock() >= self._kept_until):
                    self._next()
                left = max(self._kept_until - self._clock(), 0.0) if self._free else -1.0

    def _give(self, turns: Turns, took: Seconds) -> None:
        with self._lock:
            turns.served = turns.tag + took / turns.share
            if self._waiting and turns.served < self._waiting[0].order[0]:
                # It has had less than its share, and will be back in a moment: the next turn is its own.
                self._free, self._owner, self._kept = True, 0, turns
                self._kept_until = self._clock() + min(KEPT * took, KEPT_MOST)
                if self._waiting[0].lock.locked():
                    self._waiting[0].lock.release()
                return
            following = self._next()
        if following is not None:
            following.begun.acquire(timeout=HANDED_OVER)

    def _next(self) -> _Waiter | None:
        """Whose turn begins."""
        self._kept = None
        if not self._waiting:
            self._free, self._owner = True, 0
            return None
        waiter = heappop(self._waiting)
        self._free, self._owner, self.now = False, waiter.thread, waiter.order[0]
        waiter.granted = True
        if waiter.lock.locked():
            waiter.lock.release()
        return waiter


def _locked() -> Lock:
    lock = Lock()
    lock.acquire()
    return lock


@dataclass(slots=True, eq=False)
class _Waiter:
    """``lock`` is released to wake it, ``begun`` by itself when it has its turn; ``order``: tag, class and arrival."""

    order: tuple[float, int, int]
    thread: int
    lock: Lock
    begun: Lock
    granted: bool = False

    def __lt__(self, other: _Waiter) -> bool:
        return self.order < other.order


class Turns:
    """One job's place at the gate. ``with turns:`` around a step, up to the end of its work on the device."""

    __slots__ = ("_clock", "_gate", "_since", "priority", "served", "share", "steps", "tag", "took")

    def __init__(self, gate: Gate, priority: int, weight: float) -> None:
        self._gate, self._clock = gate, gate._clock  # pyright: ignore[reportPrivateUsage]
        self.priority = priority
        self.share = weight * CLASS ** max(-CLASSES, min(priority, CLASSES))
        self.tag = 0.0
        self.served = gate.now
        """Virtual time at which its last turn ended."""
        self.steps = 0
        self.took: Seconds = 0.0
        """Of its last turn."""
        self._since: Seconds = 0.0

    def __enter__(self) -> None:
        self._gate._take(self)  # pyright: ignore[reportPrivateUsage]
        self._since = self._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.took = self._clock() - self._since
        self.steps += 1
        self._gate._give(self, self.took)  # pyright: ignore[reportPrivateUsage]
