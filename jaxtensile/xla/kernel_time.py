"""The time of a compiled GPU step: a roofline per kernel, in XLA's own order.

A kernel takes the longer of its products and its traffic, plus a launch and the time to fill and empty the device.
Recent values are still in the L2 cache. Copies run beside the kernels, each direction one at a time; their readers
wait.

The share of the device's rates that each kind reaches was fitted to half of ``benchmarks/time`` (H100, jax 0.11) and
validated on the other half.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Final

from jaxtensile.devices.gpu_description import FACTS, GpuFacts
from jaxtensile.devices.profiles import DeviceProfile
from jaxtensile.ir.plan import CompiledTime, KernelTime
from jaxtensile.passes.seconds.cost import COPY_SHARE, MATMUL_SHARE
from jaxtensile.units import Bytes, Seconds
from jaxtensile.xla.kernels import Copied, Copying, Kernel, Product, Schedule, schedule_of

LINK_SHARE: Final = 0.95
"""Share of the link's rate that copies of many megabytes reach."""
TILE: Final = 128
"""Rows and columns of a product's tile on one multiprocessor."""
DEEPEST: Final = 512
"""Least depth of a product worth dividing among multiprocessors."""
TURNS: Final = 3
"""Turns of a loop simulated one by one; the others repeat the last of these."""
NAMED: Final = 10
"""Kinds of kernels in the account, by the operation they are named after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What kernels reach, fitted.

    ``launch``, ``turn``, ``fill``: seconds per kernel, per turn of a loop, and at most to fill and empty the device.
    ``traffic``, ``product``, ``convolution``, ``attention``, ``tile``: factors on the time by the device's rates.
    ``cached``: cost share of traffic that hits the cache. ``cache``: share of the cache that keeps recent values.
    ``start``: depth at which a product takes as long as its start and end. ``waves``: share of the time lost on
    multiprocessors without a tile. ``unaligned``: factor for products with unaligned rows.
    """

    launch: Seconds = 0.7e-6
    turn: Seconds = 4e-6
    fill: Seconds = 11.5e-6
    traffic: float = 0.834
    product: float = 0.966
    convolution: float = 2.52
    attention: float = 1.35
    tile: float = 1.29
    cached: float = 0.15
    cache: float = 0.6
    start: float = 450.0
    waves: float = 0.5
    unaligned: float = 1.4


FITTED: Final = Shares()


def timed(text: str, device: DeviceProfile, shares: Shares = FITTED) -> CompiledTime | None:
    """Time of the program with HLO text ``text``; None for devices without known kernels."""
    return seconds_of(schedule_of(text), device, shares) if device.name in FACTS else None


def seconds_of(schedule: Schedule, device: DeviceProfile, shares: Shares = FITTED) -> CompiledTime:
    """Time of a step that runs ``schedule`` on a GPU."""
    clock = _Clock(device, FACTS[device.name], shares)
    clock.run(schedule)
    most = sorted(clock.spent.items(), key=lambda item: -item[1])[:NAMED]
    named = tuple(KernelTime(*which, clock.times[which], seconds) for which, seconds in most)
    return CompiledTime(clock.now, clock.waited, clock.times.total(), named)


@dataclass(slots=True)
class _Clock:
    """The state of a device while it runs a schedule."""

    device: DeviceProfile
    gpu: GpuFacts
    shares: Shares
    now: Seconds = 0.0
    waited: Seconds = 0.0
    free: dict[bool, Seconds] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    """Time at which the link is free, to the host and from it."""
    over: dict[str, Seconds] = field(default_factory=dict[str, Seconds])
    """Time at which each copy ends."""
    cached: OrderedDict[str, Bytes] = field(default_factory=OrderedDict[str, Bytes])
    held: Bytes = 0
    times: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """Number of kernels by (kind, source operation)."""
    spent: defaultdict[tuple[str, str], Seconds] = field(default_factory=lambda: defaultdict(float))

    def run(self, schedule: Schedule, times: int = 1) -> None:
        """Run ``schedule``. ``times``: how often a step runs it, for the account of kernels."""
        for step in schedule:
            match step:
                case Kernel():
                    took = self.takes(step)
                    self.now += took
                    self.times[step.kind, step.source] += times
                    self.spent[step.kind, step.source] += times * took
                case Copying():
                    rate = self.device.reached("link_bandwidth", LINK_SHARE)
                    begin = max(self.now, self.free[step.to_host])
                    end = begin + self.device.link_latency + step.nbytes / rate
                    self.over[step.name] = self.free[step.to_host] = end
                case Copied():
                    wait = max(self.over.get(step.name, 0.0) - self.now, 0.0)
                    self.now, self.waited = self.now + wait, self.waited + times * wait
                case _:
                    self._loop(step.trips, step.body, times)

    def _loop(self, trips: int, body: Schedule, times: int) -> None:
        took = 0.0
        for turn in range(min(trips, TURNS)):
            begun = self.now
            self.now += self.shares.turn
            self.run(body, times * (trips - TURNS + 1 if turn == TURNS - 1 else 1))
            took = self.now - begun
        more = max(trips - TURNS, 0) * took
        self.now += more
        self.free = {way: at + more for way, at in self.free.items()}

    def takes(self, kernel: Kernel) -> Seconds:
        shares, device = self.shares, self.device
        there = sum(min(n, self.cached.get(v, 0)) for v, n in kernel.reads.items())
        traffic = sum(kernel.reads.values()) - there + kernel.written + shares.cached * there
        for value, nbytes in (*kernel.reads.items(), (kernel.name, kernel.written)):
            self._use(value, nbytes)
        moving = shares.traffic * traffic / device.reached("memory_bandwidth", COPY_SHARE)
        moving *= shares.tile if kernel.kind == "tile" else 1.0
        rate = device.reached("matmul_flops_f32" if kernel.wide else "matmul_flops_bf16", MATMUL_SHARE)
        if kernel.products:
            working = sum(p.flops / rate * self._slower(p) for p in kernel.products)
        else:
            factor = {"convolution": shares.convolution, "attention": shares.attention}.get(kernel.kind, 1.0)
            working = factor * kernel.flops / rate
        longest = max(moving, working)
        return shares.launch + longest + min(longest, shares.fill)

    def _slower(self, p: Product) -> float:
        """The factor of a product's sizes over the device's rate."""
        shares, units = self.shares, self.gpu.multiprocessors
        tiles = p.batch * math.ceil(p.rows / TILE) * math.ceil(p.columns / TILE)
        divided = min(max(units // tiles, 1), max(p.depth // DEEPEST, 1)) if tiles < units else 1
        tiles *= divided
        idle = math.ceil(tiles / units) * units / tiles - 1
        half = TILE // 2
        padded = math.ceil(p.rows / half) * half / p.rows * math.ceil(p.columns / half) * half / p.columns
        begun = 1 + shares.start / max(p.depth, 1) * divided
        return shares.product * begun * (1 + shares.waves * idle) * padded * (1.0 if p.aligned else shares.unaligned)

    def _use(self, value: str, nbytes: Bytes) -> None:
        """Cache ``value``, unless it is too large, and evict the least recently used."""
        room = self.shares.cache * self.gpu.l2
        self.held -= self.cached.pop(value, 0)
        if nbytes > room:
            return
        self.cached[value] = nbytes
        self.held += nbytes
        while self.held > room:
            self.held -= self.cached.popitem(last=False)[1]


__all__ = ["FITTED", "Shares", "schedule_of", "seconds_of", "timed"]
