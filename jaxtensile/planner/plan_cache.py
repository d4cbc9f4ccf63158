"""Plans of earlier processes, by program, budget, device and versions.

One file per plan, in ``plans`` of the user's cache folder (``$XDG_CACHE_HOME/jaxtensile``, else
``~/.cache/jaxtensile``) or in the folder ``$JAXTENSILE_PLAN_CACHE``; ``off`` disables it.

Invariant: no file stops a program or is trusted. A damaged or foreign file is skipped with one warning. A found plan is
checked, compiled and measured like a new one, and made anew if it does not fit.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Protocol

import msgspec

from jaxtensile._compat import JAX_VERSION, shardings
from jaxtensile.devices.cachefiles import cache_folder, write_whole
from jaxtensile.devices.measured import jaxlib_version
from jaxtensile.ir.ir import Graph
from jaxtensile.search.recipe import Recipe, fingerprint
from jaxtensile.search.request import Request
from jaxtensile.switches import switched_off

VARIABLE: Final = "JAXTENSILE_PLAN_CACHE"
FORMAT: Final = 1
"""Version of the stored format; other versions are not found. Goes up with every change."""
MOST: Final = 1000
"""Plans kept; beyond that, the least recently used are deleted. A guess."""
LEFT: Final = 0.9
"""Share of ``MOST`` that stays after a deletion, so that not every new plan causes one. A guess."""
_OFF: Final = frozenset({"0", "off", "none", "false", "no"})
FLAGS: Final = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Environment variables that change what the compiler makes of a plan."""
_DIGEST: Final = 32
"""Bytes of the SHA-256 in front of a file's content."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One plan: its key, ``choice`` of the way to compile that fitted, and its recipe."""

    key: str
    name: str
    choice: int
    recipe: Recipe


class Plans(Protocol):
    """A store of plans."""

    @property
    def folder(self) -> Path: ...
    def find(self, key: str) -> Entry | None: ...
    def keep(self, entry: Entry) -> None: ...
    def pass_over(self, key: str, problem: str) -> None: ...


@dataclass(frozen=True)
class PlanCache:
    """The plans in one folder."""

    folder: Path

    def find(self, key: str) -> Entry | None:
        """The plan kept under ``key``; None if there is none, or, with a warning, if its file is unusable."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            return self.pass_over(key, str(error))
        digest, payload = content[:_DIGEST], content[_DIGEST:]
        if hashlib.sha256(payload).digest() != digest:
            return self.pass_over(key, "it is damaged")
        try:
            entry = msgspec.msgpack.decode(payload, type=Entry)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return self.pass_over(key, f"it holds no plan: {error}")
        if entry.key != key:
            return self.pass_over(key, "it is about another program")
        _used(path)
        return entry

    def keep(self, entry: Entry) -> None:
        """Write a plan for later processes. If the folder cannot be written, warn; they plan again."""
        payload = msgspec.msgpack.encode(entry)
        try:
            write_whole(self._path(entry.key), hashlib.sha256(payload).digest() + payload)
            self._forget_oldest()
        except OSError as error:
            _say_once(f"no plan is kept in {self.folder}: {error}; ${VARIABLE}=off keeps none")

    def pass_over(self, key: str, problem: str) -> None:
        """Warn that the plan kept under ``key`` is unusable."""
        _say_once(f"{self._path(key)} is passed over, the plan is made anew: {problem}")

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.plan"

    def _forget_oldest(self) -> None:
        files = [entry for entry in os.scandir(self.folder) if entry.name.endswith(".plan")]
        if len(files) > MOST:
            for _, path in sorted((entry.stat().st_mtime, entry.path) for entry in files)[
                : len(files) - int(LEFT * MOST)
            ]:
                Path(path).unlink(missing_ok=True)


def plan_cache() -> PlanCache | None:
    """The plan cache; None if it is disabled or has no folder."""
    given = os.environ.get(VARIABLE, "").strip()
    if given.lower() in _OFF:
        return None
    if given:
        return PlanCache(Path(given).expanduser().absolute())
    folder = cache_folder()
    return None if folder is None else PlanCache(folder / "plans")


def key_of(request: Request, graph: Graph, aim: int | None = None) -> str:
    """Hash of everything a plan depends on: request, program, device and versions. ``aim``: as in ``pipeline.fit``, for
    one of several plans."""
    where = shardings((request.args, dict(request.kwargs))) if request.shards > 1 else []
    question = (
        FORMAT,
        package(),
        JAX_VERSION,
        jaxlib_version(),
        [os.environ.get(name, "") for name in FLAGS],
        fingerprint(graph),
        request.budget,
        aim,
        request.host_budget,
        request.state,
        repr(request.device),
        request.shards,
        where,
        sorted((name, repr(value)) for name, value in request.options.items()),
        request.solver,
        request.undo,
        request.chunk,
        request.keep_unused,
        sorted(switched_off()),
    )
    return hashlib.sha256(msgspec.msgpack.encode(question, order="deterministic")).hexdigest()


@cache
def package() -> str:
    """Hash of the planner's source: another planner makes other plans."""
    found = hashlib.sha256()
    home = Path(__file__).parent.parent
    for path in sorted({*home.rglob("*.py"), *(home / "passes").rglob("*.py")}):  # passes may be a link
        found.update(path.relative_to(home).as_posix().encode() + path.read_bytes())
    return found.hexdigest()


def _used(path: Path) -> None:
    with suppress(OSError):  # read-only caches are shared on purpose
        os.utime(path)


@cache
def _say_once(problem: str) -> None:
    warnings.warn(problem, RuntimeWarning, stacklevel=2)
