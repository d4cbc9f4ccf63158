"""Capacity and speed of devices: one frozen profile per target name. No JAX here.

Invariant: a rate is a hardware peak (from a data sheet or derived), in bytes or operations per second. ``sources``
gives each origin; ``measured`` puts in ``jaxtensile.calibrate``'s numbers. The cost model decides the share of a peak
that a program reaches; an H200 reached 790 of 989 TFLOP/s (bf16 matmul) and 4.3 of 4.8 TB/s (copy).

f32 products run as XLA's defaults: TF32 on CUDA from compute capability 8.0, one bf16 pass on TPU.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from jaxtensile.devices.backends import BACKENDS, CPU, CUDA, TPU, Backend
from jaxtensile.devices.hardware import host_memory
from jaxtensile.errors import TargetError
from jaxtensile.units import GIB, MIB, Bytes, Seconds

OF_MEASURED: Final = 0.95
"""Share of a measured rate that programs get: an H200 measured 0.80 and 0.90 of its peaks (products, copies), and real
programs are taken to reach 0.75 and 0.85."""


TRAFFIC_WEIGHT: Final = 0.01
"""Weight of a second of traffic under ``"flops"``. 0.03 plans up to half a percent more FLOPs for steps
up to 5 % shorter (nine workloads, H200), but misses a budget."""
RESERVE: Final = GIB
"""Bytes of the device left to the process if neither code nor config gives a budget: its context (``process.CONTEXT``)
and as much again for what is not planned. A guess."""
WEIGHTS: Final = {"flops": TRAFFIC_WEIGHT, "time": 1.0}
"""Objectives of a plan, with the weight of a second of memory traffic beside one of matrix work; 1 compares predicted
seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One device: its capacity, peak rates, fixed costs, and their sources."""

    name: str
    platform: str
    """The name of its ``backend``."""
    kinds: tuple[str, ...]
    """``jax.Device.device_kind`` strings of this device; the first is the usual one."""
    capacity: Bytes
    """Bytes that a program can allocate."""
    memory_bandwidth: float
    """Bytes per second of device memory."""
    matmul_flops_bf16: float
    matmul_flops_f32: float
    elementwise_flops: float
    """f32 operations per second outside the matrix units."""
    link_bandwidth: float
    """Bytes per second between host and device, each direction."""
    link_latency: Seconds
    kernel_launch: Seconds
    sources: Mapping[str, str] = field(hash=False, repr=False)
    """The source of each number above, by its name."""
    measured: frozenset[str] = frozenset()
    """Names of the measured numbers."""
    traffic_weight: float = TRAFFIC_WEIGHT
    """Weight of a second of memory traffic or launches beside one of matrix work in comparisons of plans; from 1 on
    predicted seconds are compared."""

    @property
    def backend(self) -> Backend:
        """The facts about its platform."""
        return BACKENDS[self.platform]

    def reached(self, rate: str, of_peak: float) -> float:
        """The rate that programs get: ``of_peak`` of a peak, ``OF_MEASURED`` of a measured rate."""
        return getattr(self, rate) * (OF_MEASURED if rate in self.measured else of_peak)


_MEMORY: Final = ("capacity", "memory_bandwidth")
_FLOPS: Final = ("matmul_flops_bf16", "matmul_flops_f32", "elementwise_flops")
_FIXED: Final = ("link_latency", "kernel_launch")
NUMBERS: Final = (*_MEMORY, *_FLOPS, "link_bandwidth", *_FIXED)
"""The fields of a profile that have a source."""

_ASSUMED: Final = "assumed, no data sheet states it; keeps tiny copies and ops from looking free"
_LATENCY: Final = 10e-6
"""Seconds until a copy over the link begins. Assumed: see ``_ASSUMED``."""
_LAUNCH: Final = 4e-6
"""Seconds of a kernel that does nothing. Assumed: see ``_ASSUMED``."""
_XLA: Final = "device description in openxla/xla"
_XLA_GEN4: Final = f"{_XLA}, which lists PCIe 4 rates for this card"
_ENCODED: Final = "PCIe 4.0 x16 after encoding"
_GOOGLE: Final = "Google's TPU system architecture pages"
_GEN3: Final = 17_179_869_184.0
"""Bytes per second of PCIe 3.0 x16, one way: 16 GiB/s, from openxla/xla's device descriptions."""
_GEN4: Final = 34_359_738_368.0
"""Bytes per second of PCIe 4.0 x16, one way: 32 GiB/s, from openxla/xla's device descriptions."""
_GEN5: Final = 68_719_476_736.0
"""Bytes per second of PCIe 5.0 x16, one way: 64 GiB/s, from openxla/xla's device descriptions."""


def _gpu(
    name: str,
    kinds: tuple[str, ...],
    *,
    capacity: Bytes,
    bandwidth: float,
    bf16: float,
    f32: float,
    elementwise: float,
    link: float,
    flops: str,
    memory: str = _XLA,
    way: str = _XLA,
    room: str | None = None,
    bf16_flops: str | None = None,
) -> DeviceProfile:
    """A GPU's profile. ``flops``, ``memory``, ``way``: sources of rates, of capacity and bandwidth, and of the link.
    ``room``, ``bf16_flops``: of the capacity and the bf16 rate, if different."""
    return DeviceProfile(
        name=name,
        platform=CUDA.name,
        kinds=kinds,
        capacity=capacity,
        memory_bandwidth=bandwidth,
        matmul_flops_bf16=bf16,
        matmul_flops_f32=f32,
        elementwise_flops=elementwise,
        link_bandwidth=link,
        link_latency=_LATENCY,
        kernel_launch=_LAUNCH,
        sources={
            "capacity": room or memory,
            "memory_bandwidth": memory,
            **dict.fromkeys(_FLOPS, flops),
            **({"matmul_flops_bf16": bf16_flops} if bf16_flops else {}),
            "link_bandwidth": way,
            **dict.fromkeys(_FIXED, _ASSUMED),
        },
    )


def _tpu(
    name: str, kinds: tuple[str, ...], *, capacity: Bytes, bandwidth: float, flops: float, vpu: float, link: float
) -> DeviceProfile:
    return DeviceProfile(
        name=name,
        platform=TPU.name,
        kinds=kinds,
        capacity=capacity,
        memory_bandwidth=bandwidth,
        matmul_flops_bf16=flops,
        matmul_flops_f32=flops,
        elementwise_flops=vpu,
        link_bandwidth=link,
        link_latency=_LATENCY,
        kernel_launch=_LAUNCH,
        sources={
            "capacity": "largest argument + output that libtpu 0.0.52 compiles, rounded down to MiB",
            "memory_bandwidth": _GOOGLE,
            "matmul_flops_bf16": _GOOGLE,
            "matmul_flops_f32": f"{_GOOGLE}: one bf16 pass",
            "elementwise_flops": "derived: vector lanes x ALUs x clock",
            "link_bandwidth": "'How to Scale Your Model', part 2",
            **dict.fromkeys(_FIXED, _ASSUMED),
        },
    )


_ACCELERATORS: Final = (
    _gpu(
        "nvidia-h200",
        ("NVIDIA H200",),
        capacity=151_397_597_184,
        bandwidth=4.8e12,
        bf16=989.4e12,
        f32=494.7e12,
        elementwise=66.9e12,
        link=_GEN4,
        flops="H200 SXM data sheet, dense",
        way=_XLA_GEN4,
    ),
    _gpu(
        "nvidia-h100-80gb",
        ("NVIDIA H100 80GB HBM3",),
        capacity=84_929_347_584,
        bandwidth=3.352e12,
        bf16=989.4e12,
        f32=494.7e12,
        elementwise=66.9e12,
        link=_GEN4,
        flops="H100 SXM data sheet, dense",
        way=_XLA_GEN4,
    ),
    _gpu(
        "nvidia-a100-80gb",
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
        capacity=85_100_068_864,
        bandwidth=2.039e12,
        bf16=312e12,
        f32=156e12,
        elementwise=19.5e12,
        link=_GEN4,
        flops="A100 data sheet, dense",
        way=f"{_XLA}, as listed for the 40 GB card",
    ),
    _gpu(
        "nvidia-a100-40gb",
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        capacity=42_331_013_120,
        bandwidth=1.555e12,
        bf16=312e12,
        f32=156e12,
        elementwise=19.5e12,
        link=_GEN4,
        flops="A100 data sheet, dense",
    ),
    _gpu(
        "nvidia-b200",
        ("NVIDIA B200",),
        capacity=191_514_411_008,
        bandwidth=7.672e12,
        bf16=2250e12,
        f32=1125e12,
        elementwise=75e12,
        link=_GEN5,
        flops="HGX B200 data sheet over 8 GPUs, sparse rates halved",
    ),
    _gpu(
        "nvidia-rtx-a6000",
        ("NVIDIA RTX A6000",),
        capacity=51_041_271_808,
        bandwidth=768.1e9,
        bf16=154.8e12,
        f32=77.4e12,
        elementwise=38.7e12,
        link=31.5e9,
        flops="RTX A6000 data sheet, sparse rates halved",
        way=_ENCODED,
    ),
    _gpu(
        "nvidia-v100-16gb",
        ("Tesla V100-SXM2-16GB",),
        capacity=16_935_682_048,
        bandwidth=898e9,
        bf16=15.7e12,
        f32=15.7e12,
        elementwise=15.7e12,
        link=_GEN3,
        flops="V100 data sheet; no TF32 units",
        bf16_flops="V100 data sheet: XLA computes bf16 products in f32 there (its 125 TFLOP/s are for f16 only)",
    ),
    _gpu(
        "nvidia-l4",
        ("NVIDIA L4",),
        capacity=22 * GIB,
        bandwidth=300e9,
        bf16=121e12,
        f32=60e12,
        elementwise=30.3e12,
        link=31.5e9,
        flops="L4 data sheet, sparse rates halved",
        memory="L4 data sheet",
        way=_ENCODED,
        room="24 GB board less ECC and the driver's share, rounded down",
    ),
    _gpu(
        "nvidia-rtx-4090",
        ("NVIDIA GeForce RTX 4090",),
        capacity=23 * GIB + 640 * MIB,
        bandwidth=1.008e12,
        bf16=165.2e12,
        f32=82.6e12,
        elementwise=82.6e12,
        link=31.5e9,
        flops="Ada architecture white paper, dense, f32 accumulation",
        memory="Ada architecture white paper",
        way=_ENCODED,
        room="24 GiB board less the driver's share (users see 23.6 to 23.7 GiB)",
    ),
    _gpu(
        "nvidia-rtx-3060",
        ("NVIDIA GeForce RTX 3060",),
        capacity=11 * GIB + 768 * MIB,
        bandwidth=360e9,
        bf16=25.5e12,
        f32=12.7e12,
        elementwise=12.7e12,
        link=31.5e9,
        flops="RTX 3060 12 GB product page",
        bf16_flops="twice the f32 rate, as the Ampere white paper has it for GeForce with f32 accumulation",
        memory="RTX 3060 12 GB product page",
        way=_ENCODED,
        room="12 GiB board less the driver's share",
    ),
    _tpu(
        "tpu-v5e",
        ("TPU v5 lite", "TPU v5e"),
        capacity=16_124 * MIB,
        bandwidth=819e9,
        flops=197e12,
        vpu=6.1e12,
        link=15e9,
    ),
    _tpu(
        "tpu-v5p",
        ("TPU v5", "TPU v5p"),
        capacity=98_022 * MIB,
        bandwidth=2.765e12,
        flops=459e12,
        vpu=14.3e12,
        link=15e9,
    ),
    _tpu(
        "tpu-v6e",
        ("TPU v6 lite", "TPU v6e"),
        capacity=31_990 * MIB,
        bandwidth=1.6e12,
        flops=918e12,
        vpu=7.2e12,
        link=32e9,
    ),
)
_RATES: Final = ("memory_bandwidth", "matmul_flops_bf16", "matmul_flops_f32", "elementwise_flops", "link_bandwidth")
_BY_NAME: Final = {p.name: p for p in _ACCELERATORS}
_SHAPE: Final = re.compile(r"[1-9]\d{0,4}(x[1-9]\d{0,4}){0,2}")
_BY_KIND: Final = {kind: p for p in _ACCELERATORS for kind in p.kinds}


def targets() -> tuple[str, ...]:
    """Names that ``target=`` accepts."""
    return (*_BY_NAME, "cpu")


def kind_and_shape(target: str) -> tuple[str, tuple[int, ...]]:
    """A target's name, and how many devices there are in each direction: ``nvidia-h200:8x8`` is 8 hosts with 8 GPUs
    each, ``tpu-v5e:4x4`` a grid of chips; empty for a name alone. Raises ``TargetError``."""
    if not isinstance(target, str):
        raise TargetError(f"target={target!r} is no name: give one of jaxtensile.targets(), or None to run here")
    name, colon, shape = target.partition(":")
    if not colon:
        return name, ()
    if not _SHAPE.fullmatch(shape):
        raise TargetError(
            f"target {target!r} has no number of devices behind its colon: write {name}:8, or {name}:2x4 for two hosts "
            "of four GPUs each or a grid of TPUs"
        )
    return name, tuple(map(int, shape.split("x")))


def profile(name: str) -> DeviceProfile:
    """The profile of a target name, with or without a number of devices (``nvidia-h200:8``); ``TargetError`` with the
    nearest names if there is none."""
    name, _ = kind_and_shape(name)
    if name == "cpu":
        return _cpu()
    found = _BY_NAME.get(name)
    if found is None:
        raise TargetError(
            f"unknown target {name!r}: nearest {' or '.join(_nearest(name))}. "
            f"Known targets are {', '.join(targets())}. Pass one of them, or target=None for the arguments' device."
        )
    return found


def profile_for_kind(device_kind: str, platform: str) -> DeviceProfile:
    """The profile of a real device as JAX names it (``device_kind``, ``platform``).

    An unknown kind gets its platform's worst number in every field, and a name that says so; take its capacity from the
    device itself.
    """
    backend = next((b for b in BACKENDS.values() if platform in (b.in_jax, b.name)), CUDA)
    if backend is CPU:
        return _cpu()
    known = _BY_KIND.get(device_kind)
    if known is not None:
        return known
    # JAX says "gpu" for CUDA and ROCm alike; other platforms, and those without a profile, are taken for the slowest
    # GPU.
    return _worst(device_kind, backend.name)


def _nearest(name: str) -> tuple[str, ...]:
    text = name.strip().lower().replace("_", "-")
    containing = tuple(t for t in targets() if text and text in t)
    close = difflib.get_close_matches(text, targets(), n=2, cutoff=0.0)
    return tuple(f"'{t}'" for t in (containing or close)[:2])


def _worst(device_kind: str, platform: str) -> DeviceProfile:
    members = [p for p in _BY_NAME.values() if p.platform == platform] or [
        p for p in _ACCELERATORS if p.backend is CUDA
    ]

    def over(pick: Callable[[list[float]], float], field: str) -> float:
        return pick([getattr(p, field) for p in members])

    slowest: dict[str, Any] = {field: over(min, field) for field in _RATES}
    return DeviceProfile(
        name=f"{platform}-unknown",
        platform=platform,
        kinds=(device_kind,),
        capacity=min(p.capacity for p in members),
        link_latency=over(max, "link_latency"),
        kernel_launch=over(max, "kernel_launch"),
        sources=dict.fromkeys(NUMBERS, f"no profile for {device_kind!r}: the worst known {platform} number"),
        **slowest,
    )


def _cpu() -> DeviceProfile:
    return DeviceProfile(
        name="cpu",
        platform=CPU.name,
        kinds=("cpu",),
        capacity=host_memory(),
        memory_bandwidth=20e9,
        matmul_flops_bf16=50e9,
        matmul_flops_f32=100e9,
        elementwise_flops=20e9,
        link_bandwidth=10e9,
        link_latency=1e-6,
        kernel_launch=1e-6,
        sources={
            **dict.fromkeys(NUMBERS, "order of magnitude of two cores"),
            "capacity": "this machine's memory, or a control group's limit",
        },
    )
