"""Run a region of the program as a loop over parts of the batch.

``rows`` finds the region and makes the loop; this file chooses the numbers of parts and prices them.
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
"""The most rows: a loop counts them with 32 bits."""
STARTS: Final = 2
"""Times ``kernel_launch`` to start a kernel of a loop. A guess."""
MOST_PARTS: Final = 256
"""Most parts: each starts all its kernels again. A guess."""

Sites = tuple[Seed, int]
"""Where the rows come from, and the number of parts."""


def parts_of(rows: int) -> tuple[int, ...]:
    """The numbers of parts that ``rows`` can be divided into."""
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
    backend = request.device.backend
    return changed(start, lambda: in_chunks(start.base, request.jaxpr, own, parts, backend=backend))


def _idle(start: Start, made: Traced, seconds: Seconds) -> Seconds:
    """Seconds by which launching all kernels takes longer than running them."""
    return max(STARTS * launches(made.graph, start.request.device) - seconds, 0.0)


def _describe(sites: Sites) -> str:
    (_, _, rows, _), parts = sites
    return f"work on {rows} rows is done in {parts} parts, {rows // parts} rows at a time"


PARTS = Rewrite(
    key="parts",
    title="work on the batch in parts",
    sharded=False,
    form=tuple[Seed, int],
    find=_find,
    apply=_apply,
    describe=_describe,
    extra=_idle,
)
