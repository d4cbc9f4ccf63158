"""The list of rewrites, and variants with one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from jaxtensile.rewrites.early_updates import EARLY_UPDATES
from jaxtensile.rewrites.loops.in_place_loops import IN_PLACE_LOOPS
from jaxtensile.rewrites.loops.levels import INNER
from jaxtensile.rewrites.loops.sink import SINK
from jaxtensile.rewrites.loops.sink_invariants import SINK_INVARIANTS
from jaxtensile.rewrites.loops.strip_mine import STRIP_MINE
from jaxtensile.rewrites.merge_branches import MERGE_BRANCHES
from jaxtensile.rewrites.microbatch import PARTS
from jaxtensile.rewrites.rewrite import Rewrite, Taken
from jaxtensile.rewrites.split import SLICES
from jaxtensile.search.variant import Variant
from jaxtensile.search.variants import priced
from jaxtensile.switches import on

REWRITES: Final[list[Rewrite]] = [
    SINK,
    EARLY_UPDATES,
    IN_PLACE_LOOPS,
    PARTS,
    INNER,
    SLICES,
    MERGE_BRANCHES,
    SINK_INVARIANTS,
    STRIP_MINE,
]
"""Last-resort rewrites are tried in this order."""


def last() -> list[Rewrite]:
    """Rewrites tried in turn once nothing else fits."""
    return [rewrite for rewrite in REWRITES if rewrite.last]


def named(key: str) -> Rewrite:
    """The rewrite with this key. Raises ``LookupError``."""
    found = next((rewrite for rewrite in REWRITES if rewrite.key == key), None)
    if found is None:
        raise LookupError(f"no rewrite is called {key!r}")
    return found


def with_rewrite(start: Variant, rewrite: Rewrite, sites: Any) -> Variant | None:
    """``start`` with a rewrite at ``sites``; None if it changes nothing."""
    base = rewrite.apply(start, sites) if on(rewrite.key) else None
    if base is None:
        return None
    made = priced(replace(start, base=base, taken=(*start.taken, Taken(rewrite, sites))))
    if rewrite.same_work:
        return replace(made, charge=start.charge, seconds=start.seconds)
    seconds = sum(made.known.seconds if made.known is not None else start.whole.seconds)
    idle = rewrite.extra(start, base, seconds) * start.whole.per_second
    return replace(made, charge=made.charge + idle, idle=made.idle + idle) if idle else made


def at(start: Variant, rewrite: Rewrite, sites: Any) -> Variant | None:
    """The same; also None if the rewrite fails, which disables it."""
    return start.request.faults.spared(rewrite.title, lambda: with_rewrite(start, rewrite, sites), lambda: None)


def ways(start: Variant, rewrite: Rewrite) -> list[Variant]:
    """``start`` with a rewrite, in each possible way."""

    def made() -> list[Variant]:
        found = (with_rewrite(start, rewrite, sites) for sites in rewrite.find(start))
        return [variant for variant in found if variant is not None]

    if not (start.request.whole or rewrite.sharded):
        return []
    return start.request.faults.spared(rewrite.title, made, list)
