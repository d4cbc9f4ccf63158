"""The names of a function in a config, and config names that match no function.

An unmatched name gives one ``ConfigWarning`` at its line of the config: when a function with nearly that name and no
own table is planned, else at exit. Names in scripts that were not loaded are skipped.

Invariant: nothing here keeps a function alive.
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Final
from weakref import WeakKeyDictionary

from jaxtensile.errors import ConfigError, ConfigWarning
from jaxtensile.runtime.config.config import Config
from jaxtensile.runtime.config.functions import Identity, is_pattern, nearest_first
from jaxtensile.runtime.config.tables import dotted

NEAR: Final = 0.8
"""Likeness of names, from 0 to 1 (``difflib``), from which another's table may mean a function: a letter or two of ten.
A guess."""
_DEPTH: Final = 100
"""Most nested wrappers followed: against wrappers of themselves."""

_lock = threading.Lock()
_stand_ins: WeakKeyDictionary[Any, Identity] = WeakKeyDictionary()


# ---- names of a function --------------------------------------------------------------------------


def identity_of(fun: Any) -> Identity:
    """The names of ``fun`` and of what it wraps (``functools.partial``, ``functools.wraps``, methods)."""
    with _lock:
        known = _stand_ins.get(fun) if inspect.isfunction(fun) else None
    if known is not None:
        return known
    layers = list(_layers(fun))
    names = dict.fromkeys(name for layer in layers for name in _names(layer))
    code = next((c for layer in reversed(layers) if (c := getattr(layer, "__code__", None)) is not None), None)
    file = getattr(code, "co_filename", "")
    return Identity(tuple(names), os.path.abspath(file) if file else "")


def stand_in(made: Callable[..., Any], fun: Any) -> None:
    """Give ``made``, a function of our own, the names of ``fun``."""
    found = identity_of(fun)
    with _lock:
        _stand_ins[made] = found


def _layers(fun: Any) -> Iterator[Any]:
    """``fun`` and what it wraps, from the outside in; last a callable object's class and ``__call__``."""
    for _ in range(_DEPTH):
        yield fun
        if isinstance(fun, partial):
            fun = fun.func
        elif inspect.ismethod(fun):
            fun = fun.__func__
        elif callable(wrapped := getattr(fun, "__wrapped__", None)):
            fun = wrapped
        else:
            break
    if not hasattr(fun, "__name__"):
        yield type(fun)
        yield type(fun).__call__


def _names(layer: Any) -> Iterator[str]:
    """``step``, ``Trainer.step``, ``train.Trainer.step``, ...: its own name first."""
    name, long = getattr(layer, "__name__", None), getattr(layer, "__qualname__", None)
    if not isinstance(name, str) or name == "__call__":
        return
    yield name
    module = getattr(layer, "__module__", None)
    parts = [part for part in (module, long) if isinstance(part, str)]
    parts = ".".join(parts).replace("<locals>.", "").split(".")
    yield from (".".join(parts[k:]) for k in reversed(range(len(parts))))


# ---- names that nothing has -----------------------------------------------------------------------


@dataclass
class _File:
    """One config's ``[functions]``. ``places``: of each name. ``done``: names matched or reported. ``planned``:
    functions, by their shortest names."""

    places: dict[str, str] = field(default_factory=dict[str, str])
    done: set[str] = field(default_factory=set[str])
    planned: dict[str, None] = field(default_factory=dict[str, None])


_files: dict[Hashable, _File] = {}
"""By the file's name; for tables from no file also by the names in them."""


def planned(config: Config, who: Identity) -> None:
    """Register a function planned by this config; warn if another's table seems meant for it."""
    if not config.functions or not who.names:
        return
    with _lock:
        written = any(place != config.file for place in config.places.values())
        known = _files.setdefault(config.file if written else (config.file, *config.functions), _File())
        known.places = {name: _place(config, name) for name in config.functions}  # a file may have been mended
        mine = nearest_first(config.functions, who)
        known.done.update(mine)
        known.planned[who.names[0]] = None
        near: list[str] = []
        if all(is_pattern(name) for name in mine):
            left = [name for name in known.places if name not in known.done and not is_pattern(name)]
            open_ = {name.rpartition(":")[2]: name for name in left if not _is_elsewhere(name, known.places[name])}
            near = [open_[n] for own in who.names for n in get_close_matches(own, open_, 1, NEAR)][:1]
            known.done.update(near)
        places = dict(known.places)
    for name in near:
        _warn(places[name], f"[{dotted(('functions', name))}] names no function so far: did you mean {who.names[0]!r}?")


def _place(config: Config, name: str) -> str:
    keys = (("functions", name, key) for key in config.functions[name].said())
    return next((config.places[key] for key in keys if key in config.places), config.file)


def tell() -> None:
    """Warn once of each name that no planned function has; called at exit too."""
    with _lock:
        told = [
            (place, name, tuple(known.planned))
            for known in _files.values()
            for name, place in known.places.items()
            if name not in known.done and not _is_elsewhere(name, place)
        ]
        for known in _files.values():
            known.done.update(known.places)
    for place, name, functions in told:
        close = get_close_matches(name.rpartition(":")[2], functions, 1, 0.0)
        nearest = f"the nearest of {len(functions)} is {close[0]!r}" if close else "there was none"
        _warn(place, f"[{dotted(('functions', name))}] names no function that was planned: {nearest}")


def _is_elsewhere(name: str, place: str) -> bool:
    """Whether a table is for a script that this process has not loaded: several may share a config."""
    file = name.rpartition(":")[0]
    if not file:
        return False
    loaded = (getattr(module, "__file__", None) for module in tuple(sys.modules.values()))
    if any(PurePath(os.path.abspath(path)).match(file) for path in loaded if isinstance(path, str)):
        return False
    folders = Path(place).parent, Path()
    try:
        return any(folder.joinpath(file).is_file() or next(folder.glob(file), None) for folder in folders)
    except (OSError, ValueError, NotImplementedError):  # an absolute pattern
        return False


def _warn(place: str, text: str) -> None:
    file, _, line = place.rpartition(":")
    here = (file, int(line)) if line.isdigit() else (place, 0)
    try:
        warnings.warn_explicit(text, ConfigWarning, *here)
    except ConfigWarning:  # where warnings are to be errors, it is one of the config's
        raise ConfigError(f"{place}: {text}") from None


atexit.register(tell)

__all__ = ["identity_of", "planned", "stand_in", "tell"]
