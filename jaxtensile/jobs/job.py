"""``jaxtensile.job``: a lease on device memory, whose steps change plans as other jobs come and go.

The first step asks for admission: with the predicted bytes of the program as it is if there is room, else with a
predicted ladder. The granted plan is compiled and verified at once, the others in the background; they replace the
predictions. GRANT and REVOKE move the job between plans, at a step boundary or while no step runs. All plans take the
same arguments, so no data moves.

A suspended job keeps its lease, and its place in the status, at the bytes that may still be on the device; its state is
charged to the host. To resume, it queues for the rest like a new job.

Invariant: a step runs only during the job's turn, with a plan within the rung it is charged for. The job reports that
it has shrunk only after the last step of the larger plan has ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from weakref import finalize

from jaxtensile.errors import AgreementError, BudgetError, ConfigError, CoordinatorError
from jaxtensile.groups.pieces import Pieces
from jaxtensile.jobs.arbitration import arbitration
from jaxtensile.jobs.ladder import Ladder
from jaxtensile.jobs.stepping import Stepping
from jaxtensile.jobs.suspension import Suspended
from jaxtensile.jobs.tenancy import Tenancy, Terms
from jaxtensile.runtime.client.uninterrupted import later, uninterrupted
from jaxtensile.runtime.config.config import MOST_GROUPS, Config
from jaxtensile.runtime.daemon.endpoint import DEVICES_VARIABLE, JOB_VARIABLE
from jaxtensile.runtime.protocol.messages import (
    HIGHEST_PRIORITY,
    LEAST_WEIGHT,
    LONGEST_NAME,
    LOWEST_PRIORITY,
    MOST_BYTES,
    MOST_WEIGHT,
    Rung,
)
from jaxtensile.search.request import Fitted
from jaxtensile.settings.options import config_of
from jaxtensile.spmd.processes.together import together
from jaxtensile.units import Bytes, Seconds, format_bytes, parse_bytes


class Job:
    """One job, made by ``jaxtensile.job``. A context manager; pass it to ``jaxtensile.jit(job=...)``."""

    def __init__(self, terms: Terms, config: Config) -> None:
        self.name, self.least, self.want = terms.name, terms.least, terms.want
        self.priority, self.weight = terms.priority, terms.weight
        self._config = config
        self._tenancy = Tenancy(terms)
        self._steps = Stepping(self._tenancy)
        # Who drops a job without its end has ended it.
        finalize(self, later, self._tenancy.taken.give_back).atexit = False

    def __enter__(self) -> Job:
        if self._tenancy.by is not None or self._tenancy.over:
            raise CoordinatorError(f"job {self.name!r} was entered before: make another one")
        uninterrupted(self._enter)
        return self

    def _enter(self) -> None:
        self._tenancy.taken.by = arbitration(self.name, self._config)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the lease back. Later steps of the job are errors, and a step that waits for its lease ends."""
        self._steps.close()

    def suspend(self, state: Any) -> Any:
        """Move ``state`` to the host, give its device bytes to others, and return it with its arrays there.

        ``state``: a pytree of everything the job keeps on the device between steps. Arrays move to pinned host memory
        one by one and are deleted on the device, like donated ones; other leaves stay. The host bytes are charged. The
        bytes of a running step are given back too. A step's other arguments stay charged, as they may still be on the
        device: suspend large ones too, ``job.suspend((state, batch))``. Steps are errors until ``resume``.

        If it fails or is interrupted midway, ``resume`` gives the state back. Raises ``CoordinatorError`` if the host
        has no room; then nothing has moved.
        """
        steps, tenancy, waiting = self._steps, self._tenancy, self._steps.waiting
        with steps.alone(f"job {self.name!r} was suspended"):
            if tenancy.processes is not None:
                raise CoordinatorError(
                    f"job {self.name!r} runs in several processes, and none of them can suspend it alone: end it, and "
                    "begin again from what was saved"
                )
            if steps.away is not None:
                raise CoordinatorError(
                    f"job {self.name!r} is suspended already: give all of its state at once, job.suspend((a, b))"
                )
            steps.away, steps.back = (away := Suspended(f"job {self.name!r}", state)), None
            try:
                tenancy.boundary()
                waiting.charge_host(away.host_bytes)
            except BaseException:
                steps.away = None
                waiting.uncharge_host()
                raise
            with self._kept():
                found = away.to_host()
                waiting.rest(away.device_bytes)
        return found

    def resume(self, state: Any = None, *, timeout: Seconds | None = None) -> Any:
        """Move a suspended job's state back once there is room, and return it, each array as and where it was.

        ``state``: what ``suspend`` returned, or one of the same structure, shapes and types; None: the suspended one.
        Its host arrays are deleted. The job queues like a new one. Raises ``NotAdmittedError`` after ``timeout``
        seconds, if given: the job is still suspended, and may ask again. Until the next step, another ``resume``
        returns the same state, in case its caller was interrupted.
        """
        steps, tenancy, waiting = self._steps, self._tenancy, self._steps.waiting
        with steps.alone(f"job {self.name!r} was resumed"):
            away = steps.away
            if away is None:
                if steps.back is not None:
                    return steps.back[0]
                raise CoordinatorError(f"job {self.name!r} is not suspended: nothing is to be resumed")
            if state is not None:
                away.take(state)
            waiting.come_back(timeout)
            with self._kept():
                found = away.to_device()
            steps.back, steps.away = (found,), None
            waiting.uncharge_host()
            tenancy.boundary()
        return found

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """On any error, keep the state and add a note that says how to get it."""
        try:
            yield
        except BaseException as error:
            error.add_note(f"nothing of job {self.name!r} is lost: 'state = job.resume()' gives its state back")
            raise

    @property
    def suspended(self) -> Any:
        """The state of a suspended job, each array where it is; None if the job is not suspended."""
        return None if (away := self._steps.away) is None else away.tree

    @property
    def budget(self) -> Bytes:
        """Device bytes that the job's steps may use now; 0 before the first step and while suspended."""
        return self._tenancy.budget

    @property
    def rung(self) -> int:
        """Index of the current rung in ``ladder``, from 0; -1 without a lease."""
        return self._tenancy.rung

    @property
    def ladder(self) -> tuple[Rung, ...]:
        """The job's plans, as the coordinator knows them."""
        return self._tenancy.ladder

    @property
    def steps(self) -> int:
        """Number of steps run."""
        return self._steps.steps

    @property
    def switches(self) -> int:
        """Number of times the job changed to another rung."""
        return self._tenancy.switches

    @property
    def compiled(self) -> bool:
        """Whether all plans are compiled and the coordinator knows them."""
        return bool(self._tenancy.ladders) and not self._steps.compiles and not self._tenancy.renew

    @property
    def ended(self) -> bool:
        """Whether it was closed."""
        return self._tenancy.over

    def device_bytes(self) -> dict[str, Bytes]:
        """Bytes that the coordinator may grant of each device it knows; none if it does not answer."""
        by = self._tenancy.by
        try:
            found = () if by is None else by.status().devices
        except CoordinatorError:
            found = ()
        return {d.device: d.capacity - d.reserve for d in found}

    def wait(self, timeout: Seconds | None = None) -> bool:
        """Wait until the plans of all steps so far are compiled; False after ``timeout`` seconds."""
        return self._steps.wait(timeout)

    def __repr__(self) -> str:
        tenancy = self._tenancy
        held = f"{format_bytes(self.budget)}, rung {self.rung} of {len(self.ladder)}" if tenancy.now else "no lease"
        held = "has ended" if tenancy.over else "suspended" if self._steps.away is not None else held
        return f"<job {self.name!r}: {held}>"

    # What planned functions ask.

    def runs_in(self, members: Sequence[int]) -> None:
        """Its steps run on devices of these processes, of which this is one."""
        if self._tenancy.processes is None:
            self._tenancy.processes = together(self.name, members)
        elif self._tenancy.processes.members != tuple(members):
            raise AgreementError(
                f"job {self.name!r} runs in processes {', '.join(map(str, self._tenancy.processes.members))}, and a "
                f"step of it in {', '.join(map(str, members))}: give each set of processes a job of its own"
            )

    def used_by(self, call: Any) -> None:
        """Register ``call``, which calls a planned function of the job."""
        self._tenancy.used_by(call)

    def step(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run one call of a step as a turn of the job, until its work on the device has ended."""
        return self._steps.step(call, args, kwargs)

    def run(self, pieces: Pieces, flat: Sequence[Any]) -> Any:
        """The results of a step in groups, between which other jobs of this process have their turns."""
        return pieces(flat, self._steps.between)

    def plan(self, ladder: Ladder, devices: Sequence[Any]) -> Fitted:
        """The plan that a call runs now. The call's turn is given back while it plans or waits for the lease."""
        return self._steps.plan(ladder, devices)

    @property
    def groups(self) -> int:
        """Executables of a step at most; 1 where it runs under a coordinator of several processes."""
        return self._tenancy.groups

    @property
    def overhead(self) -> float | None:
        """Largest factor by which a step may be slower; None: no limit."""
        return self._tenancy.terms.overhead

    @property
    def config(self) -> Config:
        """The config, which also applies to steps without another one."""
        return self._config

    def bytes_for(self, ladder: Ladder) -> Bytes | None:
        """Bytes that a plan of a step may need now; None before the first plan and while the job is suspended."""
        now = self._tenancy.now
        return None if now is None or self._tenancy.resting is not None else ladder.share(now)


def job(
    name: str | None = None,
    *,
    least: int | str | None = None,
    want: int | str | None = None,
    priority: int | None = None,
    weight: float | None = None,
    devices: Sequence[str] | None = None,
    groups: int | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> Job:
    """A job whose steps share a device with others: ``with jaxtensile.job("a") as j``, ``jaxtensile.jit(f, job=j)``.

    ``name``: unique in this process; None: the one that ``jaxtensile run`` gave the process. ``least``: bytes (an int,
    ``"4GiB"``) that the job never shrinks below. ``want``: bytes it never asks to exceed (None: as many as make it
    faster). ``priority``: its class; a higher one goes first. ``weight``: its share within the class. ``devices``:
    names like ``"cuda:0"``; by default those that a cluster gave the process, else the device of its arguments.
    ``groups``: its steps run as so many executables at most, and other jobs of this process wait for one of them and
    not for a whole step; what a step needs is then charged for good.
    ``config``: a ``jaxtensile.toml`` or its tables as a dict; by default the file found upward from here. Its
    ``[jobs.NAME]`` supplies what is not given.

    The coordinator is this process's own, unless ``$JAXTENSILE_SOCKET`` or the config names the socket of ``jaxtensile
    serve``.

    Raises ``ConfigError`` if the config is invalid. Steps raise ``RejectedError`` if the job can never fit.
    """
    if _automatic is not None:
        _automatic.close()  # the program decides for itself
    return _made(name, least, want, priority, weight, devices, groups, config)


_automatic: Job | None = None
"""The job of this process that ``begin_automatic`` began."""


def begin_automatic(name: str) -> Job:
    """A job for functions that know of none, already entered. It ends when the program makes one of its own."""
    global _automatic
    _automatic = found = _made(name, None, None, None, None, None, None, None)
    found.__enter__()
    return found


def _made(
    name: str | None,
    least: int | str | None,
    want: int | str | None,
    priority: int | None,
    weight: float | None,
    devices: Sequence[str] | None,
    groups: int | None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None,
) -> Job:
    name = os.environ.get(JOB_VARIABLE) if name is None else name
    if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME or not name.isprintable():
        here = f", or start this with 'jaxtensile run', which sets ${JOB_VARIABLE}" if name is None else ""
        raise CoordinatorError(
            f"a job's name is a text of 1 to {LONGEST_NAME} printable letters, not {name!r}: give it one{here}"
        )
    known = config_of(config)
    said = known.jobs.get(name)
    low = _bytes("least", least, said.least if said else 0)
    high = _bytes("want", want, said.want if said and said.want is not None else MOST_BYTES)
    if low > high:
        raise BudgetError(f"job {name!r}: least={format_bytes(low)} is above want={format_bytes(high)}")
    terms = Terms(
        name=name,
        least=low,
        want=high,
        priority=_class(priority) if priority is not None else said.priority if said else 0,
        weight=_share(weight) if weight is not None else said.weight if said else 1.0,
        devices=_names(devices) if devices is not None else _given(),
        overhead=said.max_overhead if said else None,
        groups=_groups(groups) if groups is not None else said.groups if said else 1,
    )
    return Job(terms, known)


def _class(given: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not LOWEST_PRIORITY <= given <= HIGHEST_PRIORITY:
        allowed = f"a whole number from {LOWEST_PRIORITY} to {HIGHEST_PRIORITY}"
        raise ConfigError(f"priority={given!r}: give {allowed}; a higher one goes first")
    return given


def _groups(given: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= MOST_GROUPS:
        raise ConfigError(f"groups={given!r}: give a whole number from 1 to {MOST_GROUPS}; with 1 a step runs whole")
    return given


def _share(given: float) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not LEAST_WEIGHT <= given <= MOST_WEIGHT:
        raise ConfigError(f"weight={given!r}: give a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}")
    return float(given)


def _names(given: Sequence[str]) -> tuple[str, ...]:
    names = () if isinstance(given, str) else tuple(given)
    if not names or len(set(names)) < len(names) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"devices={given!r}: give a list of names like 'cuda:0', each once, or leave it out")
    return names


def _given() -> tuple[str, ...] | None:
    """The devices that a cluster's agent gave this process, as their coordinator names them; None: it gave none."""
    return tuple(filter(None, os.environ.get(DEVICES_VARIABLE, "").split(","))) or None


def _bytes(what: str, given: int | str | None, default: Bytes) -> Bytes:
    if given is None:
        return default
    try:
        return parse_bytes(given)
    except ValueError as error:
        raise BudgetError(f"{what}={given!r}: {error}") from None


__all__ = ["Job", "begin_automatic", "job"]
