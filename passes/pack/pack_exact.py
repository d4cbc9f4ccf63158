"""Whether buffers fit below a capacity: exactly, or as far as a time limit allows.

Invariant: "solved" comes with offsets below the capacity, "impossible" with a completed search.

Complete searches with many tactics take turns, each with more work than the last. States that failed in one are skipped
by the others. Problem and canonical solutions: MiniMalloc (Moffitt, ASPLOS 2023).
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
"""Edges per buffer in the first turns' searches. A guess."""
GROWTH: Final = 4
"""Factor on edges for each next pair of turns: all earlier turns together cost a third of the last. A guess."""
NOISE: Final = 0.5
"""Largest share by which shaken turns change the order's numbers. A guess."""


@dataclass(frozen=True, slots=True)
class Answer:
    """``best``: the lowest packing found, within the capacity if ``solved``. ``lower_bound``: bytes of any packing,
    above the capacity if ``impossible``. ``searches``: how many ran. ``work``: edges looked at."""

    status: Literal["solved", "impossible", "timeout"]
    best: Packing
    lower_bound: Bytes
    searches: int
    work: int


def pack_exact(
    buffers: Sequence[Buffer], capacity: Bytes, limit: Seconds, clock: Callable[[], Seconds] = monotonic
) -> Answer:
    """Whether the buffers fit into ``capacity`` bytes, with offsets. ``limit``: seconds by ``clock``.

    Results do not depend on the machine; whether the time suffices does.
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
    """Tactics with edges per buffer, plain and shaken by turns."""
    seed = 0
    for turn in count():
        for order in get_args(Order):
            for edges in get_args(Edges):
                seed += 1
                yield Tactic(edges, order, NOISE if turn % 2 else 0.0, seed), FIRST * GROWTH ** (turn // 2)
