"""Values from the tables of a TOML file, and their lines for errors.

Invariant: anything invalid raises ``ConfigError`` with the file, the line if found, the key, the value and what is
allowed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, Final, TypeVar, cast

from msgspec import Struct, UnsetType, ValidationError, convert

from jaxtensile.errors import ConfigError
from jaxtensile.runtime.placement.asks import Rules
from jaxtensile.runtime.protocol.messages import MOST_BYTES
from jaxtensile.units import Bytes, Seconds, format_bytes, format_seconds, parse_bytes, parse_seconds

T = TypeVar("T")
S = TypeVar("S", bound=Struct)
Amount = int | float | str
Path = tuple[str, ...]
"""Keys that lead to a value, from the top."""

LONGEST: Final[Seconds] = 30 * 86400.0
"""Seconds, the longest time in a config: a month, above any sensible hold or deadline. A guess."""
_SIZE: Final = "a size: bytes, '12GiB' or '80%'"
_TIME: Final = "a time: seconds, '500ms', '10s' or '5m'"
_SWITCH: Final = "true or false"
_ALLOWED: Final = {
    "policy": "slowdown, fair, priority or fcfs",
    "on_overdue": "wait or terminate",
    "objective": "flops or time",
    "command": "a list of texts",
    **dict.fromkeys(("socket", "address", "kind"), "a text"),
    **dict.fromkeys(("max_clients", "priority", "hosts", "devices", "retries"), "a whole number"),
    **dict.fromkeys(("capacity", "reserve", "host", "least", "want", "budget", "host_budget"), _SIZE),
    **dict.fromkeys(("lease_ttl", "min_hold", "revoke_deadline", *Rules.__struct_fields__), _TIME),
    "chunk": "true, false or auto",
    **dict.fromkeys(("undo", "offload_state", "best_effort"), _SWITCH),
}
_DEEP: Final = 8
"""Keys above a key that an error names; no table of a config is as deep."""
_WORD: Final = r"""(?:"[^"]*"|'[^']*'|[\w-]+)"""
_KEY: Final = rf"{_WORD}(?:\s*\.\s*{_WORD})*"


class Tables:
    """A file's name and lines; no lines: tables that were never in a file."""

    def __init__(self, file: str, text: str) -> None:
        self._file, self._lines = file, text.splitlines()
        self._headers: dict[Path, int] | None = None
        self._keys: dict[Path, int] = {}

    # Tables.

    def table(self, tables: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
        """The table ``key`` of a table; empty if missing."""
        found = tables.get(key, {})
        if not isinstance(found, dict):
            raise self.error((*path, key), found, "a table")
        return found  # pyright: ignore[reportUnknownVariableType]

    def printable(self, tables: dict[str, Any]) -> None:
        """Raise ``ConfigError`` for control characters in keys and texts, which go into logs and terminals. Commands
        may have them, but for NUL."""
        left: list[tuple[Path, object]] = [((), tables)]
        while left:
            path, value = left.pop()
            if isinstance(value, dict):
                for key, inside in cast("dict[str, object]", value).items():
                    if not key.isprintable():
                        raise self.unnamed((*path, key), "letters that can be printed")
                    left.append(((*path[-_DEEP:], key), inside))
            elif isinstance(value, list):
                left += ((path, inside) for inside in cast("list[object]", value))
            elif isinstance(value, str):
                command = path[:1] == ("jobs",) and path[-1:] == ("command",)
                if "\0" in value or not (command or value.isprintable()):
                    raise self.error(path, value, "a text without NUL" if command else "a text that can be printed")

    def unnamed(self, path: Path, allowed: str) -> ConfigError:
        """The error for the wrong name of a table or key."""
        return ConfigError(
            f"{self.place(path)}: {path[-1][:40]!r} in [{dotted(path[:-1])}]: a name must have {allowed}"
        )

    def known(self, table: dict[str, Any], allowed: tuple[str, ...], path: Path) -> None:
        """Raise ``ConfigError`` for an unknown key."""
        for key in table:
            if key not in allowed:
                hint = did_you_mean(key, allowed, f"there are {', '.join(allowed)}")
                where = f" in [{dotted(path)}]" if path else ""
                raise ConfigError(f"{self.place((*path, key))}: unknown key {key!r}{where}: {hint}")

    def struct(self, kind: type[S], table: dict[str, Any], path: Path) -> S:
        """A table as a ``msgspec.Struct`` with the allowed keys as fields."""
        self.known(table, kind.__struct_fields__, path)
        try:
            return convert(table, kind)
        except ValidationError as wrong:
            reason, _, place = str(wrong).partition(" - at ")
            key = re.match(r"`\$\.(\w+)", place)
            at = (*path, key[1]) if key else path
            said = table.get(key[1]) if key else table
            allowed = _ALLOWED.get(key[1] if key else "", "a number" if "float" in reason else reason)
            raise self.error(at, said, allowed) from None

    # Values.

    def bytes(self, value: Amount | UnsetType, path: Path, capacity: Bytes | None) -> Bytes | None:
        """A size; None if not given. ``capacity``: 100 %, None if unknown."""
        if isinstance(value, UnsetType):
            return None
        size = self._parsed(lambda: parse_bytes(value, capacity=capacity), path)
        if size > MOST_BYTES:
            raise self.error(path, value, f"a size of at most {format_bytes(MOST_BYTES)}")
        return size

    def seconds(self, value: Amount, path: Path, least: Seconds) -> Seconds:
        """A time of at least ``least``."""
        seconds = self._parsed(lambda: parse_seconds(value), path)
        if not least <= seconds <= LONGEST:
            allowed = f"a time from {format_seconds(least)} to {format_seconds(LONGEST)}"
            raise self.error(path, value, allowed)
        return seconds

    def _parsed(self, parser: Callable[[], T], path: Path) -> T:
        try:
            return parser()
        except (ValueError, OverflowError) as wrong:
            raise ConfigError(f"{self.place(path)}: {dotted(path)}: {wrong}") from None

    # Places.

    def error(self, path: Path, value: object, allowed: str) -> ConfigError:
        """The error for a wrong ``value``; ``allowed``: valid ones."""
        return ConfigError(f"{self.place(path)}: {dotted(path)} = {value!r}: must be {allowed}")

    def place(self, path: Path) -> str:
        """The file, with the line of a key if it is written in a usual way."""
        if self._headers is None:
            self._headers, self._keys = _numbered(self._lines)
        # A table may be written in one line, behind its own key; that of its header is not where its keys are.
        above = (self._keys.get(path[:k]) for k in range(len(path), 0, -1))
        found = self._headers.get(path) or next(filter(None, above), None)
        return self._file if found is None else f"{self._file}:{found}"


def dotted(path: Path) -> str:
    """Keys as in TOML: ``device."cuda:0".reserve``."""
    return ".".join(part if re.fullmatch(r"[\w-]+", part) else f'"{part}"' for part in path)


def did_you_mean(given: str, known: tuple[str, ...], otherwise: str) -> str:
    """A question with the nearest known name, or ``otherwise``."""
    close = get_close_matches(given, known, 1)
    return f"did you mean {close[0]!r}?" if close else otherwise


def _numbered(lines: Sequence[str]) -> tuple[dict[Path, int], dict[Path, int]]:
    """The first line of each table's header, and of each key."""
    headers: dict[Path, int] = {}
    keys: dict[Path, int] = {}
    here: Path = ()
    for number, line in enumerate(lines, 1):
        if header := re.match(rf"\s*\[\s*({_KEY})\s*\]", line):
            here = _words(header[1])
            headers.setdefault(here, number)
        elif key := re.match(rf"\s*({_KEY})\s*=", line):
            keys.setdefault((*here, *_words(key[1])), number)
    return headers, keys


def _words(key: str) -> Path:
    return tuple(word.strip("\"'") for word in re.findall(_WORD, key))
