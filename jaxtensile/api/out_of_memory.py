"""What a program held when its device had no room left, and what would help most.

Under ``jaxtensile exec`` and after ``jaxtensile.install`` it is told behind the traceback of a ``RESOURCE_EXHAUSTED``
that ends the program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax

from jaxtensile.api.beside import Living, living
from jaxtensile.api.tally import Program
from jaxtensile.devices.hardware import allocator_stats
from jaxtensile.places import short_place
from jaxtensile.spmd.location import device_name, profile_of
from jaxtensile.units import Bytes, format_bytes, parse_bytes

_SAID: Final = "RESOURCE_EXHAUSTED"
_ASKED: Final = re.compile(r"allocat\w* (\d+(?:\.\d+)?)\s*([KMGT]iB|bytes)")
_MOST: Final = 5
"""Kinds of arrays, and programs, that are listed: the largest."""
_LEAST: Final = 0.1
"""Share of the device below which a smaller budget is no advice: hardly a program fits that. A guess."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """``asked``: bytes that were not there; None if the error does not say. ``arrays``: bytes of living arrays.
    ``capacity``: of the device. ``budget``: what programs are planned for. ``free`` and ``largest``: what the
    allocator has left, and its largest piece; None if it does not say."""

    asked: Bytes | None
    arrays: Bytes
    capacity: Bytes
    budget: Bytes
    free: Bytes | None = None
    largest: Bytes | None = None


def advice(at: Shortage) -> str:
    """The one thing that helps most."""
    asked = at.asked or 0
    if asked > at.capacity:
        return f"one value of {format_bytes(asked)} is larger than the device: it has to be made in parts, in a jax.jit"
    if at.arrays + asked > at.capacity and 2 * at.arrays > at.capacity:
        return "the arrays take most of the device: delete what is not needed, or donate what is updated"
    lacking = asked
    if at.free is not None:
        pieces = at.free - at.largest if at.largest is not None else 0
        lacking = pieces if at.free >= asked and pieces else max(asked - at.free, 0)
    less = at.budget - lacking
    if less > max(at.arrays, _LEAST * at.capacity):
        why = "the free bytes are in pieces" if at.free is not None and at.free >= asked else "what is not planned"
        return f"plan for less, which leaves room for it ({why}): --budget {format_bytes(less)}"
    return "make the batch smaller, or work on it in parts: operations outside of jax.jit are not planned"


def told(error: BaseException, programs: Sequence[Program], budget: int | str | None) -> list[str]:
    """The lines behind an error; none if no device ran out of memory."""
    found = next((str(e) for e in _chain(error) if _is_one(e)), None)
    if found is None:
        return []
    match = _ASKED.search(found)
    asked = None if match is None else parse_bytes(match[1] + match[2].replace("bytes", "B"))
    device, arrays = _fullest()
    capacity = profile_of(device).capacity
    stats = allocator_stats(device)
    limit = stats.get("bytes_limit")
    own = capacity if budget is None else parse_bytes(budget, capacity=capacity)
    shortage = Shortage(
        asked=asked,
        arrays=sum(kind.nbytes for kind in arrays),
        capacity=capacity if limit is None else limit,
        budget=own if limit is None else min(own, limit),
        free=None if limit is None else max(limit - stats.get("bytes_in_use", 0), 0),
        largest=stats.get("largest_free_block_bytes"),
    )
    more = "" if asked is None else f" for {format_bytes(asked)} more"
    lines = [f"out of memory: {device_name(device)} had no room{more}; {_of_arrays(arrays)}"]
    lines += [f"  {kind.count} x {kind.text}, {format_bytes(kind.nbytes)}" for kind in arrays[:_MOST]]
    lines += [f"  {_of_program(program)}" for program in _largest(programs)]
    return [*lines, f"what helps most: {advice(shortage)}"]


def _chain(error: BaseException) -> Iterable[BaseException]:
    """An error and those behind it."""
    seen = set[int]()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _is_one(error: BaseException) -> bool:
    return isinstance(error, jax.errors.JaxRuntimeError) and _SAID in str(error)


def _fullest() -> tuple[Any, list[Living]]:
    """The device of this process with the most bytes of arrays, and these by kind, the largest first."""
    each = ((device, living(device)) for device in jax.local_devices())
    return max(each, key=lambda found: sum(kind.nbytes for kind in found[1]))


def _of_arrays(arrays: Sequence[Living]) -> str:
    count = sum(kind.count for kind in arrays)
    if not count:
        return "no array lives there"
    return f"{count} arrays live there, {format_bytes(sum(kind.nbytes for kind in arrays))}"


def _largest(programs: Sequence[Program]) -> list[Program]:
    return sorted(programs, key=_bytes_of, reverse=True)[:_MOST]


def _bytes_of(program: Program) -> Bytes:
    if program.report is not None:
        return program.report.compiled.device
    return program.needs or 0


def _of_program(program: Program) -> str:
    place = f" at {short_place(program.place)}" if program.place else ""
    if program.report is not None and not program.report.unchanged:
        before, after = (format_bytes(m.device) for m in (program.report.baseline, program.report.compiled))
        return f"{program.name}{place} needs {after} with its arguments, planned; {before} as written"
    needs = "an unknown number of bytes" if program.needs is None else format_bytes(program.needs)
    return f"{program.name}{place} needs {needs} with its arguments, as written"


__all__ = ["Shortage", "advice", "told"]
