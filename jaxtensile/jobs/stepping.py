"""The plan and the turn of each call of a job.

The first call compiles and verifies the granted rung's plan. The others are compiled in the background, some time after
it has run. A job told to change rungs does so at a step boundary, or at once while no step runs.

Invariant: one step of the job runs at a time, only during the job's turn, and is waited for. The step's frame holds
both (``runtime.holds``), so they end with it wherever it is interrupted.
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
from jaxtensile.runtime.client.client import Client
from jaxtensile.runtime.client.forks import Owned
from jaxtensile.runtime.client.gate import GateError
from jaxtensile.runtime.client.holds import LOOK, Exclusive, Held, Hold, Mark
from jaxtensile.runtime.client.uninterrupted import uninterrupted
from jaxtensile.search.request import Fitted
from jaxtensile.units import Seconds

T = TypeVar("T")

_LONG: Seconds = 20.0
"""If the first step takes longer, other jobs do not wait; they are told the job's smaller plans. A guess: predicting
them takes half a second of a core that first steps wait for."""
_TOLD: Seconds = 60.0
"""Seconds after which a wait for a turn is logged, again and again: others' steps are long, or nobody decides. A
guess."""
_REMEASURED = 8
"""Steps after which measured times are compared with those told, and again at each doubling. A guess."""
_log = logging.getLogger("jaxtensile")


class Stepping(Owned):
    """The steps of one job."""

    def __init__(self, tenancy: Tenancy) -> None:
        super().__init__(f"job {tenancy.terms.name!r}")
        self._on = tenancy
        self._name = tenancy.terms.name
        self.waiting = Waiting(tenancy, self.settle, self._moving)
        self._lock = Exclusive()
        self._place = Exclusive()
        """Fixes the job's rung: held by a running step, or by the thread that changes the rung. A compiling step does
        not hold it, so the job can move meanwhile."""
        self._calling: Any = None
        self._runs: WeakKeyDictionary[Any, tuple[Ladder, Fitted] | None] = WeakKeyDictionary()
        """The plan that calls of a function run; None if its calls differ."""
        self._steady: Seconds | None = None
        """Seconds of the shortest step of this turn; None: it has run none."""
        self._planned: WeakKeyDictionary[Ladder, tuple[int, Fitted]] = WeakKeyDictionary()
        """The plan in groups that a step runs, until ``Tenancy.forgotten`` changes: JAX keeps no entry for it."""
        self._waited: Seconds = 0.0
        """Seconds of the present step in which other jobs had their turns."""
        self._fresh = False
        """Whether the call plans, compiles or loads, which makes its time meaningless."""
        self._builder: threading.Thread | None = None
        self._ran, self._rest = threading.Event(), 0.0
        """Set once the step that waited for a plan has run; and when the builder's rest ends."""
        self._hurry = threading.Event()
        """Set if somebody waits for the background compiles."""
        self.at_work = False
        """Whether the builder predicts or compiles just now, and does not wait."""
        self._watcher: threading.Thread | None = None
        self._ended = False
        """Whether the lease is given back for good."""
        self.away: Suspended | None = None
        """The job's state, from the beginning of ``suspend`` to the end of ``resume``."""
        self.back: tuple[Any] | None = None
        """The result of ``resume``, until the next step."""
        self.steps = 0

    def step(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """As ``Job.step``."""
        with self.alone(f"a step of job {self._name!r} was called"):
            if self.away is not None:
                raise CoordinatorError(
                    f"job {self._name!r} is suspended: call 'state = job.resume()' before its next step"
                )
            self.back = None
            self._on.boundary()
            self._fresh, self._calling, self._waited = False, call, 0.0
            self._on.begin_step()
            self._take_turn()
            began = time.perf_counter()
            try:
                out = call(*args, **kwargs)
                jax.block_until_ready(out)
            finally:
                took = time.perf_counter() - began - self._waited
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
        """As ``Job.plan``."""
        again, known = self._on.forgotten, self._planned.get(ladder)
        if known is not None and known[0] == again:
            return known[1]
        self._fresh = True
        self._end_turn()
        self.waiting.known(ladder, devices)
        while True:
            again = self._on.forgotten
            while (fitted := self._found(ladder)) is None:
                again = self._on.forgotten
            self._take_turn()
            if ladder.fits(fitted, self._on.bytes_for(ladder)):
                break
            self._end_turn()  # while it waited for its turn it was told to move
        runs = self._runs.get(self._calling, (ladder, fitted))
        self._runs[self._calling] = (ladder, fitted) if runs is not None and runs[0] is ladder else None
        if fitted.pieces is not None:
            self._planned[ladder] = again, fitted
        return fitted

    def between(self) -> None:
        """Between two groups of a step: jobs of this process that wait, and have had less than their share, go next."""
        mark, began = self._lock.holder, time.perf_counter()
        assert mark is not None
        for turns in self._on.turns:
            turns.give(mark)
        for turns in self._on.turns:
            turns.take(mark)
        self._waited += time.perf_counter() - began

    def _found(self, ladder: Ladder) -> Fitted | None:
        """The plan for the job's present rung; None if the job was told to move while it was compiled."""
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
        """Run a long compile while the job still follows changes of its rung.

        Before the first step, the job moves only after half of the time it has to shrink, after which it may be ended.
        Otherwise it could compile plan after plan before its first step.
        """
        mark, over = self._lock.holder, threading.Event()
        assert mark is not None
        self._build()

        def gives() -> None:
            while not over.wait(0.0 if self.steps else LOOK):
                client = self._on.client
                if client is not None and client.turn_ends:
                    uninterrupted(self._on.end_turn)
                if self._moves(client):
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

    def _moves(self, client: Client | None) -> bool:
        """Whether the job, which waits or compiles, moves to where it is told to be: before its first step only after
        half of its time."""
        halfway = None if client is None else client.halfway
        return bool(self.steps) or (halfway is not None and time.monotonic() >= halfway)

    def alone(self, what: str) -> Held:
        """A ``with`` context without other steps of the job. At its end the job moves to its new rung, or ends."""
        self.require_mine()
        holder = self._lock.holder
        if holder is not None and holder.mine:
            raise GateError(f"{what} inside one of its steps: do it after")
        return Held(self._begin, self._end)

    def _begin(self, mark: Mark) -> None:
        """Exclude other steps until ``_end``. Raises ``CoordinatorError`` if the job has not begun or has ended."""
        self._lock.take(mark)
        self._place.take(mark)
        if self._on.over or self._on.by is None:
            self._end(mark)
            why = "has ended" if self._on.over else "has not begun"
            state = "; its state is 'job.suspended'" if self.away is not None else ""
            raise CoordinatorError(f"job {self._name!r} {why}: call its steps inside 'with jaxtensile.job(...)'{state}")

    def _end(self, mark: Mark) -> None:
        self._place.give(mark)
        self._lock.give(mark)
        self.settle()

    # A step's turn.

    def _take_turn(self) -> None:
        if (mark := self._lock.holder) is not None:
            for turns in self._on.turns:
                turns.take(mark)
        client = self._on.client
        if client is None or self._on.turns or not client.takes_turns or (client.has_turn and not client.turn_ends):
            return
        self._steady = None
        began = told = time.monotonic()
        while not client.turn(LOOK, moves=self._moves(client)):
            self._on.require_going_on()
            if self._moves(client):
                self._on.boundary()
            if (now := time.monotonic()) >= told + _TOLD:
                told = now
                why = "" if client.connected_now else "; no coordinator is there: start one with 'jaxtensile serve'"
                _log.warning("job %r waits for its turn for %.0f s%s", self._name, now - began, why)

    def _end_turn(self) -> None:
        """No step runs now. A turn among processes goes on until others wait."""
        if (mark := self._lock.holder) is not None:
            for turns in self._on.turns:
                turns.give(mark)
        if (client := self._on.client) is not None and client.turn_ends:
            uninterrupted(self._on.end_turn)

    def _measured(self, took: Seconds) -> None:
        self.steps += 1
        runs, client = self._runs.get(self._calling), self._on.client
        if client is None or runs is None or self._fresh:
            return
        if self._steady is None:
            self._steady = took
        else:
            self._on.handing_over, self._steady = max(self._steady - took, 0.0), min(self._steady, took)
        ladder, fitted = runs
        ladder.took(fitted, took)
        self._on.calls[ladder] += 1
        client.beat(self.steps, took, self._on.in_use(), 0)
        if self.steps >= _REMEASURED and self.steps & (self.steps - 1) == 0:
            self._on.renew = self._on.renew or self._on.misjudged()

    # While no step runs.

    def settle(self) -> None:
        """If no step runs, change the rung as told, or end; otherwise the step does so at its end."""
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
        """Watch the holder of the place: it settles at its end, unless an interrupt prevents it."""
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
        """End the job and its waits; does nothing in a forked child, which does not own the job."""
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
            if on.processes is not None:
                on.processes.close()
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
        """As ``Job.wait``."""
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
        """Predict and compile the missing plans in a thread, once the step has run or if it takes long."""
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
                    self.at_work = True
                    for ladder in [*self._on.ladders]:
                        ladder.sketch()
                    self.at_work = False
                    self._on.renew = True
                    self.settle()
                while not (self._hurry.wait(LOOK) or (self._ran.is_set() and time.monotonic() >= self._rest)):
                    self._on.watch("rest")
                assert self._on.by is not None
                with self._on.by.compiles(self._on.watch):
                    self.at_work = True
                    for ladder in [*self._on.ladders] if inside else ():
                        ladder.build(self._on.watch, between=self._on.forget)
            except StoppedError:
                return
            except Exception as error:  # steps go on with what is compiled
                _log.warning("job %r: plans are not compiled ahead: %s", self._name, error)
            finally:
                self.at_work = False
            self._on.renew = True
            self.settle()

        # No daemon: the interpreter waits for it at exit, or XLA's threads would outlive what they work with.
        builder = threading.Thread(target=build, name=f"jaxtensile-ladder-{self._name}")

        def begin() -> None:
            builder.start()
            self._builder = builder  # who waits for it joins it, which must have begun

        uninterrupted(begin)
