"""Which plan does a call of a job run, and when is its turn?

The plan of the rung that was granted is compiled and verified in the first call; the others are compiled in the
background. A job that is told to go elsewhere does so at a step boundary, or at once while no step runs.

Invariant: one step of the job runs at a time, and only while the job holds its turn; it is waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from jaxtensile import _compat
from jaxtensile.errors import BudgetError, CoordinatorError, StoppedError
from jaxtensile.ladder import Ladder
from jaxtensile.request import Fitted
from jaxtensile.runtime.forks import Owned
from jaxtensile.runtime.gate import GateError
from jaxtensile.suspension import Suspended
from jaxtensile.tenancy import Tenancy
from jaxtensile.units import Seconds
from jaxtensile.waiting import Waiting

_REMEASURED = 8
"""Steps after which it is looked whether they are as fast as was told, and again each time there are twice as many."""
_log = logging.getLogger("jaxtensile")


class Stepping(Owned):
    """The steps of one job."""

    def __init__(self, tenancy: Tenancy) -> None:
        super().__init__(f"job {tenancy.terms.name!r}")
        self._on = tenancy
        self._name = tenancy.terms.name
        self.waiting = Waiting(tenancy, self.settle)
        self._step_lock = threading.Lock()
        self._stepper = 0
        """The thread that has the lock."""
        self._holds = False
        """A turn."""
        self._calling: Any = None
        self._runs: dict[Any, tuple[Ladder, Fitted] | None] = {}
        """What the calls of a function run; None where its calls are not all alike."""
        self._fresh = False
        """The call plans, compiles or loads: its time says nothing."""
        self._builder: threading.Thread | None = None
        self.away: Suspended | None = None
        """The job's state, from the begin of ``suspend`` to the end of ``resume``."""
        self.steps = 0
        """How many were run."""

    def step(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One call of a step, as a turn of the job, up to the end of its work on the device."""
        with self.alone(f"a step of job {self._name!r} was called"):
            if self.away is not None:
                raise CoordinatorError(
                    f"job {self._name!r} is suspended: call 'state = job.resume()' before its next step"
                )
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
        return out

    def plan(self, ladder: Ladder, devices: Sequence[Any]) -> Fitted:
        """What a call is to run now. Its turn is given back while plans are made or the lease is waited for."""
        self._fresh = True
        with self._aside():
            self.waiting.known(ladder, devices)
            while True:
                self._on.boundary()
                assert self._on.client is not None
                try:
                    fitted = self._on.fitted(ladder)
                except BudgetError as error:
                    # It was told to go where it can by what was predicted alone.
                    self._on.compile_more(ladder, error)
                    if ladder.smallest <= self._on.bytes_for(ladder):
                        raise
                    self.waiting.have_room(ladder)
                    continue
                if self._on.client.target == self._on.client.rung:
                    break
            self._build()
        runs = self._runs.get(self._calling, (ladder, fitted))
        self._runs[self._calling] = (ladder, fitted) if runs is not None and runs[0] is ladder else None
        return fitted

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """No other step of the job runs; when this is over, it goes where it was told to be meanwhile."""
        self.require_mine()
        me = threading.get_ident()
        if self._stepper == me:
            raise GateError(f"{what} inside one of its steps: do it after")
        with self._step_lock:
            if self._on.over or self._on.by is None:
                why = "has ended" if self._on.over else "has not begun"
                state = "; its state is 'job.suspended'" if self.away is not None else ""
                raise CoordinatorError(
                    f"job {self._name!r} {why}: call its steps inside 'with jaxtensile.job(...)'{state}"
                )
            self._stepper = me
            try:
                yield
            finally:
                self._stepper = 0
        self.settle()

    # A step's turn.

    def _take_turn(self) -> None:
        if self._on.turns is not None:
            self._on.turns.__enter__()
            self._holds = True

    def _end_turn(self) -> None:
        if self._holds and self._on.turns is not None:
            self._holds = False
            self._on.turns.__exit__(None, None, None)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Outside the turn that the call has taken: others go on meanwhile."""
        self._end_turn()
        try:
            yield
        finally:
            self._take_turn()

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

    # At rest, under the step lock.

    def settle(self) -> None:
        """If no step runs: go where the job was told to be. Whoever has the lock looks again when it is free."""
        while self._on.told() and self._step_lock.acquire(blocking=False):
            try:
                self._on.boundary()
            except CoordinatorError as error:
                _log.warning("job %r: %s", self._name, error)  # its next step says so
                return
            finally:
                self._step_lock.release()

    def close(self) -> None:
        """The job ends, and what it waits for; not in a forked child, whose it is not."""
        if not self.mine:
            return
        on = self._on
        if self._stepper == threading.get_ident():
            raise GateError(f"job {self._name!r} was ended inside one of its steps: do it after")
        on.over = True
        try:
            self.waiting.close()
            with self._step_lock:
                client, on.client = on.client, None
                on.forget()
            if client is not None and not client.release(on.in_use()):
                why = client.reason or "the coordinator did not confirm its release"
                _log.warning("job %r: %s", self._name, why)
        finally:
            if on.by is not None:
                on.by.end()

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
            builder.join(timeout)
            if builder.is_alive():
                return False
        self.settle()
        return True

    def _build(self) -> None:
        """Compile what is only predicted."""
        if self.compiles:
            return
        if all(ladder.compiled == len(ladder.places()) for ladder in self._on.ladders):
            return
        enter = _compat.configuration()

        def build() -> None:
            try:
                if enter():
                    for ladder in [*self._on.ladders]:
                        ladder.build(self._on.watch)
            except StoppedError:
                return
            except Exception as error:  # steps go on with what is compiled
                _log.warning("job %r: plans are not compiled ahead: %s", self._name, error)
            self._on.renew = True
            self.settle()

        # No daemon: the interpreter waits for it at exit, or XLA's threads would outlive what they work with.
        self._builder = threading.Thread(target=build, name=f"jaxtensile-ladder-{self._name}")
        self._builder.start()
