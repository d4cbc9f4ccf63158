"""The nodes of a cluster with the room on their devices, and sorted lists of them.

Invariant: an entry of a list is what its node's devices say.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any, NamedTuple

from msgspec import Struct, field

from jaxtensile.units import Bytes


class Room(Struct, frozen=True):
    """One device as its coordinator reports it."""

    device: str
    limit: Bytes
    """Bytes that can ever be granted: capacity less reserve."""
    guaranteed: Bytes = 0
    """The floors of admitted jobs."""


class Some(NamedTuple):
    """So many devices of one kind, ``"cuda"``; ``""``: of any."""

    kind: str
    number: int


class Device(Struct):
    """A device, and the jobs that are placed on it."""

    room: Room
    pending: dict[str, Bytes] = field(default_factory=dict[str, Bytes])
    """Floors of jobs placed and not yet admitted."""
    jobs: set[str] = field(default_factory=set[str])
    free: Bytes = 0

    def is_some(self, some: Some) -> bool:
        """Whether it is of that kind."""
        return not some.kind or self.room.device.partition(":")[0] == some.kind

    def add_up(self) -> None:
        """Compute ``free``, after a change."""
        self.free = self.room.limit - self.room.guaranteed - sum(self.pending.values())


class Node(Struct):
    """A machine."""

    name: str
    devices: list[Device] = []
    takes: bool = True
    """Whether new jobs may be placed there."""
    placed: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """The numbers of a job's devices."""

    def free(self, some: Some, idle: bool) -> Bytes:
        """The floor that ``some`` of its devices have room for; ``idle``: those without jobs. -1: they are too few."""
        found = sorted((d.free for d in self.devices if d.is_some(some) and not (idle and d.jobs)), reverse=True)
        return found[some.number - 1] if len(found) >= some.number else -1

    @property
    def left(self) -> Bytes:
        """The room on all its devices."""
        return sum(d.free for d in self.devices)

    def size(self, some: Some) -> Bytes:
        """The same, if no job were there."""
        found = sorted((d.room.limit for d in self.devices if d.is_some(some)), reverse=True)
        return found[some.number - 1] if len(found) >= some.number else -1

    def choose(self, floor: Bytes, some: Some, idle: bool) -> tuple[int, ...]:
        """The devices for a job: of those with enough room the ones with least."""
        able = ((d.free, k) for k, d in enumerate(self.devices) if d.is_some(some) and not (idle and d.jobs))
        return tuple(sorted(k for _, k in sorted((free, k) for free, k in able if free >= floor)[: some.number]))

    def most(self, floor: Bytes, some: Some) -> tuple[int, ...]:
        """The devices with most room, of those that are large enough."""
        able = [(-d.free, k) for k, d in enumerate(self.devices) if d.is_some(some) and d.room.limit >= floor]
        return tuple(sorted(k for _, k in sorted(able)[: some.number]))

    def report(self, rooms: tuple[Room, ...]) -> None:
        """Take over what its coordinator says; jobs stay on the devices of their names."""
        before = {d.room.device: d for d in self.devices}
        if [r.device for r in rooms] != [*before]:
            names = {job: {self.devices[k].room.device for k in ks} for job, ks in self.placed.items()}
            self.devices = [before.get(r.device) or Device(r) for r in rooms]
            self.placed = {
                job: tuple(k for k, r in enumerate(rooms) if r.device in found) for job, found in names.items()
            }
        for device, room in zip(self.devices, rooms, strict=True):
            device.room = room


Entry = tuple[Bytes, str]


class Lists:
    """The nodes by the room they have, for every kind and number of devices that was asked for."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._free: dict[tuple[Some, bool], list[Entry]] = {}
        self._sizes: dict[Some, list[Entry]] = {}
        self._at: dict[str, tuple[dict[tuple[Some, bool], Entry], dict[Some, Entry]]] = {}
        """The entries of each node."""

    def free(self, some: Some, idle: bool = False) -> list[Entry]:
        """The nodes that take jobs, by ``Node.free``."""
        if (some, idle) not in self._free:
            self._free[some, idle] = []
            for node in self._nodes.values():
                self.put(node)
        return self._free[some, idle]

    def sizes(self, some: Some) -> list[Entry]:
        """All nodes by ``Node.size``."""
        if some not in self._sizes:
            self._sizes[some] = []
            for node in self._nodes.values():
                self.resized(node)
        return self._sizes[some]

    def put(self, node: Node) -> None:
        """The room on a node's devices has changed, or whether it takes jobs."""
        free, _ = self._at[node.name]
        for (some, idle), entries in self._free.items():
            room = node.free(some, idle) if node.takes else -1
            old, new = free.get((some, idle)), (room, node.name)
            if old == new or (old is None and room < 0):
                continue
            if old is not None:
                drop(entries, old)
                del free[some, idle]
            if room >= 0:
                insort(entries, new)
                free[some, idle] = new

    def resized(self, node: Node) -> None:
        """A node is there, or has other devices."""
        if node.name not in self._at:
            self._nodes[node.name], self._at[node.name] = node, ({}, {})
        _, sizes = self._at[node.name]
        for some, entries in self._sizes.items():
            old, new = sizes.get(some), (node.size(some), node.name)
            if old != new:
                if old is not None:
                    drop(entries, old)
                insort(entries, new)
                sizes[some] = new
        self.put(node)

    def remove(self, node: Node) -> None:
        """A node has gone."""
        del self._nodes[node.name]
        free, sizes = self._at.pop(node.name)
        for which, entry in free.items():
            drop(self._free[which], entry)
        for some, entry in sizes.items():
            drop(self._sizes[some], entry)


def drop(entries: list[Any], entry: Any) -> None:
    """Remove an entry from a sorted list, if it is there."""
    at = bisect_left(entries, entry)
    if at < len(entries) and entries[at] == entry:
        del entries[at]
