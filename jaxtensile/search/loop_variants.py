"""Variants whose loops' stacks are recomputed or wait in host memory, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from jaxtensile.faults import leaves_out
from jaxtensile.passes.offload.loops import LoopChoice, find_pairs
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.rewrites.loops.levels import INNER
from jaxtensile.rewrites.loops.loops import RECOMPUTATION, again_of, loop_ladder
from jaxtensile.rewrites.loops.strip_mine import STRIP_MINE
from jaxtensile.search.registry import with_rewrite
from jaxtensile.search.variant import Variant
from jaxtensile.switches import on
from jaxtensile.units import Bytes


@leaves_out(RECOMPUTATION, lambda start: [start])
def with_loops(start: Variant) -> list[Variant]:
    """``start``, and variants that recompute more and more of its loops' stacks; then the same with more done for the
    loops inside their iterations. Each is cheapest first."""
    if not on("loops"):
        return [start]
    made = (with_rewrite(start, INNER, plans) for plans in INNER.find(start))
    return [v for base in (start, *made) if base is not None for v in _with_loops(base)]


def _with_loops(start: Variant) -> list[Variant]:
    """``start``, and variants that recompute more and more of its loops' stacks, cheapest first."""
    graph = start.base.graph
    # Asked only where there are loops: the device may have to be tried for the answer. What it says is of plain loops.
    hosted = start.host and not start.has(STRIP_MINE) and find_pairs(graph) and on("loops_away")
    link = start.request.loop_link if hosted else None
    ladder, faults = loop_ladder(graph, start.request.device, link), start.request.faults
    room = start.request.host_budget
    at = cache(looping(start))

    def between(less: LoopChoice) -> Callable[[Bytes], list[Variant]]:
        return cache(
            lambda room: faults.spared(RECOMPUTATION, lambda: [at(way) for way in ladder.between(less, room)], list)
        )

    def less_away(rung: LoopChoice) -> Callable[[Bytes], list[Variant]]:
        found = cache(lambda: [v for v in map(at, ladder.aways(rung)) if v.aside <= room])
        return lambda _: faults.spared(RECOMPUTATION, found, list)

    def all_away(rung: LoopChoice) -> Variant:
        """The rung with all kept stacks on the host, or as much as has room."""
        every = at(ladder.away(rung))
        return every if every.aside <= room else at(ladder.away(rung, room / every.aside))

    rungs = sorted((at(way) for way in ladder.rungs), key=lambda v: v.charge)
    away = [replace(all_away(r.loops), finer=less_away(r.loops)) for r in rungs] if link is not None else []
    return [
        *(replace(rung, finer=between(rung.loops)) if i and on("loop_steps") else rung for i, rung in enumerate(rungs)),
        *(v for v in away if 0 < v.aside <= room),
    ]


def looping(start: Variant) -> Callable[[LoopChoice], Variant]:
    """A function from a way to rewrite the loops to ``start`` rewritten that way."""
    graph, device = start.base.graph, start.request.device
    again = again_of(graph, device)
    worth = cache(lambda: (start.known or op_costs(graph, device)).per_second)

    def at(way: LoopChoice) -> Variant:
        charge, seconds = start.charge, start.seconds
        for plan in way:
            own_charge, own_seconds = again(plan)
            charge += own_charge
            charge += plan.wait * worth() if plan.wait else 0.0
            seconds += own_seconds + plan.wait
        return replace(start, loops=way, charge=charge, seconds=seconds)

    return at
