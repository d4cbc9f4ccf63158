"""What the parts of a program between any two of its cut points take: seconds, bytes, and what cutting there adds.

Between groups a buffer is written and read as it is anyway, so that a cut adds the launch of one more executable, what
kernels compute inside themselves and each group for itself, and traffic of the few values that are no buffers and
cannot be computed again. While a group runs, everything that enters or leaves it, or waits for later groups, is there
all the time, and what is its own as in the program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxtensile.ir.ir import Graph, producers
from jaxtensile.passes.lifetimes.fusion import Kernels
from jaxtensile.passes.lifetimes.liveness import Liveness, live_ranges
from jaxtensile.units import Bytes, Seconds

POINTS = 96
"""Most cut points, ends included: in each of as many equal parts of the step, where fewest bytes wait. A guess: six for
each of 16 groups; all pairs take a second for 4,000 ops."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Segments:
    """``points``: ascending op numbers, the first 0, the last behind all ops. ``seconds[i, j]``, ``added[i, j]``,
    ``nbytes[i, j]``: of ops ``[points[i], points[j])`` as one group: its work, what it takes longer for being one, and
    device bytes in use while it runs; infinite for ``j <= i``."""

    points: tuple[int, ...]
    seconds: Floats
    added: Floats
    nbytes: Floats

    def pairs(self, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """The groups between ``cuts`` as places in the tables."""
        place = {p: i for i, p in enumerate(self.points)}
        return list(pairwise((0, *(place[p] for p in cuts), len(self.points) - 1)))

    @property
    def whole(self) -> Bytes:
        """Device bytes of the program in one piece."""
        return int(self.nbytes[0, -1])


def segments(
    graph: Graph,
    kernels: Kernels,
    seconds: Sequence[Seconds],
    again: Sequence[bool],
    *,
    launch: Seconds,
    bandwidth: float,
    points: Sequence[int] | None = None,
) -> Segments:
    """The table of all pairs of ``points`` (None: chosen here).

    ``seconds``: of each op. ``again``: as from ``form.made_again``. ``launch``: seconds to start one executable.
    ``bandwidth``: of device memory, in bytes per second.
    """
    lasting = _Lasting(graph, live_ranges(graph, kernels))
    if points is None:
        points = _chosen(lasting.waiting, seconds)
    count = len(points)
    work = [0.0, *accumulate(seconds)]
    repeated = _Repeated(graph, kernels, seconds, again, bandwidth)
    tables = [np.full((count, count), np.inf) for _ in range(3)]
    for i in range(count):
        for j in range(i + 1, count):
            tables[0][i, j] = work[points[j]] - work[points[i]]
        tables[1][i, i + 1 :] = launch + repeated.behind(points[i], points[i + 1 :])
        tables[2][i, i + 1 :] = [lasting.of(points[i], stop) for stop in points[i + 1 :]]
    return Segments(tuple(points), *tables)


def _chosen(waiting: Floats, seconds: Sequence[Seconds]) -> tuple[int, ...]:
    """Cut points: of each of ``POINTS`` equal parts of the work, the op before which fewest bytes wait."""
    n = len(seconds)
    if n <= POINTS:
        return tuple(range(n + 1))
    ends = np.cumsum(seconds)
    parts = POINTS - 2
    part = np.minimum(parts * ends / max(float(ends[-1]), 1e-300), parts - 1).astype(int)
    best: dict[int, int] = {}
    for point in range(1, n):
        known = best.setdefault(int(part[point - 1]), point)
        if waiting[point] < waiting[known]:
            best[int(part[point - 1])] = point
    return (0, *sorted(best.values()), n)


class _Lasting:
    """The bytes of groups. ``waiting[p]``: of buffers that are there before op ``p`` and behind it."""

    def __init__(self, graph: Graph, live: Liveness) -> None:
        n = len(graph.ops)
        rows = [(r.start, r.stop, r.nbytes) for r in live.ranges]
        shown = np.zeros(n + 1)
        for start, stop, nbytes in rows:
            shown[start] += nbytes
            shown[stop] -= nbytes
        self.inside = np.maximum(np.array(live.profile or [0.0], float) - np.cumsum(shown)[: max(n, 1)], 0.0)
        """Bytes inside of each op's own body."""
        fixed, ends = _at_the_ends(graph, live, n)
        self.fixed = fixed
        rows += ends
        table = np.array(rows, float).reshape(-1, 3)
        self.start, self.stop, self.nbytes = table[:, 0].astype(int), table[:, 1].astype(int), table[:, 2]
        crossing = np.zeros(n + 2)
        np.add.at(crossing, self.start + 1, self.nbytes)  # there before op p for start < p < stop
        np.add.at(crossing, np.maximum(self.stop, self.start + 1), -self.nbytes)
        self.waiting = np.cumsum(crossing)[: n + 1]

    def of(self, i: int, j: int) -> float:
        """Most device bytes in use while ops ``[i, j)`` run as one group."""
        there = (self.start < j) & (self.stop > i)
        own = there & (self.start >= i) & (self.stop <= j)
        change = np.zeros(j - i + 1)
        np.add.at(change, self.start[own] - i, self.nbytes[own])
        np.add.at(change, self.stop[own] - i, -self.nbytes[own])
        profile = np.cumsum(change)[: j - i] + self.inside[i:j]
        return self.fixed + float(self.nbytes[there & ~own].sum()) + float(profile.max(initial=0.0))


def _at_the_ends(graph: Graph, live: Liveness, n: int) -> tuple[float, list[tuple[int, int, int]]]:
    """Bytes that are there all the time, and the lifetimes of inputs that go and of results that come.

    A result that takes over a donated input of its type is that input's buffer, as long as it is made behind the
    input's last reader.
    """
    values, made = graph.values, producers(graph)
    last: dict[int, int] = {int(v): -1 for v in graph.inputs}
    for op in graph.ops:
        for b in (*live.kernels.reads[op.id], *op.operands):
            if b in last:
                last[b] = op.id
    there = [v for v in graph.inputs if values[v].space != "host"]
    fixed = sum(values[v].nbytes for v in there if v not in graph.donated)
    pool = defaultdict[tuple[tuple[int, ...], str], list[int]](list)
    for v in sorted((v for v in there if v in graph.donated), key=lambda v: -last[v]):
        pool[values[v].shape, values[v].dtype].append(v)
    rows: list[tuple[int, int, int]] = []
    for v in sorted({v for v in graph.outputs if values[v].space != "host" and made[v] >= 0}, key=lambda v: made[v]):
        kind = pool[values[v].shape, values[v].dtype]
        if kind:
            old = kind.pop()
            fixed += values[v].nbytes
            if last[old] > made[v]:  # both are there in between
                rows.append((made[v], last[old] + 1, values[v].nbytes))
        else:
            rows.append((made[v], n + 1, values[v].nbytes))
    rows += ((-1, last[v] + 1, values[v].nbytes) for kind in pool.values() for v in kind)
    return float(fixed), rows


class _Repeated:
    """Seconds that groups add because values inside of kernels are not handed on."""

    def __init__(
        self, graph: Graph, kernels: Kernels, seconds: Sequence[Seconds], again: Sequence[bool], bandwidth: float
    ) -> None:
        self.rows: list[tuple[int, Seconds, Any]] = []
        """For each op that may be repeated: its number, what repeating costs, and the kernels that read it."""
        reach: list[set[int]] = [set() for _ in graph.values]
        for op in reversed(graph.ops):
            inner = set[int]().union(*(reach[r] for r in op.results)) if again[op.id] else {op.id}
            for v in op.operands:
                reach[v] |= inner
            cost = seconds[op.id] if again[op.id] else 0.0
            added = [graph.values[r].nbytes for r in op.results if r in kernels.added.values()]
            if added:  # it is stored for the sake of the cut alone
                cost = 2 * sum(added) / bandwidth
            readers = set[int]().union(*(reach[r] for r in op.results))
            if cost and readers:
                self.rows.append((op.id, cost, np.array(sorted(readers))))

    def behind(self, start: int, stops: Sequence[int]) -> Floats:
        """For groups from op ``start`` to each of ``stops``: seconds of what they compute of earlier ops' results."""
        found = np.zeros(len(stops))
        for o, cost, readers in self.rows:
            if o < start and (place := int(np.searchsorted(readers, start))) < len(readers):
                found[np.searchsorted(np.asarray(stops), readers[place], side="right") :] += cost
        return found


__all__ = ["POINTS", "Segments", "segments"]
