"""Search for a packing below a capacity, which fills valleys of the skyline from their walls.

Invariant: a placed buffer rests on the floor of every section it covers. In each section ``floor + bytes to come +
slack`` is the capacity. A state is given up only if no packing can follow from it.

A *valley* is a run of equal floors between higher walls. If there is a packing, there is one in which nothing can fall
(canonical, MiniMalloc, ASPLOS 2023). In it the section at a wall continues in one of two ways:

* with a buffer on the valley's floor that begins at that wall and fits between both;
* with nothing below the least height at which another could lie. The waste is paid from the section's slack, which is 0
  where the load is the capacity.

So few ways remain at an edge; the search takes the edge with the fewest. Sections that no waiting buffer connects are
solved one after another. Failed states are remembered (128-bit digests).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Final, Literal

from jaxtensile.passes.pack.buffers import Buffer, Packing, aligned, grid, packing
from jaxtensile.passes.pack.skyline import NEVER
from jaxtensile.units import Bytes

Edges = Literal["first", "low", "slack", "deep", "left", "lowest"]
"""Choice among edges with equally few ways: the leftmost, of the lowest valley, with the least slack, of the deepest
valley. ``left``, ``lowest``: the leftmost edge, or that of the lowest valley, whatever its ways."""
Order = Literal["size", "length", "area"]
"""First buffer: the largest, the longest lived, the one with the most bytes times time."""

REMEMBERED: Final = 1_000_000
"""Most failed states kept, some 100 bytes each: 100 MB."""


@dataclass(frozen=True, slots=True)
class Tactic:
    """How a search goes through its states. With enough time, every tactic finds a packing if there is one."""

    edges: Edges = "first"
    order: Order = "size"
    noise: float = 0.0
    """Each buffer's number in the order is multiplied by up to ``1 + noise``, at random."""
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """``packed``: the packing found, or None. ``closed``: there is none. Neither: stopped. ``work``: edges seen."""

    packed: Packing | None
    closed: bool
    work: int


@dataclass(slots=True)
class _Edge:
    """Ways to go on at one section: buffers that may come next, or nothing below ``wasted`` (None: not that)."""

    section: int
    floor: Bytes
    ways: list[int]
    wasted: Bytes | None


@dataclass(slots=True)
class _Frame:
    """One decision. ``before``, ``mark``: the log's length before and after forced steps. ``way``: the next way.
    ``todo``: parts still to solve."""

    key: bytes
    before: int
    mark: int
    span: tuple[int, int]
    edge: _Edge
    way: int = 0
    todo: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


def search(
    buffers: Sequence[Buffer],
    capacity: Bytes,
    tactic: Tactic,
    work: int,
    failed: set[bytes] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """A packing of at most ``capacity`` bytes, or that there is none; neither after ``work`` edges or when ``stop()``.

    ``failed``: failed states of earlier searches with the same buffers and capacity; this one adds its own.
    """
    solid = [k for k, b in enumerate(buffers) if b.size]
    valleys = _Valleys([buffers[k] for k in solid], capacity, tactic, failed if failed is not None else set())
    found = valleys.run(work, stop)
    if not found:
        return Outcome(None, found is False, valleys.work)
    offsets = [0] * len(buffers)
    for k, o in zip(solid, valleys.offset, strict=True):
        offsets[k] = o
    return Outcome(packing(buffers, offsets), False, valleys.work)


class _Valleys:
    """The state of a search. Only ``_place`` and ``_raise`` change it; ``_undo`` reverts them."""

    def __init__(self, buffers: list[Buffer], capacity: Bytes, tactic: Tactic, failed: set[bytes]) -> None:
        lives = grid(buffers)
        n, sections = len(buffers), lives.sections
        self.tactic, self.failed = tactic, failed
        self.first, self.last = lives.first, lives.last
        self.size, self.alignment = [b.size for b in buffers], [b.alignment for b in buffers]
        kinds: dict[Buffer, int] = {}
        self.kind = [kinds.setdefault(b, k) for k, b in enumerate(buffers)]
        self.starts: list[list[int]] = [[] for _ in range(sections + 1)]
        self.ends: list[list[int]] = [[] for _ in range(sections + 1)]
        self.covers: list[list[int]] = [[] for _ in range(sections)]
        self.waiting, self.across = [0] * sections, [0] * (sections + 1)
        self.slack, self.floor = [capacity] * sections, [0] * sections
        for k in _ordered(buffers, tactic):
            self.starts[self.first[k]].append(k)
            self.ends[self.last[k]].append(k)
            for s in range(self.first[k], self.last[k]):
                self.covers[s].append(k)
                self.slack[s] -= self.size[k]
            self._count(k, 1)
        self.least = _least_others(self.covers, self.size, self.first, self.last)
        self.placed, self.mask, self.offset = [False] * n, 0, [0] * n
        self.inside: dict[tuple[int, int], int] = {}
        self.log: list[int | tuple[int, Bytes]] = []  # buffers placed, floors before they were raised
        self.work = 0

    def run(self, work: int, stop: Callable[[], bool]) -> bool | None:
        """Whether there is a packing; None if stopped."""
        if min(self.slack, default=0) < 0:
            return False
        root = _Frame(b"", 0, 0, (0, 0), _Edge(0, 0, [], None), todo=self._parts(0, len(self.floor)))
        frames, opened = [root], 0
        while frames:
            top = frames[-1]
            if not top.todo:  # all its parts are solved
                frames.pop()
                continue
            opened += 1
            if self.work > work or (not opened % 64 and stop()):
                return None
            frame = self._open(*top.todo.pop())
            if frame is not None:
                frames.append(frame)
            while frame is None or not self._go_on(frame):  # that way is closed: the next one, or the frame before
                if frame is not None:
                    self._undo(frame.before)
                    self._remember(frame.key)
                    frames.pop()
                frame = frames[-1]
                if frame is root:
                    return False
                self._undo(frame.mark)
        return True

    def _open(self, left: int, right: int) -> _Frame | None:
        """The decision for these sections; None if nothing can come of them."""
        key = self._key(left, right)
        if key in self.failed:
            return None
        before = len(self.log)
        while True:
            edge = self._edge(left, right)
            if edge is not None and (edge.ways or edge.wasted is None):
                return _Frame(key, before, len(self.log), (left, right), edge)
            if edge is None or not self._raise(edge.section, edge.wasted or 0):
                self._undo(before)
                self._remember(key)
                return None

    def _go_on(self, frame: _Frame) -> bool:
        """Take the next way of a frame; whether there is one."""
        edge, (left, right) = frame.edge, frame.span
        while frame.way < len(edge.ways):
            k = edge.ways[frame.way]
            frame.way += 1
            if self._place(k, edge.floor):
                frame.todo = self._parts(left, right)
                return True
            self._undo(frame.mark)
        if frame.way == len(edge.ways) and edge.wasted is not None:
            frame.way += 1
            frame.todo = [frame.span]
            return self._raise(edge.section, edge.wasted)
        return False

    def _edge(self, left: int, right: int) -> _Edge | None:
        """The edge to decide next. Without ways: its floor is at least ``wasted``. None: nothing can follow."""
        floor = self.floor
        best: _Edge | None = None
        best_rank = (NEVER, NEVER)
        wall, i = NEVER, left
        while i < right:
            low, j = floor[i], i + 1
            while j < right and floor[j] == low:
                j += 1
            other = floor[j] if j < right else NEVER
            if wall > low < other:
                for at, here, near in ((i, self.starts[i], wall), (j - 1, self.ends[j], other)):
                    edge = self._ways(at, here, i, j, near, min(wall, other))
                    if edge is None or not edge.ways or (len(edge.ways) == 1 and edge.wasted is None):
                        return edge
                    rank = self._rank(edge, i, min(wall, other))
                    if rank < best_rank:
                        best, best_rank = edge, rank
            wall, i = low, j
        assert best is not None, "where something waits there is a valley"
        return best

    def _ways(self, at: int, here: list[int], i: int, j: int, near: Bytes, rim: Bytes) -> _Edge | None:
        """The ways at section ``at``, first or last of the valley ``[i, j)``; None: nothing can follow. ``here``:
        buffers that begin or end at its wall. ``near``: height of that wall. ``rim``: height of the lower wall."""
        placed, size, first, last, low = self.placed, self.size, self.first, self.last, self.floor[at]
        self.work += 1
        ways: list[int] = []
        seen: list[int] = []
        total, number, wasted = 0, 0, rim
        for k in here:
            if placed[k]:
                continue
            total += size[k]
            number += 1
            if i <= first[k] and last[k] <= j:
                wasted = min(wasted, low + self.least[k])
                if self.kind[k] not in seen:
                    seen.append(self.kind[k])
                    ways.append(k)
        slack = self.slack[at]
        if near - low - total > slack and near < NEVER and number < self.waiting[at]:
            return None  # what crosses the wall lies above it, and the rest does not reach up to it
        if not ways:
            lying = (max(self.floor[first[k] : last[k]]) for k in self.covers[at] if not placed[k])
            wasted = min(lying)
        return _Edge(at, low, ways, wasted if wasted - low <= slack or not ways else None)

    def _rank(self, edge: _Edge, i: int, rim: Bytes) -> tuple[int, int]:
        number = len(edge.ways) + (edge.wasted is not None)
        match self.tactic.edges:
            case "first":
                return number, 0
            case "low":
                return number, edge.floor
            case "slack":
                return number, self.slack[edge.section]
            case "deep":
                return number, edge.floor - rim
            case "left":
                return i, number
            case "lowest":
                return edge.floor, number

    def _place(self, k: int, floor: Bytes) -> bool:
        """Put a buffer onto a floor; False if its alignment wastes too much there."""
        first, last = self.first[k], self.last[k]
        at = aligned(floor, self.alignment[k])
        if at > floor and not all(self._raise(s, at) for s in range(first, last)):
            return False
        self.floor[first:last] = [at + self.size[k]] * (last - first)
        self._count(k, -1)
        self.placed[k], self.offset[k] = True, at
        self.mask |= 1 << k
        self.log.append(k)
        return True

    def _raise(self, section: int, height: Bytes) -> bool:
        """Waste the bytes below ``height``; False if they exceed the slack."""
        wasted = height - self.floor[section]
        if wasted > self.slack[section]:
            return False
        self.log.append((section, self.floor[section]))
        self.floor[section] = height
        self.slack[section] -= wasted
        return True

    def _undo(self, length: int) -> None:
        while len(self.log) > length:
            item = self.log.pop()
            if isinstance(item, tuple):
                section, height = item
                self.slack[section] += self.floor[section] - height
                self.floor[section] = height
            else:
                first, last = self.first[item], self.last[item]
                self.floor[first:last] = [self.offset[item]] * (last - first)
                self._count(item, 1)
                self.placed[item] = False
                self.mask ^= 1 << item

    def _count(self, k: int, by: int) -> None:
        waiting, across = self.waiting, self.across
        first = self.first[k]
        waiting[first] += by
        for s in range(first + 1, self.last[k]):
            waiting[s] += by
            across[s] += by

    def _parts(self, left: int, right: int) -> list[tuple[int, int]]:
        """Runs of sections that waiting buffers connect, longest first: the last is solved first."""
        parts: list[tuple[int, int]] = []
        i = left
        while i < right:
            j = i + 1
            if self.waiting[i]:
                while j < right and self.across[j]:
                    j += 1
                parts.append((i, j))
            i = j
        return sorted(parts, key=lambda part: part[0] - part[1])

    def _key(self, left: int, right: int) -> bytes:
        """Digest of these sections' state: their floors, and the buffers waiting there."""
        inside = self.inside.get((left, right))
        if inside is None:
            lives = zip(self.first, self.last, strict=True)
            inside = sum(1 << k for k, (a, b) in enumerate(lives) if left <= a and b <= right)
            self.inside[left, right] = inside
        told = array("q", [left, right, *self.floor[left:right]]).tobytes()
        return blake2b(told + (self.mask & inside).to_bytes(len(self.size) // 8 + 1, "little"), digest_size=16).digest()

    def _remember(self, key: bytes) -> None:
        if len(self.failed) < REMEMBERED:
            self.failed.add(key)


def _ordered(buffers: list[Buffer], tactic: Tactic) -> list[int]:
    """The buffers in the order in which they are tried."""
    random = Random(tactic.seed)
    worth = {
        "size": [(b.size, b.upper - b.lower) for b in buffers],
        "length": [(b.upper - b.lower, b.size) for b in buffers],
        "area": [(b.size * (b.upper - b.lower), b.size) for b in buffers],
    }[tactic.order]
    blurred = [(a * (1 + tactic.noise * random.random()), b) for a, b in worth]
    return sorted(range(len(buffers)), key=lambda k: blurred[k], reverse=True)


def _least_others(covers: list[list[int]], size: list[Bytes], first: list[int], last: list[int]) -> list[Bytes]:
    """For each buffer the least size among the others live with it."""
    pairs = [sorted(covered, key=lambda k: size[k])[:2] for covered in covers]
    return [
        min((size[j] for s in range(first[k], last[k]) for j in pairs[s] if j != k), default=NEVER)
        for k in range(len(size))
    ]
