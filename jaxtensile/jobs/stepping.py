"""Which plan does a call of a job run, and when is its turn?

The plan of the rung that was granted is compiled and verified in the first call; the others are compiled in the
background, some time after that has run. A job that is told to go elsewhere does so at a step boundary, or at once
while no step runs.

Invariant: one step of the job runs at a time, and only while the job holds its turn; it is waited for. Both are held by
the frame of the step (``runtime.holds``), so they end with it wherever it is interrupted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import jax

from jaxtensile import _compat
from jaxtensile.errors import BudgetError, CoordinatorError, StoppedError
from jaxtensile.jobs.ladder import Ladder
from jaxtensile.jobs.suspension import Suspended
from jaxtensile.jobs.tenancy import Tenancy
from jaxtensile.jobs.waiting import Waiting
from jaxtensile.runtime.client.forks import Owned
from jaxtensile.runtime.client.gate import GateError
from jaxtensile.runtime.client.holds import LOOK, Exclusive, Held, Hold, Mark
from jaxtensile.runtime.client.uninterrupted import uninterrupted
from jaxtensile.search.request import Fitted
from jaxtensile.units import Seconds

T = TypeVar("T")

_LONG: Seconds = 2.0
"""Where the first plan takes longer, others are not to wait for it: they are told what the job can do with less. A
guess."""
_REMEASURED = 8
"""Steps after which it is looked whether they are as fast as was told, and again each time there are twice as many. A
guess."""
_log = logging.getLogger("jaxtensile")


class Stepping(Owned):
    """The steps of one job."""

    def __init__(self, tenancy: Tenancy) -> None:
        super().__init__(f"job {tenancy.terms.name!r}")
        self._on = tenancy
        self._name = tenancy.terms.name
        self.waiting = Waiting(tenancy, self.settle, self._moving)
        self._lock = Exclusive()
        """One step at a time."""
        self._place = Exclusive()
        """Where the job is does not change: a step of it runs, or somebody changes that. A step that compiles has not
        got it, so the job goes where it is told to be meanwhile."""
        self._calling: Any = None
        self._runs: WeakKeyDictionary[Any, tuple[Ladder, Fitted] | None] = WeakKeyDictionary()
        """What the calls of a function run; None where its calls are not all alike."""
        self._fresh = False
        """The call plans, compiles or loads: its time says nothing."""
        self._builder: threading.Thread | None = None
        self._ran, self._rest = threading.Event(), 0.0
        """The step has run that had to wait for a plan; until when the builder rests."""
        self._hurry = threading.Event()
        """Somebody waits for what is compiled in the background."""
        self._watcher: threading.Thread | None = None
        self._ended = False
        """Its lease is given back, for good."""
        self.away: Suspended | None = None
        """The job's state, from the begin of ``suspend`` to the end of ``resume``."""
        self.back: tuple[Any] | None = None
        """What ``resume`` has returned, until the next step."""
        self.steps = 0
        """How many were run."""

    def step(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One call of a step, as a turn of the job, up to the end of its work on the device."""
        with self.alone(f"a step of job {self._name!r} was called"):
            if self.away is not None:
                raise CoordinatorError(
                    f"job {self._name!r} is suspended: call 'state = job.resume()' before its next step"
                )
            self.back = None
            self._on.boundary()
            self._fresh, self._calling = False, call
            self._take_turn()
            began = time.perf_counter()
            try:
                out = call(*args, **kwargs)
                jax.block_until_ready(out)
            finally:
                took = time.perf_counter() - began
                self._end_turn()
            self._measured(took)
            if self._fresh:
                # Jobs that begin together would wait for what is compiled now with their first steps.
                self._build()
                self._rest = time.monotonic() + took
                uninterrupted(self._ran.set)
            self._calling = None
        return out

    def plan(self, ladder: Ladder, devices: Sequence[Any]) -> Fitted:
        """What a call is to run now. Its turn is given back while plans are made or the lease is waited for."""
        self._fresh = True
        self._end_turn()
        self.waiting.known(ladder, devices)
        while (fitted := self._found(ladder)) is None:
            pass
        self._take_turn()
        runs = self._runs.get(self._calling, (ladder, fitted))
        self._runs[self._calling] = (ladder, fitted) if runs is not None and runs[0] is ladder else None
        return fitted

    def _found(self, ladder: Ladder) -> Fitted | None:
        """What runs where the job is now; None if it was told to go elsewhere while that was compiled."""
        if self.steps:
            self._on.boundary()
        asked = self._on.bytes_for(ladder)
        try:
            fitted = self._moving(lambda: ladder.fitted(asked, self._on.watch))
        except BudgetError as error:
            # It was told to go where it can by what was predicted alone.
            self._moving(lambda error=error: self._on.compile_more(ladder, error))
            self._on.boundary()
            if ladder.smallest <= self._on.bytes_for(ladder):
                if self._on.bytes_for(ladder) == asked:
                    raise
                return None
            self.waiting.have_room(ladder)
            return None
        if self.steps:
            self._on.boundary()
        else:
            # What was promised of the plan is more than it takes, and others may wait for that. Said before it is seen
            # whether the plan fits: what is said covers what is the fastest by then, which may be another one.
            self._on.renew = True
            self._on.tell()
        return fitted if ladder.fits(fitted, self._on.bytes_for(ladder)) else None

    def _moving(self, compiles: Callable[[], T]) -> T:
        """What takes long, while the job goes where it is told to be. Its first plan is worth waiting for, half of the
        time in which it is to shrink, since it may be ended after that: else it would compile another one, and another
        one, before its first step."""
        mark, over = self._lock.holder, threading.Event()
        assert mark is not None
        self._build()

        def gives() -> None:
            while not over.wait(0.0 if self.steps else LOOK):
                halfway = None if self._on.client is None else self._on.client.halfway
                if self.steps or (halfway is not None and time.monotonic() >= halfway):
                    self._place.give(mark)
                    self.settle()
                    return
                self._on.tell()

        giver = threading.Thread(target=gives, name=f"jaxtensile-moves-{self._name}", daemon=True)
        uninterrupted(giver.start)
        try:
            return compiles()
        finally:
            uninterrupted(over.set)
            giver.join()
            if self._place.holder is not mark:
                self._place.take(mark)
            self._on.require_going_on()

    def alone(self, what: str) -> Held:
        """For the body of a ``with``: no other step of the job runs. When it is over, the job goes where it was told to
        be meanwhile, or ends."""
        self.require_mine()
        holder = self._lock.holder
        if holder is not None and holder.mine:
            raise GateError(f"{what} inside one of its steps: do it after")
        return Held(self._begin, self._end)

    def _begin(self, mark: Mark) -> None:
        """No other step runs, until ``_end``. Raises ``CoordinatorError`` where the job has no steps at present."""
        self._lock.take(mark)
        self._place.take(mark)
        if self._on.over or self._on.by is None:
            self._end(mark)
            why = "has ended" if self._on.over else "has not begun"
            state = "; its state is 'job.suspended'" if self.away is not None else ""
            raise CoordinatorError(f"job {self._name!r} {why}: call its steps inside 'with jaxtensile.job(...)'{state}")

    def _end(self, mark: Mark) -> None:
        """Others may run."""
        self._place.give(mark)
        self._lock.give(mark)
        self.settle()

    # A step's turn.

    def _take_turn(self) -> None:
        if (mark := self._lock.holder) is not None:
            for turns in self._on.turns:
                turns.take(mark)

    def _end_turn(self) -> None:
        if (mark := self._lock.holder) is not None:
            for turns in self._on.turns:
                turns.give(mark)

    def _measured(self, took: Seconds) -> None:
        self.steps += 1
        runs, client = self._runs.get(self._calling), self._on.client
        if client is None or runs is None or self._fresh:
            return
        ladder, fitted = runs
        ladder.took(fitted, took)
        self._on.calls[ladder] += 1
        client.beat(self.steps, took, self._on.in_use(), 0)
        if self.steps >= _REMEASURED and self.steps & (self.steps - 1) == 0:
            self._on.renew = self._on.renew or self._on.misjudged()

    # While no step runs.

    def settle(self) -> None:
        """If no step runs: go where the job was told to be, or end. Else that is done when the step is over."""
        if self._to_do():
            uninterrupted(self._settle)

    def _to_do(self) -> bool:
        return (self._on.over and not self._ended) or self._on.told()

    def _settle(self) -> None:
        hold = Hold()
        while self._to_do():
            if not self._place.taken(hold.mark):
                self._watch()
                return
            try:
                if self._on.over:
                    self._finish()
                else:
                    self._on.boundary()
            except CoordinatorError as error:
                _log.warning("job %r: %s", self._name, error)  # its next step says so
                return
            finally:
                self._place.give(hold.mark)

    def _watch(self) -> None:
        """Whoever has its place settles what there is afterwards, unless it is interrupted before it can. Look."""
        holder = self._place.holder
        if holder is None or holder.thread != threading.main_thread().ident or self._watcher is not None:
            return

        def watch() -> None:
            while self._to_do() and threading.main_thread().is_alive():
                self._place.wait(LOOK)
                holder = self._place.holder
                if holder is None or not holder.alive:
                    break
            self._watcher = None
            self.settle()

        self._watcher = threading.Thread(target=watch, name=f"jaxtensile-settles-{self._name}", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """The job ends, and what it waits for; not in a forked child, whose it is not."""
        if not self.mine or self._ended:
            return
        holder = self._lock.holder
        if holder is not None and holder.mine:
            raise GateError(f"job {self._name!r} was ended inside one of its steps: do it after")
        uninterrupted(self._close)
        while not self._ended:  # a step of another thread runs
            self._place.wait(LOOK)
            self.settle()

    def _close(self) -> None:
        self._on.over = True
        self.waiting.close()
        self._settle()

    def _finish(self) -> None:
        on = self._on
        try:
            on.forget()
            why = on.taken.give_back(on.in_use())
            if why:
                _log.warning("job %r: %s", self._name, why)
        finally:
            self._ended = True

    # In the background.

    @property
    def compiles(self) -> bool:
        """Whether plans are compiled in the background."""
        return self._builder is not None and self._builder.is_alive()

    def wait(self, timeout: Seconds | None = None) -> bool:
        """Until the plans of all steps so far are compiled; False if that takes longer than ``timeout`` seconds."""
        self.require_mine()
        builder = self._builder
        if builder is not None:
            uninterrupted(self._hurry.set)
            builder.join(timeout)
            if builder.is_alive():
                return False
        self.settle()
        return True

    def _build(self) -> None:
        """Predict what is not, and compile what is only predicted: once the step has run, or where that takes long."""
        if self.compiles:
            return
        if all(ladder.complete for ladder in self._on.ladders):
            return
        enter = _compat.configuration()
        uninterrupted(self._hurry.clear)
        uninterrupted(self._ran.clear)

        def build() -> None:
            try:
                inside = enter()
                self._ran.wait(_LONG)
                self._on.watch("sketch")
                if inside and not all(ladder.sketched for ladder in self._on.ladders):
                    for ladder in [*self._on.ladders]:
                        ladder.sketch()
                    self._on.renew = True
                    self.settle()
                while not (self._hurry.wait(LOOK) or (self._ran.is_set() and time.monotonic() >= self._rest)):
                    self._on.watch("rest")
                if inside:
                    for ladder in [*self._on.ladders]:
                        ladder.build(self._on.watch, between=self._on.forget)
            except StoppedError:
                return
            except Exception as error:  # steps go on with what is compiled
                _log.warning("job %r: plans are not compiled ahead: %s", self._name, error)
            self._on.renew = True
            self.settle()

        # No daemon: the interpreter waits for it at exit, or XLA's threads would outlive what they work with.
        builder = threading.Thread(target=build, name=f"jaxtensile-ladder-{self._name}")

        def begin() -> None:
            builder.start()
            self._builder = builder  # who waits for it joins it, which must have begun

        uninterrupted(begin)
