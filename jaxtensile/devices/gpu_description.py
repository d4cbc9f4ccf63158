"""Descriptions of absent GPUs for XLA: ``GpuTargetConfigProto`` as text. No JAX here.

Invariant: every CUDA name of ``device.targets()`` has a row; the capacity is the profile's. Sources: openxla/xla's
device descriptions. For L4, RTX 4090 and RTX 3060: data sheets (SM count, boost clock, L2) and the CUDA programming
guide (threads, shared memory).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from jaxtensile.devices.profiles import profile
from jaxtensile.units import KIB, MIB, Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """What XLA's code generator and cost model read about a GPU."""

    compute_capability: tuple[int, int]
    multiprocessors: int
    fpus: int
    """f32 units per multiprocessor."""
    threads: int
    """Resident threads per multiprocessor."""
    clock_ghz: float
    l2: Bytes
    shared: Bytes
    """Shared memory per multiprocessor; a block may use all but the driver's 1 KiB."""


_HOPPER: Final = GpuFacts(
    compute_capability=(9, 0),
    multiprocessors=132,
    fpus=128,
    threads=2048,
    clock_ghz=1.98,
    l2=50 * MIB,
    shared=228 * KIB,
)
_AMPERE: Final = GpuFacts(
    compute_capability=(8, 0),
    multiprocessors=108,
    fpus=64,
    threads=2048,
    clock_ghz=1.41,
    l2=40 * MIB,
    shared=164 * KIB,
)
FACTS: Final = {
    "nvidia-h200": _HOPPER,
    "nvidia-h100-80gb": _HOPPER,
    "nvidia-a100-80gb": _AMPERE,
    "nvidia-a100-40gb": _AMPERE,
    "nvidia-b200": GpuFacts(
        compute_capability=(10, 0),
        multiprocessors=148,
        fpus=128,
        threads=2048,
        clock_ghz=1.965,
        l2=132_644_864,
        shared=228 * KIB,
    ),
    "nvidia-rtx-a6000": GpuFacts(
        compute_capability=(8, 6),
        multiprocessors=84,
        fpus=128,
        threads=1536,
        clock_ghz=1.80,
        l2=6 * MIB,
        shared=100 * KIB,
    ),
    "nvidia-v100-16gb": GpuFacts(
        compute_capability=(7, 0),
        multiprocessors=80,
        fpus=64,
        threads=2048,
        clock_ghz=1.53,
        l2=6 * MIB,
        shared=96 * KIB,
    ),
    "nvidia-l4": GpuFacts(
        compute_capability=(8, 9),
        multiprocessors=58,
        fpus=128,
        threads=1536,
        clock_ghz=2.04,
        l2=48 * MIB,
        shared=100 * KIB,
    ),
    "nvidia-rtx-4090": GpuFacts(
        compute_capability=(8, 9),
        multiprocessors=128,
        fpus=128,
        threads=1536,
        clock_ghz=2.52,
        l2=72 * MIB,
        shared=100 * KIB,
    ),
    "nvidia-rtx-3060": GpuFacts(
        compute_capability=(8, 6),
        multiprocessors=28,
        fpus=128,
        threads=1536,
        clock_ghz=1.777,
        l2=3 * MIB,
        shared=100 * KIB,
    ),
}
CUDNN: Final = (9, 10)
"""Version of cuDNN for every card, major and minor; JAX gets it for absent cards when it traces attention
(docs/xla.md)."""
OLDEST_CUDA13: Final = (7, 5)
"""Oldest compute capability that CUDA 13's ptxas accepts; older GPUs need CUDA 12's (docs/xla.md)."""


def target_config(name: str) -> str:
    """The ``GpuTargetConfigProto`` of a CUDA target, in protobuf text form."""
    device, gpu = profile(name), FACTS[name]
    major, minor = gpu.compute_capability
    # Volta keeps all of its shared memory; from Ampere on the driver takes 1 KiB of each block's.
    optin = gpu.shared if major < 8 else gpu.shared - KIB
    toolkit = (13, 0) if gpu.compute_capability >= OLDEST_CUDA13 else (12, 9)
    return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * KIB}
  shared_memory_per_core: {gpu.shared}
  shared_memory_per_block_optin: {optin}
  threads_per_core_limit: {gpu.threads}
  core_count: {gpu.multiprocessors}
  fpus_per_core: {gpu.fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(device.memory_bandwidth)}
  l2_cache_size: {gpu.l2}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {device.capacity}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} }}
runtime_version {{ major: {toolkit[0]} minor: {toolkit[1]} }}
device_description_str: "{device.kinds[0]}"
"""
