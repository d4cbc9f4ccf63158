"""What does ``jaxtensile.toml`` say?

Invariant: what is returned can be done. Everything else is a ``ConfigError`` with the file, the line where it can be
found, the key, the value, and what is allowed. Nothing here looks at the environment: its callers pass it in.

A device's table is the one of its name (``[device."cuda:0"]``), else that of its kind (``[device.cuda]``), else what
``[device]`` itself says; each key is looked up in that order.
"""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from msgspec import UNSET, Struct, UnsetType, ValidationError, convert, structs

from jaxtensile.errors import ConfigError
from jaxtensile.runtime.events import MAX_CLIENTS, Settings
from jaxtensile.runtime.leases import HOST
from jaxtensile.runtime.ledger import Capacity
from jaxtensile.runtime.policy import Objective
from jaxtensile.units import Bytes, Seconds, format_bytes, parse_bytes, parse_seconds

NAME: Final = "jaxtensile.toml"
VARIABLE: Final = "JAXTENSILE_CONFIG"
LONGEST_SOCKET: Final = 107
"""Bytes of a path that a Unix socket can be bound to: ``sun_path`` less its end."""
EMPTY: Final = 0.2
"""Seconds in which an empty file may get its words: it may just be written."""

T = TypeVar("T")
_Amount = int | float | str


class _Device(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    capacity: _Amount | UnsetType = UNSET
    reserve: _Amount | UnsetType = UNSET
    host: _Amount | UnsetType = UNSET


class _Coordinator(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    socket: str | None = None
    policy: Objective = "slowdown"
    lease_ttl: _Amount = 10.0
    min_hold: _Amount = 30.0
    min_gain: float = 0.05
    revoke_deadline: _Amount = 60.0
    on_overdue: Literal["wait", "terminate"] = "wait"
    max_clients: int = MAX_CLIENTS


class _Job(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    command: tuple[str, ...] = ()
    least: _Amount = 0
    want: _Amount | UnsetType = UNSET
    priority: int = 0
    weight: float = 1.0
    max_overhead: float | UnsetType = UNSET


class DeviceConfig(Struct, frozen=True, kw_only=True):
    """What a table says of a device; None: nothing."""

    capacity: Bytes | None = None
    reserve: Bytes | None = None
    host: Bytes | None = None


class JobConfig(Struct, frozen=True, kw_only=True):
    """One job. ``want`` None: all it can get; ``max_overhead`` None: however slow."""

    command: tuple[str, ...] = ()
    least: Bytes = 0
    want: Bytes | None = None
    priority: int = 0
    weight: float = 1.0
    max_overhead: float | None = None


class Config(Struct, frozen=True, kw_only=True):
    """A whole file, with defaults for what it does not say."""

    file: str = ""
    devices: dict[str, DeviceConfig] = {}
    """By name or kind; ``""`` for what holds for all."""
    settings: Settings = Settings()
    socket: str | None = None
    jobs: dict[str, JobConfig] = {}

    def capacities(self, reported: Mapping[str, Bytes], host: Bytes) -> dict[str, Capacity]:
        """What there is to grant: of each device that reports its bytes, and of the ``host`` memory that may be pinned.

        Raises ``ConfigError`` where a reserve leaves nothing.
        """
        found = {name: self._capacity(name, size) for name, size in reported.items()}
        said = [table.host for table in self.devices.values() if table.host is not None]
        found[HOST] = Capacity(capacity=min(max(said), host) if said else host)
        return found

    def _capacity(self, name: str, reported: Bytes) -> Capacity:
        tables = [self.devices[k] for k in (name, name.partition(":")[0], "") if k in self.devices]
        capacity = next((t.capacity for t in tables if t.capacity is not None), reported)
        reserve = next((t.reserve for t in tables if t.reserve is not None), 0)
        if reserve >= min(capacity, reported):
            raise ConfigError(
                f"{self.file}: the reserve of {format_bytes(reserve)} leaves nothing of the "
                f"{format_bytes(min(capacity, reported))} of {name}: write a smaller one"
            )
        return Capacity(capacity=min(capacity, reported), reserve=reserve)


def find(start: Path, option: str | None, environment: Mapping[str, str]) -> Path | None:
    """The file that counts: ``option``, else ``$JAXTENSILE_CONFIG``, else the first one from ``start`` upward."""
    for given in (option, environment.get(VARIABLE)):
        if given:
            return Path(given)
    return next((path for folder in (start, *start.parents) if (path := folder / NAME).is_file()), None)


def read(path: Path, wait: Seconds = 0.0) -> Config:
    """What a file says. Raises ``ConfigError``; also where it is empty for ``wait`` seconds, because who writes a file
    anew empties it first, and all that there is would be granted by what is read at that moment."""
    try:
        until = time.monotonic() + wait
        while not (text := path.read_text(encoding="utf-8")) and path.is_file():
            if time.monotonic() >= until:
                raise ConfigError(f"{path}: is empty: if it is to say nothing, write a comment ('#') into it")
            time.sleep(0.01)
    except (OSError, UnicodeDecodeError) as wrong:
        raise ConfigError(f"{path}: cannot be read: {wrong}") from None
    return parse(text, str(path))


def parse(text: str, file: str = NAME) -> Config:
    """What a text says. Raises ``ConfigError``; ``file`` is what it is called there."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as wrong:
        raise ConfigError(f"{file}: not TOML: {wrong}") from None
    return _Reader(file, text).config(tables)


def from_tables(tables: dict[str, Any], file: str = "config") -> Config:
    """What tables say that were never a file. Raises ``ConfigError``; ``file`` is what they are called there."""
    return _Reader(file, "").config(tables)


class _Reader:
    """One file: its tables become a ``Config``, or an error that says where."""

    def __init__(self, file: str, text: str) -> None:
        self._file, self._lines = file, text.splitlines()

    def config(self, tables: dict[str, Any]) -> Config:
        self._known(tables, ("device", "coordinator", "jobs"), ())
        devices = self._devices(self._table(tables, "device", ()))
        most = max((d.capacity - (d.reserve or 0) for d in devices.values() if d.capacity is not None), default=None)
        everywhere = devices.get("", DeviceConfig()).capacity
        coordinator = self._struct(_Coordinator, self._table(tables, "coordinator", ()), ("coordinator",))
        jobs = self._table(tables, "jobs", ())
        return Config(
            file=self._file,
            devices=devices,
            settings=self._settings(coordinator),
            socket=self._socket(coordinator.socket),
            jobs={name: self._job(self._table(jobs, name, ("jobs",)), name, everywhere, most) for name in jobs},
        )

    # Tables.

    def _devices(self, table: dict[str, Any]) -> dict[str, DeviceConfig]:
        own = {key: value for key, value in table.items() if not isinstance(value, dict)}
        devices = {"": self._device(own, ("device",), None)}
        for name, below in table.items():
            if isinstance(below, dict):
                devices[name] = self._device(
                    self._table(table, name, ("device",)), ("device", name), devices[""].capacity
                )
        return devices

    def _device(self, table: dict[str, Any], path: tuple[str, ...], above: Bytes | None) -> DeviceConfig:
        raw = self._struct(_Device, table, path)
        capacity = self._bytes(raw.capacity, (*path, "capacity"), above)
        known = capacity if capacity is not None else above
        reserve = self._bytes(raw.reserve, (*path, "reserve"), known)
        host = self._bytes(raw.host, (*path, "host"), None)
        if capacity == 0:
            raise self._error((*path, "capacity"), raw.capacity, "a size above 0")
        if reserve is not None and known is not None and reserve >= known:
            raise self._error((*path, "reserve"), raw.reserve, f"less than the capacity of {format_bytes(known)}")
        return DeviceConfig(capacity=capacity, reserve=reserve, host=host)

    def _settings(self, raw: _Coordinator) -> Settings:
        path = ("coordinator",)
        if not 0 <= raw.min_gain < 1:
            raise self._error((*path, "min_gain"), raw.min_gain, "a share from 0 to below 1")
        if raw.max_clients < 1:
            raise self._error((*path, "max_clients"), raw.max_clients, "at least 1")
        return Settings(
            policy=raw.policy,
            lease_ttl=self._seconds(raw.lease_ttl, (*path, "lease_ttl"), positive=True),
            min_hold=self._seconds(raw.min_hold, (*path, "min_hold"), positive=False),
            min_gain=raw.min_gain,
            revoke_deadline=self._seconds(raw.revoke_deadline, (*path, "revoke_deadline"), positive=True),
            on_overdue=raw.on_overdue,
            max_clients=raw.max_clients,
        )

    def _socket(self, socket: str | None) -> str | None:
        length = len((socket or "").encode())
        if length > LONGEST_SOCKET:
            bound = f"a path of {LONGEST_SOCKET} bytes at most: this one has {length}"
            raise self._error(("coordinator", "socket"), socket, bound)
        if socket is not None and not socket.startswith("/"):
            raise self._error(("coordinator", "socket"), socket, "an absolute path")
        return socket

    def _job(self, table: dict[str, Any], name: str, everywhere: Bytes | None, most: Bytes | None) -> JobConfig:
        path = ("jobs", name)
        raw = self._struct(_Job, table, path)
        least = self._bytes(raw.least, (*path, "least"), everywhere) or 0
        want = self._bytes(raw.want, (*path, "want"), everywhere)
        if want is not None and least > want:
            raise self._error((*path, "least"), raw.least, f"at most what it wants, {format_bytes(want)}")
        if most is not None and least > most:
            raise self._error((*path, "least"), raw.least, f"at most {format_bytes(most)}, capacity less reserve")
        if not 0 < raw.weight < float("inf"):
            raise self._error((*path, "weight"), raw.weight, "a number above 0")
        if raw.max_overhead is not UNSET and not raw.max_overhead >= 1:
            raise self._error((*path, "max_overhead"), raw.max_overhead, "a factor of at least 1")
        return JobConfig(
            command=raw.command,
            least=least,
            want=want,
            priority=raw.priority,
            weight=raw.weight,
            max_overhead=None if raw.max_overhead is UNSET else raw.max_overhead,
        )

    # Values.

    def _table(self, table: dict[str, Any], key: str, path: tuple[str, ...]) -> dict[str, Any]:
        found = table.get(key, {})
        if not isinstance(found, dict):
            raise self._error((*path, key), found, "a table")
        return found  # pyright: ignore[reportUnknownVariableType]

    def _known(self, table: dict[str, Any], allowed: tuple[str, ...], path: tuple[str, ...]) -> None:
        for key in table:
            if key not in allowed:
                close = get_close_matches(key, allowed, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(allowed)}"
                where = f" in [{_dotted(path)}]" if path else ""
                raise ConfigError(f"{self._place((*path, key))}: unknown key {key!r}{where}: {hint}")

    def _struct(self, kind: type[T], table: dict[str, Any], path: tuple[str, ...]) -> T:
        allowed = tuple(f.name for f in structs.fields(kind))  # pyright: ignore[reportArgumentType]
        self._known(table, allowed, path)
        try:
            return convert(table, kind)
        except ValidationError as wrong:
            reason, _, place = str(wrong).partition(" - at ")
            key = re.match(r"`\$\.(\w+)", place)
            at = (*path, key[1]) if key else path
            said = table.get(key[1]) if key else table
            raise self._error(at, said, _allowed(key[1] if key else "", reason)) from None

    def _bytes(self, value: _Amount | UnsetType, path: tuple[str, ...], capacity: Bytes | None) -> Bytes | None:
        if isinstance(value, UnsetType):
            return None
        return self._parsed(lambda: parse_bytes(value, capacity=capacity), path)

    def _seconds(self, value: _Amount, path: tuple[str, ...], *, positive: bool) -> Seconds:
        seconds = self._parsed(lambda: parse_seconds(value), path)
        if positive and not seconds:
            raise self._error(path, value, "a time above 0")
        return seconds

    def _parsed(self, parser: Callable[[], T], path: tuple[str, ...]) -> T:
        try:
            return parser()
        except (ValueError, OverflowError) as wrong:
            raise ConfigError(f"{self._place(path)}: {_dotted(path)}: {wrong}") from None

    def _error(self, path: tuple[str, ...], value: object, allowed: str) -> ConfigError:
        return ConfigError(f"{self._place(path)}: {_dotted(path)} = {value!r}: must be {allowed}")

    def _place(self, path: tuple[str, ...]) -> str:
        """The file, and the line of a key where its table and it are written as usual."""
        *table, key = path
        here: list[str] = []
        for number, line in enumerate(self._lines, 1):
            if header := re.match(r"\s*\[([^\[\]]+)\]", line):
                here = [a or b for a, b in re.findall(r'"([^"]*)"|([\w-]+)', header[1])]
                if here == list(path):
                    return f"{self._file}:{number}"
            elif here == table and re.match(rf'\s*"?{re.escape(key)}"?\s*=', line):
                return f"{self._file}:{number}"
        return self._file


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(part if re.fullmatch(r"[\w-]+", part) else f'"{part}"' for part in path)


def _allowed(key: str, reason: str) -> str:
    choices = {"policy": "slowdown, fair, priority or fcfs", "on_overdue": "wait or terminate"}
    types = {
        "command": "a list of texts",
        "socket": "a text",
        "max_clients": "a whole number",
        "priority": "a whole number",
    }
    amounts = {"capacity", "reserve", "host", "least", "want"}
    times = {"lease_ttl", "min_hold", "revoke_deadline"}
    if key in choices:
        return choices[key]
    if key in types:
        return types[key]
    if key in amounts:
        return "a size: bytes, '12GiB' or '80%'"
    if key in times:
        return "a time: seconds, '500ms', '10s' or '5m'"
    return "a number" if "float" in reason else reason
