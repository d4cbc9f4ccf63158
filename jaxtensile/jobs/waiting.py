"""How a job gets a lease, or more of one.

If there is room, a job enters with its programs as they are, and reports smaller plans once those have run, or
meanwhile. Otherwise it asks with all predicted plans and waits. For another shape, or to return from the host, a second
lease makes room: it waits like any job, and its bytes then pass to the first.

Invariant: ``close`` ends any wait, from any thread, and a failure leaves the lease unchanged. A request is on record in
``Taken`` from beginning to end, so the next request, or ``close``, gives back what an interrupt leaves.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakMethod

import jax
from msgspec import structs

from jaxtensile.errors import (
    AgreementError,
    BudgetError,
    CoordinatorError,
    NotAdmittedError,
    RejectedError,
    UnreachableError,
)
from jaxtensile.jobs.ladder import Ladder
from jaxtensile.jobs.tenancy import Tenancy
from jaxtensile.runtime.client.client import PATIENCE, Client
from jaxtensile.runtime.client.uninterrupted import uninterrupted
from jaxtensile.runtime.protocol.messages import Admit, Rung
from jaxtensile.spmd.location import device_name
from jaxtensile.units import Bytes, Seconds, format_bytes

_AT_ONCE: Seconds = 0.05
"""Seconds for a coordinator to admit a job that need not wait: it takes milliseconds. A guess."""
_TELL_AFTER: Seconds = 5.0
"""Seconds after which a wait is logged; shorter ones mostly end by themselves. A guess."""
_TELL_AT_LEAST: Seconds = 60.0
"""Longest interval in seconds between log lines of a wait; intervals double up to it. A guess."""
_TRIES = 5
"""Tries to get room for a larger shape, as others may be given the bytes in between. A guess."""
_PATIENCE: Seconds = 60.0
"""Seconds to wait for a larger shape, as two jobs may each wait for the other to end. A guess."""
_log = logging.getLogger("jaxtensile")


class Waiting:
    """The waits of a job. ``changed``: called if the job is told something while it does not ask. ``compiling``: runs a
    function that compiles a plan."""

    def __init__(
        self, tenancy: Tenancy, changed: Callable[[], None], compiling: Callable[[Callable[[], object]], object]
    ) -> None:
        self._on, self._changed, self._compiling = tenancy, changed, compiling
        self._name = tenancy.terms.name

    def close(self) -> None:
        """End a present or interrupted wait."""
        uninterrupted(self._drop)

    def _ask(self, admit: Admit, changed: Callable[[], None] | None = None) -> Client:
        """Ask for bytes, under a name of its own."""
        assert self._on.by is not None
        self._drop()
        self._on.taken.asking = client = Client(admit, self._on.by.connect, changed=changed)
        if self._on.over:  # ``close`` may not have seen it
            self._drop()
        self._on.require_going_on()
        return client

    def _drop(self) -> None:
        taken = self._on.taken
        asking, taken.asking = taken.asking, None
        if asking is not None:
            asking.release()

    def known(self, ladder: Ladder, devices: Sequence[Any]) -> None:
        """Ensure that the job has a lease and that its ladder includes this step."""
        if self._on.client is None:
            if ladder not in self._on.ladders:
                self._on.ladders.append(ladder)
            self._enter_all(devices)
        elif ladder not in self._on.ladders:
            if self._on.processes is not None:
                raise AgreementError(
                    f"job {self._name!r} runs in several processes, and {ladder.name} is another step or shape than "
                    "its first: give it one step of one shape, and call others outside of the job"
                )
            ladder.sketch()
            self._join(ladder)

    def _enter_all(self, devices: Sequence[Any]) -> None:
        """Ask to be admitted; one process after the other, where several run the steps."""
        others = self._on.processes
        if others is None:
            return self._enter(devices)
        assert self._on.by is not None
        if self._on.by.local is not None:
            raise AgreementError(
                f"job {self._name!r} runs in several processes, which have to share devices by a coordinator between "
                "processes on each machine: start 'jaxtensile serve' there and name its socket by $JAXTENSILE_SOCKET, "
                "or use 'jaxtensile run --on ray'"
            )
        here = jax.local_devices()
        numbers = [here.index(d) for d in devices if d in here]
        if self._on.devices is None:
            self._on.devices = tuple(f"{device_name(here[k]).partition(':')[0]}:{k}" for k in numbers)
        try:
            others.in_turn(lambda: self._enter(devices))
        except BaseException:
            uninterrupted(self._leave)
            raise
        client = self._on.client
        assert client is not None
        self._on.entered(client, others)

    def _enter(self, devices: Sequence[Any]) -> None:
        """Ask to be admitted, with predicted or known bytes."""
        assert self._on.by is not None
        if self._on.devices is None:
            self._on.devices = tuple(map(device_name, devices))
        if not self._on.turns:
            self._on.turns = self._on.by.turns(self._on.devices, self._on.terms.priority, self._on.terms.weight)
        if self._as_they_are():
            return
        for ladder in self._on.ladders:
            ladder.sketch()
        while self._on.client is None:
            client = uninterrupted(lambda: self._ask(self._on.asked(self._on.together()), _weakly(self._changed)))
            try:
                with self._going_on():
                    if not self._wait_for(client):
                        continue
            except RejectedError as error:
                self.close()
                if [ladder for ladder in self._on.ladders if ladder.tight()]:
                    continue  # without a margin it may fit: its compile will tell
                raise RejectedError(self._too_large(str(error))) from None
            except BaseException:
                self.close()
                raise
            uninterrupted(self._admitted, client)
            if not self._has_plans(self._on.own(client.admit.ladder[client.rung])):
                uninterrupted(self._leave)

    def _as_they_are(self) -> bool:
        """Try to enter with the programs as they are, if nobody else wants the bytes; whether it was admitted."""
        assert self._on.by is not None and self._on.devices is not None
        rung = self._on.together()[-1]
        if all(ladder.sketched for ladder in self._on.ladders) or rung.level > self._on.terms.want or rung.host:
            return False
        if not self._on.by.has_room(self._on.devices, self._on.charged(rung)):
            return False
        client = uninterrupted(lambda: self._ask(self._on.asked((rung,)), _weakly(self._changed)))
        try:
            with self._going_on():
                client.wait(_AT_ONCE)
            uninterrupted(self._admitted, client)
            for ladder in self._on.ladders:
                self._compiling(lambda ladder=ladder: ladder.fitted(ladder.share(rung), self._on.watch))
        except (NotAdmittedError, RejectedError, BudgetError):
            uninterrupted(self._leave)  # others were quicker, or XLA needs more than was predicted
            self.close()
            return False
        except BaseException:
            self.close()
            raise
        return True

    def _admitted(self, client: Client) -> None:
        """Make the request the job's lease."""
        self._on.require_going_on()
        self._on.taken.asking, self._on.taken.client = None, client
        self._on.put(client.admit, client.rung)

    def _leave(self) -> None:
        client, self._on.taken.client = self._on.client, None
        self._on.now = self._on.admit = None
        if client is not None:
            client.release()

    def _too_large(self, why: str) -> str:
        if "there is no device" in why:
            return f"{why}: leave devices= out, or name them in the coordinator's jaxtensile.toml"
        names, smallest = ", ".join(ladder.name for ladder in self._on.ladders), self._on.together()[0].level
        more = "raise want=" if self._on.terms.want < smallest else "give the device more capacity"
        return (
            f"{why.removesuffix(': bring a smaller plan')}; the smallest plan of {names} needs "
            f"{format_bytes(smallest)}: shrink the batch, donate the arguments that are updated, or {more}"
        )

    def _has_plans(self, rung: Rung) -> bool:
        """Whether there are plans for a rung; if not, the ladders have learned why."""
        for ladder in self._on.ladders:
            try:
                self._compiling(lambda ladder=ladder: ladder.fitted(ladder.share(rung), self._on.watch))
            except BudgetError as error:
                if ladder.compiled == 0 and not self._on.compile_more(ladder, error):
                    raise RejectedError(f"job {self._name!r} cannot be admitted: {error}") from error
                return False
        return True

    def _wait_for(self, client: Client) -> bool:
        """Wait for admission, compiling meanwhile the plans of the guaranteed rung, which any grant covers.

        False if those plans need more than the rung, or less and there may be room for it: the job then asks again,
        once, with what it knows.
        """
        with suppress(NotAdmittedError):
            client.wait(_AT_ONCE)
            return True
        low = _guaranteed(client.admit)
        if not self._has_plans(self._on.own(low)):
            return False
        less = _guaranteed(self._on.asked(self._on.together()))
        if not client.admitted and less.level < low.level:
            return False
        patience = _TELL_AFTER
        while True:
            try:
                client.wait(patience)
                return True
            except NotAdmittedError as waits:
                patience = min(2 * patience, _TELL_AT_LEAST)
                _log.warning("%s; waiting until others end or are suspended", str(waits).partition(":")[0])

    # More, or another ladder.

    def _join(self, ladder: Ladder) -> None:
        """Add a step of another shape; the job's ladder then covers all its steps."""
        self._on.ladders.append(ladder)
        try:
            self.have_room(ladder)
        except BaseException:
            self._on.ladders.remove(ladder)
            raise

    def have_room(self, ladder: Ladder) -> None:
        """Get a rung on which a step has a plan, with a ladder new to the coordinator. Raises ``NotAdmittedError``."""
        try:
            there = self._agree(lambda: self._on.covers(ladder), _PATIENCE)
        except RejectedError:
            there = False
        if not there:
            raise NotAdmittedError(self._no_room(ladder))

    def _no_room(self, ladder: Ladder) -> str:
        need, has = format_bytes(ladder.places()[0].level), format_bytes(self._on.budget)
        return (
            f"{ladder.name} needs {need} at least for arguments of this shape; job {self._name!r} has {has}, and what "
            "others are guaranteed leaves no more: suspend or end another job, or make the batch smaller"
        )

    def _agree(self, there: Callable[[], bool], patience: Seconds = 0.0, *, tell: bool = False) -> bool:
        """Make the present ladder apply, until ``there``; False if it does not.

        With ``patience``, others are asked to make room, and the job waits that many seconds for it. ``tell``: log the
        wait. Raises ``RejectedError`` if there never will be room.
        """
        until = time.monotonic() + patience
        for tries in itertools.count():
            self._on.renew = True
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
        """Wait until the coordinator knows the ladder or has refused it."""
        client = self._on.client
        assert client is not None
        away: Seconds | None = None
        while self._on.renew or client.renewing:
            self._on.require_going_on()
            self._on.boundary()
            if not (self._on.renew or client.renewing):
                break
            away = None if client.connected_now else away or time.monotonic()
            if away is not None and time.monotonic() - away > PATIENCE:
                raise UnreachableError(
                    f"no coordinator answers job {self._name!r} for {PATIENCE:.0f} s: it keeps what it has; start one "
                    "with 'jaxtensile serve'"
                )
            time.sleep(0.001)  # a coordinator in another process answers within milliseconds
        self._on.boundary()

    def _make_room(self, until: Seconds, tell: bool) -> bool:
        """Make room for a larger ladder: a second lease asks for the missing bytes, which then pass to the first.

        It waits like any job, and meanwhile the job still shrinks when asked. False after ``until``.
        """
        assert self._on.by is not None and self._on.now is not None and self._on.client is not None
        now, need = self._on.now, self._on.lowest(self._on.together(), covering=False)
        host = max(need.host - now.host, 0)
        gated = self._on.client.takes_turns and self._on.groups < 2
        missing = (
            Rung(persistent=max(need.persistent - now.persistent, 0), temp=need.temp, host=host, seconds=1.0)
            if gated
            else Rung(persistent=max(need.level - now.level, 0), host=host, seconds=1.0)
        )
        asked = structs.replace(self._on.asked((missing,)), job=f"{self._name[:120]} (more)", floor=0)
        room = uninterrupted(self._ask, asked)
        try:
            with self._going_on():
                there = self._wait_beside(room, until, tell)
            if not there:
                return False
            uninterrupted(self._add, room)
        finally:
            self.close()
        return True

    def _add(self, room: Client) -> None:
        """Pass the bytes of a second lease to the first."""
        assert self._on.by is not None and self._on.client is not None
        with self._on.by.local.at_once() if self._on.by.local is not None else nullcontext():
            room.give_back()
            self._on.renewal(self._on.client, covering=False)

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """If another thread's ``close`` ended the wait in the body, raise the error of an ended job."""
        try:
            yield
        except (RejectedError, NotAdmittedError):
            raise
        except CoordinatorError:
            self._on.require_going_on()
            raise

    def _wait_beside(self, room: Client, until: Seconds, tell: bool) -> bool:
        """Wait for room between steps; the job's own lease may shrink meanwhile."""
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
                    _log.warning("job %r waits for room to be resumed", self._name)
                self._on.boundary()

    # A suspended job.

    def charge_host(self, nbytes: Bytes) -> None:
        """Charge the job for its state's host bytes. Raises ``NotAdmittedError``."""
        if self._on.client is None or not nbytes:
            return
        before, self._on.waits = self._on.admit, nbytes

        def there() -> bool:
            # They may be charged still: what a resumed job gave back waits for an answer to something else.
            on = self._on
            return on.admit is not before or on.admit == on.asked(on.together())

        try:
            if self._agree(there, PATIENCE):
                return
            why = "others have it"
        except RejectedError as error:
            why = str(error)
        raise NotAdmittedError(
            f"job {self._name!r} is not suspended: there is no room for {format_bytes(nbytes)} of pinned host "
            f"memory ({why}): raise 'host' in the [device] table of jaxtensile.toml, or resume another job"
        )

    def uncharge_host(self) -> None:
        """Remove the charge for state on the host."""
        self._on.waits, self._on.renew = 0, True

    def rest(self, moved: Bytes) -> None:
        """Reduce the lease to what stays on the device without the state, with nothing for a step."""
        on = self._on
        if on.now is not None:
            on.resting = Rung(persistent=max(on.now.persistent - moved, 0), host=on.now.host, seconds=1.0)
            with suppress(UnreachableError):  # it is told when it is there again
                self._agree(lambda: on.ladder == (on.resting,))

    def come_back(self, timeout: Seconds | None) -> None:
        """Get the ladder and a rung of it back."""
        if self._on.client is None or self._on.resting is None:
            return
        resting, self._on.resting = self._on.resting, None
        try:
            if not self._agree(
                lambda: all(map(self._on.covers, self._on.ladders)), math.inf if timeout is None else timeout, tell=True
            ):
                raise NotAdmittedError(
                    f"job {self._name!r} is still suspended: there was no room for it within {timeout:g} s; wait "
                    "longer, or end or suspend another job"
                )
        except BaseException:
            self._on.resting, self._on.renew = resting, True
            raise


def _guaranteed(admit: Admit) -> Rung:
    return next(r for r in admit.ladder if r.level >= admit.floor)


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """A bound method that does not keep its object alive: the coordinator keeps no job."""
    known = WeakMethod(method)

    def call() -> None:
        found = known()
        if found is not None:
            found()

    return call
