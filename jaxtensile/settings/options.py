"""The options of a function, and the source of each: its code, the config, or the default.

The code wins over ``jaxtensile.toml``, which wins over the defaults, option by option. The config is that of
``config=``, else the job's, else ``$JAXTENSILE_CONFIG``, else the first ``jaxtensile.toml`` upward from the working
directory.

Invariant: each option has a ``Setting`` that names its source. No JAX here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Final, TypeVar, cast

from jaxtensile.devices.hardware import host_memory
from jaxtensile.devices.profiles import RESERVE
from jaxtensile.errors import BudgetError, ConfigError
from jaxtensile.report.facts import Setting
from jaxtensile.runtime.config import config as configs
from jaxtensile.runtime.config.config import EMPTY, Config
from jaxtensile.runtime.config.functions import Identity, said_of
from jaxtensile.runtime.config.tables import dotted
from jaxtensile.runtime.decide.leases import HOST
from jaxtensile.settings.found import config_file as config_file
from jaxtensile.units import Bytes, format_bytes, parse_bytes

T = TypeVar("T")
_Said = Mapping[str, tuple[Any, str]]
"""A config's options for a function: by key the value and its table."""
ConfigLike = Config | Mapping[str, Any] | str | os.PathLike[str]
AUTO: Final = "auto"
"""Of ``chunk``: the planner decides."""
CODE, DEFAULT, JOB = "code", "default", "job"
"""Sources of settings outside files."""


class Unsaid:
    """An option's default: prints as its value, but differs from the same value in the code."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)


def unsaid(value: T) -> T:
    """``value`` as a parameter's default, for its signature."""
    return cast(T, Unsaid(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the code asks of ``jaxtensile.jit``; None or ``Unsaid`` if nothing.

    ``to_host``: whether its solver may use host memory. ``options``: those of ``jax.jit``.
    """

    budget: int | str | None = None
    host_budget: int | str | None = None
    objective: str = unsaid("time")
    undo: bool = unsaid(True)
    chunk: bool | str = unsaid(AUTO)
    offload_state: bool = unsaid(False)
    target: str | None = None
    solver: str = "auto"
    to_host: bool = True
    job: Any = None
    config: ConfigLike | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def placed(self) -> str:
        """The ``jax.jit`` option that places arguments or results; empty if none."""
        return next((name for name in ("in_shardings", "out_shardings") if name in self.options), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The options of one function. ``state_budget``: most bytes of arguments offloaded between calls, None for no
    bound. ``settings``: all options but the budget, which depends on the device."""

    objective: str = "time"
    undo: bool = True
    chunk: bool | str = AUTO
    host_budget: Bytes = 0
    state_budget: Bytes | None = 0
    settings: tuple[Setting, ...] = ()
    config: Config = field(default=Config(), repr=False)
    _budget: Any = None
    _from: tuple[str, str] = (DEFAULT, "")

    @property
    def offloads(self) -> bool:
        """Whether arguments may be offloaded between calls."""
        return self.state_budget != 0

    @property
    def says_budget(self) -> bool:
        """Whether the code or the function's table gives a budget."""
        return self._budget is not None

    @property
    def as_written(self) -> Any:
        """The budget as written, the same on every machine; None without one."""
        return self._budget

    def limit(self, devices: Sequence[str], capacity: Bytes) -> tuple[Bytes, Setting] | None:
        """What the config's ``[device]`` leaves of the smallest of ``devices``; None if not mentioned."""
        keys = ("capacity", "reserve")
        said = {name: place for name in devices if (place := self.config.place_of(name, keys))}
        if not said:
            return None
        granted = self.config.capacities(dict.fromkeys(said, capacity), 0)
        name = min(said, key=lambda name: granted[name].limit)
        return granted[name].limit, Setting("budget", format_bytes(granted[name].limit), *said[name])

    def capacity(self, devices: Sequence[str], capacity: Bytes) -> Bytes:
        """The base of percentages: bytes of the smallest of ``devices``."""
        granted = self.config.capacities(dict.fromkeys(devices, capacity), 0)
        return min((granted[name].capacity for name in devices), default=capacity)

    def budget(self, devices: Sequence[str], capacity: Bytes) -> tuple[Bytes, Setting]:
        """Device bytes of a call on ``devices``, named as in configs, of ``capacity`` bytes each.

        Raises ``BudgetError`` and ``ConfigError``.
        """
        limit = self.limit(devices, capacity)
        if self._budget is None:
            return limit or _default_budget(capacity)
        source, table = self._from
        whole = self.capacity(devices, capacity)
        if source == CODE:
            size = budget_bytes(self._budget, whole)
        else:
            size = parse_bytes(self._budget, capacity=whole)
            if limit is not None and size > limit[0]:
                raise ConfigError(
                    f"{source}: {table}.budget = {self._budget!r}: must be at most {format_bytes(limit[0])}, what "
                    f"[{limit[1].table}] leaves of {' and '.join(devices)}"
                )
        return size, Setting("budget", format_bytes(size), source, table)

    def lease(self, devices: Sequence[str], capacity: Bytes) -> tuple[Bytes, Setting]:
        """Upper bound of a job's plans: the code's budget, else all that its coordinator might grant."""
        if self._budget is not None and self._from[0] == CODE:
            return self.budget(devices, capacity)
        size, _ = _default_budget(capacity)
        return size, Setting("budget", f"up to {format_bytes(size)}", JOB)


def resolved(asked: Asked, config: Config, who: Identity) -> Resolved:
    """The options of one function. Raises ``ConfigError`` if code and config conflict, and ``BudgetError`` for an
    unreadable size in the code."""
    said = said_of(config.functions, who)
    chosen = {name: _chosen(name, asked, config, said) for name in ("objective", "undo", "chunk", "offload_state")}
    values = {name: value for name, (value, _) in chosen.items()}
    settings = {name: setting for name, (_, setting) in chosen.items()}
    host, host_setting = _host(asked, config, said)
    offload, why = bool(values["offload_state"]), settings["offload_state"]
    if offload and asked.placed and why.source != CODE:
        raise _cannot(said, why, f"{asked.placed}= is given in the code, and both place arguments", "false")
    state = _host_said(config) if offload and host_setting.source == DEFAULT else host
    budget, whence = asked.budget, (CODE, "")
    if budget is None and "budget" in said:
        budget, whence = said["budget"][0], _place(config, said, "budget")
    return Resolved(
        objective=values["objective"],
        undo=bool(values["undo"]),
        chunk=AUTO if values["chunk"] == AUTO else bool(values["chunk"]),
        host_budget=host,
        state_budget=state if offload else 0,
        settings=(*settings.values(), host_setting),
        config=config,
        _budget=budget,
        _from=whence,
    )


def _chosen(name: str, asked: Asked, config: Config, said: _Said) -> tuple[Any, Setting]:
    value, place = getattr(asked, name), (CODE, "")
    if isinstance(value, Unsaid):
        value, place = (said[name][0], _place(config, said, name)) if name in said else (value.value, (DEFAULT, ""))
    return value, Setting(name, str(value), *place)


def _host(asked: Asked, config: Config, said: _Said) -> tuple[Bytes, Setting]:
    """Pinned host memory that plans may use; none by default."""
    name = "host_budget"
    if asked.host_budget is not None:
        size = host_bytes(asked.host_budget, _host_of(config))
        return size, Setting(name, format_bytes(size), CODE)
    if name not in said:
        return 0, Setting(name, format_bytes(0), DEFAULT)
    size = parse_bytes(said[name][0], capacity=_host_of(config))
    setting = Setting(name, format_bytes(size), *_place(config, said, name))
    if size and not asked.to_host:
        raise _cannot(said, setting, f"solver={asked.solver!r} of the code plans by recomputation alone", "0")
    return size, setting


def _host_of(config: Config) -> Bytes:
    return config.capacities({}, host_memory())[HOST].capacity


def _host_said(config: Config) -> Bytes | None:
    """``[device]``'s ``host``, or None."""
    return _host_of(config) if any(table.host is not None for table in config.devices.values()) else None


def _place(config: Config, said: _Said, name: str) -> tuple[str, str]:
    """File and line, and the table."""
    path = ("functions", said[name][1])
    return config.places.get((*path, name), config.file), dotted(path)


def _cannot(said: _Said, setting: Setting, why: str, instead: str) -> ConfigError:
    where = f"{setting.source}: {setting.table}.{setting.name} = {said[setting.name][0]!r}"
    return ConfigError(f"{where}: {why}: leave one of them out, or write {setting.name} = {instead} for this function")


def _default_budget(capacity: Bytes) -> tuple[Bytes, Setting]:
    size = max(capacity - RESERVE, 0)
    return size, Setting("budget", format_bytes(size), DEFAULT)


def budget_bytes(budget: int | str, capacity: Bytes, name: str = "budget") -> Bytes:
    """A budget of the code in bytes, on a device of ``capacity`` bytes. Raises ``BudgetError``."""
    try:
        size = parse_bytes(budget if isinstance(budget, bool | str | float) else index(budget), capacity=capacity)
    except ValueError as error:
        raise BudgetError(f"{name}={budget!r}: {error}") from None
    except TypeError:
        raise BudgetError(f"{name}={budget!r}: a size is bytes as an int, '12GiB', '12GB' or '80%'") from None
    if size <= 0:
        raise BudgetError(f"{name}={budget!r} leaves no bytes at all: give at least the arguments' size", has=size)
    return size


def host_bytes(host_budget: int | str | None, whole: Bytes) -> Bytes:
    """A ``host_budget`` of the code in bytes, on a machine with ``whole`` bytes. Raises ``BudgetError``."""
    if host_budget is None or (isinstance(host_budget, int) and host_budget == 0):
        return 0
    return budget_bytes(host_budget, whole, "host_budget")


# ---- whose options they are -------------------------------------------------------------------------


def config_of(given: ConfigLike | None) -> Config:
    """The config that ``config=`` means: a file, its tables, or None for the ``jaxtensile.toml`` that counts here."""
    if isinstance(given, Config):
        return given
    if isinstance(given, Mapping):
        return configs.from_tables(dict(given))
    if given is not None and not isinstance(given, str | os.PathLike):
        raise ConfigError(f"config={given!r}: give the path of a file, its tables as a dict, or None")
    path = config_file(given)
    return Config() if path is None else configs.read(path, wait=EMPTY)
