"""The config as text: each value with its line. No JAX, no device."""

from __future__ import annotations

import os
from pathlib import Path

from jaxtensile.places import short_place
from jaxtensile.runtime.config import config as configs
from jaxtensile.runtime.config.config import Config
from jaxtensile.runtime.config.functions import Identity
from jaxtensile.runtime.config.tables import dotted
from jaxtensile.settings.options import Asked, config_of, resolved
from jaxtensile.units import format_bytes


def checked(option: str | None = None) -> list[str]:
    """The config file that counts here, or ``option``, and all that it says to plans. Raises ``ConfigError``."""
    config = config_of(option)
    if not config.file:
        return [f"no {configs.NAME} here or above, and ${configs.VARIABLE} is not set: everything is by default"]
    named = "--config" if option else f"${configs.VARIABLE}" if os.environ.get(configs.VARIABLE) else "found from here"
    return [f"{Path(config.file).absolute()} ({named})", *told(config)]


def told(config: Config) -> list[str]:
    """A line per value of ``[device]``, ``[functions]`` and ``[exec]``, and one for the tables of jobs."""
    rows = [(dotted(path), _value(config, path), short_place(place)) for path, place in config.places.items()]
    wide = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    lines = [f"{key:<{wide[0]}}  {value:<{wide[1]}}  {place}" for key, value, place in rows]
    if config.functions:
        others = ", ".join(f"{s.name} {s.value}" for s in resolved(Asked(), Config(), Identity(())).settings)
        lines.append(f"by default: {others}; the budget is what [device] leaves")
    if config.jobs:
        lines.append(f"jobs: {', '.join(config.jobs)}")
    return lines


def _value(config: Config, path: tuple[str, ...]) -> str:
    """The value as it is meant: devices in bytes, options as written."""
    top, *name, key = path
    if top == "device":
        return format_bytes(getattr(config.devices["".join(name)], key))
    if top == "exec":
        return str(getattr(config.exec, key))
    return str(getattr(config.functions[name[0]], key))


__all__ = ["checked", "told"]
