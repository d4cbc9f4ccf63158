"""The contents of ``jaxtensile.toml``.

A device's keys come from the table of its name (``[device."cuda:0"]``), else of its kind (``[device.cuda]``), else from
``[device]`` itself, each key by itself.

Invariant: a returned config can be carried out. Everything else raises ``ConfigError`` with the file, the line if
found, the key, the value and what is allowed. Nothing here reads the environment: callers pass it in.
"""

from __future__ import annotations

import os
import stat
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, cast

from msgspec import UNSET, Struct, UnsetType, structs

from jaxtensile.errors import ConfigError
from jaxtensile.runtime.config.finding import NAME as NAME
from jaxtensile.runtime.config.finding import VARIABLE as VARIABLE
from jaxtensile.runtime.config.finding import find as find
from jaxtensile.runtime.config.functions import ExecConfig, FunctionConfig, exec_table, function_tables
from jaxtensile.runtime.config.tables import Amount, Tables, dotted
from jaxtensile.runtime.decide.events import Objective, Settings
from jaxtensile.runtime.decide.leases import HOST
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.placement.asks import Rules
from jaxtensile.runtime.protocol.messages import (
    HIGHEST_PRIORITY,
    LEAST_WEIGHT,
    LONGEST_NAME,
    LOWEST_PRIORITY,
    MOST_WEIGHT,
)
from jaxtensile.units import GIB, Bytes, Seconds, format_bytes

LONGEST_SOCKET: Final = 107
"""Bytes of a Unix socket's path: ``sun_path`` less its end."""
LARGEST: Final = 1 << 20
"""Bytes of a file that are read; a config has a few thousand. Guards against other kinds of files."""
_RESERVE, _PART = GIB, 8
"""Bytes that ``Config.granted`` leaves to contexts, libraries and other processes (``process.CONTEXT`` is half of it);
on a small device at most one part in so many. A guess."""
LONGEST_LINE: Final = 1 << 14
"""Letters of a line: a key of thousands of parts takes tomllib minutes. A guess."""
MOST_CLIENTS: Final = 1 << 20
"""Largest ``max_clients``: the files that Linux lets a process open by default (``fs.nr_open``)."""
MOST_OVERHEAD: Final = 1e3
"""Largest ``max_overhead``, a factor of the step time. A guess: nobody means more."""
MOST_NUMBER: Final = 10_000
"""Largest ``hosts``, ``devices`` and ``retries``. A guess: nobody means more."""
MOST_GROUPS: Final = 64
"""Largest ``groups``: executables of one step. A guess: each costs a launch, and a step has some hundred kernels."""
SHORTEST: Final[Seconds] = 0.1
"""Seconds, the shortest ``lease_ttl`` and ``revoke_deadline``: a busy machine lets a process speak by then. A guess."""
EMPTY: Final = 0.2
"""Seconds in which an empty file, perhaps just being written, may be filled. A guess."""


class _Device(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    capacity: Amount | UnsetType = UNSET
    reserve: Amount | UnsetType = UNSET
    host: Amount | UnsetType = UNSET
    turns: bool | UnsetType = UNSET


_SETTINGS: Final = Settings()
"""What holds where the file says nothing."""


class _Coordinator(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    socket: str | None = None
    policy: Objective = _SETTINGS.policy
    lease_ttl: Amount = _SETTINGS.lease_ttl
    min_hold: Amount = _SETTINGS.min_hold
    min_gain: float = _SETTINGS.min_gain
    revoke_deadline: Amount = _SETTINGS.revoke_deadline
    on_overdue: Literal["wait", "terminate"] = _SETTINGS.on_overdue
    max_clients: int = _SETTINGS.max_clients


class _Job(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    command: tuple[str, ...] = ()
    least: Amount = 0
    want: Amount | UnsetType = UNSET
    priority: int = 0
    weight: float = 1.0
    max_overhead: float | UnsetType = UNSET
    groups: int = 1
    hosts: int = 1
    devices: int = 1
    kind: str = ""
    retries: int = 0
    automatic: bool = True


class _Cluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    address: str | None = None
    hold_after: Amount = 600.0
    refuse_after: Amount = 60.0
    move_after: Amount = 30.0


class ClusterConfig(Struct, frozen=True, kw_only=True):
    """Jobs on many machines. ``address``: of the Ray cluster; None: as Ray finds it."""

    address: str | None = None
    rules: Rules = Rules()


class DeviceConfig(Struct, frozen=True, kw_only=True):
    """A device's table; None: not given."""

    capacity: Bytes | None = None
    reserve: Bytes | None = None
    host: Bytes | None = None
    turns: bool | None = None
    """Whether jobs of several processes take turns with their steps."""


class JobConfig(Struct, frozen=True, kw_only=True):
    """One job. ``want`` None: all it can get. ``max_overhead`` None: however slow."""

    command: tuple[str, ...] = ()
    least: Bytes = 0
    want: Bytes | None = None
    priority: int = 0
    weight: float = 1.0
    max_overhead: float | None = None
    groups: int = 1
    """Executables of a step at most, between which other jobs of its process have their turns."""
    hosts: int = 1
    """On a cluster: machines at once, ``devices`` of each, of one ``kind`` (``"cuda"``; empty: any)."""
    devices: int = 1
    kind: str = ""
    retries: int = 0
    """On a cluster: how often it is started again after it has failed."""
    automatic: bool = True
    """On one machine: whether functions of a program that never heard of us are steps of the job."""


class Config(Struct, frozen=True, kw_only=True):
    """A whole file, with defaults for missing keys."""

    file: str = ""
    devices: dict[str, DeviceConfig] = {}
    """By name or kind; ``""``: for all devices."""
    settings: Settings = Settings()
    socket: str | None = None
    cluster: ClusterConfig = ClusterConfig()
    jobs: dict[str, JobConfig] = {}
    functions: dict[str, FunctionConfig] = {}
    """By name or pattern, see ``runtime.functions``."""
    exec: ExecConfig = ExecConfig()
    places: dict[tuple[str, ...], str] = {}
    """File and line of the keys of ``[device]``, ``[functions]`` and ``[exec]``, by path of keys."""

    @property
    def of_jobs(self) -> Config:
        """The part of the config that jobs need."""
        return structs.replace(self, cluster=ClusterConfig(), functions={}, exec=ExecConfig(), places={})

    def capacities(self, reported: Mapping[str, Bytes], host: Bytes) -> dict[str, Capacity]:
        """Bytes to grant: of each device in ``reported``, and of ``host`` memory that may be pinned.

        Raises ``ConfigError`` if a reserve leaves nothing.
        """
        found = {name: self._capacity(name, size) for name, size in reported.items()}
        said = [table.host for table in self.devices.values() if table.host is not None]
        found[HOST] = Capacity(capacity=min(max(said), host) if said else host)
        return found

    def granted(self, reported: Mapping[str, Bytes], host: Bytes) -> dict[str, Capacity]:
        """``capacities``, less a reserve for contexts, libraries and other processes on devices whose bytes the file
        does not mention."""
        found = self.capacities(reported, host)
        for name in reported:
            said = [self.devices[k] for k in _tables_of(name) if k in self.devices]
            if all(t.capacity is None and t.reserve is None for t in said):
                found[name] = replace(found[name], reserve=min(_RESERVE, found[name].capacity // _PART))
        return found

    def place_of(self, name: str, keys: Sequence[str]) -> tuple[str, str] | None:
        """Place and table of the first of ``keys`` that the file has for a device."""
        tables = [("device", table) if table else ("device",) for table in _tables_of(name)]
        paths = [(*table, key) for key in keys for table in tables]
        return next(((self.places[path], dotted(path[:-1])) for path in paths if path in self.places), None)

    def _capacity(self, name: str, reported: Bytes) -> Capacity:
        tables = [self.devices[k] for k in _tables_of(name) if k in self.devices]
        capacity = next((t.capacity for t in tables if t.capacity is not None), reported)
        reserve = next((t.reserve for t in tables if t.reserve is not None), 0)
        if reserve >= min(capacity, reported):
            raise ConfigError(
                f"{self.file}: the reserve of {format_bytes(reserve)} leaves nothing of the "
                f"{format_bytes(min(capacity, reported))} of {name}: write a smaller one"
            )
        return Capacity(capacity=min(capacity, reported), reserve=reserve, gated=self.takes_turns(name))

    def takes_turns(self, name: str) -> bool:
        """Whether jobs take turns on a device; they do unless the config says otherwise."""
        tables = [self.devices[k] for k in _tables_of(name) if k in self.devices]
        return next((t.turns for t in tables if t.turns is not None), True)


def _tables_of(name: str) -> tuple[str, str, str]:
    """The tables that may hold for a device, nearest first."""
    return name, name.partition(":")[0], ""


def read(path: Path, wait: Seconds = 0.0) -> Config:
    """Read a file. Raises ``ConfigError``, also if the file stays empty for ``wait`` seconds.

    Writers empty a file first; an empty config would grant everything.
    """
    try:
        until = time.monotonic() + wait
        while not (text := _text(path)) and path.is_file():
            if time.monotonic() >= until:
                raise ConfigError(f"{path}: is empty: if it is to say nothing, write a comment ('#') into it")
            time.sleep(0.01)
    except (OSError, UnicodeDecodeError) as wrong:
        raise ConfigError(f"{path}: cannot be read: {wrong}") from None
    return parse(text, str(path))


def _text(path: Path) -> str:
    """A file's text. A pipe is an error rather than waited for."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            raise ConfigError(f"{path}: is a pipe: write the tables of {NAME} into a file")
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ConfigError(f"{path}: is larger than {format_bytes(LARGEST)}, the most that is read: leave something out")
    return text.decode()


def parse(text: str, file: str = NAME) -> Config:
    """Parse a text. Raises ``ConfigError``, which calls it ``file``."""
    if (longest := max(map(len, text.split("\n")))) > LONGEST_LINE:
        raise ConfigError(f"{file}: a line has {longest} letters, and at most {LONGEST_LINE} are read: break it up")
    try:
        tables = tomllib.loads(text)
    except ValueError as wrong:  # also what is no whole number that Python reads
        raise ConfigError(f"{file}: not TOML: {wrong}") from None
    except RecursionError:
        raise ConfigError(f"{file}: its tables are nested too deeply: two levels are all that is asked for") from None
    return _Reader(file, text).config(tables)


def from_tables(tables: dict[str, Any], file: str = "config") -> Config:
    """Read tables that were never a file. Raises ``ConfigError``, which calls them ``file``."""
    if strange := [key for key in _keys(tables) if not isinstance(key, str)]:
        raise ConfigError(f"{file}: the key {strange[0]!r} is no text: write it in quotes")
    return _Reader(file, "").config(tables)


def _keys(tables: dict[Any, Any]) -> Iterator[Any]:
    for key, below in tables.items():
        yield key
        if isinstance(below, dict):
            yield from _keys(below)  # pyright: ignore[reportUnknownArgumentType]


class _Reader:
    """Turns the tables of one file into a ``Config``, or an error with its place."""

    def __init__(self, file: str, text: str) -> None:
        self._file, self._in = file, Tables(file, text)

    def config(self, tables: dict[str, Any]) -> Config:
        self._in.printable(tables)
        self._in.known(tables, ("device", "coordinator", "cluster", "jobs", "functions", "exec"), ())
        devices = self._devices(self._in.table(tables, "device", ()))
        most = max((d.capacity - (d.reserve or 0) for d in devices.values() if d.capacity is not None), default=None)
        everywhere = devices.get("", DeviceConfig()).capacity
        coordinator = self._in.struct(_Coordinator, self._in.table(tables, "coordinator", ()), ("coordinator",))
        jobs = self._in.table(tables, "jobs", ())
        functions = self._in.table(tables, "functions", ())
        host = max((d.host for d in devices.values() if d.host is not None), default=None)
        return Config(
            file=self._file,
            devices=devices,
            settings=self._settings(coordinator),
            socket=self._socket(coordinator.socket),
            cluster=self._cluster(self._in.struct(_Cluster, self._in.table(tables, "cluster", ()), ("cluster",))),
            jobs={name: self._job(self._in.table(jobs, name, ("jobs",)), name, everywhere, most) for name in jobs},
            functions=function_tables(self._in, functions, everywhere, most if everywhere is not None else None, host),
            exec=exec_table(
                self._in,
                self._in.table(tables, "exec", ()),
                everywhere,
                most if everywhere is not None else None,
                host,
            ),
            places=self._places(tables),
        )

    def _places(self, tables: dict[str, Any]) -> dict[tuple[str, ...], str]:
        """Place of each key in ``[device]``, ``[functions]`` and ``[exec]``, by path of keys."""
        own = tables.get("device", {})
        paths: list[tuple[str, ...]] = [("device", key) for key in own if not isinstance(own[key], dict)]
        paths += [
            (top, name, key)
            for top in ("device", "functions")
            for name, below in tables.get(top, {}).items()
            if isinstance(below, dict)
            for key in cast(dict[str, Any], below)
        ]
        paths += [("exec", key) for key in tables.get("exec", {})]
        return {path: self._in.place(path) for path in paths}

    def _devices(self, table: dict[str, Any]) -> dict[str, DeviceConfig]:
        own = {key: value for key, value in table.items() if not isinstance(value, dict)}
        devices = {"": self._device(own, ("device",), None)}
        for name, below in table.items():
            if isinstance(below, dict):
                devices[name] = self._device(
                    self._in.table(table, name, ("device",)), ("device", name), devices[""].capacity
                )
        return devices

    def _device(self, table: dict[str, Any], path: tuple[str, ...], above: Bytes | None) -> DeviceConfig:
        raw = self._in.struct(_Device, table, path)
        capacity = self._in.bytes(raw.capacity, (*path, "capacity"), above)
        known = capacity if capacity is not None else above
        reserve = self._in.bytes(raw.reserve, (*path, "reserve"), known)
        host = self._in.bytes(raw.host, (*path, "host"), None)
        if capacity == 0:
            raise self._in.error((*path, "capacity"), raw.capacity, "a size above 0")
        if reserve is not None and known is not None and reserve >= known:
            raise self._in.error((*path, "reserve"), raw.reserve, f"less than the capacity of {format_bytes(known)}")
        turns = None if raw.turns is UNSET else raw.turns
        return DeviceConfig(capacity=capacity, reserve=reserve, host=host, turns=turns)

    def _settings(self, raw: _Coordinator) -> Settings:
        path = ("coordinator",)
        if not 0 <= raw.min_gain < 1:
            raise self._in.error((*path, "min_gain"), raw.min_gain, "a share from 0 to below 1")
        if not 1 <= raw.max_clients <= MOST_CLIENTS:
            raise self._in.error((*path, "max_clients"), raw.max_clients, f"a whole number from 1 to {MOST_CLIENTS}")
        return Settings(
            policy=raw.policy,
            lease_ttl=self._in.seconds(raw.lease_ttl, (*path, "lease_ttl"), SHORTEST),
            min_hold=self._in.seconds(raw.min_hold, (*path, "min_hold"), 0.0),
            min_gain=raw.min_gain,
            revoke_deadline=self._in.seconds(raw.revoke_deadline, (*path, "revoke_deadline"), SHORTEST),
            on_overdue=raw.on_overdue,
            max_clients=raw.max_clients,
        )

    def _cluster(self, raw: _Cluster) -> ClusterConfig:
        rules = {key: self._in.seconds(getattr(raw, key), ("cluster", key), 0.0) for key in Rules.__struct_fields__}
        return ClusterConfig(address=raw.address, rules=Rules(**rules))

    def _socket(self, socket: str | None) -> str | None:
        length = len((socket or "").encode())
        if length > LONGEST_SOCKET:
            bound = f"a path of {LONGEST_SOCKET} bytes at most: this one has {length}"
            raise self._in.error(("coordinator", "socket"), socket, bound)
        if socket is not None and not socket.startswith("/"):
            raise self._in.error(("coordinator", "socket"), socket, "an absolute path")
        return socket

    def _job(self, table: dict[str, Any], name: str, everywhere: Bytes | None, most: Bytes | None) -> JobConfig:
        path = ("jobs", name)
        if not 1 <= len(name) <= LONGEST_NAME:
            raise self._in.unnamed(path, f"1 to {LONGEST_NAME} letters, not {len(name)}")
        raw = self._in.struct(_Job, table, path)
        least = self._in.bytes(raw.least, (*path, "least"), everywhere) or 0
        want = self._in.bytes(raw.want, (*path, "want"), everywhere)
        if want is not None and least > want:
            raise self._in.error((*path, "least"), raw.least, f"at most what it wants, {format_bytes(want)}")
        if most is not None and least > most:
            raise self._in.error((*path, "least"), raw.least, f"at most {format_bytes(most)}, capacity less reserve")
        if not LOWEST_PRIORITY <= raw.priority <= HIGHEST_PRIORITY:
            allowed = f"a whole number from {LOWEST_PRIORITY} to {HIGHEST_PRIORITY}"
            raise self._in.error((*path, "priority"), raw.priority, allowed)
        if not LEAST_WEIGHT <= raw.weight <= MOST_WEIGHT:
            allowed = f"a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}"
            raise self._in.error((*path, "weight"), raw.weight, allowed)
        if raw.max_overhead is not UNSET and not 1 <= raw.max_overhead <= MOST_OVERHEAD:
            raise self._in.error(
                (*path, "max_overhead"), raw.max_overhead, f"a factor from 1 to {MOST_OVERHEAD:g}, or left out"
            )
        for key, first, last in (
            ("groups", 1, MOST_GROUPS),
            ("hosts", 1, MOST_NUMBER),
            ("devices", 1, MOST_NUMBER),
            ("retries", 0, MOST_NUMBER),
        ):
            if not first <= (number := getattr(raw, key)) <= last:
                raise self._in.error((*path, key), number, f"a whole number from {first} to {last}")
        return JobConfig(
            command=raw.command,
            least=least,
            want=want,
            priority=raw.priority,
            weight=raw.weight,
            max_overhead=None if raw.max_overhead is UNSET else raw.max_overhead,
            groups=raw.groups,
            hosts=raw.hosts,
            devices=raw.devices,
            kind=raw.kind,
            retries=raw.retries,
            automatic=raw.automatic,
        )
