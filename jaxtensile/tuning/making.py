"""A function that makes workloads, for any size of its batch and any values of its other parameters.

Invariant: an error of the user's function is a ``WorkloadError``: one sentence with the place. Nothing here imports JAX
before the user's file has, which may set its variables first.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxtensile.errors import JaxtensileError
from jaxtensile.program.workload import Workload, name_of

_BATCH = ("batch", "batch_size")
"""Names of a batch-size parameter."""
_MACHINERY = tuple(
    f"{Path(found.origin).parent}/" for found in map(find_spec, ("jaxtensile", "jax")) if found and found.origin
)
"""Folders of code around the user's: no line there explains an error."""


class WorkloadError(JaxtensileError, ValueError):
    """``FILE:FUNCTION`` does not lead to a ``jaxtensile.Workload``."""


@dataclass(frozen=True, slots=True)
class Maker:
    """A function of the user's. ``file``: where it is, empty if that is not to be told. ``batch``: the name of its
    batch-size parameter, empty without one. ``given``: values of its other parameters."""

    file: str
    function: str
    make: Callable[..., object]
    batch: str
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __call__(self, batch: int | None = None) -> Workload:
        """The workload, at its own batch size or at another."""
        given = {**self.given} if batch is None else {**self.given, self.batch: batch}
        call = f"{self.function}({', '.join(f'{name}={value!r}' for name, value in given.items())})"
        call += f" of {self.file}" if self.file else ""
        lacking = [name for name, p in self.parameters.items() if name not in given and _is_needed(p)]
        if lacking:
            raise WorkloadError(
                f"{call} needs {' and '.join(lacking)}: a function that returns a jaxtensile.Workload takes nothing or "
                "a batch=; give defaults to what else it takes"
            )
        try:
            result = self.make(**given)
        except Exception as error:
            raise WorkloadError(f"{call} raised {described(error)}") from error
        if not isinstance(result, Workload):
            raise WorkloadError(
                f"{call} returned {type(result).__name__}, not jaxtensile.Workload: "
                "return jaxtensile.Workload(fun=..., args=(...))"
            )
        if not isinstance(result.args, (tuple, list)):
            raise WorkloadError(
                f"{call} returned a Workload whose args are a "
                f"{type(result.args).__name__}: write args=(x,), one entry per argument of fun"
            )
        return result

    @property
    def own_batch(self) -> int | None:
        """The batch size that the function takes if none is given; None if it has none."""
        default = self.parameters[self.batch].default if self.batch else None
        return default if isinstance(default, int) and not isinstance(default, bool) else None

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The function's parameters; none of a callable that is not Python."""
        return _parameters(self.make)

    def at(self, **given: Any) -> Maker:
        """The same function with these values of its parameters."""
        return replace(self, given={**self.given, **given})


def maker_of(make: Callable[..., object], *, file: str = "", name: str = "") -> Maker:
    """``make`` as a maker: its batch is its parameter ``batch`` or ``batch_size``."""
    known = _parameters(make)
    return Maker(file, name or name_of(make), make, next((n for n in _BATCH if n in known), ""))


def _is_needed(parameter: inspect.Parameter) -> bool:
    starred = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not starred


def _parameters(make: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(make).parameters
    except (TypeError, ValueError):
        return {}


@contextmanager
def telling(workload: Workload) -> Iterator[None]:
    """Turn errors of the workload's own function or options into ``WorkloadError``; others pass.

    An error is the workload's own if JAX alone cannot trace it either.
    """
    try:
        yield
    except JaxtensileError:
        raise
    except Exception as error:
        from jaxtensile.api.jit import jit
        from jaxtensile.xla.target import tracing_for

        try:
            with tracing_for(args=workload.args):
                jit(workload.fun, config={}, **workload.jit_options).trace(*workload.args)
        except Exception as own:
            name = workload.name or name_of(workload.fun)
            raise WorkloadError(f"{name} cannot be traced: {described(own)}") from error
        raise


def described(error: BaseException) -> str:
    """An error of the user's code in one line, with its place."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_MACHINERY)]
    if isinstance(error, SyntaxError) and error.lineno is not None:
        where = f" at {error.filename}:{error.lineno}"
    else:
        where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}{where}"


__all__ = ["Maker", "WorkloadError", "described", "maker_of", "telling"]
