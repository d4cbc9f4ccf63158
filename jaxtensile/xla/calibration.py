"""Measure a device's rates: large products, a stream through memory, copies to the host and back.

A repetition is a chain of dependent calls, which hides the host's share of a call. The rate is the median repetition's.
Sizes start from the published rates, and the first runs correct them.

Invariant: a number that could not be measured stays the published one. A copy counts only if the compiled program holds
bytes on the host.
"""

from __future__ import annotations

import datetime
import json
import math
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxtensile import _compat
from jaxtensile.devices import measured
from jaxtensile.devices.hardware import allocator_stats
from jaxtensile.devices.measured import Measurement
from jaxtensile.devices.profiles import NUMBERS, DeviceProfile, profile_for_kind
from jaxtensile.errors import JaxtensileError, TargetError
from jaxtensile.units import KIB, MIB, Bytes, Seconds, format_bytes, format_rate

_TILE = 256
"""Side of the repeated random tile; divides the sides of products. Whole tiles for all matrix units."""
_RESIZES = 2
"""Most retries with another size. A guess."""
_LONGEST_CHAIN = 32
"""Most calls queued in one repetition. A guess."""
_FEWEST = 3
"""Least repetitions: a median needs three."""
_FREE = 8
"""If most memory is in use: the multiple of the free bytes that counts as the device's memory. A quarter of the free
bytes is used then (``Effort.share``)."""
_MOST_OVER_LINK: Bytes = 256 * MIB
"""Most bytes of a copy by which ``calibrate`` measures the link: pinned memory is scarce."""
_LITTLE_OVER_LINK: Bytes = 32 * MIB
"""The same for a measurement between two steps: some 1 ms each way."""
_MEASURING: Final = threading.Lock()
"""Two measurements at once would each find half of the rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How hard to try. Guesses, so that all rates are measured within seconds.

    ``aim``: seconds of a repetition. ``share``: of the device's bytes, for all arrays. ``limit``: seconds of
    repetitions per number, of which there are at least three.
    """

    aim: Seconds = 0.03
    share: float = 1 / 32
    repetitions: int = 7
    limit: Seconds = 0.8


_LITTLE = Effort(aim=0.003, repetitions=3, limit=0.05)


@dataclass(frozen=True, slots=True)
class Rate:
    """Units of work per second. ``spread``: interquartile range of the repetitions over their median."""

    value: float
    spread: float
    size: str

    def __str__(self) -> str:
        return f"{self.size}, +-{50 * self.spread:.1f} %"


def calibrate(device: Any = None, *, refresh: bool = False) -> DeviceProfile:
    """Measure the device once and plan with its own rates from then on.

    ``device``: one of ``jax.devices()``, None for the default one. It takes seconds and at most 1/32 of the memory:
    products in float32 and bfloat16, a stream through memory and, if there is one, the link to pinned host memory.

    The result is kept in ``$XDG_CACHE_HOME/jaxtensile`` (else ``~/.cache/jaxtensile``) per device kind and jaxlib
    version; ``refresh`` measures again. Later plans for this kind use it, compile-only targets included. Rates are
    bytes or operations per second; ``.sources`` gives each number's origin, ``.measured`` the measured ones. Raises
    ``TargetError`` for a device that is not here.
    """
    here = _device(device)
    published = profile_for_kind(here.device_kind, here.platform)
    with _MEASURING:
        found = None if refresh else measured.load(here.device_kind)
        if found is None:
            found = measure(here, published, Effort())
            measured.keep(found, here.device_kind)
    return measured.applied(published, found, here.device_kind)


def measure(device: Any, published: DeviceProfile, effort: Effort) -> Measurement:
    """The rates of a local device, and its capacity if no table knows it."""
    started = time.perf_counter()
    most = int(_bytes(device, published) * effort.share)
    numbers: dict[str, float] = {}
    how: dict[str, str] = {}
    problems: list[str] = []

    def put(number: str, find: Callable[[], tuple[float, str]]) -> None:
        try:
            numbers[number], how[number] = find()
        except (jax.errors.JaxRuntimeError, _NotMeasured) as error:
            problems.append(f"{number}: {(str(error).strip() or type(error).__name__).splitlines()[0]}")

    def product(dtype: Any, peak: float) -> tuple[float, str]:
        rate = products(device, dtype, peak, most, effort)
        return rate.value, f"products of {dtype.__name__} {rate}"

    def streaming() -> tuple[float, str]:
        rate = stream(device, published.memory_bandwidth, most, effort)
        return rate.value, f"{rate} read and written"

    put("matmul_flops_bf16", lambda: product(jnp.bfloat16, published.matmul_flops_bf16))
    put("matmul_flops_f32", lambda: product(jnp.float32, published.matmul_flops_f32))
    put("memory_bandwidth", streaming)
    if published.backend.own_memory:
        put("link_bandwidth", lambda: _link(device, published.link_bandwidth, min(most // 2, _MOST_OVER_LINK), effort))
    if device.device_kind not in published.kinds or published.name.endswith("-unknown"):
        limit = allocator_stats(device).get("bytes_limit")
        if limit:
            numbers["capacity"], how["capacity"] = float(limit), "what the allocator of a process could hand out"
    if not numbers:
        raise JaxtensileError(f"nothing could be measured on {device}: {'; '.join(problems)}")
    if problems:
        warnings.warn(f"not measured on {device}, so as published: {'; '.join(problems)}", RuntimeWarning, stacklevel=3)
    return Measurement(
        kind=measured.full_kind(device.device_kind),
        jaxlib=measured.jaxlib_version(),
        date=datetime.date.today().isoformat(),
        took=time.perf_counter() - started,
        numbers=numbers,
        how=how,
    )


@cache
def link_bandwidth(device: Any) -> float | None:
    """Bytes per second between a local device and pinned host memory, in the slower direction.

    Measured once per process, in some 30 ms with copies of at most 32 MiB, plus compiles, and not kept. None without
    such a link, or without room for the test.
    """
    published = profile_for_kind(device.device_kind, device.platform)
    try:
        with _MEASURING:
            return _link(device, published.link_bandwidth, _LITTLE_OVER_LINK, _LITTLE)[0]
    except (jax.errors.JaxRuntimeError, _NotMeasured):
        return None


class _NotMeasured(Exception):
    """Why a number cannot be measured."""


# ---- what is run ----------------------------------------------------------------------------------


def products(device: Any, dtype: Any, peak: float, most: Bytes, effort: Effort) -> Rate:
    """FLOP/s of products of square matrices. ``peak``: expected rate; ``most``: bytes of three matrices."""
    tile = np.random.default_rng(0).standard_normal((_TILE, _TILE)).astype(np.float32)

    @jax.jit
    def multiply(x: Any, w: Any) -> Any:
        return jnp.matmul(x, w, precision=jax.lax.Precision.DEFAULT)

    def make(n: int) -> tuple[Callable[[Any], Any], Any]:
        tiles = n // _TILE
        # Scaled so that a product of two is as large as each: values neither grow nor vanish along the chain.
        x = _filled(device, tile / (tiles * math.sqrt(_TILE)), (tiles, tiles), dtype)
        return lambda y: multiply(y, x), x

    largest = math.sqrt(most / (3 * jnp.dtype(dtype).itemsize))
    n, samples, calls = _sampled(make, (effort.aim * peak / 2) ** (1 / 3), largest, 3, _TILE, effort)
    return _rate(samples, calls * 2.0 * n**3, f"{n} x {n}")


def stream(device: Any, peak: float, most: Bytes, effort: Effort) -> Rate:
    """Bytes per second read and written by an elementwise op in place. ``most``: bytes of two arrays."""
    tile = np.random.default_rng(0).standard_normal((_TILE, _TILE)).astype(np.float32)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)

    def make(n: int) -> tuple[Callable[[Any], Any], Any]:
        return add, _filled(device, tile, (n // _TILE, 1), jnp.float32)

    row = 4 * _TILE  # bytes of a row of a tile
    n, samples, calls = _sampled(make, effort.aim * peak / (2 * row), most / (2 * row), 1, _TILE, effort)
    return _rate(samples, calls * 2.0 * n * row, format_bytes(n * row))


def copies(device: Any, to_host: bool, peak: float, most: Bytes, effort: Effort, counts: Callable[[Any], bool]) -> Rate:
    """Bytes per second to or from pinned host memory. ``counts``: whether a compiled program really copies."""
    kinds = {m.kind for m in device.addressable_memories()}
    if "pinned_host" not in kinds:
        raise _NotMeasured("the device has no pinned host memory")
    host = SingleDeviceSharding(device, memory_kind="pinned_host")
    spaces = jax.memory.Space
    out = jax.jit(lambda x: jax.device_put(x, spaces.Host), out_shardings=host)
    back = jax.jit(lambda x: jax.device_put(x, spaces.Device), in_shardings=host)

    def make(n: int) -> tuple[Callable[[Any], Any], Any]:
        x = _filled(device, np.ones((_TILE, _TILE), np.float32), (n // _TILE, 1), jnp.float32)
        program, x = (out, x) if to_host else (back, out(x))
        if not counts(program.lower(x).compile()):
            raise _NotMeasured("the compiler makes no copy to host memory")
        return lambda _: program(x), x

    row = 4 * _TILE
    # Two at a time: what is under way takes pinned memory.
    n, samples, calls = _sampled(make, effort.aim * peak / row, most / row, 1, _TILE, effort, longest=2)
    return _rate(samples, calls * float(n * row), format_bytes(n * row))


def _link(device: Any, peak: float, most: Bytes, effort: Effort) -> tuple[float, str]:
    """The slower of both directions."""

    def on_host(compiled: Any) -> bool:
        use = compiled.memory_analysis()
        return use.host_output_size_in_bytes + use.host_argument_size_in_bytes > 0

    away, back = (copies(device, there, peak, most, effort, on_host) for there in (True, False))
    told = (f"{format_rate(r.value, 'B/s')} ({r})" for r in (away, back))
    return min(away.value, back.value), " to pinned host memory, back ".join(told)


# ---- how it is timed ------------------------------------------------------------------------------


def _sampled(
    make: Callable[[int], tuple[Callable[[Any], Any], Any]],
    start: float,
    most: float,
    power: int,
    multiple: int,
    effort: Effort,
    longest: int = _LONGEST_CHAIN,
) -> tuple[int, list[Seconds], int]:
    """The chosen size, seconds of each repetition, and calls per repetition.

    ``make``: for a size, a step and its initial state; its work grows with size to the ``power``.
    """

    def rounded(size: float) -> int:
        return max(int(min(size, most)) // multiple * multiple, multiple)

    def started(size: int) -> tuple[Callable[[Any], Any], Any, Seconds]:
        step, state = make(size)
        once, state = _timed(step, step(state), 1)  # the first call compiles
        return step, state, max(once, 1e-6)

    size = rounded(start)
    step, state, once = started(size)
    for _ in range(_RESIZES):
        better = rounded(size * (effort.aim / once) ** (1 / power))
        if size / 2 < better < 2 * size:
            break
        size = better
        del step, state  # before the next ones are made
        step, state, once = started(size)
    calls = min(max(round(effort.aim / once), 1), longest)
    samples: list[Seconds] = []
    while len(samples) < effort.repetitions and (len(samples) < _FEWEST or sum(samples) < effort.limit):
        took, state = _timed(step, state, calls)
        samples.append(took)
    return size, samples, calls


def _timed(step: Callable[[Any], Any], state: Any, calls: int) -> tuple[Seconds, Any]:
    jax.block_until_ready(state)
    started = time.perf_counter()
    for _ in range(calls):
        state = step(state)
    jax.block_until_ready(state)
    return time.perf_counter() - started, state


def _rate(samples: Sequence[Seconds], work: float, size: str) -> Rate:
    median = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Rate(work / median, (high - low) / median, size)


def _filled(device: Any, tile: np.ndarray, times: tuple[int, int], dtype: Any) -> Any:
    """A random array on ``device``: units that multiply zeros draw less power and run faster."""
    return jax.jit(lambda t: jnp.tile(t.astype(dtype), times))(jax.device_put(tile, device))


# ---- the device -----------------------------------------------------------------------------------


def _device(device: Any) -> Any:
    if _compat.under_trace():
        raise JaxtensileError("calibrate() inside a function that JAX is tracing would time nothing: call it before")
    device = _compat.default_device() if device is None else device
    if not hasattr(device, "device_kind"):
        raise TargetError(f"calibrate({device!r}): give one of jax.devices(), or nothing for the default one")
    if device not in device.client.local_devices():
        raise TargetError(f"{device.device_kind} is not here, only its compiler is: calibrate() runs on real devices")
    return device


def _bytes(device: Any, published: DeviceProfile) -> Bytes:
    """Bytes to treat as the device's memory: its capacity, or less if most of it is in use."""
    stats = allocator_stats(device)
    limit = stats.get("bytes_limit") or published.capacity
    free = max(limit - stats.get("bytes_in_use", 0), 64 * KIB)
    return min(limit, published.capacity, _FREE * free)


# ---- what is told of it ---------------------------------------------------------------------------


def told_as_text(device: DeviceProfile) -> str:
    """The measured numbers beside the published ones."""
    published = profile_for_kind(device.kinds[0], device.platform)
    head = f"{device.kinds[0]} as {device.name}: in use, published, and where the first comes from"
    path = measured.file_of(device.kinds[0])
    kept = f"kept in {path}" if path is not None and path.is_file() else "kept for this process only"
    return "\n".join([head, *(f"  {line}" for line in measured.table(device, published)), kept])


def told_as_json(device: DeviceProfile) -> str:
    """The same as JSON: value, published value and source of each number."""
    path = measured.file_of(device.kinds[0])
    published = profile_for_kind(device.kinds[0], device.platform)
    numbers = {
        name: {
            "value": getattr(device, name),
            "published": getattr(published, name),
            "measured": name in device.measured,
            "source": device.sources[name],
        }
        for name in NUMBERS
    }
    kept = str(path) if path is not None and path.is_file() else None
    data = {"name": device.name, "kind": measured.full_kind(device.kinds[0]), "file": kept, "numbers": numbers}
    return json.dumps(data, indent=1)
