"""The turns of jobs in one process that share a device.

XLA allocates a step's temporaries at launch and has one compute stream per device. With turns, the peak is Σ persistent
+ max temp instead of Σ (persistent + temp).

Order: start-time fair queueing (Goyal, Vin, Cheng 1996). A turn's tag is max(virtual time, end of the member's last
turn); the lowest runs. A turn of t seconds ends t ÷ share after its tag; share = ``weight`` × 8^class. A member that
uses less than its share waits for at most the running turn, and no class starves.

Invariant: one turn at a time; a turn ends with its step, however the step ends (``runtime.holds``).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from threading import Lock
from time import perf_counter
from typing import Final, NamedTuple

from jaxtensile.errors import CoordinatorError
from jaxtensile.runtime.client.holds import LOOK, Cell, Held, Mark
from jaxtensile.runtime.decide.turns import share
from jaxtensile.units import Seconds

KEPT: Final = 0.1
"""Share of its last turn for which the next is kept for a member below its share that returns at once. Otherwise others
get every second turn, however long turns take. A guess."""
KEPT_MOST: Final = 2e-3
"""Seconds that a turn is kept at most: the device is idle meanwhile. A guess."""

HANDED_OVER: Final = 1e-3
"""Seconds for which the thread that ends a turn waits for the next to begin. The device is idle until then, and the
next thread could not run: Python threads run until they wait."""


class GateError(CoordinatorError):
    """A turn inside a turn: it would wait for itself."""


class Gate:
    """The turns of one device. ``clock``: returns seconds."""

    __slots__ = ("_clock", "_numbers", "_state")

    def __init__(self, clock: Callable[[], Seconds] = perf_counter) -> None:
        self._clock = clock
        self._numbers = count()
        self._state = Cell(_State())

    def member(self, priority: int = 0, weight: float = 1.0) -> Turns:
        """The turns of one more job, one for each of its steps."""
        return Turns(self, priority, weight)

    @property
    def waiting(self) -> int:
        """How many members wait for their turn."""
        return len(self._state.get().waiting)

    @property
    def now(self) -> float:
        """Virtual time: the tag of the turn that runs, or ran last."""
        return self._state.get().now

    def _take(self, turns: Turns, mark: Mark) -> None:
        while True:
            state = self._state.get()
            tag = turns.tag = max(state.now, turns.served)
            owner = state.owner
            if owner is None and (not state.waiting or state.kept is turns):
                if self._state.replace(state, state._replace(owner=mark, now=tag, kept=None)):
                    return
            elif owner is not None and owner.mine:
                raise GateError("a step of a job was called inside a step of a job of the same device: call it after")
            else:
                waiter = _Waiter((tag, -turns.priority, next(self._numbers)), mark, _locked(), _locked())
                if self._state.replace(state, state._replace(waiting=_with(state.waiting, waiter))):
                    break
        try:
            self._wait(waiter)
        except BaseException:  # Ctrl-C while it waited
            self._withdraw(waiter)
            raise

    def _wait(self, waiter: _Waiter) -> None:
        """Wait for the turn. A waiter woken without one starts the next turn if the time of a kept turn is over, or the
        last turn's step was interrupted."""
        left = LOOK
        while True:
            woken = waiter.lock.acquire(timeout=left)
            state = self._state.get()
            if state.owner is waiter.mark:
                waiter.begun.release()
                return
            if state.owner is None:
                over = not woken or self._clock() >= state.kept_until
            else:
                over = not woken and not state.owner.alive
            if over:
                self._next(state)
                state = self._state.get()
            left = min(max(state.kept_until - self._clock(), 0.0), LOOK) if state.owner is None else LOOK

    def _withdraw(self, waiter: _Waiter) -> None:
        while True:
            state = self._state.get()
            if state.owner is waiter.mark:
                if self._next(state) is not state:
                    return
            elif self._state.replace(state, state._replace(waiting=tuple(w for w in state.waiting if w is not waiter))):
                return

    def _give(self, turns: Turns, mark: Mark) -> None:
        took = self._clock() - turns.since
        while True:
            state = self._state.get()
            if state.owner is not mark:
                return  # it has ended, or was taken for interrupted
            turns.served = turns.tag + took / turns.share
            first = state.waiting[0] if state.waiting else None
            if first is None or turns.served >= first.order[0]:
                if self._next(state) is state:
                    continue
                if first is not None:
                    first.begun.acquire(timeout=HANDED_OVER)
                return
            # It has had less than its share, and will be back in a moment: the next turn is its own.
            until = self._clock() + min(KEPT * took, KEPT_MOST)
            if self._state.replace(state, state._replace(owner=None, kept=turns, kept_until=until)):
                first.wake()
                return

    def _next(self, state: _State) -> _State:
        """Begin the next turn; return the new state, or ``state`` itself if the gate has moved on."""
        if not state.waiting:
            new = state._replace(owner=None, kept=None)
        else:
            first, *others = state.waiting
            new = state._replace(owner=first.mark, now=first.order[0], kept=None, waiting=tuple(others))
        if not self._state.replace(state, new):
            return state
        if state.waiting:
            state.waiting[0].wake()
        return new


def _locked() -> Lock:
    lock = Lock()
    lock.acquire()
    return lock


@dataclass(slots=True, eq=False)
class _Waiter:
    """``lock``: released to wake it; ``begun``: it releases this when its turn begins. ``order``: tag, class and
    arrival."""

    order: tuple[float, int, int]
    mark: Mark
    lock: Lock
    begun: Lock

    def wake(self) -> None:
        if self.lock.locked():
            with suppress(RuntimeError):  # another one was quicker
                self.lock.release()


def _with(waiting: tuple[_Waiter, ...], waiter: _Waiter) -> tuple[_Waiter, ...]:
    found = [*waiting]
    insort(found, waiter, key=lambda w: w.order)
    return tuple(found)


class _State(NamedTuple):
    """``owner``: whose turn it is, None: nobody's; ``waiting``: in the order of their turns."""

    owner: Mark | None = None
    waiting: tuple[_Waiter, ...] = ()
    now: float = 0.0
    kept: Turns | None = None
    """The member that the next turn is kept for, unasked, until ``kept_until``."""
    kept_until: Seconds = 0.0


class Turns:
    """One job's place at the gate: ``with turns():`` around a step, up to the end of its device work."""

    __slots__ = ("_clock", "_gate", "priority", "served", "share", "since", "tag")

    def __init__(self, gate: Gate, priority: int, weight: float) -> None:
        self._gate, self._clock = gate, gate._clock  # pyright: ignore[reportPrivateUsage]
        self.priority = priority
        self.share = share(priority, weight)
        self.tag = 0.0
        self.served = gate.now
        """Virtual time at which its last turn ended."""
        self.since: Seconds = 0.0
        """When its last turn began."""

    def take(self, mark: Mark) -> None:
        """Begin a frame's turn; waits until it is its turn."""
        self._gate._take(self, mark)  # pyright: ignore[reportPrivateUsage]
        self.since = self._clock()

    def give(self, mark: Mark) -> None:
        """End that frame's turn, if it still has it."""
        self._gate._give(self, mark)  # pyright: ignore[reportPrivateUsage]

    def __call__(self) -> Held:
        """A turn for the body of a ``with``."""
        return Held(self.take, self.give)
