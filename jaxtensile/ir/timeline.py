"""Predicted live device bytes while each op runs, for charts and traces.

Invariant: ``device[i]`` is argument + output + temp - alias while step ``i`` runs; its maximum is the predicted
``MemoryUse.device``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from jaxtensile.units import Bytes, Seconds

BARRIER = -1
"""``Track.origin`` of a barrier that the plan inserted, where a stage begins. A mark: no op has this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sites:
    """The ops of tracks: primitive, source line, predicted seconds of one run."""

    primitives: tuple[str, ...]
    sources: tuple[str, ...]
    seconds: tuple[Seconds, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps ``[start, stop)``: a barrier, then the ops repeated because of it."""

    start: int
    stop: int
    repeated: int
    """Number of ops that run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One program: device bytes and op of every step.

    ``base``: arguments + outputs - aliases, live in every step.
    """

    sites: Sites
    origin: tuple[int, ...]
    device: tuple[Bytes, ...]
    base: Bytes

    @property
    def peak(self) -> int:
        """The first step with the most bytes; 0 for an empty program."""
        return max(range(len(self.device)), key=self.device.__getitem__, default=0)

    def repeats(self) -> list[bool]:
        """For each step whether its op has run before."""
        seen: set[int] = set()
        out: list[bool] = []
        for o in self.origin:
            out.append(o in seen)
            if o != BARRIER:
                seen.add(o)
        return out

    def stages(self) -> list[Stage]:
        """The stages in which ops run again, in schedule order; without those before the first barrier, which fuse with
        their readers at no cost."""
        found: list[Stage] = []
        start, stop, count = -1, -1, 0
        for i, again in enumerate([*self.repeats(), False]):
            if i == len(self.origin) or self.origin[i] == BARRIER:
                if count and start >= 0:
                    found.append(Stage(start, stop, count))
                start, count = i, 0
            elif again:
                stop, count = i + 1, count + 1
        return found

    def seconds(self) -> list[Seconds]:
        """Predicted seconds of each step."""
        return [self.sites.seconds[o] if o != BARRIER else 0.0 for o in self.origin]

    def starts(self) -> list[Seconds]:
        """Predicted start of each step, then the end of the last one."""
        return list(accumulate(self.seconds(), initial=0.0))

    def label(self, step: int) -> str:
        """What a step does, for people."""
        o = self.origin[step]
        return "barrier" if o == BARRIER else f"{self.sites.primitives[o]} at {self.sites.sources[o]}"


@dataclass(frozen=True, slots=True)
class Timeline:
    """The plain program and, if it did not fit, the planned one."""

    plain: Track
    planned: Track | None

    def aligned(self) -> list[Bytes]:
        """For each planned step, the plain program's bytes at the same work.

        It stands still while the planned one repeats ops. Programs of different ops (rewritten loops) are stretched
        over each other.
        """
        plain, planned = self.plain, self.planned
        if planned is None:
            return list(plain.device)
        n, m = len(plain.device), len(planned.device)
        if plain.sites is planned.sites:
            ends = list(accumulate(planned.origin, max))
        else:
            ends = [(i + 1) * n // m - 1 for i in range(m)]
        out: list[Bytes] = []
        seen = 0  # plain steps drawn so far
        for end in ends:
            window = plain.device[seen : end + 1]
            out.append(max(window) if window else plain.device[max(seen - 1, 0)])
            seen = max(seen, end + 1)
        return out
