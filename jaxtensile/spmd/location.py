"""The devices of a call, and its arguments as a compiler for another device wants them.

Invariant: nothing here moves or copies an array.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

from jaxtensile import _compat
from jaxtensile.devices.profiles import DeviceProfile, profile_for_kind
from jaxtensile.errors import TargetError
from jaxtensile.xla.target import PINNED_HOST, resolve_all


@dataclass(frozen=True, slots=True)
class Location:
    """Where a call runs: one device, to ask for its kind, and the number of devices."""

    device: Any
    count: int
    key: Hashable
    """Equal if the same executable serves."""
    devices: tuple[Any, ...] = ()
    """All of them, by their ids."""


def location(traced: Any, args: Any, kwargs: Any, options: Mapping[str, Any]) -> Location | None:
    """The devices of a call; None if its arguments' devices do not go together.

    ``traced``: the result of ``jax.jit``'s ``trace``. ``options``: the arguments of ``jax.jit``.
    """
    leaves = [x for x in jax.tree.leaves((args, kwargs)) if _is_committed(x)]
    placed = [x.sharding.device_set for x in leaves if not _compat.is_abstract(x.sharding)]
    sets = set(map(frozenset, placed)) | _compat.device_sets(traced)
    if len(sets) > 1:
        return None
    if not sets and (sizes := {m.size for m in _abstract_meshes(traced, leaves)}):
        return Location(_default_device(options), max(sizes), tuple(sorted(sizes))) if len(sizes) == 1 else None
    devices = next(iter(sets), None) or frozenset([_default_device(options)])
    device = min(devices, key=lambda d: d.id)
    where: Hashable = (device.client, device.device_kind)
    if len(devices) > 1:
        where = (devices, *map(_spread, leaves))
    kinds = tuple(sorted({str(x.sharding.memory_kind) for x in leaves} - {"None", "device"}))
    return Location(device, len(devices), (where, kinds), tuple(sorted(devices, key=lambda d: d.id)))


def _abstract_meshes(traced: Any, leaves: Sequence[Any]) -> Iterator[AbstractMesh]:
    """The meshes without devices that a call is for."""
    for place in (*(x.sharding for x in leaves), *_compat.asked_shardings(traced)):
        if _compat.is_abstract(place):
            yield getattr(place, "mesh", place)


def placements(args: Any, kwargs: Any) -> list[str]:
    """Each argument's placement, in words equal in every process; empty if it has none."""
    return [str(x.sharding) if _is_committed(x) else "" for x in jax.tree.leaves((args, kwargs))]


def is_nowhere(traced: Any, args: Any, kwargs: Any) -> bool:
    """Whether a program is for a mesh without devices, so none can be asked for its bytes."""
    leaves = (x.sharding for x in jax.tree.leaves((args, kwargs)) if _is_committed(x))
    return any(map(_compat.is_abstract, (*leaves, *_compat.asked_shardings(traced))))


def profile_of(device: Any) -> DeviceProfile:
    """The table's profile of a JAX device."""
    return profile_for_kind(device.device_kind, device.platform)


def device_name(device: Any) -> str:
    """A device's name in configs and coordinators: ``cuda:0``."""
    return f"{profile_of(device).platform}:{device.id}"


def as_for(target: str, plain: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of ``plain``, a ``jax.jit`` result, abstract and placed for the compiler of ``target``.

    ``NamedSharding``s over several devices are kept, over as many devices of the target. Raises ``TargetError`` for
    other shardings.
    """
    count = max((mesh.size for x in jax.tree.leaves((args, kwargs)) if (mesh := _mesh(x)) is not None), default=1)
    devices = resolve_all(target, count)
    numbers, names = _compat.static_arguments(plain)

    def abstract(x: Any) -> Any:
        sharding = SingleDeviceSharding(devices[0]) if count == 1 else _sharding_there(x, target, count)
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            return x  # Python scalars go where the arrays are; anything else is JAX's to refuse
        return _compat.placed(x, sharding)

    placed = (x if i in numbers else jax.tree.map(abstract, x) for i, x in enumerate(args))
    return tuple(placed), {k: x if k in names else jax.tree.map(abstract, x) for k, x in kwargs.items()}


def mesh_on(target: str, mesh: Mesh | AbstractMesh) -> Mesh:
    """The same mesh over devices of the target, in the order of their ids as the mesh's own. Raises ``TargetError``."""
    own = range(mesh.size) if isinstance(mesh, AbstractMesh) else [d.id for d in mesh.devices.flat]
    there = dict(zip(sorted(own), resolve_all(target, mesh.size), strict=True))
    placed = np.array([there[d] for d in own]).reshape(mesh.axis_sizes)
    return Mesh(placed, mesh.axis_names, axis_types=mesh.axis_types)


def _mesh(x: Any) -> Mesh | AbstractMesh | None:
    """The mesh of an argument over several devices. Raises ``TargetError`` if another sharding divides it."""
    if not is_spread(x):
        return None
    if isinstance(x.sharding, NamedSharding) and x.sharding.memory_kind != PINNED_HOST:
        return x.sharding.mesh
    raise TargetError(
        f"an argument of shape {x.shape} is sharded by {x.sharding}, which cannot be carried over to the devices of a "
        "target: give it a NamedSharding in device memory"
    )


def _sharding_there(x: Any, target: str, count: int) -> NamedSharding | None:
    """An argument's sharding over the target's devices; None if it has none."""
    if not _is_committed(x):
        return None
    if (mesh := _mesh(x)) is None:
        raise TargetError(
            f"an argument of shape {x.shape} is on one device and others are sharded over {count}, so that they do not "
            "go together: give it a NamedSharding of their mesh, or none"
        )
    return NamedSharding(mesh_on(target, mesh), x.sharding.spec)


def is_spread(x: Any) -> bool:
    """Whether an argument is over several devices."""
    if not _is_committed(x):
        return False
    sharding = x.sharding
    return sharding.mesh.size > 1 if _compat.is_abstract(sharding) else len(sharding.device_set) > 1


def _is_committed(x: Any) -> bool:
    """Whether an argument determines where the program runs: a committed array or a placed abstract one."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.sharding is not None
    return isinstance(x, jax.Array) and not _compat.is_tracer(x) and x.committed


def _spread(x: Any) -> Hashable:
    """An array's layout over its devices; equal if the same program serves."""
    try:
        return str(x.sharding.devices_indices_map(x.shape))
    except NotImplementedError:  # partial sums: which device holds what says too little
        return x.sharding


def _default_device(options: Mapping[str, Any]) -> Any:
    backend = options.get("backend")
    return options.get("device") or (jax.local_devices(backend=backend)[0] if backend else _compat.default_device())


__all__ = [
    "Location",
    "as_for",
    "device_name",
    "is_nowhere",
    "is_spread",
    "location",
    "mesh_on",
    "placements",
    "profile_of",
]
