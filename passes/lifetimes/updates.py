"""What an update in place reads as buffers, and what it computes as it writes.

XLA:GPU fuses into a scatter what its indices and updates are computed from, and every compiler does so for a
``dynamic_update_slice``: the rows of a table's gradient, the messages of a graph and the entries of a cache are never
stored (measured: H200, A100, V100, CPU; jax 0.10.2 and 0.12). Stored are updates

* with a transpose on the way, and those that XLA transposes itself, with the axes of their windows in front
  (``xla/service/scatter_simplifier.cc``);
* that are computed from the array they go into, which the kernel would read and write at once; but a slice that is
  read where it is written is computed in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from jaxtensile.ir.ir import Graph, Op

_SLICE: Final = "dynamic_update_slice"
_MOST: Final = 64
"""Ops on the way to an update that are looked at. A bound on work."""


def read_stored(
    graph: Graph,
    op: Op,
    made: Sequence[int],
    scatters: bool,
    on_the_way: Callable[[Op], bool],
    in_place: Callable[[Op], bool],
) -> Iterator[int]:
    """Operands of an update in place that it reads as buffers.

    ``made``: ``producers``. ``scatters``: whether the compiler computes the operands of a scatter. ``on_the_way``:
    whether an op can be computed in its reader. ``in_place``: whether it reads where it writes.
    """
    yield from op.operands[:1]
    stored = op.primitive != _SLICE and (not scatters or op.windows_first)
    for v in op.operands[1:]:
        if stored or _reads(graph, op, v, made, on_the_way, in_place):
            yield v


def _reads(
    graph: Graph,
    update: Op,
    v: int,
    made: Sequence[int],
    on_the_way: Callable[[Op], bool],
    in_place: Callable[[Op], bool],
) -> bool:
    """Whether ``v`` is computed from the array that is updated, but for the places that are written, or by a transpose,
    or in too many ops."""
    target = update.operands[0]
    left, seen, moved = [v], {v}, False
    for _ in range(_MOST):
        if not left:
            return False
        v = left.pop()
        if v == target:
            return True
        if made[v] < 0:
            continue
        op = graph.ops[made[v]]
        if op.primitive == "transpose":
            return True
        if op.operands[:1] == (target,) and not moved and _is_written(graph, made, op, update):
            continue
        if on_the_way(op):
            moved = moved or not (in_place(op) or _is_expanded(graph, op))
            left += (u for u in op.operands if u not in seen)
            seen.update(op.operands)
    return bool(left)


def _is_expanded(graph: Graph, op: Op) -> bool:
    """Whether an array only gets axes of length one, as by ``dynamic_update_index_in_dim``."""
    of = (graph.values[v].nbytes for v in (*op.operands, *op.results))
    return op.primitive == "broadcast_in_dim" and len(op.operands) == 1 and len(set(of)) == 1


def _is_written(graph: Graph, made: Sequence[int], read: Op, update: Op) -> bool:
    """Whether a slice is read where it is written. Starts that are literals are unknown, but 0 along whole axes."""
    if read.primitive != "dynamic_slice" or update.primitive != _SLICE:
        return False
    part, whole = graph.values[read.results[0]].shape, graph.values[read.operands[0]].shape
    starts, others = ([_from_the_front(graph, made, v) for v in vs] for vs in (read.operands[1:], update.operands[2:]))
    return starts == others and len(starts) == sum(a != b for a, b in zip(part, whole, strict=True))


def _from_the_front(graph: Graph, made: Sequence[int], v: int) -> int:
    """The start that ``v`` is where negative ones count from the end, as JAX writes it; else ``v``."""
    if made[v] < 0 or graph.ops[made[v]].primitive != "select_n":
        return v
    if len(operands := graph.ops[made[v]].operands) != 3:
        return v
    test, start, end = operands
    if made[test] < 0 or made[end] < 0:
        return v
    test, end = graph.ops[made[test]], graph.ops[made[end]]
    is_one = (test.primitive, end.primitive) == ("lt", "add") and test.operands == end.operands == (start,)
    return start if is_one else v
