"""What a process needs of its device beyond one program's bytes.

A simulation of XLA's allocator (`passes.bfc`) runs a few calls of a training loop and gives the pool's size. Each call
allocates its temporaries and the results that replace nothing donated, then frees the temporaries.

Invariant: the parts add up to the process's need, and each says how it was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtensile.devices.profiles import DeviceProfile
from jaxtensile.ir.ir import Graph
from jaxtensile.ir.plan import MemoryUse
from jaxtensile.passes.pack.bfc import BFC, GRAIN, Chunk, OutOfMemory, rounded
from jaxtensile.units import MIB, Bytes

CONTEXT = 512 * MIB
"""Bytes of the CUDA context, with the kernels and library handles that JAX loads."""
_ROUNDING_HOW = "each array in multiples of 256 bytes, and the results of the call before, which are still there"
_CONTEXT_HOW = "assumed: 300 to 700 MB are reported for CUDA 11.7 and newer; not yet measured"
_FINE = 2048
"""Parts of a pool to which its size is exact: fragmentation within half a thousandth is close enough."""
_CALLS = 3
"""Calls of the same program after which the pool no longer changes."""


@dataclass(frozen=True, slots=True)
class Part:
    """``nbytes`` that a process needs for ``name``, and how that is known."""

    name: str
    nbytes: Bytes
    how: str


@dataclass(frozen=True, slots=True)
class Traffic:
    """Allocations of one call. ``state``: the arguments' sizes. ``fresh``: the results that reuse no donated argument.
    ``replaced``: the argument that each of those replaces after the call, -1 if none."""

    state: tuple[Bytes, ...]
    temp: Bytes
    fresh: tuple[Bytes, ...]
    replaced: tuple[int, ...]


def traffic(graph: Graph, temp: Bytes) -> Traffic:
    """The allocations of one call. A result replaces the next argument of its shape and type, donated ones in place."""
    values = graph.values
    state = [v for v in graph.inputs if values[v].space != "host"]
    waiting: dict[tuple[bool, tuple[int, ...], str], list[int]] = {}
    for i, v in enumerate(state):
        waiting.setdefault((v in graph.donated, values[v].shape, values[v].dtype), []).append(i)
    fresh: list[Bytes] = []
    replaced: list[int] = []
    for v in graph.outputs:
        value = values[v]
        if value.space == "host":
            continue
        donated = waiting.get((True, value.shape, value.dtype))
        if donated:
            donated.pop(0)
            continue
        same = waiting.get((False, value.shape, value.dtype))
        fresh.append(value.nbytes)
        replaced.append(same.pop(0) if same else -1)
    return Traffic(tuple(values[v].nbytes for v in state), temp, tuple(fresh), tuple(replaced))


def run(pool: BFC, calls: Traffic, count: int = _CALLS) -> None:
    """``count`` calls on ``pool``; raises ``OutOfMemory`` if it is too small."""
    state = [pool.allocate(size) for size in calls.state]
    passing: list[Chunk | None] = []
    for _ in range(count):
        temp = pool.allocate(calls.temp)
        new = [pool.allocate(size) for size in calls.fresh]
        pool.free(temp)
        for old in passing:
            pool.free(old)
        passing = []
        for chunk, at in zip(new, calls.replaced, strict=True):
            if at < 0:
                passing.append(chunk)
            else:
                pool.free(state[at])
                state[at] = chunk


def pool_of(calls: Traffic) -> tuple[Bytes, Bytes]:
    """Peak bytes handed out, and the smallest pool, taken at once, in which every call succeeds."""
    endless = BFC(1 << 62, grows=False)
    run(endless, calls)
    low, high = endless.peak, endless.peak
    while not _enough(high, calls):
        low, high = high, high + high // 4 + GRAIN
    step = max(GRAIN, low // _FINE)
    while high - low > step:
        middle = (low + high) // 2
        low, high = (low, middle) if _enough(middle, calls) else (middle, high)
    return endless.peak, rounded(high)


def _enough(limit: Bytes, calls: Traffic) -> bool:
    try:
        run(BFC(limit, grows=False), calls)
    except OutOfMemory:
        return False
    return True


def parts(use: MemoryUse, graph: Graph, device: DeviceProfile) -> tuple[Part, ...]:
    """What a process that runs the program of one device needs on ``device``, part by part."""
    program = Part("program", use.device, "XLA's allocation" if use.exact else "static, from the jaxpr")
    if not device.backend.pools:
        return (program,)
    handed, pool = pool_of(traffic(graph, use.temp))
    return (
        program,
        Part("rounding", max(handed - use.device, 0), _ROUNDING_HOW),
        Part("fragmentation", pool - max(handed, use.device), "a simulation of XLA's BFC allocator over three calls"),
        Part("context", CONTEXT, _CONTEXT_HOW),
    )


def total(of: Sequence[Part]) -> Bytes:
    """Bytes of all parts."""
    return sum(part.nbytes for part in of)
