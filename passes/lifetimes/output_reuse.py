"""Temporary buffers that XLA puts in the memory of results.

A result that takes over no argument has memory from the start, though it is written at the end. XLA assigns buffers by
descending size. A buffer that fits into the memory of a result, and dies before the result is written, takes no memory
(``MaybeAssignBuffer`` in ``xla/service/buffer_assignment.cc``: the smallest that fits). It may also die in the kernel
that writes the result, if that writes over it. Others go to the heap of temporaries.

Invariant: buffers that share the memory of a result are never live together.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from itertools import accumulate, pairwise

from jaxtensile.ir.ir import Graph
from jaxtensile.passes.lifetimes.liveness import Liveness, LiveRange, taken_over
from jaxtensile.switches import on
from jaxtensile.units import Bytes


def reusing_outputs(graph: Graph, live: Liveness) -> Liveness:
    """``live`` without the buffers kept in the memory of results."""
    hosts = _own_memory(graph, live)
    if not hosts or not on("output_reuse"):
        return live
    left: list[LiveRange] = []
    profile = [0, *live.profile, 0]
    delta = [b - a for a, b in pairwise(profile)]
    for r in sorted(live.ranges, key=lambda r: (-r.nbytes, r.start)):
        if _lodged(r, hosts, live.onto.get(r.value)):
            delta[r.start] -= r.nbytes
            delta[r.stop] += r.nbytes
        else:
            left.append(r)
    if len(left) == len(live.ranges):
        return live
    left.sort(key=lambda r: r.value)
    return replace(live, ranges=tuple(left), profile=list(accumulate(delta))[: len(live.profile)])


class _Host:
    """Memory of a result: when it is taken, in order of time."""

    __slots__ = ("nbytes", "starts", "stops", "value")

    def __init__(self, value: int, nbytes: Bytes, start: int, stop: int) -> None:
        self.value, self.nbytes = value, nbytes
        self.starts, self.stops = [start], [stop]

    def take(self, start: int, stop: int) -> bool:
        k = bisect_left(self.starts, start)
        if (k and self.stops[k - 1] > start) or (k < len(self.starts) and self.starts[k] < stop):
            return False
        self.starts.insert(k, start)
        self.stops.insert(k, stop)
        return True


def _lodged(r: LiveRange, hosts: list[_Host], onto: int | None) -> bool:
    """Put ``r`` into the smallest result with room; whether there is one. ``hosts``: by ascending size. ``onto``: the
    result that may be written over it."""
    first = bisect_left(hosts, r.nbytes, key=lambda host: host.nbytes)
    return any(host.take(r.start, r.stop - (host.value == onto)) for host in hosts[first:])


def _own_memory(graph: Graph, live: Liveness) -> list[_Host]:
    """Results that take over no argument and are none, by ascending size."""
    values, home = graph.values, live.kernels.home
    given = set(graph.inputs)
    written = {int(r): op.id for op in graph.ops for r in op.results}
    written |= {r: written[product] for r, product in live.kernels.added.items()}
    hosts: list[_Host] = []
    seen = set[int]()
    for v, taken in zip(graph.outputs, taken_over(graph), strict=True):
        b = home[v]
        if taken >= 0 or b < 0 or b in given or b in seen or values[v].space == "host":
            continue
        seen.add(b)
        hosts.append(_Host(b, graph.values[b].nbytes, written[b], len(graph.ops) + 1))
    return sorted(hosts, key=lambda host: host.nbytes)
