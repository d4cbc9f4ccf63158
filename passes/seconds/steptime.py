"""How long does a planned step take where work is slower, or the link another, than it was planned for?

Invariant: at the rates that it was planned for, and at others, the step is priced by the same rules as plans
are compared by: ``streaming.waiting`` for copies in straight-line code, ``loops.copying`` for those of loops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtensile.ir.plan import Link, Program
from jaxtensile.passes.offload.loops import copying
from jaxtensile.passes.offload.streaming import waiting
from jaxtensile.units import Bytes, Seconds

_HALVINGS = 16
"""Steps of the bisection: the factor is known to 2^-16 of the measured ratio, far below the 30 % from which on it is
used (``feedback.OFF``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCopies:
    """What every iteration of a pair of loops stacks on the host: ``count`` slices of ``nbytes`` in all.

    ``forward``: seconds of work of one iteration of the forward loop.
    """

    trips: int
    count: int
    nbytes: Bytes
    forward: Seconds


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step: ``work``, and waiting for copies over ``link``, None where nothing is copied.

    ``program``: the schedule, if it copies; ``seconds``: of every op of the program that it was made from.
    """

    work: Seconds
    link: Link | None = None
    program: Program | None = None
    seconds: tuple[Seconds, ...] = ()
    loops: tuple[LoopCopies, ...] = ()

    @property
    def copies(self) -> bool:
        """Whether anything crosses the link."""
        return self.link is not None and (self.program is not None or bool(self.loops))

    def at(self, slower: float = 1.0, link: Link | None = None) -> Seconds:
        """Predicted seconds of a step whose work takes ``slower`` times as long, with copies over ``link``."""
        link = link or self.link
        wait = 0.0
        if link is not None:
            if self.program is not None:
                wait += waiting(self.program, [slower * s for s in self.seconds], link)
            for loop in self.loops:
                one_way = loop.count * link.latency + loop.nbytes / link.bandwidth
                wait += copying(loop.trips, one_way, slower * loop.forward)
        return slower * self.work + wait

    def slower(self, measured: Seconds, link: Link | None = None) -> float | None:
        """By which factor work is slower if a step takes ``measured`` seconds; None if the copies alone take longer.

        One time of one program is one equation. Its unknown is this factor: how work is divided among kinds of
        kernels, and how fast the link is, remain as they are given.
        """
        if self.work <= 0.0:
            return None
        if not self.copies:
            return measured / self.work
        # A step is never shorter where work is slower, and never shorter than its work.
        return _root(lambda slower: self.at(slower, link) - measured, measured / self.work)


def _root(excess: Callable[[float], float], high: float) -> float | None:
    """Where a growing function that is positive at ``high`` crosses zero; None when it is positive at once."""
    if excess(high * 2.0**-_HALVINGS) > 0.0:
        return None
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) > 0.0 else (middle, high)
    return (low + high) / 2


__all__ = ["LoopCopies", "StepTime"]
