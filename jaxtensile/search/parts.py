"""Numbers of parts that a step's batch can be split into, and why there are none."""

from __future__ import annotations

from functools import cached_property
from typing import Final

from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.program.trace import Traced
from jaxtensile.rewrites.microbatch import PARTS, parts_of
from jaxtensile.rewrites.rewrite import large
from jaxtensile.rewrites.rows.region import Seed, ends, find_region
from jaxtensile.search.registry import at
from jaxtensile.search.request import Request
from jaxtensile.search.variant import Variant

FEW: Final = 2
"""Ops that end the rows, named at most. A guess: a line."""
TRIED: Final = 8
"""Least number of parts that shows whether parts help; the most possible if fewer. A guess."""


class Chunks:
    """``start`` with its batch, or any large set of rows, split into parts of equally many rows. Made on first use."""

    def __init__(self, start: Variant) -> None:
        self.start = start
        self._made: dict[int, Variant | None] = {}

    @cached_property
    def seed(self) -> Seed | None:
        """Where the rows come from."""
        found = self.start.request.faults.spared(
            PARTS.title, lambda: find_region(self.start.base, large(self.start.base)), lambda: None
        )
        return found.seed if found is not None else None

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Possible numbers of parts."""
        return parts_of(self.seed.rows) if self.seed is not None else ()

    @property
    def helps(self) -> bool:
        """Whether a few parts need fewer bytes, by the model."""
        made = self.at(next((k for k in self.parts if k >= TRIED), self.parts[-1])) if self.parts else None
        return made is not None and live_ranges(made.base.graph).temp < live_ranges(self.start.base.graph).temp

    def at(self, parts: int) -> Variant | None:
        """The variant in ``parts`` parts; None if impossible."""
        if parts not in self._made:
            self._made[parts] = None if self.seed is None else at(self.start, PARTS, (self.seed, parts))
        return self._made[parts]


def why_not_in_parts(request: Request, traced: Traced) -> str:
    """Why ``chunk=True`` finds no parts; empty if it does, or was not given."""
    if request.chunk is not True:
        return ""
    if not request.whole:
        return "chunk=True has no effect on arguments that are sharded over several devices"
    least = large(traced)
    if request.faults.spared(PARTS.title, lambda: find_region(traced, least), lambda: None) is not None:
        return ""
    named = [f"{traced.graph.ops[o].primitive} at {traced.source(o)}" for o in ends(traced, least)]
    told = list(dict.fromkeys(named))[:FEW]
    why = f"{' and '.join(told)} cannot be done for some rows of an array" if told else "nothing large has any"
    return f"chunk=True found no rows to work on in parts: {why}"
