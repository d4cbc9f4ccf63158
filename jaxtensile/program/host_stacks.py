"""Copies to the host and back as slices of stacks in host memory, where the compiler places copies by itself.

XLA:TPU ignores barriers when it schedules, so a copy out would wait until just before its copy back. It respects data
dependencies. So values of one shape share a stack, one slot each, and return as slices. Their index is computed from
what the barrier ties them to. Work that a copy out must precede is multiplied by a 1 computed from the stack. Neither
depends on any value, but only the running program knows.

Invariant: what comes back is what was written. After its first read a stack is not written again, or XLA would copy it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtensile.ir.ir import Graph, Op
from jaxtensile.ir.plan import TO_DEVICE, TO_HOST
from jaxtensile.passes.order.schedule import BARRIER

_LANES, _ROWS = 128, 32
"""Multiples of the last and of other dimensions that are whole TPU tiles for every type: 8 rows of 32 bits, 32 of 8
bits."""
_Stack = tuple[tuple[int, ...], str, int]
"""Shape and type of the values in a stack, and the number of earlier stacks of these."""


@dataclass(frozen=True, slots=True)
class _Slot:
    stack: _Stack
    slot: int


class HostStacks:
    """The places of all values that ``graph`` copies to the host, and the stacks of one evaluation."""

    def __init__(self, graph: Graph) -> None:
        self._place: dict[int, _Slot] = {}
        """Places of host values that come from a copy out."""
        self._length = Counter[_Stack]()
        self._written: dict[_Stack, Any] = {}
        self._late: dict[int, Any] = {}
        """Value in host memory → zero computed from what a barrier ties it to."""
        read = Counter[tuple[tuple[int, ...], str]]()
        """Number of stacks of a kind already read, which are not written again."""
        self._come_back = {op.operands[0] for op in graph.ops if op.primitive == TO_DEVICE}
        held = _held(graph)
        for op in graph.ops:
            if op.primitive == TO_HOST and op.results[0] in held:
                value = graph.values[op.results[0]]
                stack = value.shape, value.dtype, read[value.shape, value.dtype]
                self._place[op.results[0]] = _Slot(stack, self._length[stack])
                self._length[stack] += 1
            elif op.primitive == BARRIER:
                ends = zip(op.operands, op.results, strict=True)
                self._place.update((r, self._place[v]) for v, r in ends if v in self._place)
            elif op.primitive == TO_DEVICE and op.operands[0] in self._place:
                shape, dtype, generation = self._place[op.operands[0]].stack
                read[shape, dtype] = max(read[shape, dtype], generation + 1)

    def holds(self, op: Op) -> bool:
        """Whether ``op`` is a copy to or from a stack, or a barrier over such copies."""
        return any(v in self._place for v in (*op.operands, *op.results))

    def bind(self, op: Op, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of ``op``; None for values in a stack."""
        if op.primitive == TO_HOST:
            self._write(self._place[op.results[0]], operands[0])
            return [None]
        if op.primitive == TO_DEVICE:
            return [self._read(op.operands[0])]
        return self._tie(op, operands)

    def _write(self, place: _Slot, value: Any) -> None:
        space = jax.memory.Space.Host
        row = value.reshape((1,) * max(3 - value.ndim, 1) + value.shape)  # of one dimension XLA:TPU writes no slices
        if place.stack not in self._written:
            # A slice of all that there is would be no slice to XLA.
            length = max(self._length[place.stack], 2)
            self._written[place.stack] = jax.device_put(lax.empty((length, *row.shape[1:]), value.dtype), space)
        row, at = jax.device_put(row, space), np.int32(place.slot)
        self._written[place.stack] = lax.dynamic_update_slice_in_dim(self._written[place.stack], row, at, 0)

    def _read(self, v: int) -> Any:
        place = self._place[v]
        at = np.int32(place.slot) + self._late.get(v, np.int32(0))
        row = lax.dynamic_slice_in_dim(self._written[place.stack], at, 1, 0)
        return jax.device_put(row, jax.memory.Space.Device).reshape(place.stack[0])

    def _tie(self, op: Op, operands: Sequence[Any]) -> Sequence[Any]:
        waits = [v in self._place for v in op.operands]
        held = [x for x, there in zip(operands, waits, strict=True) if not there]
        *others, last = held  # behind a real barrier nothing would fuse with it any more
        late = _zero(last)
        leaving: dict[_Stack, _Slot] = {}
        for v, r, there in zip(op.operands, op.results, waits, strict=True):
            if r in self._come_back:
                self._late[r] = late
            elif there:
                leaving[self._place[v].stack] = self._place[v]
        if jnp.issubdtype(last.dtype, jnp.floating):
            # What is behind the barrier is multiplied by 1, which is read from what was copied before it.
            for place in leaving.values():
                last = last * (1 - _zero(self._corner(place, late))).astype(last.dtype)
        behind = iter([*others, last])
        return [None if there else next(behind) for there in waits]

    def _corner(self, place: _Slot, late: Any) -> Any:
        """Some numbers of the last value written. XLA must not know their index, or it would read their source instead.

        XLA:TPU slices one dimension beside the slot, in whole tiles: the longest, to read little.
        """
        stack = self._written[place.stack]
        sizes = [1, *stack.shape[1:]]
        longest = max(range(1, stack.ndim), key=stack.shape.__getitem__)
        sizes[longest] = min(_LANES if longest == stack.ndim - 1 else _ROWS, stack.shape[longest])
        at = (np.int32(place.slot) + late, *(np.int32(0),) * (stack.ndim - 1))
        return jax.device_put(lax.dynamic_slice(stack, at, sizes), jax.memory.Space.Device)


def _held(graph: Graph) -> set[int]:
    """Host values that come back; those that stay there, like state between steps, are in no stack."""
    held = set[int]()
    for op in reversed(graph.ops):
        if op.primitive == TO_DEVICE:
            held.add(op.operands[0])
        elif op.primitive == BARRIER:
            held.update(v for v, r in zip(op.operands, op.results, strict=True) if r in held)
    return held


def _zero(value: Any) -> Any:
    """0, computed so that XLA sees a dependence on ``value``: whether it is both NaN and positive.

    A constant 0 for keys, whose numbers cannot be read.
    """
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return np.int32(0)
    first = lax.slice(value, (0,) * value.ndim, (1,) * value.ndim).reshape(())
    first = (first.real if jnp.iscomplexobj(first) else first).astype(jnp.float32)
    return ((first != first) & (first > 0)).astype(jnp.int32)
