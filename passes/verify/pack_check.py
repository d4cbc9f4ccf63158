"""Check that no buffer of a packing overlaps another that is live at the same time.

Invariant: shares nothing with the packers; derives everything from the buffers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from jaxtensile.passes.pack.buffers import Buffer, Packing


def faults(buffers: Sequence[Buffer], packed: Packing) -> list[str]:
    """The faults of a packing, one sentence each; empty if it holds.

    A sweep over time keeps the live buffers by offset: before the first overlap a new buffer can only overlap its
    neighbours. ``O(n log n)`` comparisons; after an overlap, later ones may be missed.
    """
    if len(packed.offsets) != len(buffers):
        return [f"{len(packed.offsets)} offsets for {len(buffers)} buffers"]
    wrong: list[str] = []
    for k, (b, o) in enumerate(zip(buffers, packed.offsets, strict=True)):
        if o < 0 or o % b.alignment:
            wrong.append(f"buffer {k} is at {o}: not a multiple of {b.alignment}")
        if o + b.size > packed.height:
            wrong.append(f"buffer {k} ends at {o + b.size}: above the height {packed.height}")
    solid = [k for k, b in enumerate(buffers) if b.size]
    events = [(buffers[k].upper, 0, k) for k in solid] + [(buffers[k].lower, 1, k) for k in solid]
    live: list[tuple[int, int]] = []
    for _, begins, k in sorted(events):
        item = (packed.offsets[k], k)
        if not begins:
            del live[bisect_left(live, item)]
            continue
        insort(live, item)
        place = bisect_left(live, item)
        for below, above in ((place - 1, place), (place, place + 1)):
            if below >= 0 and above < len(live):
                (low, a), (high, b) = live[below], live[above]
                if low + buffers[a].size > high:
                    wrong.append(f"buffers {a} and {b} are live at once and overlap at {high}")
    return wrong
