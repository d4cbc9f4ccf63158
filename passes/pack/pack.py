"""Where in one arena does each buffer lie, so that it is low? Dynamic storage allocation, fast.

Invariant: the packing depends on the buffers alone, never on the clock: how much is tried follows from their number
and lifetimes.

The skyline packer by its rules; where there are few buffers, then short searches below capacities a little above the
maximum load, until one succeeds. Which searches, in which order, was chosen on the instances of MiniMalloc, where
size-descending best-fit, the rule of SmartPool (arXiv 1903.06631), needs a third more than the maximum load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from jaxtensile.passes.pack.best_fit import best_fit
from jaxtensile.passes.pack.buffers import Buffer, Packing, grid, max_load
from jaxtensile.passes.pack.skyline import RULES, stack
from jaxtensile.passes.pack.valleys import Tactic, search

MANY: Final = 20_000
"""Buffers above which one rule is all there is time for: 10,000 take 0.4 s with all rules, 100,000 2 to 3 s with one
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
"""Searches in their order: capacity in maximum loads, how to search, and how many edges per buffer it may look at."""
QUADRATIC: Final = 5_000
"""Buffers up to which there is time to compare each with all others. A guess."""
LIGHT, MIDDLE, HEAVY = 4_000, 7_000, 10_000
"""Covered sections, summed over buffers, up to which there is time for all tries; for the loose ones; for the last.
Guesses; what they come to on published instances is in ``benchmarks/pack``."""


def pack(buffers: Sequence[Buffer]) -> Packing:
    """Offsets in bytes, in the order of the buffers, and the height of the arena.

    A tenth of a second for a few hundred buffers, ``O(n log n)`` from thousands on; the same packing whenever asked.
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
