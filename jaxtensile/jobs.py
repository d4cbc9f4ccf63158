"""``jaxtensile.job``: a lease on device memory whose steps change plans as others come and go.

The first call of a step says what it needs: its predicted ladder is what the job asks to be admitted with. The plan of
the rung that it is granted is compiled and verified; the others are compiled in the background, and the compiled ladder
takes the predicted one's place. From then on GRANT and REVOKE move the job from plan to plan: at a step boundary, or at
once while no step runs. All plans of a step compute the same, from the same arguments, so there is nothing to move.

A suspended job keeps its lease, and with it its place in the status, at the bytes that may still be on the device;
what waits on the host is charged there. To come back it waits for the rest as a job does that waits to be admitted.

Invariant: a step runs only while the job holds its turn, the plan that it runs fits the rung that the job is charged
for, and the job says that it has shrunk when no step of the larger plan runs any more: a step is waited for.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Any

import jax
from msgspec import structs

from jaxtensile import _compat
from jaxtensile.arbitration import Arbitration, arbitration, config_of, device_name
from jaxtensile.errors import (
    BudgetError,
    ConfigError,
    CoordinatorError,
    NotAdmittedError,
    RejectedError,
    UnreachableError,
)
from jaxtensile.ladder import Ladder, together
from jaxtensile.request import Fitted
from jaxtensile.runtime.client import PATIENCE, Client
from jaxtensile.runtime.gate import GateError, Turns
from jaxtensile.runtime.messages import MOST_BYTES, Admit, Rung
from jaxtensile.runtime.place import JOB_VARIABLE
from jaxtensile.suspension import Suspended
from jaxtensile.units import Bytes, Seconds, format_bytes, parse_bytes

_TELL_AFTER: Seconds = 5.0
_TELL_AT_LEAST: Seconds = 60.0
"""That a job waits is told, and then ever more rarely."""
_OFF = 1.3
"""Measured steps that change the ladder's seconds by more than this factor are told."""
_REMEASURED = 8
"""Steps after which that is looked at, and again each time there are twice as many."""
_TRIES = 5
"""To have room for a larger shape, where others may be given the bytes in between."""
_PATIENCE: Seconds = 60.0
"""Two jobs that wait for larger shapes may each wait for the other's end."""
_log = logging.getLogger("jaxtensile")


class _Stopped(Exception):
    """Nobody waits for this compile any more."""


class Job:
    """One job. A context manager; give it to ``jaxtensile.jit(job=...)``. Made by ``jaxtensile.job``."""

    def __init__(
        self,
        name: str,
        *,
        least: Bytes,
        want: Bytes,
        priority: int,
        weight: float,
        devices: tuple[str, ...] | None,
        overhead: float | None,
        arbitrated: Callable[[], Arbitration],
    ) -> None:
        self.name, self.least, self.want, self.priority, self.weight = name, least, want, priority, weight
        self._devices, self._overhead, self._arbitrated = devices, overhead, arbitrated
        self._by: Arbitration | None = None
        self._client: Client | None = None
        self._turns: Turns | None = None
        self._step_lock = threading.Lock()
        self._stepper = 0
        """The thread that has the lock."""
        self._ladders: list[Ladder] = []
        self._users: list[Callable[[], object]] = []
        """Forget what runs at present, each for one planned function."""
        self._admit: Admit | None = None
        """The ladder that ``_now`` is of."""
        self._now: Rung | None = None
        self._builder: threading.Thread | None = None
        self._over = False
        self._renew = False
        self._holds = False
        """A turn."""
        self._asking: Client | None = None
        """What waits at present, for the job's lease or for more."""
        self._clamped = False
        """``_now`` is less than the rung, until another ladder counts."""
        self._calling: Any = None
        self._runs: dict[Any, tuple[Ladder, Fitted] | None] = {}
        """What the calls of a function run; None where its calls are not all alike."""
        self._calls: Counter[Ladder] = Counter()
        """Of each step that were timed."""
        self._fresh = False
        """The call plans, compiles or loads: its time says nothing."""
        self._away: Suspended | None = None
        """Its state, from the begin of ``suspend`` to the end of ``resume``."""
        self._resting: Rung | None = None
        """What it holds while it is suspended, in place of its ladder."""
        self._waits: Bytes = 0
        """Host bytes of its state."""
        self.steps = 0
        """How many were run."""
        self.switches = 0
        """How often the job went to another rung."""

    # The user's side.

    def __enter__(self) -> Job:
        if self._by is not None or self._over:
            raise CoordinatorError(f"job {self.name!r} was entered before: make another one")
        self._by = self._arbitrated()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the lease back; steps of the job cannot be called any more, and one that waits for its lease ends."""
        if self._stepper == threading.get_ident():
            raise GateError(f"job {self.name!r} was ended inside one of its steps: do it after")
        self._over = True
        try:
            if (asking := self._asking) is not None:
                asking.close()
            with self._step_lock:
                client, self._client = self._client, None
                self._forget()
            if client is not None and not client.release(self._in_use()):
                _log.warning("job %r: %s", self.name, client.reason or "the coordinator did not confirm its release")
        finally:
            if self._by is not None:
                self._by.end()

    def suspend(self, state: Any) -> Any:
        """Move ``state`` to the host and give the device bytes back to others; returns it with its arrays there.

        ``state`` is a pytree, of all that the job keeps on the device between steps: its arrays go to pinned host
        memory one by one and are deleted on the device, as donated ones are; what is no array stays as it is. The host
        bytes are charged. Of the job's device bytes those of ``state`` are given back, and all that only a running
        step needs; what a step is given beside ``state`` stays charged, since it may still be there, so suspend it too
        where it is large: ``job.suspend((state, batch))``. Steps of the job are errors until ``resume``.

        Should it fail in between, or be interrupted, ``resume`` gives the state back. Raises ``CoordinatorError`` where
        there is no room on the host; then nothing has moved.
        """
        with self._alone(f"job {self.name!r} was suspended"):
            if self._away is not None:
                raise CoordinatorError(
                    f"job {self.name!r} is suspended already: give all of its state at once, job.suspend((a, b))"
                )
            self._away = away = Suspended(f"job {self.name!r}", state)
            try:
                self._boundary()
                if self._client is not None and away.host_bytes:
                    self._charge_host(away)
            except BaseException:
                self._away, self._waits, self._renew = None, 0, True
                raise
            with self._kept():
                found = away.to_host()
                if self._now is not None:
                    stays = max(self._now.persistent - away.device_bytes, 0)
                    self._resting = Rung(persistent=stays, host=self._now.host, seconds=1.0)
                    with suppress(UnreachableError):  # it is told when it is there again
                        self._agree(lambda: self.ladder == (self._resting,))
        return found

    def resume(self, state: Any = None, *, timeout: Seconds | None = None) -> Any:
        """Move the state of a suspended job back, once there is room; returns it, each array as and where it was.

        ``state``: what ``suspend`` returned, or another one of the same structure, shapes and types; without it, that
        which was suspended. Its arrays on the host are deleted. Waits for its turn like a job that is to be admitted;
        after ``timeout`` seconds, if one is given, ``NotAdmittedError``: it is still suspended, and may ask again.
        """
        with self._alone(f"job {self.name!r} was resumed"):
            away = self._away
            if away is None:
                raise CoordinatorError(f"job {self.name!r} is not suspended: nothing is to be resumed")
            if state is not None:
                away.take(state)
            if self._client is not None and self._resting is not None:
                self._come_back(timeout)
            with self._kept():
                found = away.to_device()
            self._away, self._waits = None, 0
            self._renew = True
            self._boundary()
        return found

    @property
    def suspended(self) -> Any:
        """The state of a suspended job, each array where it is; None of one that is not."""
        return None if self._away is None else self._away.tree

    @property
    def budget(self) -> Bytes:
        """Device bytes that steps of the job may use at present; 0 before its first one and while it is suspended."""
        return 0 if self._now is None or self._resting is not None else self._now.level

    @property
    def rung(self) -> int:
        """Which rung of ``ladder`` it is on, from 0; -1 while it has no lease."""
        return -1 if self._client is None else self._client.rung

    @property
    def ladder(self) -> tuple[Rung, ...]:
        """What the coordinator knows of the job's plans."""
        return () if self._admit is None else self._admit.ladder

    @property
    def compiled(self) -> bool:
        """Whether all its plans are compiled, and the coordinator knows."""
        busy = self._builder is not None and self._builder.is_alive()
        return bool(self._ladders) and not busy and not self._renew

    def wait(self, timeout: Seconds | None = None) -> bool:
        """Until the plans of all steps so far are compiled; False if that takes longer than ``timeout`` seconds."""
        builder = self._builder
        if builder is not None:
            builder.join(timeout)
            if builder.is_alive():
                return False
        self._settle()
        return True

    def __repr__(self) -> str:
        held = f"{format_bytes(self.budget)}, rung {self.rung} of {len(self.ladder)}" if self._now else "no lease"
        held = "has ended" if self._over else "suspended" if self._away is not None else held
        return f"<job {self.name!r}: {held}>"

    # What planned functions ask.

    def users(self, forget: Callable[[], object]) -> None:
        """A planned function is the job's; ``forget``: have its next call ask again what to run."""
        self._users.append(forget)

    def step(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One call of a step, as a turn of the job, up to the end of its work on the device."""
        with self._alone(f"a step of job {self.name!r} was called"):
            self._require_present()
            self._boundary()
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
            self._known(ladder, devices)
            while True:
                self._boundary()
                assert self._client is not None
                try:
                    fitted = self._fitted(ladder)
                except BudgetError as error:
                    # It was told to go where it can by what was predicted alone.
                    self._compile_more(ladder, error)
                    if ladder.smallest <= self.bytes_for(ladder):
                        raise
                    self._have_room(ladder)
                    continue
                if self._client.target == self._client.rung:
                    break
            self._build()
        runs = self._runs.get(self._calling, (ladder, fitted))
        self._runs[self._calling] = (ladder, fitted) if runs is not None and runs[0] is ladder else None
        return fitted

    @property
    def overhead(self) -> float | None:
        """By which factor a step may be slower at most; None: by any."""
        return self._overhead

    def bytes_for(self, ladder: Ladder) -> Bytes:
        """What a plan of a step may need now."""
        assert self._now is not None
        return min(ladder.persistent, self._now.persistent) + self._now.temp

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """No other step of the job runs; when this is over, it goes where it was told to be meanwhile."""
        me = threading.get_ident()
        if self._stepper == me:
            raise GateError(f"{what} inside one of its steps: do it after")
        with self._step_lock:
            if self._over or self._by is None:
                why = "has ended" if self._over else "has not begun"
                state = "; its state is 'job.suspended'" if self._away is not None else ""
                raise CoordinatorError(
                    f"job {self.name!r} {why}: call its steps inside 'with jaxtensile.job(...)'{state}"
                )
            self._stepper = me
            try:
                yield
            finally:
                self._stepper = 0
        self._settle()

    # ---- a suspended job ----

    def _require_present(self) -> None:
        if self._away is not None:
            raise CoordinatorError(f"job {self.name!r} is suspended: call 'state = job.resume()' before its next step")

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Whatever goes wrong, the state is not lost, and the error says where it is."""
        try:
            yield
        except BaseException as error:
            error.add_note(f"nothing of job {self.name!r} is lost: 'state = job.resume()' gives its state back")
            raise

    def _charge_host(self, away: Suspended) -> None:
        """The job is charged what its state will take of the host."""
        before, self._waits = self._admit, away.host_bytes
        try:
            if self._agree(lambda: self._admit is not before, PATIENCE):
                return
            why = "others have it"
        except RejectedError as error:
            why = str(error)
        raise NotAdmittedError(
            f"job {self.name!r} is not suspended: there is no room for {format_bytes(away.host_bytes)} of pinned host "
            f"memory ({why}): raise 'host' in the [device] table of jaxtensile.toml, or resume another job"
        )

    def _come_back(self, timeout: Seconds | None) -> None:
        """The job has its ladder again, and a rung of it."""
        resting, self._resting = self._resting, None
        try:
            if not self._agree(
                lambda: all(map(self._covers, self._ladders)), math.inf if timeout is None else timeout, tell=True
            ):
                raise NotAdmittedError(
                    f"job {self.name!r} is still suspended: there was no room for it within {timeout:g} s; wait "
                    "longer, or end or suspend another job"
                )
        except BaseException:
            self._resting, self._renew = resting, True
            raise

    # ---- a step's turn ----

    def _take_turn(self) -> None:
        if self._turns is not None:
            self._turns.__enter__()
            self._holds = True

    def _end_turn(self) -> None:
        if self._holds and self._turns is not None:
            self._holds = False
            self._turns.__exit__(None, None, None)

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
        runs, client = self._runs.get(self._calling), self._client
        if client is None or runs is None or self._fresh:
            return
        ladder, fitted = runs
        ladder.took(fitted, took)
        self._calls[ladder] += 1
        client.beat(self.steps, took, self._in_use(), 0)
        if self.steps >= _REMEASURED and self.steps & (self.steps - 1) == 0:
            self._renew = self._renew or self._misjudged()

    # ---- at rest, under the step lock ----

    def _settle(self) -> None:
        """If no step runs: go where the job was told to be. Whoever has the lock looks again when it is free."""
        while self._told() and self._step_lock.acquire(blocking=False):
            try:
                self._boundary()
            except CoordinatorError as error:
                _log.warning("job %r: %s", self.name, error)  # its next step says so
                return
            finally:
                self._step_lock.release()

    def _told(self) -> bool:
        client = self._client
        if client is None or not client.admitted:
            return False
        if client.target != client.rung or client.admit is not self._admit:
            return True
        return (self._renew or self._clamped) and not client.renewing

    def _boundary(self) -> None:
        client = self._client
        if client is None:
            return
        rung = client.boundary()
        if rung is not None:
            self._put(client.admit, rung)
            client.moved(self._in_use())
        elif client.rung >= 0 and not client.renewing and (self._clamped or client.admit is not self._admit):
            self._put(client.admit, client.rung)
        if self._renew and not client.renewing:
            self._renew = False
            self._renewal(client)

    def _put(self, admit: Admit, rung: int) -> None:
        before, self._admit, self._now, self._clamped = self._now, admit, admit.ladder[rung], False
        if before is not None and before.temp != self._now.temp:
            self.switches += 1
        self._forget()

    def _forget(self) -> None:
        for forget in self._users:
            forget()

    # ---- admission ----

    def _known(self, ladder: Ladder, devices: Sequence[Any]) -> None:
        """The job has a lease, and a ladder that this step is part of."""
        if self._client is None:
            if ladder not in self._ladders:
                self._ladders.append(ladder)
            self._enter(devices)
        elif ladder not in self._ladders:
            self._join(ladder)

    def _enter(self, devices: Sequence[Any]) -> None:
        """Ask to be admitted, by what is predicted or known."""
        assert self._by is not None
        if self._devices is None:
            self._devices = tuple(map(device_name, devices))
        if self._turns is None:
            self._turns = self._by.turns(self._devices[0], self.priority, self.weight)
        while self._client is None:
            client = Client(self._asked(self._together()), self._by.connect, changed=self._settle)
            try:
                with self._waits_for(client):
                    self._wait_for(client)
            except RejectedError as error:
                client.close()
                if [ladder for ladder in self._ladders if ladder.tight()]:
                    continue  # without a margin it may fit: its compile will tell
                raise RejectedError(self._too_large(str(error))) from None
            except BaseException:
                client.close()
                raise
            self._client = client
            self._put(client.admit, client.rung)
            if not self._has_plans():
                client.release()
                self._client = self._now = self._admit = None

    def _too_large(self, why: str) -> str:
        if "there is no device" in why:
            return f"{why}: leave devices= out, or name them in the coordinator's jaxtensile.toml"
        names, smallest = ", ".join(ladder.name for ladder in self._ladders), self._together()[0].level
        more = "raise want=" if self.want < smallest else "give the device more capacity"
        return (
            f"{why.removesuffix(': bring a smaller plan')}; the smallest plan of {names} needs "
            f"{format_bytes(smallest)}: shrink the batch, donate the arguments that are updated, or {more}"
        )

    def _has_plans(self) -> bool:
        """Whether there are plans for the rung that was granted; the ladders know better if not."""
        for ladder in self._ladders:
            try:
                self._fitted(ladder)
            except BudgetError as error:
                if ladder.compiled == 0 and not self._compile_more(ladder, error):
                    raise RejectedError(f"job {self.name!r} cannot be admitted: {error}") from error
                return False
        return True

    def _compile_more(self, ladder: Ladder, error: BudgetError) -> bool:
        """Compile the smallest plan that there is, before asking for its bytes."""
        if error.needs is None or error.needs > self.want:
            return False
        try:
            ladder.compile(error.needs, self._watch)
        except BudgetError:
            return False
        return True

    def _asked(self, ladder: tuple[Rung, ...]) -> Admit:
        assert self._devices is not None
        return Admit(
            job=self.name,
            devices=self._devices,
            ladder=ladder,
            floor=self.least if ladder[-1].level >= self.least else ladder[-1].level,
            want=max(self.want, 0),
            priority=self.priority,
            weight=self.weight,
            suspended=self._resting is not None,
        )

    def _wait_for(self, client: Client) -> None:
        patience = _TELL_AFTER
        while True:
            try:
                client.wait(patience)
                return
            except NotAdmittedError as waits:
                patience = min(2 * patience, _TELL_AT_LEAST)
                _log.warning("%s; waiting until others end or are suspended", str(waits).partition(":")[0])

    def _join(self, ladder: Ladder) -> None:
        """A step of another shape: the job's ladder is that of all its steps together from now on."""
        self._ladders.append(ladder)
        try:
            self._have_room(ladder)
        except BaseException:
            self._ladders.remove(ladder)
            raise

    def _have_room(self, ladder: Ladder) -> None:
        """Have a rung on which a step has a plan, by a ladder that the coordinator does not know yet."""
        try:
            there = self._agree(lambda: self._covers(ladder), _PATIENCE)
        except RejectedError:
            there = False
        if not there:
            raise NotAdmittedError(self._no_room(ladder))

    def _agree(self, there: Callable[[], bool], patience: Seconds = 0.0, *, tell: bool = False) -> bool:
        """Have the ladder count that is known now, until ``there``. With ``patience`` others are asked to make room for
        it, and that is waited for; ``tell``: say that it waits. Raises ``RejectedError`` where there never will be."""
        until = time.monotonic() + patience
        for tries in itertools.count():
            self._renew = True
            self._answered()
            if there():
                return True
            if tries >= _TRIES and time.monotonic() >= until:
                return False
            if patience and not self._make_room(until, tell):
                return False
            self._answered()
        return False

    def _answered(self) -> None:
        """The coordinator knows the ladder, or has refused it."""
        client = self._client
        assert client is not None
        away: Seconds | None = None
        while self._renew or client.renewing:
            self._require_going_on()
            self._boundary()
            if not (self._renew or client.renewing):
                break
            away = None if client.connected_now else away or time.monotonic()
            if away is not None and time.monotonic() - away > PATIENCE:
                raise UnreachableError(
                    f"no coordinator answers job {self.name!r} for {PATIENCE:.0f} s: it keeps what it has; start one "
                    "with 'jaxtensile serve'"
                )
            time.sleep(0.001)  # a coordinator in another process answers within milliseconds
        self._boundary()

    def _make_room(self, until: Seconds, tell: bool) -> bool:
        """Have room made for a larger ladder, by a second lease that asks for what is missing; its bytes go over to the
        first one. It waits as any job does, and the job goes on to shrink when it is asked to. False after ``until``.
        """
        assert self._by is not None and self._now is not None and self._client is not None
        now, need = self._now, self._lowest(covering=False)
        host = max(need.host - now.host, 0)
        gated = self._by.local is not None
        missing = (
            Rung(persistent=max(need.persistent - now.persistent, 0), temp=need.temp, host=host, seconds=1.0)
            if gated
            else Rung(persistent=max(need.level - now.level, 0), host=host, seconds=1.0)
        )
        asked = structs.replace(self._asked((missing,)), job=f"{self.name[:120]} (more)", floor=0)
        room = Client(asked, self._by.connect)
        try:
            with self._waits_for(room):
                there = self._wait_beside(room, until, tell)
            if not there:
                return False
            with self._by.local.at_once() if self._by.local is not None else nullcontext():
                room.give_back()
                self._renewal(self._client, covering=False)
        finally:
            room.release()
        return True

    @contextmanager
    def _waits_for(self, client: Client) -> Iterator[None]:
        """Until ``close``, from whatever thread."""
        self._asking = client
        try:
            self._require_going_on()
            yield
        except (RejectedError, NotAdmittedError):
            raise
        except CoordinatorError:
            self._require_going_on()
            raise
        finally:
            self._asking = None

    def _require_going_on(self) -> None:
        if self._over:
            raise CoordinatorError(f"job {self.name!r} has ended while it waited")

    def _wait_beside(self, room: Client, until: Seconds, tell: bool) -> bool:
        """Until there is room, at rest: the job's own lease may shrink meanwhile."""
        next_ = time.monotonic() + _TELL_AFTER
        while True:
            try:
                room.wait(0.01)
                return True
            except NotAdmittedError:
                now = time.monotonic()
                if now >= until:
                    return False
                if tell and now >= next_:
                    next_ = now + _TELL_AFTER
                    _log.warning("job %r waits for room to be resumed", self.name)
                self._boundary()

    def _no_room(self, ladder: Ladder) -> str:
        need, has = format_bytes(ladder.places()[0].level), format_bytes(self.budget)
        return (
            f"{ladder.name} needs {need} at least for arguments of this shape; job {self.name!r} has {has}, and what "
            "others are guaranteed leaves no more: suspend or end another job, or make the batch smaller"
        )

    def _lowest(self, *, covering: bool = True) -> Rung:
        """The lowest rung of the ladder as it is known now that is no lower than ``least``, and covers what runs."""
        assert self._now is not None
        rungs = self._together()
        runs = [p.temp for ladder in self._ladders if (p := ladder.runs(self.bytes_for(ladder))) is not None]
        used, floor = max(runs, default=0) if covering else 0, self._asked(rungs).floor
        return next((r for r in rungs if r.temp >= used and r.level >= floor), rungs[-1])

    def _covers(self, ladder: Ladder) -> bool:
        """Whether a step has a plan, as far as is known, for the rung that the job is on."""
        now = self._now
        assert now is not None
        return any(p.temp <= now.temp and p.persistent <= now.persistent for p in ladder.places())

    def _renewal(self, client: Client, *, covering: bool = True) -> None:
        """Tell the coordinator the ladder as it is known now. Until that counts, nothing larger runs than does now."""
        assert self._now is not None and self._admit is not None
        rungs = self._together()
        asked = self._asked(rungs)
        if asked == self._admit:
            return
        rung = self._lowest(covering=covering)
        before = self._now
        self._now, self._clamped = structs.replace(before, temp=min(rung.temp, before.temp)), True
        self._forget()
        if not client.renew(asked, rungs.index(rung), self._in_use()):
            self._now, self._clamped, self._renew = before, False, True

    def _together(self) -> tuple[Rung, ...]:
        if self._resting is not None:
            return (self._resting,)
        rungs = together(self._ladders, [self._calls[ladder] for ladder in self._ladders])
        return tuple(structs.replace(r, host=r.host + self._waits) for r in rungs) if self._waits else rungs

    def _fitted(self, ladder: Ladder) -> Fitted:
        return ladder.fitted(self.bytes_for(ladder), self._watch)

    def _in_use(self) -> tuple[Bytes, ...]:
        """Measured bytes per device, where they are this job's alone: not while a process has several."""
        return ()

    def _misjudged(self) -> bool:
        """Whether measured steps say something else of the rungs than the coordinator knows."""
        new, old = self._together(), self.ladder
        if len(new) != len(old):
            return True
        best, was = min(r.seconds for r in new), min(r.seconds for r in old)
        ratios = [(a.seconds / best) / (b.seconds / was) for a, b in zip(new, old, strict=True)]
        return max(ratios) > _OFF or min(ratios) < 1 / _OFF

    # ---- in the background ----

    def _build(self) -> None:
        """Compile what is only predicted."""
        if self._builder is not None and self._builder.is_alive():
            return
        if all(ladder.compiled == len(ladder.places()) for ladder in self._ladders):
            return
        enter = _compat.configuration()

        def build() -> None:
            try:
                if enter():
                    for ladder in [*self._ladders]:
                        ladder.build(self._watch)
            except _Stopped:
                return
            except Exception as error:  # steps go on with what is compiled
                _log.warning("job %r: plans are not compiled ahead: %s", self.name, error)
            self._renew = True
            self._settle()

        # No daemon: the interpreter waits for it at exit, or XLA's threads would outlive what they work with.
        self._builder = threading.Thread(target=build, name=f"jaxtensile-ladder-{self.name}")
        self._builder.start()

    def _watch(self, _: str) -> None:
        if self._over or not threading.main_thread().is_alive():
            raise _Stopped


def job(
    name: str | None = None,
    *,
    least: int | str | None = None,
    want: int | str | None = None,
    priority: int | None = None,
    weight: float | None = None,
    devices: Sequence[str] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> Job:
    """A job whose steps share a device with others: ``with jaxtensile.job("a") as j``, ``jaxtensile.jit(f, job=j)``.

    ``name``: its own in this process; without it, the one that ``jaxtensile run`` has given the process. ``least``:
    bytes (an int, ``"4GiB"``) below which it is never put; ``want``: bytes above which it asks for nothing (without it:
    all it is faster with). ``priority``: its class, a higher one goes first; ``weight``: its share inside the class.
    ``devices``: names as ``"cuda:0"``, by default the one its arguments are on. ``config``: a ``jaxtensile.toml`` or
    its tables as a dict, by default the file found upward from here; its ``[jobs.NAME]`` holds for what is not given.
    The coordinator is this process's own, unless ``$JAXTENSILE_SOCKET`` or the config names the socket of
    ``jaxtensile serve``.

    Raises ``ConfigError`` for what cannot be meant. Steps raise ``RejectedError`` when the job can never fit.
    """
    name = os.environ.get(JOB_VARIABLE) if name is None else name
    if not isinstance(name, str) or not 1 <= len(name) <= 128:
        here = f", or start this with 'jaxtensile run', which sets ${JOB_VARIABLE}" if name is None else ""
        raise CoordinatorError(f"a job's name is a text of 1 to 128 letters, not {name!r}: give it one{here}")
    known = config_of(config)
    said = known.jobs.get(name)
    low = _bytes("least", least, said.least if said else 0)
    high = _bytes("want", want, said.want if said and said.want is not None else MOST_BYTES)
    if low > high:
        raise BudgetError(f"job {name!r}: least={format_bytes(low)} is above want={format_bytes(high)}")
    return Job(
        name,
        least=low,
        want=high,
        priority=_class(priority) if priority is not None else said.priority if said else 0,
        weight=_share(weight) if weight is not None else said.weight if said else 1.0,
        devices=None if devices is None else _names(devices),
        overhead=said.max_overhead if said else None,
        arbitrated=lambda: arbitration(name, known),
    )


def _class(given: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not -1000 <= given <= 1000:
        raise ConfigError(f"priority={given!r}: give a whole number from -1000 to 1000; a higher one goes first")
    return given


def _share(given: float) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 1e-3 <= given <= 1e3:
        raise ConfigError(f"weight={given!r}: give a number from 0.001 to 1000")
    return float(given)


def _names(given: Sequence[str]) -> tuple[str, ...]:
    names = () if isinstance(given, str) else tuple(given)
    if not names or len(set(names)) < len(names) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"devices={given!r}: give a list of names like 'cuda:0', each once, or leave it out")
    return names


def _bytes(what: str, given: int | str | None, default: Bytes) -> Bytes:
    if given is None:
        return default
    try:
        return parse_bytes(given)
    except ValueError as error:
        raise BudgetError(f"{what}={given!r}: {error}") from None


__all__ = ["Job", "job"]
