"""The compile-only device of a target name: the target's own compiler, without the hardware.

Invariant: resolving a target leaves the process as it was. ``jax.devices()`` stays and nothing is printed. libtpu's
environment variables are set only while its topology is built. (A CUDA target compiles a small program, which starts
JAX's usual backends.)

Found on jax 0.10.2 and 0.12.0.1 (nothing needs a driver):

- XLA:GPU needs ``ptxas`` and ``libdevice``, from a toolkit in its usual place or the wheels nvidia-cuda-nvcc and
  nvidia-nvvm. With the wheel nvidia-nvjitlink it assembles in its own process: a sixth of a compile less.
- CUDA 13's ptxas accepts compute capability 7.5 and newer. A V100 (7.0) needs CUDA 12's (wheel nvidia-cuda-nvcc-cu12),
  through the compiler option ``xla_gpu_cuda_data_dir``, and nvJitLink switched off. Compiled for 7.5, an f16 step came
  out 25 % too small.
- The CUDA plugin looks for cuDNN and the driver once, at the first use of JAX. After a failure the process cannot use
  it: hence ``hardware.quiet_plugins`` and the second try here.
- libtpu takes ``v5e:1x1``, ``v5p:1x1x1``, ``v6e:1x1``. It refuses a second process on the machine (a lock file) unless
  ``ALLOW_MULTIPLE_LIBTPU_LOAD`` is set. Without a TPU it complains on stderr: again ``hardware.quiet_plugins``.
"""

from __future__ import annotations

import importlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Sharding, SingleDeviceSharding

from jaxtensile import _compat
from jaxtensile.devices.backends import CPU, CUDA, TPU
from jaxtensile.devices.gpu_description import CUDNN, FACTS, OLDEST_CUDA13, target_config
from jaxtensile.devices.hardware import WITHOUT_TPU, has_tpu
from jaxtensile.devices.profiles import kind_and_shape, profile
from jaxtensile.errors import TargetError

Device = Any
"""``jax.Device``, which type checkers do not accept as a class."""

PINNED_HOST: Final = "pinned_host"
"""Memory kind of host memory that a device reads and writes directly."""

_CUDA_PLUGINS: Final = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_TPU_TOPOLOGIES: Final = {"tpu-v5e": ("v5e", 2), "tpu-v5p": ("v5p", 3), "tpu-v6e": ("v6e", 2)}
"""Generation, and the number of dimensions of its chip grid."""
_LOCK: Final = threading.RLock()


def resolve(name: str) -> Device:
    """The device to put in a ``SingleDeviceSharding`` to compile for ``name``; always the same object.

    Raises ``TargetError`` for an unknown name, a missing plugin (with the extra to install) or a compiler that refuses.
    """
    with _LOCK:
        return _resolve(kind_and_shape(name)[0])


def target_devices(target: str) -> list[Device]:
    """The devices of a target, for a mesh to plan and compile for without having them.

    ``target``: a name of ``jaxtensile.targets()`` and how many: ``"nvidia-h200:8"``, ``"nvidia-h200:2x8"`` (two hosts
    with eight each), ``"tpu-v5e:4x4"`` (a grid); without a number, one. Raises ``TargetError``. Nothing runs on them:
    ``jax.make_mesh((8,), ("data",), devices=jaxtensile.target_devices("nvidia-h200:8"))``.
    """
    _, shape = kind_and_shape(target)
    return [*resolve_all(target, math.prod(shape))]


def compiler_options(name: str) -> Mapping[str, str]:
    """Options for every compile for ``name``; the user's own take precedence."""
    name, _ = kind_and_shape(name)
    if name not in FACTS or FACTS[name].compute_capability >= OLDEST_CUDA13:
        return {}
    root = _wheel_folder("nvidia.cuda_nvcc")
    if root is None or not (root / "bin" / "ptxas").is_file():
        raise TargetError(
            f"target {name!r} has compute capability {_dotted(FACTS[name].compute_capability)}; CUDA 13's ptxas "
            f"accepts {_dotted(OLDEST_CUDA13)} and newer, and CUDA 12's is not installed. {_install('cuda-aot')}"
        )
    # nvJitLink, which XLA prefers where it is installed, is of CUDA 13 too.
    return {"xla_gpu_cuda_data_dir": str(root), "xla_gpu_libnvjitlink_mode": "LIB_NV_JIT_LINK_MODE_DISABLED"}


def resolve_all(name: str, count: int) -> tuple[Device, ...]:
    """``count`` devices to compile one program for; always the same objects.

    Raises ``TargetError`` as ``resolve`` does, if there are fewer, and if the name says another number.
    """
    kind, shape = kind_and_shape(name)
    if shape and math.prod(shape) != count:
        raise TargetError(
            f"target {name!r} has {math.prod(shape)} devices, and the program is divided among {count}, as its "
            f"arguments' shardings say: divide it among as many, or write target={kind!r}"
        )
    if count == 1:
        return (resolve(kind),)
    with _LOCK:
        return _resolve_all(kind, count, shape)


@cache
def _resolve_all(name: str, count: int, shape: tuple[int, ...]) -> tuple[Device, ...]:
    resolve(name)  # says what is missing
    try:
        found = _SEVERAL[profile(name).platform](name, count, shape)
    except Exception as error:
        raise TargetError(f"{count} devices of target {name!r} cannot be compiled for: {_reason(error)}") from error
    if len(found) < count:
        raise TargetError(
            f"the arguments are sharded over {count} devices, and target {name!r} has {len(found)} here: set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count} before JAX is first used"
        )
    return tuple(sorted(found, key=lambda d: d.id)[:count])


@cache
def _resolve(name: str) -> Device:
    return _ONE[profile(name).platform](name)


def _cuda_device(name: str) -> Device:
    plugin = next((p for p in _CUDA_PLUGINS if _wheel_folder(p) is not None), None)
    if plugin is None:
        raise TargetError(f"target {name!r} needs JAX's CUDA plugin, which is not installed. {_install('cuda-aot')}")
    options = compiler_options(name)
    try:
        (device,) = _cuda_topology(target_config(name), plugin)
        _compile_something(device, options)
    except Exception as error:
        raise TargetError(
            f"target {name!r} cannot be compiled for: {_reason(error)}. Needed are JAX's CUDA plugin in jax's own "
            f"version ({jax.__version__}) and a CUDA toolkit or its wheels. {_install('cuda-aot')}"
        ) from error
    return device


def _cuda_topology(config: str, plugin: str = "", count: int = 1, hosts: int = 1) -> Sequence[Device]:
    """``count`` GPUs, as many on each host. ``plugin``: the module to register at the first use."""

    def build() -> Sequence[Device]:
        described = topologies.get_topology_desc(
            platform=CUDA.name, topology_name="", topology=f"1x{hosts}x{count // hosts}", target_config=config
        )
        return described.devices

    try:
        return build()
    except NotImplementedError:
        # Plugins were discovered before the variable was set: register this one again.
        importlib.import_module(plugin).initialize()
        return build()


class _PinnedHost(SingleDeviceSharding):
    """Pinned host memory of a compile-only GPU.

    Such a device lists no memories, so JAX drops the memory kind. XLA would place the argument on the device, and let
    kernels read it across the link.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)

    @property
    def memory_kind(self) -> str:
        return PINNED_HOST


def is_absent(device: Device) -> bool:
    """Whether ``device`` can only be compiled for, not run on."""
    return _compat.only_compiles(device.client)


def tracing_for(*targets: str, args: Any = ()) -> AbstractContextManager[None]:
    """A context for tracing for named targets, or for the absent GPUs that hold ``args``.

    In this thread JAX sees cuDNN and their lowest compute capability. Without targets, devices and a local GPU, the
    program is only inspected: JAX sees the newest GPU's. Other targets change nothing.
    """
    targets = tuple(kind_and_shape(target)[0] for target in targets)
    placed = (getattr(x, "sharding", None) for x in jax.tree.leaves(args))
    devices = {d for s in placed if isinstance(s, Sharding) and not _compat.is_abstract(s) for d in s.device_set}
    kinds = {d.device_kind for d in devices if d.platform == CUDA.in_jax and is_absent(d)}
    found = [gpu for name, gpu in FACTS.items() if name in targets or kinds.intersection(profile(name).kinds)]
    if not targets and not devices and jax.default_backend() != CUDA.in_jax:
        found = [max(FACTS.values(), key=lambda gpu: gpu.compute_capability)]
    if not found:
        return nullcontext()
    return _compat.as_on((CUDNN[0] * 10_000 + CUDNN[1] * 100, min(gpu.compute_capability for gpu in found)))


def host_sharding(device: Device) -> SingleDeviceSharding:
    """Pinned host memory beside ``device``; ``TargetError`` if it has none."""
    if device.platform == CUDA.in_jax and is_absent(device):
        return _PinnedHost(device)
    try:
        kinds = [m.kind for m in device.addressable_memories()]
    except Exception:  # what a backend without memories raises is its own affair
        kinds = []
    if PINNED_HOST not in kinds:
        raise TargetError(
            f"{device} has no pinned host memory ({', '.join(kinds) or 'it lists no memories'}), so nothing can wait "
            "there between steps: leave offload_state= out"
        )
    return SingleDeviceSharding(device, memory_kind=PINNED_HOST)


def _compile_something(device: Device, options: Mapping[str, str]) -> None:
    """Compile a program that needs ptxas and libdevice; raises the compiler's error."""
    x = jax.ShapeDtypeStruct((128,), jnp.float32, sharding=SingleDeviceSharding(device))
    with _compat.using_mesh(None):  # a mesh in force is of other devices
        jax.jit(lambda x: jnp.log1p(x).sum()).lower(x).compile(compiler_options=dict(options))


def _tpu_device(name: str) -> Device:
    if _wheel_folder("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise TargetError(f"target {name!r} needs libtpu, which is not installed. {_install('tpu-aot')}")
    try:
        return _tpu_topology(_grid(name, 1))[0]
    except Exception as error:
        raise TargetError(
            f"target {name!r} cannot be compiled for: {_reason(error)}. "
            f"The installed libtpu does not offer it here. {_install('tpu-aot')}"
        ) from error


def _tpu_topology(topology: str) -> Sequence[Device]:
    with _environment({} if has_tpu() else WITHOUT_TPU):
        return topologies.get_topology_desc(platform=TPU.name, topology_name=topology).devices


def _grid(name: str, count: int, shape: tuple[int, ...] = ()) -> str:
    """The topology of ``count`` chips, by default the one nearest to a square or a cube: ``v5e:2x4``."""
    generation, directions = _TPU_TOPOLOGIES[name]
    if len(shape) > 1:
        return f"{generation}:{'x'.join(map(str, shape))}"
    sides: list[int] = []
    for left in range(directions, 0, -1):
        fit = [n for n in range(1, count + 1) if count % n == 0 and n**left <= count]
        sides.append(fit[-1])
        count //= fit[-1]
    return f"{generation}:{'x'.join(map(str, sides))}"


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _wheel_folder(module: str) -> Path | None:
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # the parent package is missing
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def _reason(error: Exception) -> str:
    """The first sentence of an XLA error; the rest is advice to XLA's developers."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].split(". ")[0].rstrip(".")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _install(extra: str) -> str:
    return f'Install it: pip install "jaxtensile[{extra}]"'


def _cpus(_: str, __: int = 1, ___: tuple[int, ...] = ()) -> Sequence[Device]:
    return jax.local_devices(backend=CPU.in_jax)


_ONE: Final[dict[str, Callable[[str], Device]]] = {
    CPU.name: lambda name: _cpus(name)[0],
    TPU.name: _tpu_device,
    CUDA.name: _cuda_device,
}
"""How to get the device of a target, by its backend."""
_SEVERAL: Final[dict[str, Callable[[str, int, tuple[int, ...]], Sequence[Device]]]] = {
    CPU.name: _cpus,
    TPU.name: lambda name, count, shape: _tpu_topology(_grid(name, count, shape)),
    CUDA.name: lambda name, count, shape: _cuda_topology(target_config(name), count=count, hosts=math.prod(shape[:-1])),
}
