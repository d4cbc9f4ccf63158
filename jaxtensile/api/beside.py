"""The device bytes that live beside a call: arrays of the program that are not its arguments. And all that live.

JAX lists its arrays. It is asked when a program of a new signature has to be judged, never by a call that JAX
dispatches by itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxtensile import _compat
from jaxtensile.units import Bytes


def bytes_beside(devices: Sequence[Any], args: Any, kwargs: Any) -> Bytes:
    """Bytes of living arrays on the fullest of ``devices``, without those among the arguments.

    An array that shares the buffer of another counts once. Arrays in host memory do not count.
    """
    of = set(devices)
    seen = {key for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array) for key in _keys(x)}
    found = dict.fromkeys(of, 0)
    for x in _others(devices[0].platform, seen):
        for device in of & set(x.sharding.device_set):
            found[device] += _part(x)
    return max(found.values())


@dataclass(frozen=True, slots=True)
class Living:
    """``count`` arrays of one kind, ``text`` as ``f32[64,64]``, with their bytes on one device."""

    text: str
    count: int
    nbytes: Bytes


def living(device: Any) -> list[Living]:
    """The arrays on a device by kind, the largest bytes first. Arrays that share a buffer count once."""
    kinds = defaultdict[str, list[Bytes]](list)
    for x in _others(device.platform, set()):
        if device in x.sharding.device_set:
            kinds[x.aval.str_short(short_dtypes=True)].append(_part(x))
    found = [Living(text, len(sizes), sum(sizes)) for text, sizes in kinds.items()]
    return sorted(found, key=lambda kind: (-kind.nbytes, kind.text))


def _others(platform: str, seen: set[tuple[str, int]]) -> Iterator[Any]:
    """The living arrays in device memory whose keys are not in ``seen``, to which theirs are added."""
    for x in jax.live_arrays(platform):
        keys = set(_keys(x))
        if keys and seen.isdisjoint(keys) and not _compat.in_host_memory(x):
            seen |= keys
            yield x


def _keys(x: Any) -> Iterator[tuple[str, int]]:
    """What tells an array's memory from others'; nothing if it has none any more."""
    if _compat.is_tracer(x) or x.is_deleted():
        return
    yield "array", id(x)
    if len(x.sharding.device_set) == 1:  # of several devices each has a buffer of its own, and views are rare
        try:
            (device,) = x.sharding.device_set  # two devices may use the same numbers
            yield f"buffer of {device.id}", x.unsafe_buffer_pointer()
        except Exception:  # keys of random numbers have none by themselves; what a backend raises is its own affair
            return


def _part(x: Any) -> Bytes:
    """Bytes of an array on each of its devices."""
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


__all__ = ["Living", "bytes_beside", "living"]
