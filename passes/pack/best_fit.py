"""Offsets that XLA's heap gives to buffers.

Buffers go by descending size, longest-lived first among equals. Each takes the smallest hole that is free for its
lifetime, else the top of all buffers it meets (``GlobalDecreasingSizeBestFitHeap`` in
``xla/service/heap_simulator/heap_simulator.cc``).

Invariant: buffers live together do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxtensile.passes.pack.buffers import Buffer, Packing, packing
from jaxtensile.units import Bytes


def best_fit(buffers: Sequence[Buffer]) -> Packing:
    """Offsets as XLA assigns them. Quadratic in buffers, by numpy."""
    n = len(buffers)
    order = sorted(range(n), key=lambda k: (-buffers[k].size, buffers[k].lower - buffers[k].upper, k))
    start, stop, low, high = (np.zeros(n, np.int64) for _ in range(4))
    offsets = [0] * n
    for placed, k in enumerate(order):
        b = buffers[k]
        meets = np.flatnonzero((start[:placed] < b.upper) & (stop[:placed] > b.lower))
        offsets[k] = offset = _hole(low[meets], high[meets], b.size, b.alignment)
        start[placed], stop[placed], low[placed], high[placed] = b.lower, b.upper, offset, offset + b.size
    return packing(buffers, offsets)


def _hole(low: np.ndarray, high: np.ndarray, size: Bytes, alignment: Bytes) -> Bytes:
    """The offset of the smallest hole that fits, the lowest of equals; else the top."""
    if not len(low):
        return 0
    by_offset = np.argsort(low, kind="stable")
    ends = np.maximum.accumulate(high[by_offset])
    ends += -ends % alignment
    begins = np.concatenate(([0], ends[:-1]))
    holes = low[by_offset] - begins
    fits = np.flatnonzero(holes >= size)
    if not len(fits):
        return int(ends[-1])
    return int(begins[fits[np.argmin(holes[fits])]])
