"""The places of a call's arguments: state waits in host memory and looks as if on the device.

Invariant: the user's function sees only device arrays, and a planned program gets arguments where it was compiled for
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxtensile import _compat
from jaxtensile.devices.profiles import profile_for_kind
from jaxtensile.errors import TargetError
from jaxtensile.ir.plan import Leaf
from jaxtensile.rewrites.loops.hosted import state_comes_back
from jaxtensile.xla.target import host_sharding, is_absent


class Placement:
    """The places of the arguments of ``plain``, a ``jax.jit`` result.

    ``active``: whether some may be on the host, asked on demand. After the first yes, host arguments are always looked
    for.
    """

    def __init__(self, plain: Any, active: Callable[[], bool]) -> None:
        self._plain, self._ask, self._was = plain, active, False

    @property
    def _active(self) -> bool:
        now = self._ask()
        self._was = self._was or now
        return self._was

    def job_place(self, device: Any, args: Any, kwargs: Any) -> Any:
        """``Request.place``: the arguments with some leaves on the host; None if none may be there."""
        if not self._ask():
            return None
        _require_streams(device)

        def on_host(leaves: Sequence[Leaf]) -> tuple[Any, Any]:
            return self.abstract(device, frozenset(leaf.argument for leaf in leaves), args, kwargs)

        return on_host

    def without_jit(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """The function under ``jax.disable_jit``, on arrays all on the device."""

        @functools.wraps(fun)
        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.on_device(args, kwargs)
            return fun(*args, **kwargs)

        return run

    def on_device(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with donated ones copied from the host; the same objects if there are none."""
        return self._donated(_to_device, args, kwargs)

    def as_on_device(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments as the user's function sees them; the same objects if none is on the host."""
        return self._donated(_as_on_device, args, kwargs)

    def abstract(self, device: Any, state: frozenset[int], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Abstract arguments of a call: ``state`` on the host and other donated arrays on ``device``."""
        host, here = host_sharding(device), SingleDeviceSharding(device)

        def abstract(i: int, x: Any, donated: bool) -> Any:
            if i in state:
                return _abstract(x, host, _compat.HostShape)
            if donated and isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
                return _abstract(x, here)
            return x

        return self.dynamic(abstract, args, kwargs)

    def moved(self, device: Any, state: frozenset[int], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with ``state`` on the host and other donated arrays on ``device``; the same objects if they
        are.

        They are committed if their replacements are; otherwise JAX would compile again.
        """
        if not state:
            return self.on_device(args, kwargs)
        host, here = host_sharding(device), SingleDeviceSharding(device)
        emptied: list[Any] = []
        changed = False

        def move(i: int, x: Any, donated: bool) -> Any:
            nonlocal changed
            if not (donated and isinstance(x, jax.Array | np.ndarray)):
                return x
            there = host if i in state else here
            if isinstance(x, jax.Array) and x.committed and x.sharding == there:
                return x
            changed = True
            if isinstance(x, jax.Array) and (i in state or _compat.in_host_memory(x)):
                emptied.append(x)  # it was donated; on the device its buffer itself is
            return jax.device_put(x, there)

        moved = self.dynamic(move, args, kwargs)
        if not changed:
            return args, kwargs
        for x in emptied:
            x.delete()
        return moved

    def dynamic(self, change: Callable[[int, Any, bool], Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with every dynamic leaf changed, by its position, value, and whether it is donated."""
        static, static_names = _compat.static_arguments(self._plain)
        donated, donated_names = _compat.donated_arguments(self._plain)
        position = count()

        def each(x: Any, is_donated: bool) -> Any:
            return jax.tree.map(lambda leaf: change(next(position), leaf, is_donated), x)

        new = tuple(x if i in static else each(x, i in donated) for i, x in enumerate(args))
        named = {k: each(kwargs[k], k in donated_names) for k in sorted(kwargs) if k not in static_names}
        return new, {k: named.get(k, x) for k, x in kwargs.items()}

    def _donated(self, change: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with every donated leaf in host memory changed; the same objects if there are none."""
        numbers, names = _compat.donated_arguments(self._plain)
        inside = [x for i, x in enumerate(args) if i in numbers], {k: x for k, x in kwargs.items() if k in names}
        if not any(map(_compat.in_host_memory, jax.tree.leaves(inside))) or not self._active:
            return args, kwargs

        def changed(x: Any) -> Any:
            return change(x) if _compat.in_host_memory(x) else x

        new = (jax.tree.map(changed, x) if i in numbers else x for i, x in enumerate(args))
        return tuple(new), {k: jax.tree.map(changed, x) if k in names else x for k, x in kwargs.items()}


def _abstract(x: Any, sharding: Any, kind: type[jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
    return kind(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def _as_on_device(x: Any) -> jax.ShapeDtypeStruct:
    """An array in host memory, as the user's function sees it."""
    return _abstract(x, SingleDeviceSharding(next(iter(x.sharding.device_set))))


def _require_streams(device: Any) -> None:
    """Raise ``TargetError`` if arguments cannot wait on the host, or do not come back on a present TPU."""
    host_sharding(device)
    backend = profile_for_kind(device.device_kind, device.platform).backend
    if backend.places_copies and not is_absent(device) and not state_comes_back(device):
        raise TargetError(
            f"{device} did not give back what a small step left in its host memory (or had no room for that step), so "
            "no state goes there: leave offload_state= out"
        )


def _to_device(x: Any) -> Any:
    return jax.device_put(x, jax.memory.Space.Device)


__all__ = ["Placement"]
