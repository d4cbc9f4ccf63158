"""What is true of every device of a platform: what its compiler does and can be told, one frozen record each.

Invariant: nothing else in the package asks for a platform by its name. A quirk says where it is known from; how XLA
was seen to behave is in ``docs/xla.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """``name``: as targets and JAX's topologies have it; ``in_jax``: as devices of JAX have it."""

    name: str
    in_jax: str
    own_memory: bool = True
    """Whether its memory is not the host's."""
    offloads: bool = False
    """Whether values may wait on the host: in straight-line code, and what loops stack."""
    heeds_barriers: bool = False
    """Whether its scheduler keeps the order that barriers give. XLA:CPU and XLA:TPU schedule after dropping them."""
    recomputes: bool = False
    """Whether it recomputes by itself near the limit of its memory, and does not where it is told not to."""
    takes_all: bool = False
    """Whether it uses what memory there is, and less where it is told that others use some: then it computes things
    twice, which its program shows."""
    places_copies: bool = False
    """Whether it places copies to the host by itself, so that they have to be tied to data (``host_stacks``)."""
    reads_backwards_from: tuple[int, ...] = (0,)
    """The jax from which on it finds slices of stacks in host memory by itself (``rewrites.loops``): XLA:GPU before its
    change 46308 of 2026-07-27 does not."""
    draws_dear: bool = False
    """Whether drawing random bits again is dear in straight-line code: measured for v5e, ``benchmarks/tpu``."""
    bounded: bool = False
    """Whether what single ops need at once bounds every program, and no program without loops needs much less than is
    predicted: of some 300 plans for an H200, XLA allocated 0.88 of it at least."""
    pools: bool = False
    """Whether a process takes its memory from XLA's BFC allocator, beside a context."""
    widens_sums: bool = True
    """Whether products of 16-bit numbers can be added up in 32 bits."""
    schedulers: tuple[Mapping[str, Any], ...] = field(default=({},), hash=False)
    """Compiler options of the schedulers that are worth trying for a rewritten program, best first."""
    drops_barriers_before: tuple[int, ...] = (0,)
    """The jax before which the pass ``cse_barrier_expander`` drops barriers before XLA schedules, which undoes every
    recomputation (a GPT step that recomputes by hand: 592 MiB with it, 129 without; the same bits)."""
    alike: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Compiler options under which a process compiles without the others: XLA:GPU shares out the tuning of kernels
    among the processes of a program, and would wait for those that do not compile it."""
    kernels_known: bool = False
    """Whether the text of a compiled program says which kernels it runs, and what each takes (``xla/kernel_time``)."""
    sketched: float = 0.25
    """What a plan may need more temporaries than was sketched. So many are asked for, since a first step waits where
    they are too few. A CPU's compiler keeps no plan's order."""


CUDA: Final = Backend(
    name="cuda",
    in_jax="gpu",
    offloads=True,
    heeds_barriers=True,
    recomputes=True,
    reads_backwards_from=(0, 12),
    bounded=True,
    pools=True,
    kernels_known=True,
    alike={"xla_gpu_shard_autotuning": False},
)
TPU: Final = Backend(name="tpu", in_jax="tpu", offloads=True, takes_all=True, places_copies=True, draws_dear=True)
CPU: Final = Backend(
    name="cpu",
    in_jax="cpu",
    own_memory=False,
    widens_sums=False,
    schedulers=({}, {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}),
    drops_barriers_before=(0, 11),
    sketched=0.5,
)
BACKENDS: Final[dict[str, Backend]] = {backend.name: backend for backend in (CUDA, TPU, CPU)}
