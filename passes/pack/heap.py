"""Height of XLA's heap of a program's temporaries, holes included.

``passes.pack`` packs lower; this is what XLA itself takes.
"""

from __future__ import annotations

from itertools import accumulate

from jaxtensile.passes.lifetimes.liveness import Liveness
from jaxtensile.passes.pack.best_fit import best_fit
from jaxtensile.passes.pack.buffers import Buffer
from jaxtensile.switches import on
from jaxtensile.units import Bytes


def heap(live: Liveness) -> Bytes:
    """Bytes of a run's temporaries, with the holes between them."""
    return best_fit(temporaries(live)).height if on("heap_holes") else live.temp


def temporaries(live: Liveness) -> list[Buffer]:
    """A run's temporaries and the needs of its loop and branch bodies, as buffers over its kernels."""
    kernel = [*accumulate(live.kernels.is_root, initial=0)]
    """By step, how many kernels come before: XLA orders equal buffers by the number of kernels that they outlive."""
    buffers = [Buffer(kernel[r.start], max(kernel[r.stop], kernel[r.start] + 1), r.nbytes) for r in live.ranges]
    held = [0] * (len(live.profile) + 1)
    for r in live.ranges:
        held[r.start] += r.nbytes
        held[min(r.stop, len(live.profile))] -= r.nbytes
    for step, (all_bytes, outside) in enumerate(zip(live.profile, accumulate(held), strict=False)):
        if all_bytes > outside:  # what the op's bodies need inside
            buffers.append(Buffer(kernel[step], kernel[step] + 1, all_bytes - outside))
    return buffers
