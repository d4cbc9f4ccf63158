"""The first thing that every Python under ``jaxtensile exec`` runs: after the first import of JAX, ``install``.

The folder leaves the path again, and the user's own ``sitecustomize`` runs as ever. A Python that never imports JAX
notices nothing. ``python -I``, ``-E`` and ``-S`` read no path or run no such file: there nothing is planned.

Invariant: nothing here raises, and nothing but the standard library is imported before JAX is.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
"""Where the package is that this file belongs to."""
_JAX = "jax"


class _Jax:
    """A finder for ``jax`` alone: as ever, with ``install`` behind it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _JAX:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Then(spec.loader)  # pyright: ignore[reportAttributeAccessIssue]
                return spec
        return None


class _Then:
    """The loader of ``jax``, and ``install`` once it is there."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _install()


def _install() -> None:
    sys.path.append(_ROOT)  # for an interpreter that has no jaxtensile of its own
    try:
        from jaxtensile.api.install import begin_from_environment

        begin_from_environment()
    except Exception as error:
        print(f"jaxtensile: nothing is planned, {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        if _ROOT in sys.path:
            sys.path.reverse()
            sys.path.remove(_ROOT)
            sys.path.reverse()


def _begin() -> None:
    sys.path[:] = [path for path in sys.path if not path or os.path.abspath(path) != _HERE]
    sys.meta_path.insert(0, _Jax())
    users = PathFinder.find_spec(__name__, sys.path)
    if users is not None and users.loader is not None:
        module = sys.modules[__name__] = _made(users)
        users.loader.exec_module(module)


def _made(spec: ModuleSpec) -> ModuleType:
    from importlib.util import module_from_spec

    return module_from_spec(spec)


if __name__ == "sitecustomize":
    _begin()
