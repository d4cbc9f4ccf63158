"""The stand-in by which JAX knows a planned function; jits that ask the same of one function share it.

JAX keeps dispatch entries by function and options, for all jit objects and while the function lives. So repeated
``jax.jit(f)(x)`` compiles once, and repeated ``jaxtensile.jit(f)(x)`` plans once.

Invariant: a planned function never shares entries with ``jax.jit`` of it, nor with a jit of it that is asked something
else. Nothing here keeps a function alive.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from jaxtensile.devices.measured import measured_here
from jaxtensile.settings.options import Asked, Unsaid, config_file
from jaxtensile.switches import switched_off

_StandIn = Callable[..., Any]
_KNOWN: WeakKeyDictionary[Any, dict[Hashable, tuple[_StandIn, WeakSet[Any]]]] = WeakKeyDictionary()
"""By function and question: the stand-in, and the callables that may run for it."""
_LOCK = threading.Lock()


def stand_in(fun: Callable[..., Any], asked: Asked, run: Callable[..., Any]) -> _StandIn:
    """The function that JAX sees instead of ``fun`` for ``asked``; called, it runs ``run`` or an equal one.

    ``run`` must live as long as its callers. Methods and callable objects are not shared: they may be equal yet differ.
    """
    key = _question(asked)
    if key is None or type(fun) is not FunctionType:
        return _for(fun, {run})
    with _LOCK:
        known = _KNOWN.setdefault(fun, {})
        if key not in known:
            running: WeakSet[Any] = WeakSet()
            known[key] = _for(fun, running), running
        made, running = known[key]
        running.add(run)
        return made


def _question(asked: Asked) -> Hashable | None:
    """All asked in code and config, our switches, and which rates are known; None if that cannot be compared."""
    if asked.job is not None or not (asked.config is None or isinstance(asked.config, str | os.PathLike)):
        return None
    values = (getattr(asked, f.name) for f in dataclasses.fields(asked) if f.name != "options")
    said = ((isinstance(value, Unsaid), repr(value)) for value in values)  # a default is printed as its value
    file = config_file(asked.config)
    try:
        text = None if file is None else file.read_bytes()
        key = *said, file, text, *sorted(asked.options.items()), switched_off(), measured_here()
        hash(key)
    except (OSError, TypeError):
        return None
    return key


def _for(fun: Callable[..., Any], running: set[Any] | WeakSet[Any]) -> _StandIn:
    """A function that looks like ``fun`` to JAX without holding it, and runs one of ``running``."""

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        with _LOCK:  # another thread may add one
            run = next(iter(running))
        return run(*args, **kwargs)

    functools.update_wrapper(stand_in, fun)
    del vars(stand_in)["__wrapped__"]
    with suppress(TypeError, ValueError):  # builtins have none
        vars(stand_in)["__signature__"] = inspect.signature(fun)
    return stand_in


__all__ = ["stand_in"]
