"""Exchanges in a plan that fits: keep values dear to recompute, drop cheap ones instead.

Segments are chosen for the bytes at the boundary and at their own recomputation, not value by value. Here single
products are kept after all. If that is too much, other values are dropped: live at the step over budget and cheap to
recompute per byte. Each exchange is laid out and measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from jaxtensile.ir.plan import Program
from jaxtensile.passes.recompute.clones import Recomputation
from jaxtensile.passes.recompute.stages import Boundary
from jaxtensile.switches import on
from jaxtensile.units import Bytes, Seconds

_TRIES, _WORTH = 8, 0.005
"""Ops tried, each of at least this share of the program's charge. A guess. At half and double no plan changes
with the first."""
_MEASURED = 4
"""Schedules measured for one op. A guess."""


class Trial(Protocol):
    """One kept set, laid out and measured. ``at_peak``: values with a version in memory at the peak."""

    @property
    def kept(self) -> frozenset[int]: ...
    @property
    def device(self) -> Bytes: ...
    @property
    def at_peak(self) -> frozenset[int]: ...


T = TypeVar("T", bound=Trial)


def local_search(
    budget: Bytes,
    start: Program,
    boundary: Boundary,
    recomputation: Recomputation,
    charge: Sequence[Seconds],
    measure: Callable[[frozenset[int]], T],
    best: T,
) -> T:
    """The cheapest of ``best``, which fits, and its exchanges. ``start``: the program that is planned."""
    graph = start.graph
    worth = _WORTH * sum(charge)
    tried: set[int] = set()
    for _ in range(_TRIES):
        again = recomputation.ops(best.kept)
        o = max(again - tried, key=lambda o: (charge[o], o), default=None)
        if o is None or charge[o] < worth or not on("local_search"):
            break
        tried.add(o)
        most = sum(charge[p] for p in again) - worth
        new = {r for r in graph.ops[o].results if r not in boundary.always}
        kept = best.kept | new
        for _ in range(_MEASURED):
            if sum(charge[p] for p in recomputation.ops(kept)) > most:
                break
            trial = measure(kept)
            if trial.device <= budget:
                best = trial
                break
            room = make_room(start, recomputation, charge, kept - new, trial.at_peak, trial.device - budget)
            if not room:
                break
            kept -= room
    return best


def make_room(
    start: Program,
    recomputation: Recomputation,
    charge: Sequence[Seconds],
    kept: frozenset[int],
    at_peak: frozenset[int],
    short: Bytes,
) -> set[int]:
    """The kept values cheapest to drop, of ``short`` bytes or more, among those ``at_peak``. Empty if those have fewer
    bytes."""
    graph, made = start.graph, recomputation.made
    again = recomputation.ops(kept)

    price: dict[int, Seconds] = {}
    for v in kept:
        if start.version_of[v] in at_peak and graph.values[v].nbytes and not graph.ops[made[v]].pinned:
            beside = recomputation.beside(again, kept, v)
            if not any(graph.ops[o].pinned for o in beside):  # it would read what only such an op makes
                price[v] = sum(charge[o] for o in beside)
    size = {v: graph.values[v].nbytes for v in price}
    chosen: set[int] = set()
    for v in sorted(price, key=lambda v: (price[v] / size[v], v)):  # the cheapest per byte, as many as it takes
        if short <= 0:
            break
        chosen.add(v)
        short -= size[v]
    return chosen if short <= 0 else set()
