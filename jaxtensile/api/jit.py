"""``jaxtensile.jit``: like ``jax.jit``, and the program fits.

Calls go through one C++ jit object of JAX's own; only new signatures come to Python. There the plain ``jax.jit(fun)``
traces them, so errors, static arguments and caching are JAX's. After planning, compiling and verifying, the verified
jit object gives the dispatch entry. Later calls cost what a ``jax.jit`` call costs, for any number of signatures.

Invariant: a call runs an executable whose allocation was read and is within the budget. Under an outer trace or
``jax.disable_jit`` it is ``jax.jit(fun)``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pickle import PicklingError
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax

from jaxtensile import _compat
from jaxtensile.api import shared_dispatch
from jaxtensile.api.feedback import Feedback, without_arrays
from jaxtensile.devices.measured import best_known, measured_here
from jaxtensile.devices.profiles import WEIGHTS, DeviceProfile, profile
from jaxtensile.errors import (
    BudgetError,
    IgnoredBudgetWarning,
    InternalError,
    ManyPlansWarning,
    OptionError,
    SolverError,
    TargetError,
    require_known,
)
from jaxtensile.faults import REPORT, as_ours, is_of_the_user, outside, told, unless_faulty, warn_unplanned
from jaxtensile.groups.step import leaves
from jaxtensile.jobs.ladder import Ladder
from jaxtensile.jobs.ladder_together import TogetherLadder
from jaxtensile.passes.solvers.by_name import TO_THE_HOST, named
from jaxtensile.planner.build_report import too_large
from jaxtensile.planner.plan_cache import plan_cache
from jaxtensile.program.upperbound import AMPLE, WORTHWHILE, all_values, recomputes
from jaxtensile.program.workload import Transformed, name_of, told_of_modules
from jaxtensile.report.facts import Setting
from jaxtensile.report.report import Report
from jaxtensile.rewrites.loops.hosted import copies_come_back, stacks_come_back
from jaxtensile.search.request import Evaluate, Fitted, Request, loads_index
from jaxtensile.settings.identity import identity_of, planned
from jaxtensile.settings.options import (
    AUTO,
    Asked,
    ConfigLike,
    Resolved,
    Unsaid,
    budget_bytes,
    config_of,
    host_bytes,
    resolved,
    unsaid,
)
from jaxtensile.spmd.elsewhere import Carried, carried, in_force
from jaxtensile.spmd.local_shapes import sharded
from jaxtensile.spmd.location import Location, device_name, is_nowhere, location, profile_of
from jaxtensile.spmd.of_one_device import of_one_device
from jaxtensile.spmd.placement import Placement
from jaxtensile.spmd.processes import one_plan
from jaxtensile.spmd.processes.agreement import Agreed
from jaxtensile.units import TIB, Bytes, Seconds
from jaxtensile.xla.compile import Options, compile_program, not_recomputing
from jaxtensile.xla.target import compiler_options, is_absent, resolve_all, tracing_for

_SHARED: WeakValueDictionary[Hashable, Ladder] = WeakValueDictionary()
"""Ladders of jobs by program, place and options: jobs that train the same function and shapes share them."""
_SHARING = threading.Lock()
MANY = 8
"""Plans of one function after which it warns that every shape needs its own, which takes seconds. A guess."""


def jit(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    budget: int | str | None = None,
    host_budget: int | str | None = None,
    target: str | None = None,
    job: Any = None,
    solver: str = "auto",
    objective: str = unsaid("time"),
    undo: bool = unsaid(True),
    offload_state: bool = unsaid(False),
    chunk: bool | str = unsaid(AUTO),
    config: ConfigLike | None = None,
    **jax_jit_options: Any,
) -> Any:
    """``jax.jit(fun)`` whose compiled program fits ``budget`` device bytes.

    A program that fits as it is runs unchanged. Otherwise residuals are recomputed so that it fits at the least cost
    in time; values stay the same within the dtype's rounding. Everything that is not listed goes to ``jax.jit``.

    - ``budget``: argument + output + temp - alias bytes on one device as XLA allocates them: an int, ``"12GiB"``,
      ``"12GB"``, ``"80%"`` of the device, or None for what the config says, else the device's capacity less 1 GiB.
    - ``host_budget``: bytes of pinned host memory where residuals may wait instead (on GPUs and TPUs; default: none).
    - ``chunk``: work on many rows (a batch, the logits of a loss) may be done for some of them at a time, often at a
      fraction of the bytes and with nothing computed twice. Sums over rows, gradients above all, are then sums of the
      parts' sums, added in float32 or more, and round differently. ``"auto"``: where the step is shorter for it by 2 %
      or more, or nothing else fits; True: wherever it is cheaper; False: never.
    - ``undo``: keep what the function's own ``jax.checkpoint`` calls would recompute where the budget has room for it;
      False honours them as written (those inside loops, and those that offload, always are).
    - ``objective``: ``"time"``, the step is to be short, whatever is computed twice for it; ``"flops"``, no matrix
      product is computed twice where anything else can be, and then the predicted step is to be short.
    - ``solver``: ``"auto"``, fast at any size: ``"greedy"``, and for programs of a few layers an integer programme
      without its proof; ``"exact"``, with it, which takes up to a minute and reports a gap; ``"chain"``, a dynamic
      programme for programs that are chains.
    - ``offload_state``: donated arguments that only the update needs (optimizer moments, master weights, averages; of
      1 MiB or more) live in pinned host memory between calls, in at most ``host_budget`` bytes where one is given. The
      first call moves them there, their replacements are returned there, and each is on the device only while it is
      updated. Arguments on the device are moved again. For one GPU or TPU, and not together with ``in_shardings`` and
      ``out_shardings``.
    - ``target``: a name from ``jaxtensile.targets()`` to plan for a device that need not be here, or for as many of
      them as the arguments' shardings are over; ``"nvidia-h200:8"`` and ``"nvidia-h200:2x8"`` say how many, too.
    - ``job``: one of ``jaxtensile.job``, whose lease is the budget where none is given; calls are steps of the job.
    - ``config``: the path of a ``jaxtensile.toml`` or its tables as a dict; by default that of the job, else
      ``$JAXTENSILE_CONFIG``, else the first one upward from the working directory. Its table
      ``[functions."train_step"]`` (or a pattern, or ``"train.py:train_step"``) gives ``budget``, ``host_budget``,
      ``objective``, ``undo``, ``chunk`` and ``offload_state`` where they are not given here, and ``[device]`` the bytes
      where no budget is. It is read when the first call is planned, and again after ``clear_cache``.

    Raises ``BudgetError`` (``.needs``, ``.has``, ``.culprits``) when no plan fits, at the call that
    needs the plan, ``TargetError`` for a target that cannot be compiled for, ``SolverError`` for an unknown
    solver or one that cannot plan this program, ``ConfigError`` for an invalid config, and
    ``AgreementError``, in all processes of a program, where they cannot run one plan.
    """
    _require_known(jax_jit_options)
    named(solver)
    if not isinstance(objective, Unsaid) and objective not in WEIGHTS:
        raise OptionError(f"objective={objective!r} is not known: give one of {', '.join(map(repr, WEIGHTS))}")
    if not isinstance(chunk, Unsaid) and chunk not in (True, False, AUTO):
        raise OptionError(f"chunk={chunk!r} is not known: give True, False or {AUTO!r}")
    for name, value in (("undo", undo), ("offload_state", offload_state)):
        if not isinstance(value, Unsaid) and value not in (True, False):
            raise OptionError(f"{name}={value!r} is not known: give True or False")
    placed = [name for name in ("in_shardings", "out_shardings") if name in jax_jit_options]
    if placed and offload_state:
        raise OptionError(
            f"offload_state=True places the arguments itself, {placed[0]}= is given too: leave one of them out"
        )
    # Bad values are an error where they are written; a percentage waits for its device.
    capacity = TIB if target is None else profile(target).capacity
    if budget is not None:
        budget_bytes(budget, capacity)
    if config is not None and not isinstance(config, str | os.PathLike):
        config = config_of(config)
    host = host_bytes(host_budget, TIB)
    if host and solver not in TO_THE_HOST:
        raise SolverError(
            f"solver={solver!r} plans by recomputation alone: leave host_budget={host_budget!r} out, "
            f"or use solver={TO_THE_HOST[0]!r}"
        )
    if fun is None:
        return functools.partial(
            jit,
            budget=budget,
            host_budget=host_budget,
            target=target,
            solver=solver,
            objective=objective,
            undo=undo,
            chunk=chunk,
            offload_state=offload_state,
            job=job,
            config=config,
            **jax_jit_options,
        )
    if job is not None and (target is not None or not _is_job(job)):
        what = f"job={job!r}" if target is None else f"target={target!r}"
        raise OptionError(f"{what} cannot be: jobs run where their arguments are, job= takes a jaxtensile.job(...)")
    asked = Asked(
        budget=budget,
        host_budget=host_budget,
        target=target,
        solver=solver,
        objective=objective,
        undo=undo,
        chunk=chunk,
        offload_state=offload_state,
        to_host=solver in TO_THE_HOST,
        job=job,
        config=config,
        options=jax_jit_options,
    )
    return Planned(fun, asked)


def _require_known(options: Mapping[str, Any]) -> None:
    """``OptionError`` for an option that neither this ``jit`` has nor JAX's."""
    if not options:
        return
    known = {*inspect.signature(jit).parameters, *inspect.signature(jax.jit).parameters} - {"fun", "jax_jit_options"}
    require_known("jit", options, known)


def _is_job(job: Any) -> bool:
    from jaxtensile.jobs.job import Job  # nobody else has to load the coordinator

    return isinstance(job, Job)


@dataclass(slots=True)
class _Entry:
    """The outcome for one signature. ``measured``: the plain program was compiled for the report. ``watched``: calls
    come to Python to be timed."""

    feedback: Feedback
    measured: bool
    device: Any
    watched: bool

    @property
    def fitted(self) -> Fitted:
        return self.feedback.fitted


class Planned(Transformed):
    """The result of ``jaxtensile.jit``: callable, with everything a ``jax.jit`` result has, and ``plan``.

    Invariant: all state is in slots. ``__dict__`` is the user's: ``functools.wraps``, and so every transform of JAX,
    copies it to and from other functions.
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "_agreed",
        "_asked",
        "_compiler_options",
        "_dispatch",
        "_elsewhere",
        "_entries",
        "_found",
        "_fun",
        "_ignored",
        "_jit_options",
        "_ladders",
        "_lock",
        "_placement",
        "_plain",
        "_planned_for",
        "_refused",
        "_without_jit",
    )

    def __init__(self, fun: Callable[..., Any], asked: Asked) -> None:
        options = asked.options
        self._plain = _compat.jit(fun, **options)  # first: it knows best what is wrong with them
        _look_like(self, fun)
        self._fun, self._asked = fun, asked
        self._found: Resolved | None = None
        self._ignored = False
        self._planned_for: dict[tuple[str, ...], Seconds] = {}
        self._jit_options = {k: v for k, v in options.items() if k != "compiler_options"}
        self._compiler_options: Options = dict(options.get("compiler_options") or {})
        self._lock = threading.RLock()
        self._entries: WeakKeyDictionary[Any, dict[Hashable, _Entry]] = WeakKeyDictionary()
        self._refused: WeakKeyDictionary[Any, dict[Hashable, BudgetError]] = WeakKeyDictionary()
        self._agreed: dict[str, Agreed] = {}
        self._elsewhere: dict[Hashable, Planned] = {}
        self._placement = Placement(self._plain, _weakly(self._offloads))
        self._without_jit = self._placement.without_jit(fun)
        self._dispatch: Any = _compat.dispatcher(
            shared_dispatch.stand_in(fun, asked, self._without_jit), options, _weakly(self._chosen)
        )
        self._ladders: WeakKeyDictionary[Any, dict[Hashable, Ladder]] = WeakKeyDictionary()
        if asked.job is not None:
            asked.job.used_by(self._dispatch)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        job = self._asked.job
        if job is None or _compat.under_trace() or _compat.jit_is_disabled():
            return self._dispatch(*args, **kwargs)
        return job.step(self._dispatch, args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else Bound(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> Planned:
        """A new one of the same function, as for a ``jax.jit`` result, without plans and executables."""
        return type(self)(copy.deepcopy(self._fun, memo), self._asked)

    def __reduce__(self) -> tuple[type[Planned], tuple[Any, Asked]]:
        """The function and what was asked, if the function can be pickled: the copy plans anew. Raises
        ``PicklingError`` for a step of a job."""
        if self._asked.job is not None:
            raise PicklingError(
                f"{self!r} is a step of {self._asked.job!r}, which is of this process alone: pickle the function, and "
                "make it a step of a job where it is loaded"
            )
        return type(self), (self._fun, self._asked)

    def __getstate__(self) -> Any:
        return self._plain.__getstate__()

    def __repr__(self) -> str:
        if self._unasked:
            return repr(self._plain)
        return f"<jaxtensile.jit of {getattr(self._fun, '__qualname__', self._fun)!s}, budget={self._asked.budget!r}>"

    def plan(self, *args: Any, **kwargs: Any) -> Report:
        """The report of the plan for these arguments, with XLA's figures; nothing is executed.

        ``args``: arrays or ``jax.ShapeDtypeStruct``. The plain program is compiled too, for XLA's own
        ``report.baseline``. If the devices belong to several processes, all must call it (or ``lower``, ``trace``, or
        the function itself): they agree on one plan, or raise one error.
        """
        with self._seen(args, kwargs) as (there, args, kwargs):
            traced = there._trace_plain(args, kwargs)
            return unless_faulty(
                lambda: there._entry_of(traced, args, kwargs, measure=True).fitted.report,
                lambda error: there._without_report(error, args, kwargs),
            )

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.jit``'s ``lower`` of the planned program."""
        return self.trace(*args, **kwargs).lower()

    def asks(self, *args: Any, **kwargs: Any) -> Request:
        """What ``plan`` of these arguments would ask the planner; nothing is planned, and no compiler is needed."""
        with self._tracing(args, kwargs):
            traced = self._trace_plain(args, kwargs)
            if self._asked.target is None:
                self._require_devices(traced, args, kwargs)
            place = self._together(traced, location(traced, args, kwargs, self._jit_options))
            request = self._request(traced, place, args, kwargs)
        if self._asked.target is None:
            return request
        return dataclasses.replace(request, stacks_come_back=lambda: True)  # the target is not here to be asked

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.jit``'s ``trace`` of the planned program; its ``jaxpr`` is the rewritten one.

        Without a budget it is the plain program's if that has ample room, no known device, or no plan that fits. Such a
        program can be inspected, or lowered for another platform.
        """
        with self._seen(args, kwargs) as (there, args, kwargs):
            return there._traced(args, kwargs)

    def as_written(self, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The ``jax.jit`` result of the function, and its arguments."""
        return self._plain, args

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the result, as ``jax.jit`` gives them."""
        with self._tracing(args, kwargs):
            return self._plain.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forget every plan and executable."""
        with self._lock:
            for entry in (e for entries in self._entries.values() for e in entries.values()):
                entry.feedback.give_up()
            self._entries.clear()
            self._refused.clear()
            self._ladders.clear()
            self._agreed.clear()
            self._elsewhere.clear()
            self._found = None
            self._plain.clear_cache()
            self._dispatch._clear_cache()

    def _cache_size(self) -> int:
        return self._dispatch._cache_size()

    def served_by(self, dispatch: Any) -> None:
        """Calls come from ``dispatch``, which asks ``for_call``: its entries are dropped when a plan changes."""
        self._dispatch = dispatch

    def for_call(self, traced: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any, _compat.Run | None]:
        """What a call runs: the jit object, its arguments, and a runner if the call is watched.

        ``traced``: the function's trace for the arguments ``seen``. Every error is raised, faults of ours too.
        """
        return self._chosen_for(traced, *self.seen(args, kwargs), args, kwargs)

    def seen(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A call's arguments as the user's function sees them; the same objects if none is on the host."""
        return self._placement.as_on_device(args, kwargs)

    def on_device(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A call's arguments with donated ones copied from the host; the same objects if there are none."""
        return self._placement.on_device(args, kwargs)

    def report_of(self, traced: Any, place: Location) -> Report | None:
        """The report of what runs for a trace; None if nothing was planned."""
        entry = self._entries.get(traced.jaxpr, {}).get(place.key)
        return None if entry is None else entry.fitted.report

    # ---- from here on: once per signature ----

    def _resolved(self) -> Resolved:
        """The options; the config is read once after each ``clear_cache``."""
        with self._lock:
            if self._found is None:
                config, job = self._asked.config, self._asked.job
                config = config_of(job.config if config is None and job is not None else config)
                who = identity_of(self._fun)
                planned(config, who)
                self._found = resolved(self._asked, config, who)
            return self._found

    def _offloads(self) -> bool:
        return self._resolved().offloads

    @property
    def _unasked(self) -> bool:
        """Whether the code only asks for fitting the device."""
        asked = self._asked
        return asked.budget is None and asked.target is None and asked.job is None and not asked.offload_state

    def _runs_as_it_is(self, traced: Any, place: Location) -> bool:
        """Whether nothing is asked and the program is of unknown size, or surely fits without checkpoints to undo."""
        wanted = self._resolved()
        if not self._is_free(wanted):
            return False
        most = all_values(traced.jaxpr)
        room, _ = self._budget(wanted, place, profile_of(place.device))
        return most is None or (AMPLE * most <= room and not (self._undoes(traced) and recomputes(traced.jaxpr)))

    def _is_free(self, wanted: Resolved) -> bool:
        """Whether code and config only ask for fitting the device."""
        return self._unasked and not (wanted.says_budget or wanted.offloads)

    def _undoes(self, traced: Any) -> bool:
        """Whether the function's checkpoints may be undone; unasked, only in programs worth planning."""
        wanted = self._resolved()
        most = all_values(traced.jaxpr) if self._is_free(wanted) else None
        return wanted.undo and (most is None or most >= WORTHWHILE)

    def _chosen(self, args: Any, kwargs: Any) -> tuple[Any, Any, Any, _compat.Run | None]:
        """The jit object for a call, its arguments, and a runner if the call is watched."""
        if _compat.under_trace() or _compat.jit_is_disabled():
            self._say_ignored()
            return self._plain, *self._placement.on_device(args, kwargs), None
        known, named = self._placement.as_on_device(args, kwargs)
        traced = self._trace_plain(known, named)
        return unless_faulty(
            lambda: self._chosen_for(traced, known, named, args, kwargs),
            lambda error: self._without_plan(error, args, kwargs),
        )

    def _trace_plain(self, args: Any, kwargs: Any) -> Any:
        with told_of_modules(self._fun, args, kwargs):
            return self._plain.trace(*args, **kwargs)

    def _say_ignored(self) -> None:
        if self._asked.budget is None or self._ignored or not _compat.under_trace():
            return
        self._ignored = True
        warnings.warn(
            f"{name_of(self._fun)} has budget={self._asked.budget!r} and is called inside of another transformation "
            "(jax.grad, jax.vmap, jax.jit), where nothing is planned: put jaxtensile.jit around the whole step instead",
            IgnoredBudgetWarning,
            stacklevel=outside(),
        )

    def _say_many(self, shapes: tuple[str, ...], seconds: Seconds) -> None:
        """Warn once that ``MANY`` shapes were planned for. Equal shapes count once: they are planned again if JAX
        forgot their trace, as when the cache of any jit of the function is cleared."""
        known = self._planned_for
        if len(known) == MANY:
            return
        known[shapes] = known.get(shapes, 0.0) + seconds
        if len(known) == MANY:
            warnings.warn(
                f"{name_of(self._fun)} was planned for {MANY} shapes of its arguments, in {sum(known.values()):.0f} s: "
                "pad them to a few sizes, since each new one is planned and compiled anew",
                ManyPlansWarning,
                stacklevel=outside(),
            )

    def _chosen_for(
        self, traced: Any, known: Any, named: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Any, Any, _compat.Run | None]:
        """``_chosen`` for a traced call. ``known``, ``named``: the arguments as the user's function sees them."""
        place = location(traced, known, named, self._jit_options)
        alone = place is not None and not one_plan.members_of(place.devices)  # the others might not say the same
        if place is None or (alone and self._runs_as_it_is(traced, place)):
            return self._plain, args, kwargs, None  # where there is no place, its call raises JAX's own error
        if self._asked.target is not None and profile(self._asked.target) != profile_of(place.device):
            raise TargetError(
                f"target {self._asked.target!r} is not here: the arguments of {name_of(self._fun)} are on "
                f"{place.device}. Use .plan(...) or .lower(...).compile() to plan and compile for it, or leave target= "
                "out to run here"
            )
        if self._asked.job is not None:
            job = self._asked.job
            fitted = job.plan(self._ladder(traced, place, known, named), place.devices)
            moved = self._placement.moved(place.device, fitted.state, args, kwargs)
            if fitted.pieces is None:
                return fitted.jitted, *moved, None
            return fitted.jitted, *moved, lambda jitted, a, k: job.run(fitted.pieces, leaves(jitted, a, k))
        entry = self._entry(traced, place, known, named)
        fitted = entry.fitted
        moved = self._placement.moved(place.device, fitted.state, args, kwargs)
        if not entry.watched:
            return fitted.jitted, *moved, None

        def request() -> Request:
            abstract = self._placement.dynamic(lambda _, x, __: without_arrays(x), known, named)
            return self._request(traced, place, *abstract)

        return fitted.jitted, *moved, lambda _, a, k: entry.feedback.run(fitted, a, k, request, place.device)

    def _without_plan(self, error: Exception, args: Any, kwargs: Any) -> tuple[Any, Any, Any, None]:
        """``_chosen`` after a fault: the function as written, if it fits."""
        name = name_of(self._fun)
        shared = any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in jax.tree.leaves((args, kwargs)))
        if shared or self._asked.job is not None:
            why = "other processes may have planned it" if shared else "steps of a job run by a plan"
            raise InternalError(f"planning {name} failed ({told(error)}), and {why}. {REPORT}") from error
        args, kwargs = self._placement.on_device(args, kwargs)
        plain = compile_program(lambda _: self._plain, args, kwargs, self._compiler_options)
        device, budget = _compat.default_device(), self._asked.budget
        bound = unless_faulty(
            lambda: self._resolved().budget((device_name(device),), profile_of(device).capacity)[0],
            lambda _: TIB if budget is None else budget_bytes(budget, TIB),
        )
        if plain.device > bound:
            raise too_large(name, error, plain, bound) from error
        warn_unplanned(name, error)
        return self._plain, args, kwargs, None

    def _without_report(self, error: Exception, args: Any, kwargs: Any) -> Report:
        """Raise the function's own error, else that planning failed."""
        compile_program(lambda _: self._plain, args, kwargs, self._compiler_options)
        with as_ours(f"planning {name_of(self._fun)}", "call it, and it runs as it was written where that fits"):
            raise error

    def _is_for_looking(self, traced: Any, args: Any, kwargs: Any) -> bool:
        """Whether an unasked program is traced as it is."""
        if is_nowhere(traced, args, kwargs):
            return True
        place = location(traced, args, kwargs, self._jit_options)
        return place is None or self._runs_as_it_is(traced, place)

    @contextmanager
    def _seen(self, args: Any, kwargs: Any) -> Iterator[tuple[Planned, Any, Any]]:
        """A context for tracing a program that is not called: the function and its arguments as the compiler wants
        them, which is another function where this one names devices that are not the target's."""
        target, there = self._asked.target, self
        with self._tracing(args, kwargs):
            if target is not None:
                trace = functools.partial(self._trace_plain, args, kwargs)
                found = carried(target, trace, self._plain, self._fun, self._asked.options, args, kwargs)
                there, args, kwargs = self._carried(found), found.args, found.kwargs
            with in_force(target):
                yield there, *there._placement.as_on_device(args, kwargs)

    def _carried(self, found: Carried) -> Planned:
        """This function itself, or one for the devices of the target; the same one for the same options."""
        if found.fun is self._fun and found.options is self._asked.options:
            return self
        outs = found.options.get("out_shardings")
        key = (found.fun is self._fun, tuple(jax.tree.leaves(outs)), jax.tree.structure(outs))
        with self._lock:
            if key not in self._elsewhere:
                self._elsewhere[key] = Planned(found.fun, dataclasses.replace(self._asked, options=found.options))
            return self._elsewhere[key]

    def _planned(self, args: Any, kwargs: Any) -> tuple[_Entry, Any, Any]:
        """The entry and arguments of a program that is not called; the plain program is not compiled."""
        with self._seen(args, kwargs) as (there, args, kwargs):
            return there._entry_of(there._trace_plain(args, kwargs), args, kwargs), args, kwargs

    def _entry_of(self, traced: Any, args: Any, kwargs: Any, *, measure: bool = False) -> _Entry:
        """The entry of a program that is not called; arguments as from ``_seen``."""
        self._require_devices(traced, args, kwargs)
        place = location(traced, args, kwargs, self._jit_options)
        if place is None and self._asked.target is not None:
            raise TargetError(
                f"{name_of(self._fun)} names devices that are no {self._asked.target!r} in a shard_map or a "
                "constraint, and its arguments name none: give them their shardings, as "
                "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)), or leave target= out to plan "
                "for this machine"
            )
        place = self._together(traced, place)
        if self._asked.target is not None and place.device not in resolve_all(self._asked.target, place.count):
            raise TargetError(
                f"{name_of(self._fun)} takes no array, so that nothing tells JAX to compile it for "
                f"{self._asked.target!r}: give it an array argument"
            )
        if self._asked.job is None:
            return self._entry(traced, place, args, kwargs, measure=measure)
        ladder = self._ladder(traced, place, args, kwargs)
        budget = self._asked.job.bytes_for(ladder)
        fitted = ladder.fitted(ladder.request.budget if budget is None else budget)
        feedback = Feedback(fitted, ladder.request.device, self._dispatch._clear_cache)
        return _Entry(feedback, True, place.device, watched=False)

    def _require_devices(self, traced: Any, args: Any, kwargs: Any) -> None:
        if is_nowhere(traced, args, kwargs):
            raise TargetError(
                f"{name_of(self._fun)} is traced for a mesh without devices, and nothing can be compiled for one: give "
                "it a mesh of devices, or leave budget= out"
            )

    def _together(self, traced: Any, place: Location | None) -> Location:
        if place is None:
            traced.lower()
            raise TargetError(
                f"the arguments of {name_of(self._fun)} are on devices that do not go together: place them"
            )
        return place

    def _ladder(self, traced: Any, place: Location, args: Any, kwargs: Any) -> Ladder:
        """The ladder of a job's steps of one signature; one per program and place."""
        if members := one_plan.members_of(place.devices):
            self._asked.job.runs_in(members)
        with self._lock:
            known = self._ladders.setdefault(traced.jaxpr, {})
            if place.key not in known:
                groups = self._asked.job.groups
                key = (id(traced.jaxpr), place.key, self._asked.job.overhead, groups, *self._question(place))
                with _SHARING:
                    found = _SHARED.get(key)
                    if found is None or found.request.jaxpr is not traced.jaxpr:
                        abstract = self._placement.dynamic(lambda _, x, __: without_arrays(x), args, kwargs)
                        request = self._request(traced, place, *abstract)
                        # A job's plans are predicted as a whole before any is compiled: parts are there where asked.
                        request = dataclasses.replace(request, chunk=request.chunk is True)
                        most = self._asked.job.overhead
                        if members:
                            found = TogetherLadder(request, place.devices, plan_cache(), most=most)
                        else:
                            found = Ladder(request, plan_cache(), most=most, groups=groups)
                        _SHARED[key] = found
                known[place.key] = found
            return known[place.key]

    def _entry(self, traced: Any, place: Location, args: Any, kwargs: Any, *, measure: bool = False) -> _Entry:
        """Plan once per program, as JAX's trace cache tells them apart, and place."""
        with self._lock:
            entries = self._entries.setdefault(traced.jaxpr, {})
            entry = entries.get(place.key)
            if entry is None:
                refused = self._refused.setdefault(traced.jaxpr, {})
                if place.key in refused:
                    raise refused[place.key].anew()
                job = self._request(traced, place, args, kwargs)
                try:
                    fitted = one_plan.fit(
                        job, place.devices, budget=self._resolved().as_written, known=self._agreed, baseline=measure
                    )
                except BudgetError as error:
                    refused[place.key] = error.anew()
                    raise
                feedback = Feedback(fitted, job.device, self._dispatch._clear_cache)
                measured = measure or not fitted.report.compiled.exact  # nothing can be measured of that
                entry = entries[place.key] = _Entry(feedback, measured, place.device, watched=False)
                if not fitted.report.unchanged:
                    shapes = tuple(map(str, traced.jaxpr.in_avals))
                    self._say_many(shapes, sum(fitted.report.seconds.values()))
            elif measure and not entry.measured:
                self._measure(entry, place, args, kwargs)
            entry.feedback.change()
            if entry.watched and not entry.feedback.timing:
                self._dispatch._clear_cache()  # what has no dispatch entry gets one from its next call on
            entry.watched = entry.feedback.timing
        return entry

    def _request(self, traced: Any, place: Location, args: Any, kwargs: Any) -> Request:
        device, wanted = self._device(place), self._resolved()
        budget, setting = self._budget(wanted, place, device)
        device = dataclasses.replace(device, traffic_weight=WEIGHTS[wanted.objective])
        captured = _compat.captured(traced)
        request = Request(
            name=name_of(self._fun),
            jaxpr=traced.jaxpr,
            donated=_compat.donated_inputs(traced),
            args=args,
            kwargs=kwargs,
            budget=budget,
            device=device,
            shards=place.count,
            make=functools.partial(self._make, traced.out_tree, captured),
            options=self._asked_options(),
            host_budget=wanted.host_budget,
            undo=self._undoes(traced),
            chunk=wanted.chunk,
            solver=self._asked.solver,
            place=self._placement.job_place(place.device, args, kwargs),
            state_budget=wanted.state_budget,
            names=_compat.argument_names(traced) if wanted.offloads else (),
            settings=(setting, *wanted.settings),
            keep_unused=bool(self._jit_options.get("keep_unused", False)),
            stacks_come_back=functools.partial(_stacks_come_back, place.device, device),
        )
        if place.count == 1:
            return request
        static = _compat.static_arguments(self._plain)
        return of_one_device(request, sharded(traced, args, kwargs, static, place.count))

    def _asked_options(self) -> Options:
        """The compiler options that every program of this function has."""
        needed = compiler_options(self._asked.target) if self._asked.target is not None else {}
        return {**needed, **self._compiler_options}

    def _question(self, place: Location) -> tuple[Hashable, ...]:
        """Everything that a ladder depends on besides its program and place."""
        wanted = self._resolved()
        budget, _ = self._budget(wanted, place, self._device(place))
        options = repr((self._asked.options, self._asked.solver))
        said = wanted.host_budget, wanted.state_budget, wanted.objective, wanted.undo, wanted.chunk
        return options, budget, *said, measured_here()

    def _device(self, place: Location) -> DeviceProfile:
        # Compile-only devices too: a kind's rates are the same wherever it is.
        known = profile_of(place.device), place.device.device_kind
        return best_known(*known) if self._asked.target is None else best_known(profile(self._asked.target))

    def _budget(self, wanted: Resolved, place: Location, device: DeviceProfile) -> tuple[Bytes, Setting]:
        """Device bytes of a call; for a job an upper bound of its lease."""
        names = tuple(map(device_name, place.devices)) if self._asked.target is None else (device.platform,)
        return (wanted.budget if self._asked.job is None else wanted.lease)(names, device.capacity)

    # ---- making and measuring ----

    def _make(self, out_tree: Any, captured: Sequence[Any], evaluate: Evaluate | None, options: Options) -> Any:
        """A jit object that runs ``evaluate``; None: the user's function as it is."""
        if evaluate is None and options == self._compiler_options:
            return self._plain
        fun = self._fun

        @functools.wraps(fun)
        def run(*args: Any, **kwargs: Any) -> Any:
            if evaluate is None or not _compat.under_trace():  # jax_debug_nans repeats it op by op
                return fun(*args, **kwargs)
            flat = [x for x in jax.tree.leaves((args, kwargs)) if _compat.is_tracer(x)]
            return jax.tree.unflatten(out_tree, evaluate([*captured, *flat]))

        return _compat.jit(run, **self._jit_options, compiler_options=dict(options) or None)

    def _measure(self, entry: _Entry, place: Location, args: Any, kwargs: Any) -> None:
        report = entry.fitted.report
        if not report.baseline.exact:
            # Not with the plan's options, such as a scheduler that needs fewer bytes.
            options = not_recomputing(self._device(place).backend, self._asked_options())
            plain = compile_program(functools.partial(self._make, None, (), None), args, kwargs, options)
            if plain.memory is not None:
                entry.feedback.tell(baseline=plain.memory)
        entry.measured = True

    def _traced(self, args: Any, kwargs: Any) -> Any:
        """``trace`` for arguments as the compiler wants them."""
        traced = self._trace_plain(args, kwargs)
        if self._unasked and self._is_for_looking(traced, args, kwargs):
            return traced
        try:
            entry = unless_faulty(lambda: self._entry_of(traced, args, kwargs), lambda _: None)
        except BudgetError:
            if self._resolved().says_budget or self._asked.job is not None:
                raise
            return traced
        except Exception as error:
            if not is_of_the_user(error):
                raise
            return traced  # what JAX cannot lower may still be looked at
        if entry is None:
            return traced
        if entry.fitted.state:
            args, kwargs = self._placement.abstract(entry.device, entry.fitted.state, args, kwargs)
        return entry.fitted.jitted.trace(*args, **kwargs)

    def _tracing(self, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        """The context for tracing for an absent device."""
        named = () if self._asked.target is None else (self._asked.target,)
        return tracing_for(*named, args=(args, kwargs))


class Bound(Transformed):
    """A planned method; the object is the first argument."""

    __slots__ = ("__func__", "__self__", "__weakref__")

    def __init__(self, planned: Planned, instance: Any) -> None:
        self.__func__, self.__self__ = planned, instance

    @property
    def __signature__(self) -> inspect.Signature:
        """The method's signature without the object, so that names of arguments find their places."""
        try:
            return inspect.signature(MethodType(self.__func__._fun, self.__self__))
        except (TypeError, ValueError) as error:
            raise AttributeError(str(error)) from None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def as_written(self, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The ``jax.jit`` result of the function, and its arguments, the object first."""
        return self.__func__.as_written((self.__self__, *args))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__func__, name)
        return functools.partial(found, self.__self__) if name in _TAKE_ARGUMENTS else found

    def __repr__(self) -> str:
        return f"<bound {self.__func__!r} of {self.__self__!r}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bound) and self.__func__ is other.__func__ and self.__self__ is other.__self__

    def __hash__(self) -> int:
        return hash((id(self.__func__), id(self.__self__)))


_TAKE_ARGUMENTS = frozenset({"plan", "lower", "trace", "eval_shape"})


_compat.ask_for_shapes(Planned)


def _stacks_come_back(device: Any, known: DeviceProfile) -> bool:
    """Whether ``device`` reads stacks on the host correctly; True for absent devices."""
    if is_absent(device):
        return True
    straight = not known.backend.places_copies or copies_come_back(device)
    return straight and stacks_come_back(device, load_index=loads_index(known))


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method that does not keep its object alive: a jitted function's closure lives as long as the function."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        assert bound is not None, "whoever calls has the object"
        return bound(*args)

    return call


def _look_like(planned: Planned, fun: Callable[..., Any]) -> None:
    """Copy the name, docs, signature and attributes of ``fun``, except attributes that would hide ``Planned``'s."""
    own = {k: v for k, v in getattr(fun, "__dict__", {}).items() if not hasattr(Planned, k)}
    vars(planned).update(own)  # before what a wrapper around another function may have copied from there
    functools.update_wrapper(planned, fun, updated=())


__all__ = ["Bound", "Planned", "jit"]
