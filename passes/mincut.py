"""Which residuals to keep at a given price per byte: an exact minimum cut.

Every needed value is either kept (price x bytes) or recomputed (seconds of its op), and a
recomputed op needs its operands available too. With x_v = "v is available after the turn" and
y_o = "op o runs again", minimise

    sum_v  price * bytes_v * [x_v and not y_maker(v)]  +  sum_o  seconds_o * [y_o]
    subject to  x_v = 1 for needed v,   y_o = 1  implies  x_u = 1 for every operand u of o.

All terms are submodular, so a minimum s-t cut solves it exactly (Picard 1976; the same
construction as the min-cut partitioner of arXiv 2406.xxxxx style recompute, with a price).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jaxtensile.ir import Graph
from jaxtensile.passes.stages import Mountain

_INFINITE = 2**31 - 1
_TOTAL = 2**30


class ResidualCut:
    """The cut problem of one mountain; ``keep(price)`` solves it. Built once, solved often.

    ``cuts``: steps across which nothing is recomputed: a value read beyond one is kept if it
    is available at all.
    """

    def __init__(self, graph: Graph, mountain: Mountain, seconds: Sequence[float], cuts: Sequence[int]) -> None:
        self._graph = graph
        values, ops = graph.values, graph.ops
        op_node, value_node = {}, {}
        for o in mountain.cone:
            op_node[o] = 2 + len(op_node)
        for o in mountain.cone:
            for r in ops[o].results:
                value_node[r] = 2 + len(op_node) + len(value_node)
        crossing = self._crossing(mountain, cuts)
        tail: list[int] = []
        head: list[int] = []
        fixed: list[float] = []  # seconds, or -1 for infinite
        nbytes: list[int] = []
        needed = set(mountain.needed)

        def edge(a: int, b: int, cost: float, size: int) -> None:
            tail.append(a)
            head.append(b)
            fixed.append(cost)
            nbytes.append(size)

        for o in mountain.cone:
            op = ops[o]
            if not op.pinned:
                edge(op_node[o], 1, seconds[o], 0)
            for r in op.results:
                stuck = r in crossing or op.pinned or r in mountain.always
                edge(value_node[r], 1 if stuck else op_node[o], 0.0, 0 if r in mountain.always else values[r].nbytes)
                if r in needed:
                    edge(0, value_node[r], -1.0, 0)
            if not op.pinned:
                for u in dict.fromkeys(op.operands):
                    if u in value_node and u not in mountain.always:
                        edge(op_node[o], value_node[u], -1.0, 0)
        self._tail, self._head = np.array(tail, np.int32), np.array(head, np.int32)
        self._fixed, self._nbytes = np.array(fixed), np.array(nbytes, np.float64)
        self._size = 2 + len(op_node) + len(value_node)
        self._op_node, self._value_node, self.crossing = op_node, value_node, crossing
        self._needed_bytes = float(sum(values[v].nbytes for v in needed))
        self._mountain = mountain

    def _crossing(self, mountain: Mountain, cuts: Sequence[int]) -> set[int]:
        made = {r: o for o in mountain.cone for r in self._graph.ops[o].results}
        return {
            u
            for o in mountain.cone
            for u in self._graph.ops[o].operands
            if u in made and bisect_right(cuts, made[u]) != bisect_right(cuts, o)
        }

    def keep(self, price: float) -> frozenset[int]:
        """Values to keep when a byte costs ``price`` seconds."""
        total = max(price * self._needed_bytes, 1e-30)
        scale = _TOTAL / total
        caps = np.where(self._fixed < 0, _INFINITE, (self._fixed + price * self._nbytes) * scale)
        caps = np.minimum(caps, _INFINITE).astype(np.int64)
        caps = np.where((caps == 0) & (self._fixed > 0), 1, caps).astype(np.int32)
        network = csr_array((caps, (self._tail, self._head)), shape=(self._size, self._size))
        flow = maximum_flow(network, 0, 1).flow
        residual = network - flow
        residual.eliminate_zeros()
        reached = np.zeros(self._size, bool)
        reached[breadth_first_order(residual, 0, return_predecessors=False)] = True
        kept: list[int] = []
        for r, node in self._value_node.items():
            if not reached[node] or r in self._mountain.always:
                continue
            op = self._maker(r)
            if r in self.crossing or self._graph.ops[op].pinned or not reached[self._op_node[op]]:
                kept.append(r)
        return frozenset(kept)

    def _maker(self, value: int) -> int:
        if not hasattr(self, "_makers"):
            self._makers = {r: o for o in self._mountain.cone for r in self._graph.ops[o].results}
        return self._makers[value]
