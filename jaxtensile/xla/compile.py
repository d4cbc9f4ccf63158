"""Lower and compile with XLA, read the allocation back, work around known failures.

Invariant: the measured executable is the one that the jit object runs: options belong to it, never to a separate
compile. But kernels for a device that is not here come from a file, and a trial is only measured.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax

from jaxtensile import _compat
from jaxtensile.devices.backends import Backend
from jaxtensile.devices.profiles import DeviceProfile
from jaxtensile.errors import TargetError
from jaxtensile.ir.plan import NOTHING_AGAIN, CompiledTime, MemoryUse, Recomputed
from jaxtensile.units import Bytes, Seconds
from jaxtensile.xla.hlo import recomputed
from jaxtensile.xla.kernel_cache import kernel_cache

Options = Mapping[str, Any]
"""``compiler_options`` of ``jax.jit``."""

RESERVED = "xla_tpu_user_reserved_hbm_bytes"
_SLOP = "xla_gpu_memory_limit_slop_factor"
_DISABLED = "xla_disable_hlo_passes"
REMATERIALIZATION = "rematerialization"
"""The pass in which XLA recomputes by itself."""
_SCHEDULED = 0.8
"""Share of a GPU's memory that XLA schedules for, times percent of ``_SLOP`` (default 95): see docs/xla.md."""
RECOMPUTES = 0.95 * _SCHEDULED
"""Share of a GPU's memory above which XLA recomputes by itself (docs/xla.md: about 0.76)."""
_TILE_SIZES = "output tile sizes"
_NO_BACKEND = "Unknown backend"
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "CompileTimeHbmOom", "Ran out of memory")


@dataclass(frozen=True)
class Compiled:
    """One executable: its jit object and XLA's allocation.

    ``jitted`` is None after a trial, of which nothing is run. ``memory`` is None if the compiler ran out of memory;
    ``refusal`` is then its message.
    """

    jitted: Any
    memory: MemoryUse | None
    options: Options
    seconds: Seconds
    notes: tuple[str, ...] = field(default=())
    refusal: str = ""
    again: Recomputed = NOTHING_AGAIN
    """What XLA recomputes by itself, if asked for."""
    time: CompiledTime | None = None
    """Time of a step by its kernels, if asked for and known."""

    @property
    def device(self) -> Bytes:
        """Bytes on the device; larger than any budget if the compiler refused."""
        return self.memory.device if self.memory is not None else 1 << 62


def compile_program(
    make: Callable[[Options], Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Options,
    meanwhile: Callable[[], object] | None = None,
    counts: DeviceProfile | None = None,
    clock: Callable[[str], CompiledTime | None] | None = None,
    trial: Options = MappingProxyType({}),
) -> Compiled:
    """Compile ``make(options)`` (a jit object) for the arguments and read its allocation.

    ``meanwhile``: called while XLA compiles in another thread. ``counts``: device for counting XLA's recomputation.
    ``clock``: step time of the compiled text. ``trial``: options to add where only figures are wanted.
    """
    started = time.perf_counter()
    notes: tuple[str, ...] = ()
    for attempt in _attempts(options):
        made = make({**attempt, **trial})
        jitted = None if trial else made
        try:
            # Only XLA's part runs elsewhere: tracing and lowering read this thread's configuration.
            lowered = _compat.lower(made, args, kwargs)
            kernels = kernel_cache(lowered, attempt)
            if meanwhile is None:
                executable = lowered.compile(kernels)
            else:
                with ThreadPoolExecutor(1) as pool:
                    compiling = pool.submit(lowered.compile, kernels)
                    now, meanwhile = meanwhile, None
                    now()
                executable = compiling.result()
        except Exception as error:
            text = str(error)
            if _TILE_SIZES in text and "xla_gpu_enable_triton_gemm" not in attempt:
                notes = ("XLA found no tile sizes for a product: compiled with xla_gpu_enable_triton_gemm=False",)
                continue
            if _NO_BACKEND in text:
                raise TargetError(
                    "callbacks into Python cannot be compiled for a device that is not here: leave them out to plan "
                    f"for it, or plan where the device is ({text.partition(chr(10))[0]})"
                ) from None
            if any(mark in text for mark in _OUT_OF_MEMORY):
                seconds = time.perf_counter() - started
                return Compiled(jitted, None, attempt, seconds, notes, text.split("\n", 1)[0][:300])
            raise
        text = executable.as_text() if counts is not None or clock is not None else ""
        again = recomputed(text, counts) if counts is not None else NOTHING_AGAIN
        took = clock(text) if clock is not None else None
        seconds = time.perf_counter() - started
        return Compiled(jitted, memory_of(executable), attempt, seconds, notes, again=again, time=took)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _attempts(options: Options) -> list[Options]:
    return [options, {**options, "xla_gpu_enable_triton_gemm": False}]


def memory_of(executable: Any) -> MemoryUse:
    """XLA's own allocation of a compiled executable."""
    m = executable.memory_analysis()
    return MemoryUse(
        argument=int(m.argument_size_in_bytes),
        output=int(m.output_size_in_bytes),
        temp=int(m.temp_size_in_bytes),
        alias=int(m.alias_size_in_bytes),
        host=int(m.host_temp_size_in_bytes)
        + int(m.host_argument_size_in_bytes)
        + int(m.host_output_size_in_bytes)
        - int(m.host_alias_size_in_bytes),
        exact=True,
    )


def sooner(backend: Backend, options: Options) -> Options:
    """Options to add to ``options`` for a trial; none where the user has chosen how much is optimized."""
    flags = os.environ.get("XLA_FLAGS", "")
    chosen = any(name in options or name in flags for name in backend.sooner)
    return {} if chosen or jax.config.read("jax_disable_most_optimizations") else backend.sooner


def within(options: Options, spare: Bytes) -> Options:
    """``options`` that tell XLA:TPU that others use ``spare`` bytes of the chip.

    It schedules for speed while there is room. Told of less it saves bytes, if necessary by recomputing, and refuses
    nothing.
    """
    return options if RESERVED in options else {**options, RESERVED: max(spare, 0)}


def disabled(options: Options) -> tuple[str, ...]:
    """The passes that ``options``, else ``$XLA_FLAGS``, disable."""
    flags = re.findall(rf"--{_DISABLED}=(\S+)", os.environ.get("XLA_FLAGS", ""))
    return tuple(filter(None, str(options.get(_DISABLED, flags[-1] if flags else "")).split(",")))


def _without_pass(options: Options, *names: str) -> Options:
    return {**options, _DISABLED: ",".join(dict.fromkeys((*disabled(options), *names)))}


def not_recomputing(backend: Backend, options: Options) -> Options:
    """``options`` that keep XLA from recomputing by itself, if there are any."""
    return _without_pass(options, REMATERIALIZATION) if backend.recomputes else options


def recomputing(options: Options, capacity: Bytes, aim: Bytes) -> Options:
    """``options`` under which XLA:GPU recomputes by itself down to ``aim`` bytes."""
    return options if _SLOP in options else {**options, _SLOP: max(int(100 * aim / (_SCHEDULED * capacity)), 1)}


def planned_options(backend: Backend, user: Options) -> list[Options]:
    """Options worth trying for a rewritten program, best first."""
    drops = backend.drops_barriers_before > _compat.JAX_VERSION
    # A small loop becomes one kernel, for which XLA:CPU writes no barrier: the process would end (docs/xla.md).
    first = _without_pass(user, "cse_barrier_expander", "small-while-loop-hoisting") if drops else dict(user)
    return [{**first, **scheduler} for scheduler in backend.schedulers]
