"""Choose buffers to wait in host memory, with copies hidden behind work.

A candidate is a *gap* around the peak step: no op in it touches the buffer. A copy out takes the earliest free link
time after the gap opens; a copy in the latest before it closes. Each direction carries one copy at a time.

Until the peak fits, the candidate there with the most bytes x absence goes, hidden ones first. Copies that are not
hidden are waited for; that wait is the price.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from jaxtensile.ir.ir import Graph, producers
from jaxtensile.ir.plan import Link, Program
from jaxtensile.passes.lifetimes.fusion import Kernels
from jaxtensile.passes.lifetimes.liveness import Liveness, live_ranges
from jaxtensile.passes.offload.insertion import Copy, Remade, insert, tie
from jaxtensile.passes.recompute.stages import buffer_steps
from jaxtensile.switches import on
from jaxtensile.units import MIB, Bytes, Seconds

NEAREST = 4
"""Ops between two uses below which a buffer stays: too few to hide copies behind. A guess."""
SMALLEST = MIB
"""Bytes: smaller buffers are never copied. A copy of this size takes 30 us each way on 32 GiB/s, three times the
latency. A guess beyond that."""


@dataclass(frozen=True, slots=True)
class Offloaded:
    """A program with copies, and the seconds of waiting they add."""

    program: Program
    copies: tuple[Copy, ...]
    live: Liveness
    wait: Seconds


@dataclass(frozen=True, slots=True)
class _Gap:
    """A buffer, untouched between ops ``after`` and ``until``."""

    value: int
    nbytes: Bytes
    after: int
    until: int


def offload(program: Program, seconds: Sequence[Seconds], link: Link, budget: Bytes, host_budget: Bytes) -> Offloaded:
    """Move buffers to the host until the program fits ``budget`` device bytes, or as far as possible.

    ``seconds``: of every op.
    """
    live = live_ranges(program.graph)
    copies = _choose(program, live, seconds, link, budget - (live.device - live.temp), host_budget)
    if not copies:
        return Offloaded(program, (), live, 0.0)
    planned = insert(program, copies)
    new = live_ranges(planned.graph)
    return Offloaded(planned, tuple(copies), new, _wait(seconds, copies, link))


class Channel:
    """One direction of the link: one copy at a time."""

    def __init__(self) -> None:
        self._starts: list[Seconds] = []
        self._ends: list[Seconds] = []
        """Ends of the busy stretches, ascending; adjacent copies share a stretch."""

    def earliest(self, ready: Seconds, length: Seconds) -> Seconds:
        """Start of the first free stretch of ``length`` from ``ready`` on."""
        start = ready
        for k in range(bisect_right(self._ends, ready), len(self._ends)):
            if start + length <= self._starts[k]:
                break
            start = self._ends[k]
        return start

    def latest(self, due: Seconds, length: Seconds) -> Seconds:
        """Start of the last free stretch of ``length`` that ends by ``due``."""
        end = due
        for k in range(bisect_left(self._starts, due) - 1, -1, -1):
            if end - length >= self._ends[k]:
                break
            end = self._starts[k]
        return end - length

    def take(self, start: Seconds, length: Seconds) -> None:
        """Mark ``length`` from ``start`` on as busy; it must be free."""
        end = start + length
        k = bisect_left(self._starts, start)
        if k and self._ends[k - 1] >= start:
            k -= 1
            start, end = self._starts[k], max(end, self._ends[k])
            del self._starts[k], self._ends[k]
        if k < len(self._starts) and self._starts[k] <= end:
            end = max(end, self._ends[k])
            del self._starts[k], self._ends[k]
        self._starts.insert(k, start)
        self._ends.insert(k, end)


def _choose(
    program: Program, live: Liveness, seconds: Sequence[Seconds], link: Link, budget_temp: Bytes, host_budget: Bytes
) -> list[Copy]:
    """Copies that bring the profile down to ``budget_temp``, or as many as help."""
    begins = [0.0, *accumulate(seconds)]  # begins[i]: when op i starts
    profile = np.array(live.profile, np.int64)
    anchors = _anchors(program.graph, live.kernels)
    gaps = _gaps(program, live)
    out, back = Channel(), Channel()
    copies: list[Copy] = []
    room = host_budget
    while profile.size and int(profile.max()) > budget_temp:
        peak = int(profile.argmax())
        best: tuple[tuple[bool, float], Copy, Seconds, Seconds, Seconds] | None = None
        for gap in gaps:
            if not gap.after < peak < gap.until or gap.nbytes > room:
                continue
            length = link.latency + gap.nbytes / link.bandwidth
            leaves = out.earliest(begins[gap.after + 1], length)
            arrives = back.latest(begins[gap.until], length)
            done = _at_or_after(anchors, bisect_left(begins, leaves + length), gap.after + 1, peak)
            begin = _at_or_before(anchors, bisect_left(begins, arrives) - 1, peak + 1, gap.until - 1)
            if done is None or begin is None or begin <= done:
                continue
            hidden = leaves + length <= begins[done] and arrives >= begins[begin]
            score = (hidden and on("hidden_first"), gap.nbytes * (begins[gap.until] - begins[gap.after + 1]))
            if best is None or score > best[0]:
                copy = Copy(gap.value, gap.nbytes, gap.after, done, begin, gap.until, hidden)
                best = (score, copy, leaves, arrives, length)
        if best is None:
            if not on("tighten") or not _tighten(copies, peak, anchors, begins, profile):
                break
            continue
        _, copy, leaves, arrives, length = best
        out.take(leaves, length)
        back.take(arrives, length)
        profile[copy.done : copy.begin] -= copy.nbytes
        copies.append(copy)
        room -= copy.nbytes
        gaps = [g for g in gaps if (g.value, g.after) != (copy.value, copy.after)]
    return copies


def _tighten(
    copies: list[Copy], peak: int, anchors: Sequence[int], begins: Sequence[Seconds], profile: np.ndarray
) -> bool:
    """Take one buffer in transit at ``peak`` off the device, and wait for its copy; False if there is none."""
    i = bisect_left(anchors, peak + 1)
    before, behind = anchors[i - 1] if i else -1, anchors[i] if i < len(anchors) else len(begins)
    best: tuple[Seconds, int] | None = None
    for k, c in enumerate(copies):
        if c.begin <= peak < c.until:
            if behind < c.until and (best is None or begins[behind] - begins[c.begin] < best[0]):
                best = begins[behind] - begins[c.begin], k
        elif c.after < before and peak < c.done and (best is None or begins[c.done] - begins[before] < best[0]):
            best = begins[c.done] - begins[before], k
    if best is None:
        return False
    k, c = best[1], copies[best[1]]
    new = replace(c, begin=behind, hidden=False) if c.begin <= peak else replace(c, done=before, hidden=False)
    profile[new.done : copies[k].done] -= new.nbytes
    profile[copies[k].begin : new.begin] -= new.nbytes
    copies[k] = new
    return True


def _gaps(program: Program, live: Liveness) -> list[_Gap]:
    """Long gaps of buffers for which one copy serves all later reads."""
    graph, kernels, owner = program.graph, live.kernels, live.owner
    home, leaves = kernels.home, kernels.leaves
    touched = buffer_steps(graph, live)
    remade = Remade(program, kernels)
    made = remade.made
    last = [-1] * len(graph.values)
    for op in graph.ops:
        for v in op.operands:
            last[v] = op.id
    end = len(graph.ops)
    for v in graph.outputs:
        last[v] = end
    # Every value that needs a buffer to be read: the buffer's own versions, and what fuses from it.
    bound: dict[int, list[int]] = {}
    for v in range(len(graph.values)):
        sources = (home[v],) if home[v] >= 0 else leaves[v]
        for b in sources:
            bound.setdefault(owner[b], []).append(v)
    gaps: list[_Gap] = []
    for r in live.ranges:
        if r.nbytes < SMALLEST:
            continue
        steps = sorted(set(touched[r.value]))
        for after, until in pairwise(steps):
            if until - after < NEAREST:
                continue
            late = [v for v in bound[r.value] if made[v] <= after and last[v] > after]
            if not late or any(last[v] >= end for v in late):
                continue
            buffers = {b for v in late for b in ((home[v],) if home[v] >= 0 else leaves[v]) if owner[b] == r.value}
            if len(buffers) != 1:
                continue
            buffer = buffers.pop()
            v = late[0]
            if len(late) > 1 or home[v] < 0:
                # The newest version of all that is there; the others are made from it.
                whole = [u for u in late if home[u] == buffer and remade.whole(u) == buffer]
                v = max(whole, default=buffer)
                if not remade.can_be(late, v, buffer):
                    continue
            value = graph.values[v]
            if value.nbytes != r.nbytes or value.space == "host" or "key" in value.dtype:
                continue
            gaps.append(_Gap(v, r.nbytes, after, until))
    return gaps


def _anchors(graph: Graph, kernels: Kernels) -> list[int]:
    """Ops at which a barrier can hold a copy (``tie``), ascending."""
    made = producers(graph)
    return [op.id for op in graph.ops if tie(graph, kernels, made, op) is not None]


def _at_or_after(anchors: Sequence[int], step: int, low: int, high: int) -> int | None:
    """The first anchor from ``step`` on, else the last one before it, in ``[low, high]``."""
    i = bisect_left(anchors, max(step, low))
    if i < len(anchors) and anchors[i] <= high:
        return anchors[i]
    i = bisect_left(anchors, high + 1) - 1
    return anchors[i] if i >= 0 and anchors[i] >= low else None


def _at_or_before(anchors: Sequence[int], step: int, low: int, high: int) -> int | None:
    """The last anchor up to ``step``, else the first one after it, in ``[low, high]``."""
    i = bisect_left(anchors, min(step, high) + 1) - 1
    if i >= 0 and anchors[i] >= low:
        return anchors[i]
    i = bisect_left(anchors, low)
    return anchors[i] if i < len(anchors) and anchors[i] <= high else None


def _wait(seconds: Sequence[Seconds], copies: Sequence[Copy], link: Link) -> Seconds:
    """Seconds by which the copies delay the program; they queue in each direction."""
    leaving: dict[int, list[int]] = {}
    done: dict[int, list[int]] = {}
    begin: dict[int, list[int]] = {}
    until: dict[int, list[int]] = {}
    for k, copy in enumerate(copies):
        leaving.setdefault(copy.after, []).append(k)
        done.setdefault(copy.done, []).append(k)
        begin.setdefault(copy.begin, []).append(k)
        until.setdefault(copy.until, []).append(k)
    length = [link.latency + c.nbytes / link.bandwidth for c in copies]
    left, arrived = [0.0] * len(copies), [0.0] * len(copies)
    wait = clock = out = back = 0.0
    for i, duration in enumerate(seconds):
        for k in sorted(begin.get(i, ()), key=lambda k: copies[k].until):
            back = arrived[k] = max(back, clock, left[k]) + length[k]
        ready = max([clock, *(left[k] for k in done.get(i, ())), *(arrived[k] for k in until.get(i, ()))])
        wait += ready - clock
        clock = ready + duration
        for k in leaving.get(i, ()):
            out = left[k] = max(out, clock) + length[k]
    return wait
