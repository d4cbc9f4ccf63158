"""Values that XLA:CPU stores because a kernel would compute them at several places: arrays padded or put together.

Its fusion lets a kernel emit an op once for each index at which it is read, 15 times at most, and ops whose values the
emitter does not keep only once (``FusionNodeIndexingEvaluation`` in ``xla/service/fusion_node_indexing_evaluation.cc``;
measured: jax 0.10.2 and 0.12). ``associative_scan`` puts its halves together by adding padded ones: each level reads
the sum in slices, and stores both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from jaxtensile.ir.ir import Graph, Op

ONCE: Final = frozenset({"pad", "concatenate"})
"""Ops that a kernel emits once or not at all."""
_MOST: Final = 15
"""Times that a kernel emits any other op at most."""

Place = tuple[int, ...]
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
    """The values of ``ONCE`` and of other fusible ops that are read at too many places to be computed there.

    ``must_exist``: values that are buffers anyway. ``moves``: whether an op reads other places than it writes.
    ``costly``: whether it is computed in one kernel only. Readers come first, as in XLA.
    """
    stored = set[int]()
    if not any(op.primitive in ONCE for op in graph.ops) and all(len(readers) <= _MOST for readers in read_by):
        return stored
    inside: dict[int, frozenset[Place]] = {}
    """Of ops without a kernel of their own: the places at which they are computed."""
    for op in reversed(graph.ops):
        if not op.results or not fusible(op) or any(must_exist[r] for r in op.results):
            continue
        readers = [inside.get(o, frozenset({(o,)})) for r in op.results for o in read_by[r]]
        places = frozenset[Place]().union(*readers)
        kernels = {place[0] for place in places}
        again = sum(map(len, readers)) if op.primitive in ONCE else 0
        most = max((sum(place[0] == k for place in places) for k in kernels), default=0)
        if again > 1 or most > _MOST:
            stored.update(op.results)
        elif not costly(op) or len(kernels) <= 1:
            inside[op.id] = frozenset((*place, op.id) for place in places) if moves(op) else places
    return stored
