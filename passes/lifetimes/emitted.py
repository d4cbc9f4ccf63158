"""Values that XLA:CPU stores and could compute where they are read: arrays padded or put together.

Its fusion lets a kernel emit an op once for each index at which it is read, 15 times at most, and ops whose values the
emitter does not keep only once (``FusionNodeIndexingEvaluation`` in ``xla/service/fusion_node_indexing_evaluation.cc``;
measured: jax 0.10.2 and 0.12). ``associative_scan`` puts its halves together by adding padded ones: each level reads
the sum in slices, and stores both.

Arrays put together along their last axis are copied there from buffers, if a row has a cache line or more: both halves
of a rotary embedding, and what ``roll`` cuts off, are stored beside the result. Along another axis they are fused
(measured from 14 to 128 elements in four types).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from jaxtensile.ir.ir import Graph, Op

_ONCE: Final = frozenset({"pad", "concatenate"})
"""Ops that a kernel emits once or not at all."""
_MOST: Final = 15
"""Times that a kernel emits any other op at most."""

_LINE: Final = 64
"""Least bytes of a row that is copied."""

_Place = tuple[int, ...]
"""The op that a kernel ends with, and the ops by which elements move on the way there."""


def rows_joined(graph: Graph) -> frozenset[int]:
    """Ops that put arrays together along their last axis, by copies of what is stored."""
    found = set[int]()
    for op in graph.ops:
        if op.primitive != "concatenate" or not op.operands:
            continue
        part, whole = graph.values[op.operands[0]], graph.values[op.results[0]]
        rows = math.prod(whole.shape[:-1])
        if len(whole.shape) > 1 and part.shape[:-1] == whole.shape[:-1] and whole.nbytes >= _LINE * rows:
            found.add(op.id)
    return frozenset(found)


def stored_at_places(
    graph: Graph,
    read_by: Sequence[Sequence[int]],
    must_exist: Sequence[bool],
    *,
    fusible: Callable[[Op], bool],
    moves: Callable[[Op], bool],
    costly: Callable[[Op], bool],
) -> set[int]:
    """The values of ``_ONCE`` and of other fusible ops that are read at too many places to be computed there.

    ``must_exist``: values that are buffers anyway. ``moves``: whether an op reads other places than it writes.
    ``costly``: whether it is computed in one kernel only. Readers come first, as in XLA.
    """
    stored = set[int]()
    if not any(op.primitive in _ONCE for op in graph.ops) and all(len(readers) <= _MOST for readers in read_by):
        return stored
    inside: dict[int, frozenset[_Place]] = {}
    """Of ops without a kernel of their own: the places at which they are computed."""
    for op in reversed(graph.ops):
        if not op.results or not fusible(op) or any(must_exist[r] for r in op.results):
            continue
        readers = [inside[o] if o in inside else frozenset({(o,)}) for r in op.results for o in read_by[r]]
        places = readers[0] if len(readers) == 1 else frozenset[_Place]().union(*readers)
        again = op.primitive in _ONCE and sum(map(len, readers)) > 1
        if again or (len(places) > _MOST and max(Counter(place[0] for place in places).values()) > _MOST):
            stored.update(op.results)
        elif len(places) <= 1 or not costly(op) or len({place[0] for place in places}) == 1:
            inside[op.id] = frozenset((*place, op.id) for place in places) if moves(op) else places
    return stored
