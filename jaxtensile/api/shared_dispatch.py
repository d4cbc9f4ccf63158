"""By what does JAX know a planned function? By a stand-in, which jits of one function that ask for the same share.

JAX keeps dispatch entries by function and options, for all jit objects and as long as there is the function, so that
``jax.jit(f)(x)`` again and again is compiled once. ``jaxtensile.jit(f)(x)`` is planned once as well.

Invariant: entries of a planned function are never those of ``jax.jit`` of it, nor of one that is asked something else.
Nothing here keeps a function alive.
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

from jaxtensile.settings.options import Asked, Unsaid, config_file
from jaxtensile.switches import switched_off

_StandIn = Callable[..., Any]
_KNOWN: WeakKeyDictionary[Any, dict[Hashable, tuple[_StandIn, WeakSet[Any]]]] = WeakKeyDictionary()
"""By function and by what is asked: the stand-in, and what may run for it."""
_LOCK = threading.Lock()


def stand_in(fun: Callable[..., Any], asked: Asked, run: Callable[..., Any]) -> _StandIn:
    """What JAX is to know ``fun`` by where ``asked`` is asked of it; called, it is ``run``, or one like it.

    ``run`` is to live as long as whoever calls. Shared are functions alone: methods and callable objects may equal
    each other and be different things.
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
    """All that is asked, in the code and in the config, and our switches; None where that cannot be compared."""
    if asked.job is not None or not (asked.config is None or isinstance(asked.config, str | os.PathLike)):
        return None
    values = (getattr(asked, f.name) for f in dataclasses.fields(asked) if f.name != "options")
    said = ((isinstance(value, Unsaid), repr(value)) for value in values)  # a default is printed as its value
    file = config_file(asked.config)
    try:
        key = *said, file, None if file is None else file.read_bytes(), *sorted(asked.options.items()), switched_off()
        hash(key)
    except (OSError, TypeError):
        return None
    return key


def _for(fun: Callable[..., Any], running: set[Any] | WeakSet[Any]) -> _StandIn:
    """A function that looks like ``fun`` to JAX, does not hold it, and runs as any of ``running``."""

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
