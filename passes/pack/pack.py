"""Low offsets of buffers in one arena: dynamic storage allocation, fast.

Invariant: the packing depends on the buffers alone, never on the clock. Their number and lifetimes decide how much is
tried.

The skyline packer runs with its rules. For few buffers, short searches below capacities just above the maximum load
follow, until one succeeds. They were chosen on MiniMalloc's instances. There size-descending best-fit (SmartPool, arXiv
1903.06631) needs a third more than the maximum load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from jaxtensile.passes.pack.best_fit import best_fit
from jaxtensile.passes.pack.buffers import Buffer, Packing, grid, max_load
from jaxtensile.passes.pack.skyline import RULES, stack
from jaxtensile.passes.pack.valleys import Tactic, search

MANY: Final = 20_000
"""Buffers above which there is time for one rule only: 10,000 take 0.4 s with all rules, 100,000 2 to 3 s with one
(``benchmarks/pack``)."""
Try = tuple[float, Tactic, int]
TIGHT: Final[tuple[Try, ...]] = (
    (1.0, Tactic("low", "length"), 7),
    (1.0, Tactic("deep", "size"), 7),
    (1.0, Tactic("deep", "area"), 7),
    (1.03, Tactic("low", "size"), 8),
    (1.07, Tactic("deep", "size"), 8),
)
LOOSE: Final[tuple[Try, ...]] = (
    (1.07, Tactic("left", "length"), 9),
    (1.07, Tactic("deep", "area"), 11),
    (1.13, Tactic("deep", "length"), 12),
)
"""Searches in order: capacity in maximum loads, tactic, and most edges looked at per buffer."""
QUADRATIC: Final = 5_000
"""Buffers up to which there is time to compare each with all others. A guess."""
LIGHT, MIDDLE, HEAVY = 4_000, 7_000, 10_000
"""Covered sections, summed over buffers, up to which there is time for all tries; for the loose ones; for the last.
Guesses; their results on published instances are in ``benchmarks/pack``."""


def pack(buffers: Sequence[Buffer]) -> Packing:
    """Offsets in bytes, in the order of the buffers, and the height of the arena. Deterministic.

    A tenth of a second for a few hundred buffers, ``O(n log n)`` from thousands on.
    """
    if not buffers:
        return Packing((), 0)
    rules = RULES if len(buffers) <= MANY else RULES[:1]
    packings = [stack(buffers, rule) for rule in rules]
    if len(buffers) <= QUADRATIC:
        packings.append(best_fit(buffers))  # of programs, which it often packs without a hole
    best = min(packings, key=lambda packed: packed.height)
    load = max_load(buffers)
    for ratio, tactic, edges in _tries(buffers):
        capacity = int(load * ratio)
        if capacity >= best.height:
            break
        found = search(buffers, capacity, tactic, edges * len(buffers)).packed
        if found is not None:
            return found
    return best


def _tries(buffers: Sequence[Buffer]) -> tuple[Try, ...]:
    if len(buffers) > HEAVY:
        return ()
    lives = grid(buffers)
    covered = sum(lives.last) - sum(lives.first)
    if covered <= LIGHT:
        return TIGHT + LOOSE
    return LOOSE if covered <= MIDDLE else LOOSE[-1:] if covered <= HEAVY else ()
