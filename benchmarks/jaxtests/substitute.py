"""Put ``jaxtensile.jit`` in the place of ``jax.jit`` for everybody but JAX and jaxtensile themselves.

Whoever calls ``jax.jit`` or ``jax._src.api.jit`` gets JAX's own where the caller's module belongs to JAX or to
jaxtensile, and ours everywhere else: in test files, and in JAX's helpers that test files run their checks through.
``pjit``, which takes its mesh from another context, stays JAX's.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

import jaxtensile
from benchmarks.jaxtests.run import MODES
from jaxtensile.api import jit as api_of_ours
from jaxtensile.api import substitute as installed_substitute
from jaxtensile.errors import BudgetError
from jaxtensile.ir.plan import MemoryUse
from jaxtensile.passes.recompute.lowerbound import Bound
from jaxtensile.planner import pipeline, trial_compiles
from jaxtensile.search import modelled
from jaxtensile.search.request import Fitted, Request
from jaxtensile.xla.compile import compile_program

_INSIDE = ("jax", "jaxlib", "jaxtensile")
_HELPERS = ("jax._src.test_util", "jax._src.internal_test_util", "jax.test_util", "jax._src.public_test_util")
_SMALLEST = 1
"""Bytes nobody can plan for: the refusal tells what can be reached."""
_REFUSALS = 3


@dataclass
class Counts:
    """How many programs there were, how many of them run as another one, and how many budgets were refused at first."""

    programs: int = 0
    planned: int = 0
    refused: int = 0


COUNTS = Counts()


def install(mode: str) -> None:
    """Ours for everybody outside, in ``mode``; for the rest of this process."""
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is not known: there are {', '.join(MODES)}")
    from jax._src import api

    own = jax.jit
    if mode.startswith("exec"):
        jaxtensile.install(**({"budget": _SMALLEST, "best_effort": True} if mode == "exec-tight" else {}))
        put(own, jax.jit, (api, "jit"))
        installed_substitute.AMPLE = math.inf  # as if no program were small: each is compiled and looked at
    else:
        put(own, jaxtensile.jit, (jax, "jit"), (api, "jit"))
    if mode not in ("one", "exec"):
        api_of_ours.AMPLE = math.inf  # no program has so much room that it is not planned
    pipeline.fit = _counted(_BUDGETS.get(mode, _as_asked)(pipeline.fit))


def put(theirs: Callable[..., Any], ours: Callable[..., Any], *places: tuple[Any, str]) -> None:
    """``ours`` in ``places`` and in JAX's test helpers, for callers outside."""

    @functools.wraps(theirs)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (theirs if _is_inside(sys._getframe(1)) else ours)(*args, **kwargs)

    for place, name in places:
        setattr(place, name, either)
    import jax._src.test_util  # noqa: F401, holds names of its own

    for module in [m for name, m in sys.modules.items() if name.startswith(_HELPERS)]:
        for name, value in list(vars(module).items()):
            if value is theirs:
                setattr(module, name, either)


def _is_inside(frame: Any) -> bool:
    module = frame.f_globals.get("__name__") or ""
    return module.partition(".")[0] in _INSIDE and not module.startswith(_HELPERS)


# ---- the three modes: what a job's budget is ----

Fit = Callable[..., Fitted]


def _as_asked(fit: Fit) -> Fit:
    return fit


def _smallest(fit: Fit) -> Fit:
    def tight(request: Request, *args: Any, **kwargs: Any) -> Fitted:
        found = _reachable(fit, replace(request, budget=_SMALLEST), *args, **kwargs)
        if found.evaluate is not None:
            return found
        try:  # the program as it is was enough: is anything less?
            return fit(replace(request, budget=max(found.report.compiled.device - 1, 1)), *args, **kwargs)
        except BudgetError:
            COUNTS.refused += 1
            return found

    return tight


def _half(fit: Fit) -> Fit:
    def half(request: Request, *args: Any, **kwargs: Any) -> Fitted:
        make = functools.partial(request.make, None)
        memory = compile_program(make, *request.arguments(), request.options).memory
        if memory is None:
            return fit(request, *args, **kwargs)
        budget = max(memory.device - memory.temp // 2, 1)
        return _reachable(fit, replace(request, budget=budget, chunk=True), *args, **kwargs)

    return half


def _forced(fit: Fit) -> Fit:
    """The smallest plan that the model finds is taken, whatever XLA allocates for it."""
    real, nothing = trial_compiles.compile_program, MemoryUse(argument=0, output=0, temp=0, alias=0)
    trial_compiles.compile_program = lambda *args: replace(real(*args), memory=nothing)
    modelled.lower_bound = lambda *_, **__: Bound(0, ())
    modelled.SURELY_OVER = modelled.SURELY_OVER_WITH_LOOPS = 0.0

    def forced(request: Request, *args: Any, **kwargs: Any) -> Fitted:
        return fit(replace(request, budget=_SMALLEST), *args, **kwargs)

    return forced


def _reachable(fit: Fit, request: Request, *args: Any, **kwargs: Any) -> Fitted:
    """``request`` in its budget, or in what it is said to need; what is said first is about right, and may be
    refused."""
    for _ in range(_REFUSALS):
        try:
            return fit(request, *args, **kwargs)
        except BudgetError as error:
            COUNTS.refused += 1
            if not error.needs:
                raise
            request = replace(request, budget=error.needs)
    return fit(request, *args, **kwargs)


def _counted(fit: Fit) -> Fit:
    @functools.wraps(fit)
    def counted(*args: Any, **kwargs: Any) -> Fitted:
        COUNTS.programs += 1
        fitted = fit(*args, **kwargs)
        COUNTS.planned += fitted.evaluate is not None
        return fitted

    return counted


_BUDGETS: dict[str, Callable[[Fit], Fit]] = {
    "tight": _smallest,
    "half": _half,
    "forced": _forced,
}
