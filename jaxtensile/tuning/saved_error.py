"""What the text of a ``RESOURCE_EXHAUSTED`` says: XLA's of CPUs, GPUs (with the dump of their allocator) and TPUs.

The formats are those of public reports from 2019 to 2026. Whatever is not there is not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from jaxtensile.errors import JaxtensileError
from jaxtensile.places import short_place
from jaxtensile.units import Bytes, parse_bytes

LARGEST: Final = 64 << 20
"""Letters of a text that are read. A guess."""
_SIZE: Final = r"(\d+(?:\.\d+)?)\s?(bytes|[KMGT]i?B?|B)?(?!\w|\.\d)"
_IS_ONE: Final = re.compile(r"RESOURCE_EXHAUSTED|Resource exhausted|[Oo]ut of memory|ran out of memory", re.ASCII)
_ASKED: Final = re.compile(rf"(?:allocat\w*|allocate request for|to reserve) {_SIZE}")
_HBM: Final = re.compile(rf"Used {_SIZE} of {_SIZE} (hbm|vmem|smem)")
_FREE: Final = re.compile(rf"There are {_SIZE} free")
_CAPACITY: Final = re.compile(rf"HBM capacity {_SIZE}")
_STAT: Final = re.compile(r"^\s*(Limit|InUse|LargestFreeBlock): +(\d+)\s*$", re.MULTILINE)
_IN_CHUNKS: Final = re.compile(rf"Sum Total of in-use chunks: {_SIZE}")
_CHUNKS: Final = re.compile(r"(\d+) Chunks of size (\d+) totalling")
_PART: Final = re.compile(
    rf"^\s*(parameter|constant|maybe_live_out|preallocated temp|total) allocation: +{_SIZE}", re.MULTILINE
)
_TPU_PART: Final = re.compile(rf"^ {{4}}(arguments|output|program|HLO temp|reserved) +{_SIZE}", re.MULTILINE)
_NAMES: Final[dict[str, str]] = {
    "parameter": "arguments",
    "maybe_live_out": "output",
    "preallocated temp": "temp",
    "HLO temp": "temp",
    "constant": "constants",
}
_LOG: Final = re.compile(r"^.{0,120}?\w+\.cc:\d+\] ?", re.MULTILINE)
"""What loggers put before a line."""
_BUFFER: Final = re.compile(
    rf"^\s*(?:Buffer \d+:\s*\n\s*|\d+\. )Size: {_SIZE}(?P<rest>(?:\n(?!\s*=====).*)*)", re.MULTILINE
)
_OP: Final = re.compile(r'op_name="(?:[^"\\]|\\.)*?([\w.-]+)(?:\[[^"]*)?"')
_SOURCE: Final = re.compile(r'source_file="([^"]+)"(?: source_line=(\d+))?')
_SHAPE: Final = re.compile(r"^\s*(?:Entry Parameter Sub)?[Ss]hape: +(\S+?)(?:\{|\s|$)", re.MULTILINE)
_PADDING: Final = re.compile(rf"Extra memory due to padding: {_SIZE}")


class SavedError(JaxtensileError, ValueError):
    """A text that says nothing of a device without room."""


@dataclass(frozen=True, slots=True)
class Lived:
    """Like values that were there, or were to be: ``what`` made them, ``kind`` as ``f32[64,64]``, and the source line,
    each empty if the text does not say. ``padding``: bytes of them that hold nothing."""

    what: str
    kind: str
    source: str
    count: int
    nbytes: Bytes
    padding: Bytes = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """``asked``: bytes that were not there. ``capacity``: of the device. ``in_use``: allocated. ``free``, ``largest``:
    what was left, and its largest piece. ``parts``: of the program, as ``arguments`` and ``temp``. ``lived``: the
    largest values, or pieces of the allocator. None: the text does not say."""

    device: str
    asked: Bytes | None = None
    capacity: Bytes | None = None
    in_use: Bytes | None = None
    free: Bytes | None = None
    largest: Bytes | None = None
    needs: Bytes | None = None
    parts: dict[str, Bytes]
    lived: tuple[Lived, ...] = ()


def read(text: str) -> Saved:
    """The text of an error, alone or in a log. Raises ``SavedError``."""
    if not _IS_ONE.search(text):
        raise SavedError(
            f"a text of {len(text)} letters has no RESOURCE_EXHAUSTED: save all that the program wrote to standard "
            "error, as in python train.py 2> error.txt"
        )
    text = _LOG.sub("", text)
    hbm, free, capacity = _HBM.search(text), _FREE.search(text), _CAPACITY.search(text)
    stats = {name: int(number) for name, number in _STAT.findall(text)}
    tpu = bool(hbm or free or capacity) or "hbm" in text.lower()
    of_tpu: dict[str, Bytes] = {name: _bytes(*size) for name, *size in _TPU_PART.findall(text)} if tpu else {}
    of_gpu: dict[str, Bytes] = {name: _bytes(*size) for name, *size in _PART.findall(text)}
    parts: dict[str, Bytes] = {_NAMES.get(name, name): size for name, size in (of_tpu or of_gpu).items() if size}
    asked, in_chunks = _ASKED.search(text), _IN_CHUNKS.search(text)
    limit, in_use = stats.get("Limit"), stats.get("InUse")
    if in_use is None and in_chunks is not None:
        in_use = _bytes(*in_chunks.groups())
    left = limit - in_use if limit is not None and in_use is not None else None
    lived = tuple(_buffers(text)) or tuple(_pieces(text))
    return Saved(
        device="TPU" if tpu else "GPU" if _of_gpu(text) else "device",
        asked=None if asked is None else _bytes(*asked.groups()),
        capacity=_bytes(*hbm.groups()[2:4]) if hbm else _bytes(*capacity.groups()) if capacity else limit,
        in_use=in_use,
        free=_bytes(*free.groups()) if free else left,
        largest=stats.get("LargestFreeBlock") or None,
        needs=_bytes(*hbm.groups()[:2]) if hbm else parts.get("total"),
        parts={name: size for name, size in parts.items() if name not in ("total", "program")},
        lived=tuple(sorted(lived, key=lambda kind: -kind.nbytes)),
    )


def _of_gpu(text: str) -> bool:
    return bool(re.search(r"GPU_\d|_bfc\b|BufferAssignment|cuda|rocm", text))


def _bytes(number: str, unit: str) -> Bytes:
    """TPUs write ``2.00G`` for GiB."""
    unit = unit or "B"
    unit = "B" if unit == "bytes" else f"{unit}iB" if unit in "KMGT" else unit
    return parse_bytes(number + unit)


def _buffers(text: str) -> Iterator[Lived]:
    """The largest values of the program, like ones together."""
    found: dict[tuple[str, str, str], tuple[int, Bytes, Bytes]] = {}
    for match in _BUFFER.finditer(text):
        rest = match["rest"]
        op, source, shape, padding = (p.search(rest) for p in (_OP, _SOURCE, _SHAPE, _PADDING))
        what = "argument" if "Entry Parameter" in rest else op[1] if op else ""
        place = short_place(f"{source[1]}:{source[2]}") if source and source[2] else source[1] if source else ""
        key = what, shape[1] if shape else "", place
        count, nbytes, padded = found.get(key, (0, 0, 0))
        more = _bytes(*padding.groups()) if padding else 0
        found[key] = count + 1, nbytes + _bytes(match[1], match[2]), padded + more
    yield from (Lived(*key, *sums) for key, sums in found.items())


def _pieces(text: str) -> Iterator[Lived]:
    """The pieces that an allocator had given away, by size."""
    yield from (Lived("piece", "", "", int(n), int(n) * int(size)) for n, size in _CHUNKS.findall(text))


__all__ = ["LARGEST", "Lived", "Saved", "SavedError", "read"]
