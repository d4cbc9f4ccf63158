"""Facts about every device of a platform: what its compiler does and accepts. One frozen record each.

Invariant: nothing else in the package tests a platform's name. Each quirk names its source; XLA's observed behavior is
in ``docs/xla.md``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from jaxtensile.units import MIB

ALLOCATOR: Final = "XLA_PYTHON_CLIENT_ALLOCATOR"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A platform. ``name``: in targets and JAX's topologies. ``in_jax``: in JAX's devices."""

    name: str
    in_jax: str
    own_memory: bool = True
    """Whether its memory is separate from the host's."""
    offloads: bool = False
    """Whether values can be offloaded: in straight-line code, and stacks of loops."""
    heeds_barriers: bool = False
    """Whether its scheduler keeps the order that barriers give. XLA:CPU and XLA:TPU drop them before scheduling."""
    recomputes: bool = False
    """Whether it recomputes by itself near the memory limit, and has an option against that."""
    takes_all: bool = False
    """Whether it uses all memory, or less if told that others use some; then it recomputes, visibly in its program."""
    places_copies: bool = False
    """Whether it places host copies itself, so that they must be tied to data (``host_stacks``)."""
    reads_backwards_from: tuple[int, ...] = (0,)
    """The jax from which it recognizes slices of stacks in host memory (``rewrites.loops``): XLA:GPU before its change
    46308 of 2026-07-27 does not."""
    draws_dear: bool = False
    """Whether redrawing random bits is expensive in straight-line code: measured for v5e, ``benchmarks/tpu``."""
    bounded: bool = False
    """Whether single ops' needs bound every program, and programs without loops need hardly less than predicted: of
    some 300 plans for an H200, XLA allocated at least 0.88 of it."""
    pools: bool = False
    """Whether a process allocates from XLA's BFC allocator, beside a context."""
    shown_by: str = ""
    """The environment variable that names the devices a process sees, by their numbers; empty: there is none here."""
    gives_back: tuple[str, ...] = ()
    """If it pools, the values of ``$XLA_PYTHON_CLIENT_ALLOCATOR`` with which freed bytes go back to the driver."""
    widens_sums: bool = True
    """Whether products of 16-bit numbers can be summed in 32 bits: XLA:CPU cannot for all shapes."""
    hoists_invariants: bool = False
    """Whether it makes what no iteration of a loop changes once, in front of the loop, however many bytes that is
    (``WhileLoopInvariantCodeMotion``). XLA:GPU leaves large values inside; of XLA:TPU it is not known."""
    loops_channels_last: bool = False
    """Whether convolutions in loops are fast only as NHWC by HWIO: outside of loops alone does XLA:CPU transpose others
    for its fast kernels (``ConvCanonicalization``)."""
    adds_at_once: float = 0.0
    """Most bytes of sums over devices in one all-reduce (``AllReduceCombiner``). XLA:CPU combined all gradients in
    ``benchmarks/spmd``; XLA:GPU has ``xla_gpu_all_reduce_combine_threshold_bytes``; a TPU's limit is not known."""
    scatters_sums: bool = False
    """Whether an all-reduce of which each device keeps a part becomes a reduce-scatter (``ReduceScatterCreator``)."""
    schedulers: tuple[Mapping[str, Any], ...] = field(default=({},), hash=False)
    """Compiler options of the schedulers to try for a rewritten program, best first."""
    sooner: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Compiler options with which a program takes as many bytes and is compiled sooner, but runs slower. Without LLVM's
    optimizations XLA:CPU needs 30 to 60 % of its time; XLA:GPU, with a cache of kernels, 90."""
    drops_barriers_before: tuple[int, ...] = (0,)
    """The jax before which the pass ``cse_barrier_expander`` drops barriers before scheduling and undoes every
    recomputation (a GPT step: 592 MiB with the pass, 129 without)."""
    alike: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Compiler options for a process that compiles alone: XLA:GPU otherwise divides kernel tuning among a program's
    processes and waits for those that do not compile."""
    kernels_known: bool = False
    """Whether the compiled text names the kernels, with known times (``xla/kernel_time``)."""
    sketched: float = 0.25
    """Extra share of temporaries requested over the sketch: a first step waits if it has too little. A CPU's compiler
    keeps no plan's order."""


CUDA: Final = Backend(
    name="cuda",
    in_jax="gpu",
    offloads=True,
    heeds_barriers=True,
    recomputes=True,
    reads_backwards_from=(0, 12),
    bounded=True,
    pools=True,
    shown_by="CUDA_VISIBLE_DEVICES",
    gives_back=("cuda_async", "platform", "vmm"),
    kernels_known=True,
    adds_at_once=30 * MIB,
    scatters_sums=True,
    alike={"xla_gpu_shard_autotuning": False},
)
TPU: Final = Backend(
    name="tpu", in_jax="tpu", offloads=True, takes_all=True, places_copies=True, draws_dear=True, scatters_sums=True
)
CPU: Final = Backend(
    name="cpu",
    in_jax="cpu",
    own_memory=False,
    widens_sums=False,
    loops_channels_last=True,
    schedulers=({}, {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}),
    sooner={"xla_backend_optimization_level": 0},
    drops_barriers_before=(0, 11),
    sketched=0.5,
    hoists_invariants=True,
    adds_at_once=math.inf,
)
BACKENDS: Final[dict[str, Backend]] = {backend.name: backend for backend in (CUDA, TPU, CPU)}


def keeps_bytes(device: str, environment: Mapping[str, str]) -> bool:
    """Whether the allocator of a process keeps a device's bytes that are free, instead of returning them to the driver.
    ``device``: its name, as ``cuda:0``."""
    backend = BACKENDS.get(device.partition(":")[0])
    return backend is not None and backend.pools and environment.get(ALLOCATOR, "default") not in backend.gives_back


def visible(device: str) -> str:
    """The variable that names the devices of this one's kind that a process sees; empty: there is none."""
    backend = BACKENDS.get(device.partition(":")[0])
    return "" if backend is None else backend.shown_by
