"""One ``jax.jit`` result of a program that knows nothing of us: what a call of a new signature runs.

The object is one of JAX's own, and so are its entries for later calls. Only its cache misses come here:

    traced, as JAX would           its own errors, its own cache
    four times all values fit      JAX's path
    compiled, as JAX would, fits   JAX's path: the same executable runs
    else                           ``jaxtensile.jit``'s plan for what the arrays beside the call leave of the budget

Invariant: a fault of ours never ends the user's program: the function runs as written, and one line says so.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import jax

from jaxtensile import _compat
from jaxtensile.api.automatic import Automatic
from jaxtensile.api.beside import bytes_beside
from jaxtensile.api.explain import OF_EXEC, users_line
from jaxtensile.api.tally import Program, Tally
from jaxtensile.devices.hardware import allocator_stats
from jaxtensile.devices.profiles import RESERVE
from jaxtensile.errors import BudgetError, ConfigError, InternalError, JaxtensileError, RejectedError
from jaxtensile.faults import passes, strict, told
from jaxtensile.places import is_own, short_place
from jaxtensile.program.upperbound import AMPLE, all_values
from jaxtensile.program.workload import name_of
from jaxtensile.settings.wanted import Wanted
from jaxtensile.spmd.location import Location, device_name, is_nowhere, location, profile_of
from jaxtensile.units import Bytes, format_bytes, parse_bytes
from jaxtensile.xla.target import is_absent

if TYPE_CHECKING:
    from jaxtensile.api.jit import Planned

_LIKELY: Final = 8
"""Times the room: a program whose values are more, all together, is not compiled just to see whether it fits. A step
keeps about a quarter of its values at once. A guess."""
_STEPS: Final = 128
"""Parts of a budget by which what lives beside a call is rounded up, so that plans of earlier runs are found: less than
1 % of the budget is lost. A guess."""

_UNFINISHED: Final = "its planning did not end"


@dataclass
class Session:
    """One ``install``. ``active``: until ``uninstall``. ``planned``: drop the entries of functions that run plans.
    ``automatic``: the job whose lease they run within, under ``jaxtensile run``."""

    wanted: Wanted
    tally: Tally
    active: bool = True
    planned: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    automatic: Automatic | None = None


_OVER = Session(Wanted(), Tally(), active=False)
_now = _OVER


def begin(session: Session) -> None:
    """``session`` is that of functions which come from other processes."""
    global _now
    _now = session


@dataclass(slots=True)
class _Verdict:
    """What one signature runs: ``planned``, or None for the function as written."""

    planned: Planned | None = None
    program: Program | None = None


class Substitute:
    """One jit object's answer to new signatures."""

    def __init__(self, fun: Callable[..., Any], options: Mapping[str, Any], plain: Any, session: Session) -> None:
        self._fun, self._options, self._plain, self._session = fun, options, plain, session
        self._verdicts: WeakKeyDictionary[Any, dict[Any, _Verdict]] = WeakKeyDictionary()
        self._lock = threading.RLock()
        self._made: weakref.ref[Any] = weakref.ref(plain)
        self._hosted: Planned | None = None
        self._told = False
        self._step: Planned | None = None

    def __reduce__(self) -> tuple[Callable[..., Substitute], tuple[Any, ...]]:
        """The function as written: where it arrives it is planned if it has to be there."""
        return _arrived, (self._fun, self._options)

    def served_by(self, made: Any) -> None:
        """The jit object whose misses come here."""
        self._made = weakref.ref(made)

    def choose(self, args: Any, kwargs: Any) -> tuple[Any, Any, Any, _compat.Run | None]:
        """The jit object for a call, its arguments, and a runner if the call is watched."""
        if not self._session.active or _compat.under_trace() or _compat.jit_is_disabled():
            return self._as_written(args, kwargs)
        seen = self._seen(args, kwargs)
        traced = self._plain.trace(*seen[0], **seen[1])
        if self._session.automatic is not None:
            step = self._step_for(self._session.automatic, traced, *seen)
            if step is None:
                return self._as_written(args, kwargs)
            return self._plain, args, kwargs, lambda _, given, named: _as_a_step(step, given, named)
        with self._lock:
            return self._guarded(
                traced, seen, lambda planned: planned.for_call(traced, args, kwargs)
            ) or self._as_written(args, kwargs)

    def trace(self, own: _compat.Trace, args: Any, kwargs: Any) -> Any:
        """``jax.jit``'s ``trace`` of what a call would run. ``own``: of JAX."""
        traced = own(self._plain, *args, **kwargs)
        if not self._session.active or self._session.automatic is not None or _compat.under_trace():
            return traced
        with self._lock:
            return self._guarded(traced, (args, kwargs), lambda planned: planned.trace(*args, **kwargs)) or traced

    def _guarded(self, traced: Any, seen: tuple[Any, Any], run: Callable[[Planned], Any]) -> Any:
        """What ``run`` makes of the plan for a trace; None if the function runs as written."""
        place: Location | None = None
        try:
            if is_nowhere(traced, *seen):
                return None  # traced for a mesh without devices, to be looked at
            place = location(traced, *seen, self._options)
            if place is None:
                return None  # JAX raises its own error
            verdict = self._verdict(traced, place, *seen)
            return None if verdict.planned is None else self._run(verdict, traced, place, run)
        except Exception as error:
            if isinstance(error, BudgetError | ConfigError) and not isinstance(error, InternalError):
                raise
            if strict() or (passes(error) and not isinstance(error, JaxtensileError)):
                raise
            self._give_up(traced, place, error)
            return None

    def _run(self, verdict: _Verdict, traced: Any, place: Location, run: Callable[[Planned], Any]) -> Any:
        """``run`` of the verdict's plan; under ``best_effort`` of the smallest that was found."""
        planned, program = verdict.planned, verdict.program
        assert planned is not None and program is not None
        try:
            found = run(planned)
        except BudgetError as error:
            if isinstance(error, InternalError):
                raise
            program.why = "does not fit"
            if not self._session.wanted.best_effort:
                raise self._unmet(error, program) from None
            planned = verdict.planned = self._smallest(error, program)
            if planned is None:
                return None
            found = run(planned)
        if program.why == _UNFINISHED:
            program.why = ""
        report = program.report = planned.report_of(traced, place)
        if not self._told and report is not None and not report.unchanged:
            self._told = True
            self._session.planned.append(_dropping(self._fun, self._options))
        return found

    def _step_for(self, automatic: Automatic, traced: Any, args: Any, kwargs: Any) -> Planned | None:
        """The function as a step of the process's job; None where it runs as written."""
        if is_nowhere(traced, args, kwargs):
            return None
        place = location(traced, args, kwargs, self._options)
        job = None if place is None else automatic.job_for(all_values(traced.jaxpr), place)
        if job is None:
            return None
        with self._lock:
            if self._step is None:
                self._step = self._planned(None, job)
            return self._step

    # ---- once per signature ----

    def _verdict(self, traced: Any, place: Location, args: Any, kwargs: Any) -> _Verdict:
        known = self._verdicts.setdefault(traced.jaxpr, {})
        if place.key not in known:
            known[place.key] = self._judged(traced, place, args, kwargs)
        return known[place.key]

    def _judged(self, traced: Any, place: Location, args: Any, kwargs: Any) -> _Verdict:
        budget, beside = self._budget(place, args, kwargs)
        room = budget - beside
        most, tally = all_values(traced.jaxpr), self._session.tally
        if most is None or AMPLE * most <= room:
            tally.fits()
            return _Verdict()
        program = Program(*self._named(traced), None, max(room, 0))
        if most <= _LIKELY * room * place.count:
            program.needs = self._needed(args, kwargs)
            if program.needs is not None and program.needs <= room:
                return _Verdict(None, tally.add(program))
        needs = "may need more than" if program.needs is None else f"needs {format_bytes(program.needs)}, more than"
        others = f" ({format_bytes(budget)} less {format_bytes(beside)} of other arrays)" if beside else ""
        where = f"{program.name} ({short_place(program.place)})" if program.place else program.name
        program.why = _UNFINISHED
        tally.add(program)
        tally.say(f"planning {where}, which {needs} {format_bytes(max(room, 0))}{others}")
        return _Verdict(self._planned(max(room, 1)), program)

    def _needed(self, args: Any, kwargs: Any) -> Bytes | None:
        """Device bytes of the function as written, by its compiler; None where that cannot say."""
        from jaxtensile.xla.compile import compile_program  # most programs never get here

        options = dict(self._options.get("compiler_options") or {})
        with suppress(Exception):  # its call raises the same, and it is the user's
            found = compile_program(lambda _: self._plain, args, kwargs, options)
            return None if found.memory is None else found.memory.device
        return None

    def _planned(self, budget: Bytes | None, job: Any = None) -> Planned:
        from jaxtensile.api.jit import Planned  # the planner takes 0.6 s to import
        from jaxtensile.settings.options import Asked

        wanted = self._session.wanted
        nearer = self._said() if wanted.config else ()  # the function's own table
        options = {name: value for name, value in wanted.options.items() if name not in nearer}
        if any(name in self._options for name in ("in_shardings", "out_shardings")):
            options.pop("offload_state", None)  # they place the arguments themselves
        asked = Asked(budget=budget, config=wanted.config or {}, options=self._options, job=job, **options)
        planned = Planned(self._fun, asked)
        if job is not None:
            return planned
        planned.served_by(_Entries(self._made))
        return planned

    def _smallest(self, error: BudgetError, program: Program) -> Planned | None:
        """The plan to run where none meets the budget; None: the function as written."""
        name, has = program.name, format_bytes(program.budget)
        needs = error.needs
        if needs is None or (program.needs is not None and program.needs <= needs):
            self._session.tally.say(f"{name} does not fit {has}: it runs as written, which needs the least")
            return None
        self._session.tally.say(
            f"{name} does not fit {has}: it runs in {format_bytes(needs)}, the least that was found"
        )
        return self._planned(needs)

    def _unmet(self, error: BudgetError, program: Program) -> BudgetError:
        """The error with the ways out that there are here."""
        beside = "" if program.budget else "; all of the budget is taken by arrays beside it: delete what is not needed"
        text = f"{error}{beside}; or run what comes nearest with --best-effort (install(best_effort=True))"
        found = BudgetError(text, needs=error.needs, has=error.has, culprits=error.culprits)
        found.add_note(OF_EXEC)
        return found

    def _give_up(self, traced: Any, place: Location | None, error: Exception) -> None:
        """The function runs as written from now on, and one line says why."""
        program = Program(*self._named(traced), None, 0, why="a fault of jaxtensile")
        if place is not None:
            known = self._verdicts.setdefault(traced.jaxpr, {})
            before = known.get(place.key)
            if before is not None and before.program is not None:
                before.program.why, program = program.why, before.program
            else:
                self._session.tally.add(program)
            known[place.key] = _Verdict(None, program)
        self._session.tally.say(f"{program.name} runs as it was written: planning it failed ({told(error)})")

    # ---- bytes ----

    def _budget(self, place: Location, args: Any, kwargs: Any) -> tuple[Bytes, Bytes]:
        """Device bytes of a call, and how many of them other arrays take."""
        own = self._own_budget(place)
        if own is not None:
            return own, 0
        budget = self._shared_budget(place)
        if is_absent(place.device) or (jax.process_count() > 1 and len(place.devices) > 1):
            return budget, 0  # the processes of a program decide alike only by what they all know
        beside = bytes_beside(place.devices, args, kwargs)
        step = max(budget // _STEPS, 1)
        return budget, -(-beside // step) * step

    def _own_budget(self, place: Location) -> Bytes | None:
        """What the function's table in the config says: of its calls alone."""
        if not self._session.wanted.config:
            return None
        found = self._resolved()
        return found.budget(*_of(place))[0] if found.says_budget else None

    def _shared_budget(self, place: Location) -> Bytes:
        """What the program may hold on a device in all."""
        wanted, capacity = self._session.wanted, profile_of(place.device).capacity
        limit = None
        if wanted.config:
            found = self._resolved()
            limit, capacity = found.limit(*_of(place)), found.capacity(*_of(place))
        if wanted.budget is not None:
            return parse_bytes(wanted.budget, capacity=capacity)
        most = max(capacity - RESERVE, 0) if limit is None else limit[0]
        return min(most, allocator_stats(place.device).get("bytes_limit", most))

    def _said(self) -> Container[str]:
        """The keys of the function's table in the config."""
        from jaxtensile.runtime.config.functions import said_of
        from jaxtensile.settings.identity import identity_of
        from jaxtensile.settings.options import config_of

        return said_of(config_of(self._session.wanted.config).functions, identity_of(self._fun))

    def _resolved(self) -> Any:
        from jaxtensile.settings.identity import identity_of  # only where there is a config
        from jaxtensile.settings.options import Asked, config_of, resolved

        return resolved(Asked(options=self._options), config_of(self._session.wanted.config), identity_of(self._fun))

    # ---- arguments ----

    def _seen(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments as the user's function sees them: on the device, wherever a plan left them."""
        hosted = self._hosting()
        return (args, kwargs) if hosted is None else hosted.seen(args, kwargs)

    def _as_written(self, args: Any, kwargs: Any) -> tuple[Any, Any, Any, None]:
        hosted = self._hosting()
        if hosted is not None:
            args, kwargs = hosted.on_device(args, kwargs)
        return self._plain, args, kwargs, None

    def _hosting(self) -> Planned | None:
        """Who moves arguments to the device, where plans may leave them on the host."""
        if not self._session.wanted.offload_state:
            return None
        if self._hosted is None:
            self._hosted = self._planned(1)
        return self._hosted

    def _named(self, traced: Any) -> tuple[str, str]:
        """The function's name and its place; if that is in a library, the user's line that runs it."""
        found, _, place = _compat.function_source(traced.jaxpr).partition(" at ")
        if not place:
            return name_of(self._fun), ""
        return found, place if is_own(place) else users_line(traceback.walk_stack(None)) or place


def _as_a_step(step: Planned, args: Any, kwargs: Any) -> Any:
    """The results of a step; a job that can never fit is told in one line, as a budget is."""
    try:
        return step(*args, **kwargs)
    except (BudgetError, RejectedError) as error:
        error.add_note(OF_EXEC)
        raise


def _arrived(fun: Callable[..., Any], options: Mapping[str, Any]) -> Substitute:
    return Substitute(fun, options, jax.jit(fun, **options), _now)


def _dropping(fun: Callable[..., Any], options: Mapping[str, Any]) -> Callable[[], None]:
    """Drops the dispatch entries of all jit objects of a function, which it does not keep alive."""
    try:
        known: Callable[[], Any] = weakref.ref(fun)
    except TypeError:  # its entries go with its jit object
        known = lambda: None  # noqa: E731

    def drop() -> None:
        if (found := known()) is not None:
            jax.jit(found, **options)._clear_cache()  # pyright: ignore[reportAttributeAccessIssue]

    return drop


class _Entries:
    """The dispatch entries of a jit object that it does not keep alive."""

    def __init__(self, made: weakref.ref[Any]) -> None:
        self._made = made

    def _clear_cache(self) -> None:
        made = self._made()
        if made is not None:
            made._clear_cache()


def _of(place: Location) -> tuple[tuple[str, ...], Bytes]:
    """The names of a call's devices in a config, and their capacity."""
    return tuple(map(device_name, place.devices)), profile_of(place.device).capacity


__all__ = ["Session", "Substitute", "begin"]
