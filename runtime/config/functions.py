"""Which tables of ``[functions]`` hold for a function, and which one of them for each key?

A table's name is that of a function, with its class and module or without (``step``, ``Trainer.step``,
``project.train.Trainer.step``). It may have the wildcards ``*``, ``?`` and ``[abc]``, and a file in front of it
(``train.py:step``, ``project/*.py:step``; the last parts of the path are enough).

Where several hold, each key is taken from the nearest that has it. A name without wildcards is nearer than one with;
then one with a file than one without; then the longer; of equal ones the first.
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
    """One table; sizes as they were written, since a percentage waits for its device. UNSET: it says nothing."""

    budget: Amount | UnsetType = UNSET
    host_budget: Amount | UnsetType = UNSET
    objective: Literal["flops", "time"] | UnsetType = UNSET
    undo: bool | UnsetType = UNSET
    chunk: bool | Literal["auto"] | UnsetType = UNSET
    offload_state: bool | UnsetType = UNSET

    def said(self) -> dict[str, Any]:
        """The keys that it has."""
        return {key: value for key in KEYS if (value := getattr(self, key)) is not UNSET}


class Identity(Struct, frozen=True):
    """What a function may be called: all of its ``names``, and the ``file`` that it is written in."""

    names: tuple[str, ...]
    file: str = ""


def nearest_first(functions: Iterable[str], who: Identity) -> list[str]:
    """The tables that hold for a function, by their names."""
    return sorted((name for name in functions if _holds(name, who)), key=_nearness, reverse=True)


def said_of(functions: Mapping[str, FunctionConfig], who: Identity) -> dict[str, tuple[Any, str]]:
    """What holds for a function: by key the value, and the table that it is from."""
    found: dict[str, tuple[Any, str]] = {}
    for name in reversed(nearest_first(functions, who)):
        found |= {key: (value, name) for key, value in functions[name].said().items()}
    return found


def is_pattern(name: str) -> bool:
    """Whether a table's name may hold for functions of several names."""
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
    """``[functions]`` as it was written, or ``ConfigError``.

    ``capacity``: of every device; ``most``: that less the reserve, of the largest; ``host``: memory that may be pinned.
    None: the file does not say.
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
        for key, whole, bound, what in (
            ("budget", capacity, most, "capacity less reserve"),
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
        found[name] = raw
    return found


__all__ = ["KEYS", "FunctionConfig", "Identity", "function_tables", "is_pattern", "nearest_first", "said_of"]
