"""The state of a suspended job: arrays in pinned host memory until they are back in place.

Arrays move one by one: copy, wait, delete. So at most one array is in both places. Donation is not needed; JAX cannot
donate a buffer of one memory to one of another.

Invariant: whatever fails midway, ``tree`` has every value of the state, each array in one of its two places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxtensile import _compat
from jaxtensile.errors import CoordinatorError, TargetError
from jaxtensile.units import Bytes
from jaxtensile.xla.target import PINNED_HOST, host_sharding

_HOST = (PINNED_HOST, "unpinned_host")


@dataclass(frozen=True, slots=True, eq=False)
class _Home:
    """The original place of an array: its leaves, and what restores it there."""

    leaves: tuple[int, ...]
    aval: Any
    sharding: Any
    committed: bool
    nbytes: Bytes
    """Bytes on the device that has most of the array."""


class Suspended:
    """The state of one job on its way to the host and back. ``who``: for messages."""

    def __init__(self, who: str, state: Any) -> None:
        self._who = who
        self._leaves, self._structure = jax.tree.flatten(state)
        self._homes = [_home(leaves, self._leaves[leaves[0]]) for leaves in self._arrays()]

    @property
    def tree(self) -> Any:
        """The state, every array where it is now."""
        return jax.tree.unflatten(self._structure, self._leaves)

    @property
    def device_bytes(self) -> Bytes:
        """Bytes of its arrays on the device that has most of them."""
        total: dict[Any, Bytes] = {}
        for home in self._homes:
            for device in home.sharding.device_set:
                total[device] = total.get(device, 0) + home.nbytes
        return max(total.values(), default=0)

    @property
    def host_bytes(self) -> Bytes:
        """Bytes of its arrays in host memory."""
        return sum(home.nbytes * len(home.sharding.device_set) for home in self._homes)

    def to_host(self) -> Any:
        """Move every array to pinned host memory; returns the state with the copies."""
        jax.block_until_ready([self._leaves[home.leaves[0]] for home in self._homes])
        for home in self._homes:
            self._move(home, lambda x: jax.device_put(x, x.sharding.with_memory_kind(PINNED_HOST)))
        return self.tree

    def to_device(self) -> Any:
        """Move every array back, except those already there; returns the state with the copies."""
        for home in self._homes:
            x = self._leaves[home.leaves[0]]
            if isinstance(x, jax.Array) and x.sharding == home.sharding:
                continue
            self._move(home, lambda x, home=home: _placed(x, home))
        return self.tree

    def take(self, state: Any) -> None:
        """Replace the state by one of the same structure, shapes and types, such as one read from a file."""
        leaves, structure = jax.tree.flatten(state)
        if structure != self._structure:
            raise CoordinatorError(
                f"{self._who}: what is to be resumed is built otherwise than what was suspended ({structure} instead "
                f"of {self._structure}): give what suspend() returned, or nothing"
            )
        of = {k: home for home in self._homes for k in home.leaves}
        for k, leaf in enumerate(leaves):
            if k not in of:
                continue
            if not isinstance(leaf, jax.Array | np.ndarray):
                got = type(leaf).__name__
            elif isinstance(leaf, jax.Array) and leaf.is_deleted():
                if leaf is not self._leaves[k]:
                    raise CoordinatorError(
                        f"{self._who}: an array of what is to be resumed is deleted: give what suspend() returned, or "
                        "nothing"
                    )
                continue
            elif leaf.shape == of[k].aval.shape and leaf.dtype == of[k].aval.dtype:
                continue
            else:
                got = f"{leaf.dtype}{list(leaf.shape)}"
            aval = of[k].aval
            raise CoordinatorError(
                f"{self._who}: what is to be resumed has {got} where {aval.dtype}{list(aval.shape)} was suspended"
            )
        self._leaves = leaves
        self._homes = [one for home in self._homes for one in _apart(home, leaves)]

    def _move(self, home: _Home, put: Callable[[Any], Any]) -> None:
        before = [self._leaves[k] for k in home.leaves]
        there = jax.block_until_ready(put(before[0]))
        for k in home.leaves:
            self._leaves[k] = there
        for x in before:
            if isinstance(x, jax.Array) and x is not there and not x.is_deleted():
                x.delete()

    def _arrays(self) -> list[tuple[int, ...]]:
        """Leaves that are arrays on devices, grouped by buffer: a buffer can be deleted only once."""
        groups: dict[Any, list[int]] = {}
        for k, x in enumerate(self._leaves):
            if _compat.is_tracer(x):
                raise CoordinatorError(f"{self._who}: a state is suspended outside of transformations, not inside jit")
            if not isinstance(x, jax.Array) or x.sharding.memory_kind in _HOST:
                continue
            if x.is_deleted():
                raise CoordinatorError(
                    f"{self._who}: an array of the state ({x.dtype}{list(x.shape)}) is deleted, as donated ones are: "
                    "suspend what the last step returned"
                )
            self._require_host(x)
            groups.setdefault(_buffers(x) if x.nbytes else (k,), []).append(k)
        shared = [b for buffers, leaves in groups.items() if self._leaves[leaves[0]].nbytes for b in buffers]
        if len(set(shared)) < len(shared):
            raise CoordinatorError(
                f"{self._who}: an array of the state is a part of another one and shares its memory: leave it out"
            )
        return [tuple(leaves) for leaves in groups.values()]

    def _require_host(self, x: Any) -> None:
        for device in x.sharding.device_set:
            try:
                host_sharding(device)
            except TargetError:
                why = f"{self._who}: {device} has no pinned host memory for its state to wait in"
                raise CoordinatorError(why) from None


def _home(leaves: tuple[int, ...], x: Any) -> _Home:
    nbytes = max((_bytes_of(s.data) for s in x.addressable_shards), default=0)
    return _Home(leaves, jax.typeof(x), x.sharding, x.committed, nbytes)


def _apart(home: _Home, leaves: list[Any]) -> list[_Home]:
    """One home for each distinct array."""
    if all(leaves[k] is leaves[home.leaves[0]] for k in home.leaves):
        return [home]
    return [replace(home, leaves=(k,)) for k in home.leaves]


def _bytes_of(x: Any) -> Bytes:
    """Bytes as stored: sub-byte types may be packed."""
    return x.on_device_size_in_bytes() if hasattr(x, "on_device_size_in_bytes") else int(x.nbytes)


def _buffers(x: Any) -> tuple[int, ...]:
    return tuple(s.data.unsafe_buffer_pointer() for s in x.addressable_shards)


def _placed(x: Any, home: _Home) -> Any:
    there = jax.device_put(x, home.sharding, may_alias=False)
    return there if home.committed else _compat.uncommitted(there)


__all__ = ["Suspended"]
