"""Measured rates by device kind, kept in files between processes.

One JSON file per device kind, jaxlib version and format version, in ``profiles`` of the user's cache folder
(``$XDG_CACHE_HOME/jaxtensile``, else ``~/.cache/jaxtensile``). A kind is the same on every machine, compile-only
targets included; a CPU's includes its processor and this process's cores.

Invariant: this cache never stops anyone. A broken or foreign file is skipped with a warning; without a writable folder
the next process measures again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from jaxtensile.devices.cachefiles import cache_folder, write_whole
from jaxtensile.devices.profiles import NUMBERS, DeviceProfile
from jaxtensile.units import Seconds, format_bytes, format_rate, format_seconds

FORMAT: Final = 1
"""Version of the measurements and their format; others are ignored. Goes up with every change."""

_UNITS: Final = {"bandwidth": "B/s", "flops": "FLOP/s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measured numbers of a device of ``kind``. ``numbers``, ``how``: by field of ``DeviceProfile``."""

    kind: str
    jaxlib: str
    date: str
    """Day of the measurement, as 2026-01-31."""
    took: Seconds
    numbers: Mapping[str, float]
    how: Mapping[str, str]


def full_kind(device_kind: str) -> str:
    """The kind in a measurement: JAX's own; for a CPU with this machine's processor and cores."""
    return f"cpu: {_processor()}, {len(os.sched_getaffinity(0))} cores" if device_kind == "cpu" else device_kind


def applied(device: DeviceProfile, found: Measurement, device_kind: str) -> DeviceProfile:
    """``device`` with the numbers measured on ``device_kind``, its first kind from then on."""
    kinds = (device_kind, *(k for k in device.kinds if k != device_kind))
    told = {name: f"measured {found.date} with jaxlib {found.jaxlib}: {how}" for name, how in found.how.items()}
    numbers: dict[str, Any] = {n: int(x) if n == "capacity" else x for n, x in found.numbers.items()}
    sources = {**device.sources, **told}
    return replace(device, **numbers, kinds=kinds, sources=sources, measured=frozenset(numbers))


def best_known(device: DeviceProfile, device_kind: str | None = None) -> DeviceProfile:
    """``device`` with numbers measured on this kind, if any; None: on its first measured kind."""
    kinds = device.kinds if device_kind is None else (device_kind,)
    found = ((kind, load(kind)) for kind in kinds)
    return next((applied(device, m, kind) for kind, m in found if m is not None), device)


# ---- the cache ------------------------------------------------------------------------------------

_unwritten: dict[str, Measurement] = {}
"""Measurements of this process that could not be written, by the full kind of the device."""
_kept: list[str] = []
"""The kinds measured by this process, in order."""


def measured_here() -> int:
    """How many measurements this process has kept: plans made before the last one know other rates."""
    return len(_kept)


def load(device_kind: str) -> Measurement | None:
    """The measurement of this kind with the installed jaxlib; None if there is none."""
    kind, path = full_kind(device_kind), file_of(device_kind)
    if (found := _unwritten.get(kind)) is not None:
        return found
    return None if path is None else _read(path, kind)


def keep(found: Measurement, device_kind: str) -> Path | None:
    """Write a measurement atomically; its path, or None with a warning."""
    path = file_of(device_kind)
    text = json.dumps({"format": FORMAT, **asdict(found)}, indent=1) + "\n"
    problem: object = "there is no home folder and no $XDG_CACHE_HOME"
    if path is not None:
        try:
            write_whole(path, text.encode())
        except OSError as error:
            problem = error
        else:
            _unwritten.pop(full_kind(device_kind), None)
            _kept.append(device_kind)
            return path
    _unwritten[full_kind(device_kind)] = found
    _kept.append(device_kind)
    warnings.warn(f"the measured profile holds for this process only: {problem}", RuntimeWarning, stacklevel=3)
    return None


def file_of(device_kind: str) -> Path | None:
    """The file of a kind's measurement; None without a cache folder."""
    folder, kind = cache_folder(), full_kind(device_kind)
    if folder is None:
        return None
    words = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")[:60]
    digest = hashlib.sha256(kind.encode()).hexdigest()[:8]
    return folder / "profiles" / f"{words}-{digest}-jaxlib-{jaxlib_version()}-v{FORMAT}.json"


@cache
def jaxlib_version() -> str:
    """The version of the installed jaxlib, without importing it."""
    try:
        return version("jaxlib")
    except PackageNotFoundError:
        return "none"


def _read(path: Path, kind: str) -> Measurement | None:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        return _passed_over(path, str(error))
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _passed_over(path, f"it is no JSON: {error}")
    problem = _problem(data, kind)
    if problem:
        return _passed_over(path, problem)
    fields = {name: data[name] for name in ("kind", "jaxlib", "date", "took", "numbers", "how")}
    return Measurement(**fields)


def _problem(data: Any, kind: str) -> str:
    """Why ``data`` is no measurement of ``kind``; empty if it is one."""
    if not isinstance(data, dict):
        return "it holds no table"
    for name, expected in (("format", FORMAT), ("kind", kind), ("jaxlib", jaxlib_version())):
        if data.get(name) != expected:
            return f"its {name} is {data.get(name)!r}, not {expected!r}"
    if not isinstance(data.get("date"), str) or not _positive(data.get("took")):
        return "it does not say when it was made"
    numbers, how = data.get("numbers"), data.get("how")
    if not (isinstance(numbers, dict) and isinstance(how, dict) and numbers and numbers.keys() == how.keys()):
        return "its numbers and their sources do not go together"
    if unknown := sorted(set(numbers) - set(NUMBERS)):
        return f"{unknown[0]!r} is no number of a profile"
    wrong = sorted(n for n in numbers if not _positive(numbers[n]) or not isinstance(how[n], str))
    return f"its {wrong[0]} is {numbers[wrong[0]]!r}" if wrong else ""


def _positive(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) and x > 0


def _passed_over(path: Path, problem: str) -> None:
    warnings.warn(
        f"{path} is passed over: {problem}; `jaxtensile calibrate --refresh` writes it anew",
        RuntimeWarning,
        stacklevel=2,
    )


# ---- as text --------------------------------------------------------------------------------------


def told(name: str, number: float) -> str:
    """A number of a profile with its unit."""
    if name == "capacity":
        return format_bytes(number)
    unit = next((u for word, u in _UNITS.items() if word in name), None)
    return format_seconds(number) if unit is None else format_rate(number, unit)


def table(device: DeviceProfile, published: DeviceProfile | None = None) -> list[str]:
    """A line per number of a profile, with its source and, if given, the ``published`` number."""
    rows = [
        (name, told(name, getattr(device, name)), told(name, getattr(published, name)) if published else "")
        for name in NUMBERS
    ]
    wide = [max(len(row[i]) for row in rows) for i in range(3)]
    return [
        f"{name:<{wide[0]}}  {value:>{wide[1]}}  {other:>{wide[2]}}{'  ' if published else ''}{device.sources[name]}"
        for name, value, other in rows
    ]


@cache
def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.machine()
