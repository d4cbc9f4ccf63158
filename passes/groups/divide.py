"""Where to cut: the least added cost in at most so many groups, none of them too long or too large.

A dynamic programme over cut points, exact for the table it is given:

    f[k][j] = min over i < j, where segment (i, j) is allowed, of f[k - 1][i] + added[i][j]

The shortest longest group is found by the same recurrence with the maximum in place of the sum.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxtensile.passes.groups.segments import Floats, Segments
from jaxtensile.units import Bytes, Seconds

SLACK = 0.1
"""Share by which the longest group may be longer than the shortest possible, for cheaper cuts. A guess."""


def divide(
    table: Segments, count: int, longest: Seconds = np.inf, most: Bytes | float = np.inf
) -> tuple[int, ...] | None:
    """The op numbers to cut before, ascending, with the least added seconds in all; None if nothing is allowed.

    ``count``: groups at most. ``longest``: seconds of work of one. ``most``: device bytes while one runs.
    """
    allowed = (table.seconds <= longest) & (table.nbytes <= most)
    return _least(table, count, np.where(allowed, table.added, np.inf), lambda before, cost: before + cost)


def shortest(table: Segments, count: int, most: Bytes | float = np.inf) -> Seconds:
    """The least seconds of the longest of at most ``count`` groups within ``most`` bytes; infinite if none are."""
    cost = np.where(table.nbytes <= most, table.seconds, np.inf)
    cuts = _least(table, count, cost, np.maximum)
    if cuts is None:
        return float("inf")
    return max(float(cost[pair]) for pair in table.pairs(cuts))


def cut(table: Segments, count: int, most: Bytes | float = np.inf) -> tuple[int, ...] | None:
    """The cuts for at most ``count`` groups within ``most`` bytes: hardly longer than possible, and the cheapest of
    these; None if no groups are within the bytes."""
    longest = shortest(table, count, most)
    return None if np.isinf(longest) else divide(table, count, longest * (1 + SLACK), most)


def _least(
    table: Segments, count: int, cost: Floats, join: Callable[[Floats, Floats], Floats]
) -> tuple[int, ...] | None:
    """The cuts of the path from the first to the last point in at most ``count`` segments with the least ``cost``,
    joined along the path; of equal ones that with fewest cuts."""
    n = len(table.points)
    best = np.full(n, np.inf)
    best[0] = -np.inf if join is np.maximum else 0.0
    ends: list[tuple[float, int]] = []
    came: list[np.ndarray] = []
    for k in range(count):
        through = join(best[:, None], cost)
        through[np.isinf(best) & (best > 0), :] = np.inf
        came.append(np.argmin(through, axis=0))
        best = np.min(through, axis=0)
        ends.append((float(best[-1]), k))
    least, k = min(ends)
    if np.isinf(least) and least > 0:
        return None
    found: list[int] = []
    j = n - 1
    for step in reversed(range(k + 1)):
        j = int(came[step][j])
        found.append(table.points[j])
    return tuple(reversed(found[:-1]))


__all__ = ["SLACK", "cut", "divide", "shortest"]
