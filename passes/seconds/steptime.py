"""Seconds of a planned step at other work or link rates than it was planned for.

Invariant: the rules are those by which plans are compared: ``streaming.waiting`` for straight-line copies,
``loops.copying`` for copies of loops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtensile.ir.plan import Link, Program
from jaxtensile.passes.offload.loops import copying
from jaxtensile.passes.offload.streaming import waiting
from jaxtensile.units import Bytes, Seconds

_HALVINGS = 16
"""Bisection steps: the factor is known to 2^-16 of the measured ratio, far below the 30 % at which it is used
(``feedback.OFF``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCopies:
    """Slices that each iteration of a pair of loops stacks on the host: ``count`` of them, ``nbytes`` in all.

    ``forward``: seconds of work of one forward iteration.
    """

    trips: int
    count: int
    nbytes: Bytes
    forward: Seconds


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step: ``work``, and waiting for copies over ``link`` (None without copies).

    ``program``: the schedule, if it copies. ``seconds``: of every op of the original program.
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
        """Predicted seconds of a step with ``slower`` times the work time, and copies over ``link``."""
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
        """The factor by which work is slower if a step takes ``measured`` seconds; None if the copies alone take
        longer.

        One measurement determines one unknown: the ratios among kinds of kernels, and the link's rate, stay as given.
        """
        if self.work <= 0.0:
            return None
        if not self.copies:
            return measured / self.work
        # A step is never shorter where work is slower, and never shorter than its work.
        return _root(lambda slower: self.at(slower, link) - measured, measured / self.work)


def _root(excess: Callable[[float], float], high: float) -> float | None:
    """The zero of a growing function that is positive at ``high``; None if it is positive at once."""
    if excess(high * 2.0**-_HALVINGS) > 0.0:
        return None
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) > 0.0 else (middle, high)
    return (low + high) / 2


__all__ = ["LoopCopies", "StepTime"]
