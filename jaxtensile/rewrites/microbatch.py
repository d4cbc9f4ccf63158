"""Work on the batch in parts: a region of the program as a loop over some of its rows at a time.

``rows`` knows which region that may be and makes the loop; here is how often it may be divided, and what that costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from jaxtensile.passes.seconds.cost import launches
from jaxtensile.program.trace import Traced
from jaxtensile.rewrites.rewrite import Rewrite, Start, changed, large
from jaxtensile.rewrites.rows.chunk import in_chunks
from jaxtensile.rewrites.rows.region import Seed, find_region, region_of
from jaxtensile.units import Seconds

MOST_ROWS: Final = 2**31 - 1
"""A loop counts them with 32 bits."""
STARTS: Final = 2
"""Times ``kernel_launch`` that a kernel of a loop takes to be started. A guess."""
MOST_PARTS: Final = 256
"""Work is done in so many parts at most: each starts all its kernels again. A guess."""

Sites = tuple[Seed, int]
"""Where the rows come from, and in how many parts they are worked on."""


def parts_of(rows: int) -> tuple[int, ...]:
    """The numbers of parts that so many rows may be worked on in."""
    most = min(rows, MOST_PARTS) if rows <= MOST_ROWS else 1
    return tuple(k for k in range(2, most + 1) if rows % k == 0)


def _find(start: Start) -> Iterator[Sites]:
    own = find_region(start.base, large(start.base))
    if own is not None:
        yield from ((own.seed, k) for k in parts_of(own.seed.rows))


def _apply(start: Start, sites: Sites) -> Traced | None:
    request, (seed, parts) = start.request, sites
    own = region_of(start.base, seed)
    if own is None:
        return None
    mixed = request.device.backend.widens_sums
    return changed(start, lambda: in_chunks(start.base, request.jaxpr, own, parts, mixed=mixed))


def _idle(start: Start, made: Traced, seconds: Seconds) -> Seconds:
    """Kernels are started while others run: what it takes to start them counts once it takes longer than they do."""
    return max(STARTS * launches(made.graph, start.request.device) - seconds, 0.0)


def _describe(sites: Sites) -> str:
    (_, _, rows, _), parts = sites
    return f"work on {rows} rows is done in {parts} parts, {rows // parts} rows at a time"


PARTS = Rewrite(
    key="parts",
    title="work on the batch in parts",
    form=tuple[Seed, int],
    find=_find,
    apply=_apply,
    describe=_describe,
    extra=_idle,
)
