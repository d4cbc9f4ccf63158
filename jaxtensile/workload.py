"""A program with its abstract arguments: what estimates, plans and benchmarks are made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Workload:
    """``fun(*args)`` as a job would run it.

    ``args``: pytrees of ``jax.ShapeDtypeStruct`` (or arrays); ``jit_options``: keyword
    arguments of ``jax.jit`` (``donate_argnums``, …); ``name``: for tables.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    jit_options: Mapping[str, Any] = field(default_factory=lambda: {})
    name: str = ""


class Transformed(ABC):
    """A function that this package made of a user's. It is told by its type: attributes are copied by wrappers."""

    __slots__ = ()

    @abstractmethod
    def as_written(self, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """A ``jax.jit`` result of the user's function, and what it is to be called with for a call with ``args``."""


def name_of(fun: Any) -> str:
    """What a function is called in reports and errors."""
    return getattr(fun, "__name__", type(fun).__name__)
