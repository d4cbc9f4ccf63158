"""The boundary of a program, the residuals that wait there, and the cut points of its forward part.

Residuals pile up in the forward part and are used in the backward part. The boundary is the step with the most bytes
live but idle. Cut points are local minima of the bytes that the rest of the forward part still needs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise

from jaxtensile.ir.ir import Graph
from jaxtensile.passes.lifetimes.liveness import Liveness
from jaxtensile.switches import on

PROMINENCE = 1.3
"""A cut point counts if the profile rises by this factor before the next one. A guess. At 1.15 no plan changes; at 1.6
some do."""


NARROW, NEIGHBOURS = 1.25, 2
"""A cut point is narrow if at most this factor wider than its neighbours, so many to each side. A guess. At 1.125 and
at 1.5 no plan changes."""
FEW, MOST = 3, 32
"""With fewer cut points than the first, a level forward part is cut into at most about the second. A guess."""
SHORTEST, LONGEST, WINDOWS = 2, 64, 64
"""Ops in the shortest gap between two uses that is worth an eviction: least, most, and between them one of so many
parts of the program. A guess."""
QUARTER = 4
"""The usual width of a level forward part: one step in so many is narrower, such as its ends. A guess."""
PLATEAU = 0.9
"""The boundary is the highest step among those with this share of the most idle bytes. A guess. At 0.95 no plan
changes; at 0.8 two do."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """One boundary: ops before ``step`` are the forward part, the others the backward part.

    ``needed``: values made before the boundary, read after it, and idle long enough around it. ``always``: values
    available after the boundary in any case. ``cone``: ops before the boundary that can recompute something needed,
    ascending.
    """

    step: int
    needed: tuple[int, ...]
    always: frozenset[int]
    cone: tuple[int, ...]


def idle_window(graph: Graph) -> int:
    """Shortest gap between two uses, in steps, that is worth an eviction."""
    return max(SHORTEST, min(LONGEST, len(graph.ops) // WINDOWS))


def use_steps(graph: Graph) -> list[list[int]]:
    """For each value its steps of definition and use, ascending; inputs start at -1."""
    steps: list[list[int]] = [[] for _ in graph.values]
    for v in graph.inputs:
        steps[v].append(-1)
    for op in graph.ops:
        for v in dict.fromkeys(op.operands):
            steps[v].append(op.id)
        for r in op.results:
            steps[r].append(op.id)
    return steps


def buffer_steps(graph: Graph, live: Liveness) -> list[list[int]]:
    """For each buffer the steps at which a kernel touches it or what took over its memory, or copies it to where it
    belongs."""
    kernels, owner = live.kernels, live.owner
    steps: list[list[int]] = [[] for _ in graph.values]
    for op in graph.ops:
        if kernels.is_root[op.id]:
            for b in kernels.reads[op.id]:
                steps[owner[b]].append(op.id)
            for r in op.results:
                if kernels.home[r] == r:
                    steps[owner[r]].append(op.id)
    for r in live.ranges:
        touched = steps[r.value]
        if touched and touched[-1] != r.stop - 1:
            steps[r.value] = [i for i in touched if i < r.stop - 1] + [r.stop - 1]
    return steps


def find_boundary(graph: Graph, live: Liveness, budget_temp: int) -> int | None:
    """The step over budget with the most idle bytes; None if nothing idles there."""
    window = idle_window(graph)
    touches = buffer_steps(graph, live)
    n = len(graph.ops)
    delta = [0] * (n + 1)
    for r in live.ranges:
        points = touches[r.value]
        for a, b in pairwise(points):
            if b - a > window:
                delta[a + 1] += r.nbytes
                delta[b] -= r.nbytes
    idle = list(accumulate(delta))[:n]
    over = [i for i in range(n) if live.profile[i] > budget_temp and idle[i] > 0]
    if not over:
        return None
    most = max(idle[i] for i in over)
    level = PLATEAU if on("plateau") else 1.0
    return max((i for i in over if idle[i] >= level * most), key=lambda i: (live.profile[i], -i))


def boundary_at(graph: Graph, step: int) -> Boundary:
    """The ``Boundary`` at ``step``."""
    window = idle_window(graph)
    steps = use_steps(graph)
    fixed: set[int] = {*graph.inputs, *graph.outputs}
    always = set(fixed)
    needed: list[int] = []
    made: dict[int, int] = {r: op.id for op in graph.ops[:step] for r in op.results}
    for v, op_id in made.items():
        after = bisect_left(steps[v], step)
        if after >= len(steps[v]):
            continue
        gap = steps[v][after] - steps[v][bisect_right(steps[v], step - 1) - 1]
        if v in fixed:
            continue
        if gap <= window or graph.ops[op_id].pinned or graph.values[v].space == "host":
            always.add(v)
        else:
            needed.append(v)
    cone: set[int] = set()
    todo = [made[v] for v in needed]
    while todo:
        o = todo.pop()
        if o in cone:
            continue
        cone.add(o)
        op = graph.ops[o]
        if op.pinned:
            continue
        todo.extend(made[u] for u in op.operands if u not in always and u in made and made[u] not in cone)
    return Boundary(step, tuple(needed), frozenset(always), tuple(sorted(cone)))


def cut_points(graph: Graph, boundary: Boundary) -> tuple[list[int], list[int]]:
    """Steps before the boundary at which few bytes cross to the rest of the forward part, ascending.

    A cut at step ``w`` separates ops ``< w`` from ops ``>= w``. Returns all cut points (possible starts of stages) and
    the narrow ones (worth keeping all that crosses).
    """
    cone, always = boundary.cone, boundary.always
    if not cone:
        return [], []
    made: dict[int, int] = {r: o for o in cone for r in graph.ops[o].results if r not in always}
    last: dict[int, int] = {}
    for o in cone:
        for u in graph.ops[o].operands:
            if u in made:
                last[u] = o
    delta = [0] * (boundary.step + 2)
    for v, o in last.items():
        delta[made[v] + 1] += graph.values[v].nbytes
        delta[o + 1] -= graph.values[v].nbytes
    profile = list(accumulate(delta))
    costly = [bool(op.flops) for op in graph.ops] if on("cuts_behind_products") else [False] * len(graph.ops)
    found = _valleys(profile, list(cone), costly)
    if len(found) < FEW and on("level_cuts"):
        found = sorted({*found, *_level(profile, list(cone), costly)})
    width = [profile[w] for w in found]
    narrow = [
        w for i, w in enumerate(found) if width[i] <= NARROW * min(width[max(i - NEIGHBOURS, 0) : i + NEIGHBOURS + 1])
    ]
    return found, narrow if on("narrow_cuts") else found


def _level(profile: list[int], steps: list[int], costly: list[bool]) -> list[int]:
    """Evenly spaced steps of a forward part that is about equally narrow everywhere, such as a plain chain."""
    widths = sorted(profile[s] for s in steps if profile[s] > 0)
    level = widths[len(widths) // QUARTER] if widths else 0
    low = [s for s in steps if 0 < profile[s] <= NARROW * level]
    # What crosses right behind a product is dear to make again, what comes after it cheap.
    low = [s for s in low if s > 0 and costly[s - 1]] or low
    return low[:: max(len(low) // MOST, 1)][1:]


def _valleys(profile: list[int], steps: list[int], costly: list[bool]) -> list[int]:
    """Local minima of ``profile`` over ``steps`` whose sides rise by ``PROMINENCE``.

    ``costly``: ops that are dear to rerun; of equal minima the one behind such an op is taken.
    """
    found: list[int] = []
    low_step, low, high = -1, float("inf"), 0.0
    falling = False
    for s in steps:
        here = profile[s]
        if not falling:
            high = max(high, here)
            if here * PROMINENCE < high:
                falling, low_step, low = True, s, here
        elif here < low or (here == low and s > 0 and costly[s - 1] and not costly[low_step - 1]):
            low_step, low = s, here
        elif here > low * PROMINENCE and here > 0:
            if low > 0:
                found.append(low_step)
            falling, high = False, here
    return found
