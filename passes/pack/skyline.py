"""Buffers placed one after another from the bottom up.

Invariant: placed buffers form a skyline over time. The next goes to the bottom of the lowest valley, as close to a wall
as any can: ``O(n log n)``. A valley in which nothing fits is filled up to its lower wall. That wastes nothing, as all
remaining buffers there cross a wall. Best-fit for strip packing with fixed abscissae, after Burke, Kendall and Whitwell
(Operations Research 52(4), 2004) and Sekiyama et al. (arXiv 1804.10001).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final, Literal

from jaxtensile.passes.pack.buffers import Buffer, Grid, Packing, aligned, grid, packing
from jaxtensile.units import Bytes

NEVER: Final = 1 << 62
"""A height in bytes above all others. Sums with it stay within 64 bits."""

Rule = Literal["close", "long", "large"]
"""Choice between the candidates at a valley's two walls. ``close``: the closer to its wall, then the longer. ``long``:
the one with the longer lifetime less its gap to the wall. ``large``: the closer, then the larger."""
RULES: Final[tuple[Rule, ...]] = ("close", "long", "large")


def stack(buffers: Sequence[Buffer], rule: Rule = "close") -> Packing:
    """A packing from the bottom up, by one rule."""
    solid = [k for k, b in enumerate(buffers) if b.size]
    offsets: list[Bytes] = [0] * len(buffers)
    if solid:
        chosen = [buffers[k] for k in solid]
        for k, o in zip(solid, _stack(chosen, grid(chosen), rule), strict=True):
            offsets[k] = o
    return packing(buffers, offsets)


def _stack(buffers: list[Buffer], lives: Grid, rule: Rule) -> list[Bytes]:
    line = Skyline(lives.sections)
    waiting = _Waiting(buffers, lives)
    offsets = [0] * len(buffers)
    for _ in buffers:
        while True:
            left, right, floor = line.lowest()
            k = waiting.beside(left, right, rule)
            if k >= 0:
                break
            line.fill(left)
        waiting.take(k)
        offsets[k] = aligned(floor, buffers[k].alignment)
        line.place(left, lives.first[k], lives.last[k], offsets[k] + buffers[k].size)
    return offsets


class Skyline:
    """Heights over sections, as runs of equal height, by a run's first section. ``end``; ``height``: ``NEVER`` if no
    run begins there; ``before``: the run to the left, -1 if none."""

    def __init__(self, sections: int) -> None:
        self.end = [sections] * (sections + 1)
        self.height = [NEVER] * (sections + 1)
        self.before = [-1] * (sections + 1)
        self.height[0] = 0
        self.heap = [(0, 0, sections)]  # also holds runs that are no more

    def lowest(self) -> tuple[int, int, Bytes]:
        """First section, end and height of the lowest run; the leftmost of equals."""
        while True:
            floor, left, right = heappop(self.heap)
            if self.height[left] == floor and self.end[left] == right:
                return left, right, floor

    def fill(self, left: int) -> None:
        """Raise a run to its lower wall and join it with runs of that height."""
        before, right = self.before[left], self.height[self.end[left]]
        self.height[left] = right if before < 0 else min(self.height[before], right)
        self._join(left)

    def place(self, run: int, left: int, right: int, top: Bytes) -> None:
        """Cover ``[left, right)`` of a run up to ``top``. The run must have no entry in the heap."""
        end, floor = self.end[run], self.height[run]
        if left > run:
            self.end[run] = left
            heappush(self.heap, (floor, run, left))
            self._insert(left, right, top, run)
        else:
            self.height[run], self.end[run] = top, right
        if right < end:
            self._insert(right, end, floor, left)
            heappush(self.heap, (floor, right, end))
        self._join(left)

    def _insert(self, left: int, right: int, height: Bytes, before: int) -> None:
        self.end[left], self.height[left], self.before[left] = right, height, before
        self.before[right] = left

    def _join(self, run: int) -> None:
        height, before, right = self.height[run], self.before[run], self.end[run]
        if self.height[right] == height:
            self.height[right], right = NEVER, self.end[right]
        if before >= 0 and self.height[before] == height:
            self.height[run], run = NEVER, before
        self.end[run] = right
        self.before[right] = run
        heappush(self.heap, (height, run, right))


class _Waiting:
    """Buffers not placed yet; finds the first from the left, or from the right, within a valley."""

    def __init__(self, buffers: list[Buffer], lives: Grid) -> None:
        first, last = lives.first, lives.last
        self.buffers, self.lives = buffers, lives
        every = range(len(buffers))
        self.rightward = sorted(every, key=lambda k: (first[k], -last[k], -buffers[k].size))
        self.leftward = sorted(every, key=lambda k: (-last[k], first[k], -buffers[k].size))
        self.starts = [first[k] for k in self.rightward]
        self.ends = [-last[k] for k in self.leftward]
        self.from_left = _Least([last[k] for k in self.rightward])
        self.from_right = _Least([-first[k] for k in self.leftward])
        self.place, self.place_back = [0] * len(buffers), [0] * len(buffers)
        for p, (k, j) in enumerate(zip(self.rightward, self.leftward, strict=True)):
            self.place[k] = self.place_back[j] = p

    def beside(self, left: int, right: int, rule: Rule) -> int:
        """The buffer to place in the valley ``[left, right)``; -1 if none fits."""
        p = self.from_left.find(bisect_left(self.starts, left), right)
        if p < 0 or self.starts[p] >= right:
            return -1
        one = self.rightward[p]
        other = self.leftward[self.from_right.find(bisect_left(self.ends, -right), -left)]
        if one == other:
            return one
        times, a, b = self.lives.times, self.buffers[one], self.buffers[other]
        gap, gap_other = a.lower - times[left], times[right] - b.upper
        if rule == "long":
            return one if a.upper - a.lower - gap >= b.upper - b.lower - gap_other else other
        if gap != gap_other:
            return one if gap < gap_other else other
        if rule == "close":
            return one if a.upper - a.lower >= b.upper - b.lower else other
        return one if a.size >= b.size else other

    def take(self, k: int) -> None:
        """Mark buffer ``k`` as placed."""
        self.from_left.remove(self.place[k])
        self.from_right.remove(self.place_back[k])


class _Least:
    """A tree of minima: finds the first small enough number from a place on, in ``O(log n)``."""

    def __init__(self, numbers: list[int]) -> None:
        self.width = 1 << len(numbers).bit_length()
        tree = [NEVER] * (2 * self.width)
        tree[self.width : self.width + len(numbers)] = numbers
        for at in range(self.width - 1, 0, -1):
            tree[at] = min(tree[2 * at], tree[2 * at + 1])
        self.tree = tree

    def find(self, start: int, bound: int) -> int:
        """First place from ``start`` on with a number of at most ``bound``; -1 if none."""
        tree, at = self.tree, start + self.width
        while tree[at] > bound:
            while at & 1:  # a right child: what follows it is right of its parent
                at >>= 1
            if not at:
                return -1
            at += 1
        while at < self.width:
            at *= 2
            if tree[at] > bound:
                at += 1
        return at - self.width

    def remove(self, place: int) -> None:
        """Never find the number at ``place`` again."""
        tree, at = self.tree, place + self.width
        tree[at] = NEVER
        at >>= 1
        while at:
            least = min(tree[2 * at], tree[2 * at + 1])
            if tree[at] == least:
                break
            tree[at] = least
            at >>= 1
