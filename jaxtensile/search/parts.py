"""The numbers of parts that a step's batch may be worked on in, and why there are none."""

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
"""Ops named at most that end the rows. A guess: a line."""
TRIED: Final = 8
"""So many parts at least say whether parts help at all; the most there may be where those are fewer. A guess."""


class Chunks:
    """``start`` with its batch, or whatever has many rows, worked on in parts of equally many rows. Made when first
    asked for."""

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
        """The numbers of parts there may be."""
        return parts_of(self.seed.rows) if self.seed is not None else ()

    @property
    def helps(self) -> bool:
        """Whether a few parts need fewer bytes, by the model."""
        made = self.at(next((k for k in self.parts if k >= TRIED), self.parts[-1])) if self.parts else None
        return made is not None and live_ranges(made.base.graph).temp < live_ranges(self.start.base.graph).temp

    def at(self, parts: int) -> Variant | None:
        """In so many parts; None where it cannot be."""
        if parts not in self._made:
            self._made[parts] = None if self.seed is None else at(self.start, PARTS, (self.seed, parts))
        return self._made[parts]


def why_not_in_parts(request: Request, traced: Traced) -> str:
    """Why a program that may be worked on in parts cannot be; empty where it can, or was not asked to."""
    if request.chunk is not True:
        return ""
    if request.shards > 1:
        return "chunk=True has no effect on arguments that are sharded over several devices"
    least = large(traced)
    if request.faults.spared(PARTS.title, lambda: find_region(traced, least), lambda: None) is not None:
        return ""
    named = [f"{traced.graph.ops[o].primitive} at {traced.source(o)}" for o in ends(traced, least)]
    told = list(dict.fromkeys(named))[:FEW]
    why = f"{' and '.join(told)} cannot be done for some rows of an array" if told else "nothing large has any"
    return f"chunk=True found no rows to work on in parts: {why}"
