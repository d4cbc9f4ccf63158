"""Placement of jobs on nodes. A job has a floor of bytes; the devices of a node have room for floors.

The coordinator of the node decides, and a placement is a hint. The room of a device is its limit, less the floors that
its coordinator has guaranteed, less the floors of jobs placed there and not yet admitted.

Jobs of a higher class are placed first. Within a class the order is: the oldest job, if it has waited for
``hold_after``; then the largest job that fits. A job is placed on idle devices, if any have room, and otherwise on
devices in use. Among nodes with room the fullest one is chosen, so that whole nodes stay free for large jobs. If the
oldest job fits nowhere, its floor is held on the devices with most room, and jobs of its class or below do not get it.

Invariant: floors placed on a device are within its room. A job of several hosts has a place on all or on none. The same
calls give the same answers: there is no clock here and nothing random.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from heapq import nsmallest

from msgspec import structs

from jaxtensile.runtime.placement.asks import Ask, Place, Placed, Refused, Rules
from jaxtensile.runtime.placement.nodes import Lists, Node, Room, Some, drop
from jaxtensile.units import Bytes, Seconds, format_bytes


class Fleet:
    """The nodes, the jobs that wait, and where the others are."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._nodes: dict[str, Node] = {}
        self._lists = Lists()
        self._waiting: dict[int, dict[tuple[Some, int], list[tuple[Bytes, int, str]]]] = {}
        """By class, and by devices and hosts: the jobs by floor, of equal ones the oldest last."""
        self._ages: dict[int, list[tuple[int, str]]] = {}
        """By class: the jobs that wait, in the order of their submission."""
        self._asks: dict[str, Ask] = {}
        self._placed: dict[str, tuple[str, ...]] = {}
        self._holder: str | None = None
        """The job whose floor is held."""
        self._held: dict[str, tuple[int, ...]] = {}
        """Where: nodes, and the numbers of devices."""
        self._resized, self._settled = True, 0.0
        """Whether nodes have come, gone or changed their sizes since the last decision, and when that was last seen."""

    # What is known.

    @property
    def waiting(self) -> tuple[str, ...]:
        """The jobs that wait: higher classes first, then by age."""
        return tuple(job for c in sorted(self._ages, reverse=True) for _, job in self._ages[c])

    def where(self, job: str) -> tuple[str, ...]:
        """The nodes of a job; empty if it waits or is not known."""
        return self._placed.get(job, ())

    def on(self, name: str) -> tuple[str, ...]:
        """The jobs that are placed on a node."""
        return tuple(self._nodes[name].placed) if name in self._nodes else ()

    def rooms(self, name: str) -> tuple[tuple[Room, Bytes], ...]:
        """A node's devices, with what is free on each."""
        return tuple((d.room, d.free) for d in self._nodes[name].devices) if name in self._nodes else ()

    def reason(self, ask: Ask) -> str:
        """Why no node is large enough for a job, even if all were empty; empty text: some are."""
        sizes = self._lists.sizes(ask.some)
        if len(sizes) - bisect_left(sizes, (ask.floor, "")) >= ask.hosts:
            return ""
        able = [size for size, _ in sizes if size >= 0]
        what = f"{ask.kind} device" if ask.kind else "device"
        needs = f"{format_bytes(ask.floor)} on " + (
            f"a {what}" if ask.devices == 1 else f"each of {ask.devices} {what}s"
        )
        needs += "" if ask.hosts == 1 else f" of each of {ask.hosts} machines"
        if len(able) < ask.hosts:
            has = f"{len(able)} of the {len(sizes)} machines have as many"
        else:
            has = f"the cluster can grant {format_bytes(able[-ask.hosts])} there"
        return f"it needs {needs}, and {has}: bring a smaller plan, or add larger machines"

    # Nodes.

    def report(self, name: str, rooms: Sequence[Room], admitted: Iterable[str] = (), *, takes: bool = True) -> None:
        """What a node's coordinator says: its devices, and which of the jobs there it has admitted.

        ``takes``: whether new jobs may be placed there. A node that was not known joins.
        """
        node = self._nodes.setdefault(name, Node(name))
        self._resized |= [(d.room.device, d.room.limit) for d in node.devices] != [(r.device, r.limit) for r in rooms]
        if [d.room.device for d in node.devices] != [r.device for r in rooms]:
            self._held.pop(name, None)  # by numbers that are others' now
        node.report(tuple(rooms))
        node.takes = takes
        there = set(admitted)
        for k, device in enumerate(node.devices):
            device.pending = {job: self._asks[job].floor for job in device.jobs if job not in there}
            if self._holder is not None and k in self._held.get(name, ()):
                device.pending[self._holder] = self._asks[self._holder].floor
            device.add_up()
        self._lists.resized(node)

    def lost(self, name: str) -> tuple[str, ...]:
        """A node has gone; returns its jobs, which wait again. Where they are also placed, they must be ended."""
        jobs = self.on(name)
        node = self._nodes.pop(name, None)
        if node is not None:
            self._lists.remove(node)
            self._held.pop(name, None)
        for job in jobs:
            self.back(job)
        return jobs

    # Jobs.

    def submit(self, ask: Ask) -> None:
        """A job waits. Again: nothing happens."""
        if ask.job not in self._asks:
            self._asks[ask.job] = ask
            self._queue(ask)

    def adopt(self, ask: Ask, places: Sequence[Place]) -> None:
        """A job has its places already, as nodes say when they are asked after a restart."""
        if ask.job not in self._asks:
            self._asks[ask.job] = ask
            self._put(ask, places)

    def ended(self, job: str) -> None:
        """A job needs no place any more."""
        ask = self._asks.get(job)
        if ask is not None:
            self._take(job) if job in self._placed else self._unqueue(ask)
            del self._asks[job]

    def back(self, job: str, floor: Bytes | None = None) -> None:
        """A placed job waits again, with another floor if given."""
        if job in self._placed:
            self._take(job)
            ask = self._asks[job]
            if floor is not None:
                ask = self._asks[job] = structs.replace(ask, floor=floor)
            self._queue(ask)

    # Decisions.

    def decide(self, now: Seconds) -> list[Placed | Refused]:
        """Place what fits, and refuse what no node is large enough for."""
        out: list[Placed | Refused] = []
        classes = sorted((c for c, ages in self._ages.items() if ages), reverse=True)
        if self._holder is not None and self._asks[self._holder].priority < classes[0]:
            self._release()
        for priority in classes:
            self._serve_oldest(priority, now, out)
            while (ask := self._largest(priority)) is not None:
                found = self._found(ask)
                assert found is not None, "there is room for it"
                out.append(self._start(ask, found))
        self._refuse(now, out)
        return out

    def elsewhere(self, job: str) -> Placed | None:
        """Move a placed job of one host to another node that has room; None: it stays."""
        ask, (old, *others) = self._asks[job], self._placed[job]
        node = self._nodes[old]
        if others or not node.takes:
            return None
        node.takes = False
        self._lists.put(node)
        found = self._found(ask)
        node.takes = True
        self._lists.put(node)
        if found is None:
            return None
        self._take(job)
        return self._chosen(ask, found)

    def _serve_oldest(self, priority: int, now: Seconds, out: list[Placed | Refused]) -> None:
        """Place the oldest jobs of a class that have waited long. Hold the floor of the first that fits nowhere."""
        while ages := self._ages[priority]:
            ask = self._asks[ages[0][1]]
            if now - ask.since < self._rules.hold_after:
                return
            if self._holder == ask.job and self._is_free(ask):
                places = [self._place(name, numbers) for name, numbers in sorted(self._held.items())]
                self._unqueue(ask)
                out.append(self._placed_at(ask, places))
            elif (found := self._found(ask)) is not None:
                out.append(self._start(ask, found))
            else:
                if self._holder in (None, ask.job) and not self.reason(ask):
                    self._hold(ask)
                return

    def _largest(self, priority: int) -> Ask | None:
        """The job of a class with the most bytes of those that fit; of equal ones the oldest."""
        best: Ask | None = None
        for (some, hosts), bucket in self._waiting[priority].items():
            nodes = self._lists.free(some)
            if bucket and len(nodes) >= hosts and (room := nodes[-hosts][0]) >= bucket[0][0]:
                ask = self._asks[bucket[bisect_right(bucket, (room, 1, "")) - 1][2]]
                if best is None or (ask.total, -ask.order) > (best.total, -best.order):
                    best = ask
        return best

    def _refuse(self, now: Seconds, out: list[Placed | Refused]) -> None:
        if self._resized:
            self._resized, self._settled = False, now
        for buckets in self._waiting.values():
            for (some, hosts), bucket in buckets.items():
                sizes = self._lists.sizes(some)
                most = sizes[-hosts][0] if len(sizes) >= hosts else -1
                for _, _, job in bucket[bisect_right(bucket, (most, 1, "")) :]:
                    ask = self._asks[job]
                    if now - max(ask.since, self._settled) >= self._rules.refuse_after:
                        out.append(Refused(job, self.reason(ask)))
                        self.ended(job)

    # The queue.

    def _queue(self, ask: Ask) -> None:
        bucket = self._waiting.setdefault(ask.priority, {}).setdefault((ask.some, ask.hosts), [])
        insort(bucket, (ask.floor, -ask.order, ask.job))
        insort(self._ages.setdefault(ask.priority, []), (ask.order, ask.job))

    def _unqueue(self, ask: Ask) -> None:
        drop(self._waiting[ask.priority][ask.some, ask.hosts], (ask.floor, -ask.order, ask.job))
        drop(self._ages[ask.priority], (ask.order, ask.job))
        if self._holder == ask.job:
            self._release()

    # Places.

    def _found(self, ask: Ask) -> list[tuple[str, bool]] | None:
        """The nodes for a job, and whether idle devices there; None: too few have room."""
        for idle in (True, False):
            nodes = self._lists.free(ask.some, idle)
            at = bisect_left(nodes, (ask.floor, ""))
            if len(nodes) - at >= ask.hosts:
                able = ((self._nodes[name].left, name) for _, name in nodes[at:])
                return sorted((name, idle) for _, name in nsmallest(ask.hosts, able))
        return None

    def _start(self, ask: Ask, found: Sequence[tuple[str, bool]]) -> Placed:
        self._unqueue(ask)
        return self._chosen(ask, found)

    def _chosen(self, ask: Ask, found: Sequence[tuple[str, bool]]) -> Placed:
        chosen = ((name, self._nodes[name].choose(ask.floor, ask.some, idle)) for name, idle in found)
        return self._placed_at(ask, [self._place(name, numbers) for name, numbers in chosen])

    def _place(self, name: str, numbers: Iterable[int]) -> Place:
        return Place(name, tuple(self._nodes[name].devices[k].room.device for k in numbers))

    def _placed_at(self, ask: Ask, places: Sequence[Place]) -> Placed:
        self._put(ask, places)
        return Placed(ask.job, tuple(places))

    def _put(self, ask: Ask, places: Sequence[Place]) -> None:
        self._placed[ask.job] = tuple(p.node for p in places)
        for place in places:
            node = self._nodes.get(place.node)
            if node is None:
                continue
            node.placed[ask.job] = tuple(k for k, d in enumerate(node.devices) if d.room.device in place.devices)
            for k in node.placed[ask.job]:
                device = node.devices[k]
                device.jobs.add(ask.job)
                device.pending[ask.job] = ask.floor
                device.add_up()
            self._lists.put(node)

    def _take(self, job: str) -> None:
        for name in self._placed.pop(job):
            node = self._nodes.get(name)
            if node is None:
                continue
            for k in node.placed.pop(job, ()):
                device = node.devices[k]
                device.jobs.discard(job)
                device.pending.pop(job, None)
                device.add_up()
            self._lists.put(node)

    def _is_free(self, ask: Ask) -> bool:
        """Whether the room that is held for a job is free on all its nodes."""
        return len(self._held) == ask.hosts and all(
            self._nodes[name].takes and self._nodes[name].devices[k].free >= 0
            for name, numbers in self._held.items()
            for k in numbers
        )

    def _hold(self, ask: Ask) -> None:
        """Hold a job's floor on the nodes with most room that are large enough, as many as it needs."""
        self._holder = ask.job
        missing = ask.hosts - len(self._held)
        for _, name in self._lists.free(ask.some)[::-1] if missing > 0 else ():
            node = self._nodes[name]
            if missing > 0 and name not in self._held and node.size(ask.some) >= ask.floor:
                missing -= 1
                self._held[name] = node.most(ask.floor, ask.some)
                for k in self._held[name]:
                    node.devices[k].pending[ask.job] = ask.floor
                    node.devices[k].add_up()
                self._lists.put(node)

    def _release(self) -> None:
        """Hold nothing any more."""
        for name, numbers in self._held.items():
            node = self._nodes[name]
            for k in numbers:
                node.devices[k].pending.pop(self._holder or "", None)
                node.devices[k].add_up()
            self._lists.put(node)
        self._holder, self._held = None, {}
