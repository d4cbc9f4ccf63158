"""Does a set of buffers fit below a capacity? Exactly, or as far as a time limit allows.

Invariant: "solved" comes with offsets below the capacity, "impossible" with a search that went through all there is.

Complete searches with many tactics take turns, each with more work than in the turn before; what one has found to lead
nowhere the others do not enter. The problem and its canonical solutions: MiniMalloc (Moffitt, ASPLOS 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import Final, Literal, get_args

from jaxtensile.passes.pack.buffers import Buffer, Packing, max_load
from jaxtensile.passes.pack.pack import pack
from jaxtensile.passes.pack.valleys import Edges, Order, Tactic, search
from jaxtensile.units import Bytes, Seconds

FIRST: Final = 18
"""Edges per buffer that the first turns' searches look at. A guess."""
GROWTH: Final = 4
"""Times as many edges in each next pair of turns, so that all earlier turns together cost a third of the last. A
guess."""
NOISE: Final = 0.5
"""Largest share by which the shaken turns change the order's numbers. A guess."""


@dataclass(frozen=True, slots=True)
class Answer:
    """``best``: the lowest packing found, not above the capacity if ``solved``. ``lower_bound``: bytes that every
    packing needs, above the capacity if ``impossible``. ``searches``, ``work``: how many, and edges looked at."""

    status: Literal["solved", "impossible", "timeout"]
    best: Packing
    lower_bound: Bytes
    searches: int
    work: int


def pack_exact(
    buffers: Sequence[Buffer], capacity: Bytes, limit: Seconds, clock: Callable[[], Seconds] = monotonic
) -> Answer:
    """Whether the buffers fit into ``capacity`` bytes, with offsets; ``limit``: seconds by ``clock``.

    What is found, and that there is nothing, does not depend on the machine; whether the time suffices does.
    """
    start = clock()
    best, bound = pack(buffers), max_load(buffers)
    if best.height <= capacity:
        return Answer("solved", best, bound, 0, 0)
    if bound > capacity:
        return Answer("impossible", best, bound, 0, 0)
    failed: set[bytes] = set()
    work = 0

    def late() -> bool:
        return clock() - start > limit

    for number, (tactic, edges) in enumerate(_turns()):
        if late():
            return Answer("timeout", best, bound, number, work)
        done = search(buffers, capacity, tactic, edges * len(buffers), failed, late)
        work += done.work
        if done.packed is not None:
            return Answer("solved", done.packed, bound, number + 1, work)
        if done.closed:
            return Answer("impossible", best, capacity + 1, number + 1, work)
    raise AssertionError("the turns have no end")


def _turns() -> Iterator[tuple[Tactic, int]]:
    """Tactics and edges per buffer: plain ones and shaken ones by turns."""
    seed = 0
    for turn in count():
        for order in get_args(Order):
            for edges in get_args(Edges):
                seed += 1
                yield Tactic(edges, order, NOISE if turn % 2 else 0.0, seed), FIRST * GROWTH ** (turn // 2)
