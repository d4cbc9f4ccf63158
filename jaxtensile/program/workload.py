"""A program with its abstract arguments, for estimates, plans and benchmarks."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Workload:
    """``fun(*args)`` as a job would run it.

    ``args``: pytrees of ``jax.ShapeDtypeStruct`` (or arrays). ``jit_options``: keyword arguments of ``jax.jit``
    (``donate_argnums``, …). ``name``: for tables.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    jit_options: Mapping[str, Any] = field(default_factory=lambda: {})
    name: str = ""


class Transformed(ABC):
    """A function this package made of a user's. Recognized by type, as wrappers copy attributes."""

    __slots__ = ()

    @abstractmethod
    def as_written(self, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The user's function as a ``jax.jit`` result, and its arguments for a call with ``args``."""


def name_of(fun: Any) -> str:
    """A function's name in reports and errors."""
    return getattr(fun, "__name__", type(fun).__name__)


@contextmanager
def told_of_modules(fun: Any, *arguments: Any) -> Iterator[None]:
    """Add a note to errors caused by an Equinox module argument, naming the function that takes one."""
    try:
        yield
    except Exception as error:
        if any(map(_is_module, _parts(arguments))):
            name = name_of(fun)
            error.add_note(
                f"{name} takes an Equinox module, not all of which are arrays: jaxtensile.filter_jit({name}) plans it, "
                f"jaxtensile.estimate(jaxtensile.filter_jit({name}), ...) estimates it"
            )
        raise


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _parts(part)
    else:
        yield value


def _is_module(value: Any) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(value, equinox.Module)
