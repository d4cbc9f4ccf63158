"""Sums over devices that XLA combines into one all-reduce (``xla/service/all_reduce_combiner.cc``).

The combined all-reduce runs once its last operand is ready. So partial sums of all gradients are live at once, and so
are their sums.

Invariant: combined sums have the same axes and type, and none depends on another.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxtensile.ir.ir import Op, OpId, Value
from jaxtensile.units import Bytes


def together(
    ops: Sequence[Op], values: Sequence[Value], sums: Mapping[int, str], limit: float
) -> tuple[list[Op], list[int]]:
    """The ops with combined sums of at most ``limit`` bytes, in a valid order, and each op's position before.

    ``sums``: by op that sums over devices, its axes.
    """
    each = {
        i: Summed(axes, values[ops[i].operands[0]].dtype, sum(values[v].nbytes for v in ops[i].operands))
        for i, axes in sums.items()
        if ops[i].operands
    }
    groups = [group for group in combined(ops, each, limit) if len(group) > 1]
    if not groups:
        return [*ops], [*range(len(ops))]
    last = {i: group[-1] for group in groups for i in group}
    merged = {
        group[-1]: replace(
            ops[group[-1]],
            operands=tuple(v for i in group for v in ops[i].operands),
            results=tuple(r for i in group for r in ops[i].results),
        )
        for group in groups
    }
    left = [merged.get(i, op) for i, op in enumerate(ops) if last.get(i, i) == i]
    before = [i for i in range(len(ops)) if last.get(i, i) == i]
    order = _in_order(left)
    return [replace(left[n], id=OpId(k)) for k, n in enumerate(order)], [before[n] for n in order]


class Summed(NamedTuple):
    """A sum over devices: its axes, and the type and the bytes of what is added up."""

    axes: str
    dtype: str
    nbytes: Bytes


def combined(ops: Sequence[Op], sums: Mapping[int, Summed], limit: float) -> list[list[int]]:
    """The sums that are made in one go, each sum in the first group that it can join. ``sums``: by op."""
    behind: dict[int, int] = {}
    """By value: the sums that it depends on, as bits."""
    bit = {i: 1 << n for n, i in enumerate(sums)}
    needs: dict[int, int] = {}
    for i, op in enumerate(ops):
        found = 0
        for v in op.operands:
            found |= behind.get(v, 0)
        if i in sums:
            needs[i] = found
        for r in op.results:
            behind[r] = found | bit.get(i, 0)
    kinds: dict[tuple[str, str], list[int]] = {}
    for i, one in sums.items():
        kinds.setdefault((one.axes, one.dtype), []).append(i)
    out: list[list[int]] = []
    for left in kinds.values():
        while left:
            group: list[int] = []
            inside, nbytes = 0, 0
            for i in left:
                if not needs[i] & inside and (not group or nbytes + sums[i].nbytes <= limit):
                    group.append(i)
                    inside |= bit[i]
                    nbytes += sums[i].nbytes
            left = [i for i in left if i not in group]
            out.append(group)
    return out


def _in_order(ops: Sequence[Op]) -> list[int]:
    """Positions in an order in which results come before their readers, else as they are."""
    made = {r: n for n, op in enumerate(ops) for r in op.results}
    waits = [len({made[v] for v in op.operands if v in made}) for op in ops]
    read_by: dict[int, set[int]] = {}
    for n, op in enumerate(ops):
        for v in op.operands:
            if v in made:
                read_by.setdefault(made[v], set()).add(n)
    ready = [n for n, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    out: list[int] = []
    while ready:
        n = heapq.heappop(ready)
        out.append(n)
        for reader in read_by.get(n, ()):
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, reader)
    return out


__all__ = ["Summed", "combined", "together"]
