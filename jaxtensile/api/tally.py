"""What was planned in a process, and the table of it on standard error when it ends.

Invariant: what a program prints on standard output stays its own. A process in which nothing was planned ends with one
line.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtensile.places import short_place
from jaxtensile.units import Bytes, format_bytes, format_seconds

if TYPE_CHECKING:
    from jaxtensile.report.facts import Facts  # of plans, which most programs do not need

_NAME = "jaxtensile"


@dataclass(slots=True)
class Program:
    """One function at one signature. ``needs``: bytes as written, None if not known. ``budget``: of one call.

    ``report``: of its plan; None: it runs as it is.
    """

    name: str
    place: str
    needs: Bytes | None
    budget: Bytes
    report: Facts | None = None
    why: str = ""


class Tally:
    """The programs of a process that were planned, or too large to be sure of without their compiler."""

    def __init__(self) -> None:
        self.small = 0
        """Signatures with ample room."""
        self.programs: list[Program] = []
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def fits(self) -> None:
        """A signature that has ample room."""
        with self._lock:
            self.small += 1

    def add(self, program: Program) -> Program:
        """Another program, for the table."""
        with self._lock:
            self.programs.append(program)
        return program

    def say(self, text: str) -> None:
        """One line on standard error, once."""
        with self._lock:
            if text in self._told:
                return
            self._told.add(text)
        tell(text)

    def summary(self) -> list[str]:
        """The lines to end with."""
        planned = [p for p in self.programs if p.report is not None and not p.report.unchanged]
        count = self.small + len(self.programs)
        if not planned:
            return [self._nothing(count)]
        rows = [_row(p) for p in self.programs]
        head = ("program", "needs", "budget", "has", "step", "", "at")
        return [f"{len(planned)} of {_programs(count)} planned", *(f"  {line}" for line in _aligned((head, *rows)))]

    def _nothing(self, count: int) -> str:
        if not count:
            return "nothing was planned: no jax.jit of this process was called"
        reasons = "; ".join(dict.fromkeys(f"{p.name}: {p.why}" for p in self.programs if p.why))
        if reasons:
            return f"nothing was planned: {reasons}"
        most = max((p.needs for p in self.programs if p.needs is not None), default=None)
        largest = "" if most is None else f", the largest needs {format_bytes(most)}"
        return f"nothing was planned: {_programs(count)} had room as written{largest}"


def tell(text: str) -> None:
    """One line of ours on standard error."""
    with suppress(OSError, ValueError):  # it may be closed
        print(f"{_NAME}: {text}", file=sys.stderr, flush=True)


def _programs(count: int) -> str:
    return f"{count} program{'s' * (count != 1)}"


def _row(program: Program) -> tuple[str, ...]:
    report, place = program.report, short_place(program.place)
    needs = "-" if program.needs is None else format_bytes(program.needs)
    if program.needs is None and report is not None:
        needs = f"{'' if report.baseline.exact else 'about '}{format_bytes(report.baseline.device)}"
    if report is None or report.unchanged:
        return program.name, needs, format_bytes(program.budget), needs, "", program.why or "as written", place
    has = format_bytes(report.compiled.device)
    step = f"{100 * report.overhead_ratio:+.1f} %"
    took = "" if report.measured is None else f", measured {format_seconds(report.measured)}"
    predicted = f"predicted {format_seconds(report.step)}{took}{f', {program.why}' if program.why else ''}"
    return program.name, needs, format_bytes(program.budget), has, step, predicted, place


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell: text to the left, numbers to the right."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    left = {0, 5, 6}

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(f"{c:<{w}}" if k in left else f"{c:>{w}}" for k, (c, w) in cells).rstrip()

    return [line(row) for row in rows]


__all__ = ["Program", "Tally", "tell"]
