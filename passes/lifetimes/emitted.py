"""Values that XLA:CPU stores because a kernel would compute them at several places: arrays padded or put together.

Its fusion lets a kernel emit an op once for each index at which it is read, 15 times at most, and ops whose values the
emitter does not keep only once (``FusionNodeIndexingEvaluation`` in ``xla/service/fusion_node_indexing_evaluation.cc``;
measured: jax 0.10.2 and 0.12). ``associative_scan`` puts its halves together by adding padded ones: each level reads
the sum in slices, and stores both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from jaxtensile.ir.ir import Graph, Op

_ONCE: Final = frozenset({"pad", "concatenate"})
"""Ops that a kernel emits once or not at all."""
_MOST: Final = 15
"""Times that a kernel emits any other op at most."""

_Place = tuple[int, ...]
"""The op that a kernel ends with, and the ops by which elements move on the way there."""


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
