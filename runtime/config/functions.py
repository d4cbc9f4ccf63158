"""The tables of ``[functions]`` that hold for a function.

A table is named after a function, with or without class and module (``step``, ``Trainer.step``,
``project.train.Trainer.step``). Names may have wildcards (``*``, ``?``, ``[abc]``) and a file in front
(``train.py:step``, ``project/*.py:step``; the last parts of the path suffice).

Each key comes from the nearest table that has it: without wildcards first, then with a file, then the longest name,
then the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from jaxtensile.errors import ConfigError
from jaxtensile.runtime.config.tables import Amount, Tables, dotted
from jaxtensile.units import TIB, Bytes, format_bytes

KEYS = ("budget", "host_budget", "objective", "undo", "chunk", "offload_state")


class FunctionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table; UNSET: key not given. Sizes stay as written, since a percentage needs its device."""

    budget: Amount | UnsetType = UNSET
    host_budget: Amount | UnsetType = UNSET
    objective: Literal["flops", "time"] | UnsetType = UNSET
    undo: bool | UnsetType = UNSET
    chunk: bool | Literal["auto"] | UnsetType = UNSET
    offload_state: bool | UnsetType = UNSET

    def said(self) -> dict[str, Any]:
        """The keys that are given."""
        return {key: value for key in KEYS if (value := getattr(self, key)) is not UNSET}


class ExecConfig(FunctionConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[exec]``: what all programs under ``jaxtensile exec`` are planned for, beside the tables of their functions."""

    best_effort: bool | UnsetType = UNSET

    def said(self) -> dict[str, Any]:
        """The keys that are given."""
        given = {} if self.best_effort is UNSET else {"best_effort": self.best_effort}
        return {**super().said(), **given}


class Identity(Struct, frozen=True):
    """All ``names`` of a function, and the ``file`` that defines it."""

    names: tuple[str, ...]
    file: str = ""


def nearest_first(functions: Iterable[str], who: Identity) -> list[str]:
    """Names of the tables that hold for a function, nearest first."""
    return sorted((name for name in functions if _holds(name, who)), key=_nearness, reverse=True)


def said_of(functions: Mapping[str, FunctionConfig], who: Identity) -> dict[str, tuple[Any, str]]:
    """The value and its table, by key, for a function."""
    found: dict[str, tuple[Any, str]] = {}
    for name in reversed(nearest_first(functions, who)):
        found |= {key: (value, name) for key, value in functions[name].said().items()}
    return found


def is_pattern(name: str) -> bool:
    """Whether a table's name has wildcards."""
    return any(letter in name for letter in "*?[")


def _nearness(name: str) -> tuple[bool, bool, int]:
    return not is_pattern(name), ":" in name, len(name)


def _holds(table: str, who: Identity) -> bool:
    file, _, name = table.rpartition(":")
    if file and not (who.file and PurePosixPath(who.file).match(file)):
        return False
    return any(fnmatchcase(known, name) for known in who.names)


def function_tables(
    within: Tables, tables: dict[str, Any], capacity: Bytes | None, most: Bytes | None, host: Bytes | None
) -> dict[str, FunctionConfig]:
    """``[functions]`` as written. Raises ``ConfigError``.

    ``capacity``: of every device. ``most``: capacity less reserve, of the largest. ``host``: memory that may be pinned.
    None: not in the file.
    """
    found: dict[str, FunctionConfig] = {}
    for name in tables:
        path = ("functions", name)
        if not all(part.strip() for part in name.rsplit(":", 1)):
            raise ConfigError(
                f'{within.place(path)}: [{dotted(path)}] names no function: write [functions."train_step"], '
                '[functions."*.train_*"] or [functions."train.py:step"]'
            )
        raw = within.struct(FunctionConfig, within.table(tables, name, ("functions",)), path)
        _check_sizes(within, raw, path, (capacity, most), host)
        found[name] = raw
    return found


def exec_table(
    within: Tables, table: dict[str, Any], capacity: Bytes | None, most: Bytes | None, host: Bytes | None
) -> ExecConfig:
    """``[exec]`` as written; the sizes as for ``function_tables``. Raises ``ConfigError``."""
    raw = within.struct(ExecConfig, table, ("exec",))
    _check_sizes(within, raw, ("exec",), (capacity, most), host)
    return raw


def _check_sizes(
    within: Tables,
    raw: FunctionConfig,
    path: tuple[str, ...],
    device: tuple[Bytes | None, Bytes | None],
    host: Bytes | None,
) -> None:
    """Raise ``ConfigError`` for sizes that cannot be. ``device``: its capacity, and that less the reserve."""
    for key, whole, bound, what in (
        ("budget", *device, "capacity less reserve"),
        ("host_budget", host, host, "host of [device]"),
    ):
        value = getattr(raw, key)
        # Where the whole is not known yet, a percentage is read for the sake of its errors.
        size = within.bytes(value, (*path, key), whole if whole is not None else TIB)
        absolute = whole is not None or not (isinstance(value, str) and "%" in value)
        if size is not None and absolute and bound is not None and size > bound:
            raise within.error((*path, key), value, f"at most {format_bytes(bound)}, {what}")
        if key == "budget" and size == 0:
            raise within.error((*path, key), value, "a size above 0")


__all__ = [
    "KEYS",
    "ExecConfig",
    "FunctionConfig",
    "Identity",
    "exec_table",
    "function_tables",
    "is_pattern",
    "nearest_first",
    "said_of",
]
