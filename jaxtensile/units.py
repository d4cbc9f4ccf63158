"""Bytes and seconds: parsing, printing, and the only place that knows 1024.

Invariant: sizes are non-negative integers of bytes, times are floats of seconds; the aliases name them in signatures.
"""

from __future__ import annotations

import math
import re
from typing import Final, NewType

Bytes = int
Seconds = float
Flops = float
Step = NewType("Step", int)
"""Index into a schedule, not a time."""

KIB: Final = 1024
"""Bytes: the binary prefixes of IEC 80000-13, each 1024 times the one before."""
MIB: Final = KIB * 1024
"""Bytes."""
GIB: Final = MIB * 1024
"""Bytes."""
TIB: Final = GIB * 1024
"""Bytes."""

_FACTORS: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
}
"""Bytes of a unit of size, by its lower-case name: powers of 1000 (SI), with an ``i`` of 1024 (IEC 80000-13)."""
MOST: Final = 1 << 60
"""Of any size, in bytes: 1 EiB."""
_SECONDS: Final[dict[str, float]] = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
"""Seconds of a unit of time, by its name; seconds without a name."""
_SIZE: Final = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*|%)\s*")


def parse_bytes(text: int | float | str, *, capacity: Bytes | None = None) -> Bytes:
    """Bytes meant by ``12 * 2**30``, ``"12GiB"``, ``"12GB"`` or ``"80%"`` (of ``capacity``).

    Raises ``ValueError`` with the value and the accepted forms; callers wrap it in an error class of their own.
    """
    if isinstance(text, bool):
        raise ValueError(f"a size must be a number of bytes or a text like '12GiB', not {text!r}")
    if isinstance(text, (int, float)):
        if not math.isfinite(text) or text < 0:
            raise ValueError(f"a size must be a finite, non-negative number of bytes, not {text!r}")
        return _bounded(int(text))
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"cannot read {text!r} as a size: write bytes (12884901888), '12GiB', '12GB' or '80%'")
    number, unit = float(match[1].replace("_", "")), match[2]
    if number < 0 or not math.isfinite(number):
        raise ValueError(f"a size must be finite and not negative, not {text!r}")
    if unit == "%":
        if capacity is None:
            raise ValueError(f"{text!r} is a share of a device whose capacity is unknown: write bytes instead")
        if number > 100:
            raise ValueError(f"{text!r} is more than the whole device: write at most '100%'")
        return int(capacity * number / 100)
    factor = _FACTORS.get(unit.lower())
    if factor is None:
        raise ValueError(f"unknown unit {unit!r} in {text!r}: use B, KB, MB, GB, TB, KiB, MiB, GiB, TiB or %")
    return _bounded(int(number * factor))


def _bounded(size: Bytes) -> Bytes:
    if size > MOST:
        raise ValueError(f"{size:.3g} bytes are more than any machine has: write at most {MOST}, 1 EiB")
    return size


def parse_seconds(text: int | float | str) -> Seconds:
    """Seconds meant by ``2.5``, ``"500ms"``, ``"10s"``, ``"5m"`` or ``"1h"``.

    Raises ``ValueError`` with the value and the accepted forms.
    """
    if isinstance(text, bool):
        raise ValueError(f"a time must be a number of seconds or a text like '10s', not {text!r}")
    if isinstance(text, str):
        match = _SIZE.fullmatch(text)
        factor = None if match is None else _SECONDS.get(match[2])
        if match is None or factor is None:
            raise ValueError(f"cannot read {text!r} as a time: write seconds (2.5), '500ms', '10s', '5m' or '1h'")
        text = float(match[1].replace("_", "")) * factor
    if not math.isfinite(text) or text < 0:
        raise ValueError(f"a time must be finite and not negative, not {text!r}")
    return float(text)


def format_bytes(size: float, *, up: bool = False) -> str:
    """``13448000000`` → ``'12.52GiB'``: two places, binary units, sign kept. ``up``: rounded up, so that whoever gives
    that many gives enough."""
    sign, size = ("-", -size) if size < 0 else ("", size)
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= factor:
            return f"{sign}{math.ceil(100 * size / factor) / 100 if up else size / factor:.2f}{unit}"
    return f"{sign}{size:.0f}B"


def format_seconds(time: Seconds) -> str:
    """``0.0123`` → ``'12.3ms'``: three significant places, never an exponent."""
    if abs(time) >= 999.5:
        return f"{time:.0f}s"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        # What would round to 1000 of a unit is 1 of the next.
        if abs(time) >= 0.9995 * factor:
            return f"{time / factor:.3g}{unit}"
    return f"{time / 1e-9:.3g}ns" if time else "0s"


def format_rate(rate: float, unit: str) -> str:
    """``7.9e14, 'FLOP/s'`` → ``'790 TFLOP/s'``: three significant places, decimal prefixes."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # What would round to 1000 of a prefix is 1 of the next.
        if rate >= 0.9995 * factor:
            return f"{rate / factor:#.3g}".rstrip(".") + f" {prefix}{unit}"
    return f"{rate:.3g} {unit}"
