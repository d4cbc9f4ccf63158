"""The turns of jobs in one process that share a device.

XLA allocates a step's temporaries at launch and has one compute stream per device. With turns, the peak is Σ persistent
+ max temp instead of Σ (persistent + temp).

Order: ``runtime.decide.gate_order``, with share = ``weight`` × 8^class.

Invariant: one turn at a time; a turn ends with its step, however the step ends (``runtime.holds``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from threading import Lock
from time import perf_counter
from typing import Final

from jaxtensile.errors import CoordinatorError
from jaxtensile.runtime.client.holds import LOOK, Cell, Held, Mark
from jaxtensile.runtime.decide.gate_order import Order
from jaxtensile.runtime.decide.turns import share
from jaxtensile.units import Seconds

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
        self._state = Cell(Order[Mark, _Waiter]())

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
            tag = turns.tag = state.tag(turns.served)
            if state.begins(turns):
                if self._state.replace(state, state.begun(mark, tag)):
                    return
            elif state.owner is not None and state.owner.mine:
                raise GateError("a step of a job was called inside a step of a job of the same device: call it after")
            else:
                waiter = _Waiter((tag, -turns.priority, next(self._numbers)), mark, _locked(), _locked())
                if self._state.replace(state, state.joined(waiter)):
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
            elif self._state.replace(state, state.without(waiter)):
                return

    def _give(self, turns: Turns, mark: Mark) -> None:
        took = self._clock() - turns.since
        while True:
            state = self._state.get()
            if state.owner is not mark:
                return  # it has ended, or was taken for interrupted
            turns.served = turns.tag + took / turns.share
            if state.passes_on(turns.served):
                if self._next(state) is state:
                    continue
                if state.waiting:
                    state.waiting[0].begun.acquire(timeout=HANDED_OVER)
                return
            if self._state.replace(state, state.keeping(turns, took, self._clock())):
                state.waiting[0].wake()
                return

    def _next(self, state: Order[Mark, _Waiter]) -> Order[Mark, _Waiter]:
        """Begin the next turn; return the new state, or ``state`` itself if the gate has moved on."""
        new = state.following()
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
