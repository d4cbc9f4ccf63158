"""``jaxtensile.jit``: like ``jax.jit``, and it fits.

Invariant: a call whose signature was planned goes straight through one ``jax.jit`` object. A new
signature makes that object's trace raise ``_Unplanned``; the plan is then made, compiled and
verified, and the very executable that was verified is the one the call runs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxtensile import _compat, pipeline
from jaxtensile.compile import Options
from jaxtensile.device import DeviceProfile, profile, profile_for_kind
from jaxtensile.errors import BudgetError, TargetError
from jaxtensile.pipeline import Evaluate, Fitted, Job
from jaxtensile.report import Report
from jaxtensile.target import compiler_options, resolve
from jaxtensile.units import GIB, Bytes, parse_bytes

_SOLVERS = ("auto", "greedy")
_RESERVE = GIB
"""Bytes of the device left to the process when no budget is given."""


def jit(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    budget: int | str | None = None,
    host_budget: int | str | None = None,
    target: str | None = None,
    job: Any = None,
    solver: str = "auto",
    offload_state: bool = False,
    chunk: bool = False,
    verify: bool = True,
    config: Any = None,
    **jax_jit_options: Any,
) -> Any:
    """``jax.jit(fun)`` whose compiled program fits ``budget`` device bytes.

    ``budget`` bounds argument + output + temp - alias bytes on one device as XLA allocates them:
    an int, ``"12GiB"``, ``"12GB"``, ``"80%"`` of the device, or None for the device's capacity
    less 1 GiB. A program that fits as it is runs unchanged. Otherwise residuals are recomputed so
    that it fits at the least cost in time; values stay the same within the dtype's rounding.
    ``target``: a name from ``jaxtensile.targets()`` to plan for a device that need not be here.
    Everything else goes to ``jax.jit``.

    Raises ``BudgetError`` (``.needs``, ``.has``, ``.culprits``) when no plan fits, at the call that
    needs the plan, and ``TargetError`` for a target that cannot be compiled for.
    """
    given = {
        "host_budget": host_budget,
        "job": job,
        "offload_state": offload_state or None,
        "chunk": chunk or None,
        "config": config,
    }
    unsupported = [name for name, value in given.items() if value is not None]
    if unsupported:
        raise NotImplementedError(
            f"jaxtensile.jit({unsupported[0]}=...) is not available yet: leave it out; budget= and target= are"
        )
    if solver not in _SOLVERS:
        raise ValueError(f"unknown solver {solver!r}: use {' or '.join(map(repr, _SOLVERS))}")
    if target is not None:
        profile(target)
    _read_budget(budget, None if target is None else profile(target).capacity, final=False)
    if fun is None:
        return functools.partial(
            jit, budget=budget, target=target, solver=solver, verify=verify, **jax_jit_options
        )
    return Planned(fun, budget, target, jax_jit_options)


def _read_budget(budget: int | str | None, capacity: Bytes | None, *, final: bool = True) -> Bytes:
    """The budget in bytes; before the device is known (``final=False``) only its text is judged."""
    if budget is None:
        return max((capacity or 0) - _RESERVE, 0)
    try:
        size = parse_bytes(budget, capacity=capacity if final or capacity is not None else 1 << 40)
    except (ValueError, TypeError, AttributeError) as error:
        raise BudgetError(f"budget={budget!r}: {error}") from None
    if size <= 0:
        raise BudgetError(f"budget={budget!r} is no bytes at all: give at least the arguments' size", has=size)
    return size


class _Unplanned(Exception):
    """Raised while tracing a signature that has no plan yet."""

    def __init__(self, key: Any) -> None:
        super().__init__("this signature has not been planned")
        self.key = key


class Planned:
    """The result of ``jaxtensile.jit``: callable, with all that a ``jax.jit`` result has, and ``plan``."""

    def __init__(
        self, fun: Callable[..., Any], budget: int | str | None, target: str | None, options: Mapping[str, Any]
    ) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._budget, self._target = budget, target
        self._jit_options = {k: v for k, v in options.items() if k != "compiler_options"}
        self._compiler_options: Options = dict(options.get("compiler_options") or {})
        self._plain = jax.jit(fun, **options)
        self._lock = threading.RLock()
        self._fitted: dict[Any, Fitted] = {}
        self._run: Any = self._object({}, self._compiler_options)
        self._table: dict[Any, Evaluate | None] = {}
        self._others: dict[Any, Any] = {}
        self._probe = self._object({}, self._compiler_options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _compat.under_trace():
            return self._plain(*args, **kwargs)
        try:
            return self._run(*args, **kwargs)
        except _Unplanned as miss:
            key = miss.key
        return self._object_for(key, args, kwargs)(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"<jaxtensile.jit of {getattr(self._fun, '__qualname__', self._fun)!s}, budget={self._budget!r}>"

    def plan(self, *args: Any, **kwargs: Any) -> Report:
        """What was decided for these arguments and what XLA said; nothing is executed.

        ``args``: arrays or ``jax.ShapeDtypeStruct``. Compiles the plain program as well, so that
        ``report.baseline`` is XLA's own number.
        """
        key = self._key(args, kwargs)
        self._prepare(key, args, kwargs, baseline=True)
        return self._fitted[key].report

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.jit``'s ``lower`` of the planned program."""
        key = self._key(args, kwargs)
        run = self._object_for(key, args, kwargs)
        args, kwargs = self._placed(args, kwargs)
        return run.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.jit``'s ``trace`` of the planned program; its ``jaxpr`` is the rewritten one."""
        key = self._key(args, kwargs)
        run = self._object_for(key, args, kwargs)
        args, kwargs = self._placed(args, kwargs)
        return run.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the result, as ``jax.jit`` gives them."""
        return self._plain.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forget every plan and executable."""
        with self._lock:
            self._plain.clear_cache()
            self._fitted.clear()
            self._others.clear()
            self._table = {}
            self._run = self._object(self._table, self._compiler_options)

    def _cache_size(self) -> int:
        return self._run._cache_size() + sum(o._cache_size() for o in self._others.values())

    # ---- from here on: once per signature ----

    def _object(self, table: Mapping[Any, Evaluate | None], options: Options) -> Any:
        """A jit object that runs the signatures in ``table`` and raises ``_Unplanned`` for others."""
        fun = self._fun

        @functools.wraps(fun)
        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = jax.tree.flatten((args, kwargs))
            flat = [x for x in leaves if _compat.is_tracer(x)]
            if leaves and not flat and not _compat.under_trace():
                return fun(*args, **kwargs)  # jax.disable_jit
            key = _signature(leaves, tree)
            if key not in table:
                raise _Unplanned(key)
            evaluate = table[key]
            if evaluate is None:
                return fun(*args, **kwargs)
            return jax.tree.unflatten(self._out_trees[key], evaluate(flat))

        options = dict(options)
        return jax.jit(run, **self._jit_options, **({"compiler_options": options} if options else {}))

    def _key(self, args: Any, kwargs: Any) -> Any:
        try:
            self._probe.trace(*args, **kwargs)
        except _Unplanned as miss:
            return miss.key
        raise AssertionError("unreachable: the probe has no plans")

    def _object_for(self, key: Any, args: Any, kwargs: Any) -> Any:
        self._prepare(key, args, kwargs)
        return self._others.get(key, self._run)

    def _prepare(self, key: Any, args: Any, kwargs: Any, *, baseline: bool = False) -> None:
        with self._lock:
            known = self._fitted.get(key)
            if known is None or (baseline and not known.report.baseline.exact):
                self._adopt(key, self._fit(key, args, kwargs, baseline))

    _out_trees: dict[Any, Any]

    def _fit(self, key: Any, args: Any, kwargs: Any, baseline: bool) -> Fitted:
        device, sharding, shards = self._place(args, kwargs)
        traced = self._plain.trace(*args, **kwargs)
        args, kwargs = self._placed(args, kwargs)
        if not hasattr(self, "_out_trees"):
            self._out_trees = {}
        self._out_trees[key] = jax.tree.structure(traced.out_info)
        budget = _read_budget(self._budget, device.capacity)
        options = dict(self._compiler_options)
        if self._target is not None:
            options = {**compiler_options(self._target), **options}
        job = Job(
            name=getattr(self._fun, "__name__", type(self._fun).__name__),
            jaxpr=traced.jaxpr,
            donated=tuple(bool(a.donated) for a in jax.tree.leaves(traced.args_info)),
            args=args,
            kwargs=kwargs,
            budget=budget,
            device=device,
            shards=shards,
            make=lambda evaluate, options: self._object({key: evaluate}, options),
            options=options,
            keep_unused=bool(self._jit_options.get("keep_unused", False)),
        )
        return pipeline.fit(job, baseline=baseline)

    def _adopt(self, key: Any, fitted: Fitted) -> None:
        """Make the verified executable the one that calls run."""
        self._fitted[key] = fitted
        if not self._table or set(self._table) == {key}:
            self._table = {key: fitted.evaluate}
            self._run = fitted.jitted
        else:
            self._others[key] = fitted.jitted

    def _place(self, args: Any, kwargs: Any) -> tuple[DeviceProfile, Any, int]:
        """Profile of the device that the program is for, and over how many devices it is spread."""
        if self._target is not None:
            device = resolve(self._target)
            return profile(self._target), SingleDeviceSharding(device), 1
        shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves((args, kwargs))]
        sets = [s.device_set for s in shardings if s is not None and hasattr(s, "device_set")]
        devices = max(sets, key=len) if sets else {jax.devices(self._jit_options.get("backend"))[0]}
        device = next(iter(devices))
        return profile_for_kind(device.device_kind, device.platform), None, len(devices)

    def _placed(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments as the target's compiler wants them; untouched without ``target``."""
        if self._target is None:
            return args, kwargs
        sharding = SingleDeviceSharding(resolve(self._target))

        def abstract(x: Any) -> Any:
            if hasattr(x, "shape") and hasattr(x, "dtype"):
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=getattr(x, "weak_type", False))
            return x

        return jax.tree.map(abstract, (args, kwargs))


def _signature(leaves: list[Any], tree: Any) -> Any:
    """What decides the traced program: structure, avals, static values, configuration."""
    parts = tuple(jax.typeof(x) if _compat.is_tracer(x) else ("static", x) for x in leaves)
    return (tree, parts, _compat.trace_context())


__all__ = ["Planned", "TargetError", "jit"]
