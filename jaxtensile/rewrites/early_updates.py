"""Updates right behind their gradients: the same ops, ordered so that no large gradient waits for others."""

from __future__ import annotations

from jaxtensile.passes.order.early_updates import early_updates
from jaxtensile.program.cse import rebuilt
from jaxtensile.rewrites.rewrite import Rewrite, Start, large

_SMALLER = 4
"""How many times smaller than ``large`` a value worth waiting for may be: updates are many. A guess."""


def _find(start: Start) -> list[tuple[int, ...]]:
    # Where updates wait for state from the host anyway, and for compilers that do not keep to the order that barriers
    # give, there is none.
    if not start.request.device.backend.heeds_barriers or start.request.state:
        return []
    order = early_updates(start.base.graph, least=large(start.base) // _SMALLER)
    return [] if order is None else [tuple(order)]


EARLY_UPDATES = Rewrite(
    key="early_updates",
    title="updates right behind their gradients",
    form=tuple[int, ...],
    find=_find,
    apply=lambda start, order: rebuilt(start.base, {}, order)[0],
    describe=lambda _: "updates are done behind their own gradients, not behind all",
    reorders=True,
)
