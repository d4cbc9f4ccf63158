"""Which residuals to keep at a given price per byte: an exact minimum cut.

Every needed value is either kept (price x bytes) or recomputed (seconds of its op), and a
recomputed op needs its operands available too. With x_v = "v is available after the turn" and
y_o = "op o runs again", minimise

    sum_v  price * bytes_v * [x_v and not y_maker(v)]  +  sum_o  seconds_o * [y_o]
    subject to  x_v = 1 for needed v,   y_o = 1  implies  x_u = 1 for every operand u of o.

All terms are submodular, so a minimum s-t cut solves it exactly (Picard, "Maximal closure of a
graph and applications to combinatorial problems", 1976; PyTorch's min-cut partitioner cuts the
same way with bytes alone).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, cast

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jaxtensile.ir import Graph
from jaxtensile.passes.stages import Mountain


def price_ladder(graph: Graph, cone: Sequence[int], seconds: Sequence[float], count: int) -> tuple[float, ...]:
    """``count`` prices in seconds per byte, from 'keep whatever costs anything' to 'recompute all that can be'.

    Spread evenly over the orders of magnitude of what the ops of ``cone`` cost per byte they make,
    so that no unit, device or size is assumed.
    """
    rates = [
        seconds[o] / size
        for o in cone
        if seconds[o] > 0 and (size := sum(graph.values[r].nbytes for r in graph.ops[o].results))
    ]
    if not rates:
        return (1.0,)
    low, high = np.quantile(rates, 0.05) / 10, max(rates) * 100
    return tuple(float(p) for p in np.geomspace(low, high, count))


_INFINITE = 2**31 - 1
_TOTAL = 2**30
"""Capacities are scaled to integers so that the whole flow stays below this (scipy's are 32-bit)."""


class ResidualCut:
    """The cut problem of one mountain; ``keep(price)`` solves it, ``keeps(prices)`` for many. Built once.

    ``cuts``: steps across which nothing is recomputed: a value read beyond one (``crossing``) is
    kept if it is available at all.
    """

    def __init__(self, graph: Graph, mountain: Mountain, seconds: Sequence[float], cuts: Sequence[int]) -> None:
        values, ops, always = graph.values, graph.ops, mountain.always
        maker: dict[int, int] = {r: o for o in mountain.cone for r in ops[o].results}
        op_node: dict[int, int] = {o: 2 + i for i, o in enumerate(mountain.cone)}
        first = 2 + len(op_node)
        value_node: dict[int, int] = {r: first + i for i, r in enumerate(maker)}
        self.crossing: frozenset[int] = frozenset(
            u
            for o in mountain.cone
            for u in ops[o].operands
            if u in maker and bisect_right(cuts, maker[u]) != bisect_right(cuts, o)
        )
        stuck = {r for r, o in maker.items() if r in self.crossing or ops[o].pinned}
        own = [r for r in maker if r not in always]
        self._values = np.array(own, np.int64)
        self._value_nodes = np.array([value_node[r] for r in own], np.int64)
        self._maker_nodes = np.array([op_node[maker[r]] for r in own], np.int64)
        self._held = np.array([r in stuck for r in own], bool)
        needed = set(mountain.needed)
        edges: list[tuple[int, int, float, int]] = []
        for o in mountain.cone:
            op, node = ops[o], op_node[o]
            if not op.pinned:
                edges.append((node, 1, seconds[o], 0))
                for u in dict.fromkeys(op.operands):
                    if u in value_node and u not in always:
                        edges.append((node, value_node[u], -1.0, 0))
            for r in op.results:
                to = 1 if r in stuck or r in always else node
                edges.append((value_node[r], to, 0.0, 0 if r in always else values[r].nbytes))
                if r in needed:
                    edges.append((0, value_node[r], -1.0, 0))
        # Rows of the network: the edges by tail, then head.
        edges.sort(key=itemgetter(0, 1))
        self._head = np.array([e[1] for e in edges], np.int32)
        self._fixed = np.array([e[2] for e in edges])  # seconds; -1: infinite
        self._nbytes = np.array([e[3] for e in edges], np.float64)
        self._size = 2 + len(op_node) + len(value_node)
        out = np.bincount([e[0] for e in edges], minlength=self._size)
        self._rows = np.concatenate(([0], np.cumsum(out))).astype(np.int32)
        self._needed_bytes = float(sum(values[v].nbytes for v in needed))

    def keeps(self, prices: Sequence[float]) -> list[frozenset[int]]:
        """What to keep at each of ascending prices.

        Of any one choice the cost is a line over the price, and the least of lines is concave: what is best at two
        prices is best between them.
        """
        found: dict[int, frozenset[int]] = {}

        def between(low: int, high: int) -> None:
            for k in (low, high):
                if k not in found:
                    found[k] = self.keep(prices[k])
            if found[low] == found[high]:
                found.update((k, found[low]) for k in range(low + 1, high))
            elif high - low > 1:
                middle = (low + high) // 2
                between(low, middle)
                between(middle, high)

        between(0, len(prices) - 1)
        return [found[k] for k in range(len(prices))]

    def keep(self, price: float) -> frozenset[int]:
        """Values to keep when a byte costs ``price`` seconds."""
        scale = _TOTAL / max(price * self._needed_bytes, 1e-30)
        costs = np.where(self._fixed < 0, np.inf, (self._fixed + price * self._nbytes) * scale)
        capacity = np.minimum(costs, _INFINITE).astype(np.int32)
        capacity[(capacity == 0) & (self._fixed > 0)] = 1
        # scipy's sparse types are unknown to type checkers.
        network = cast(Any, csr_array((capacity, self._head, self._rows), shape=(self._size, self._size)))
        residual: Any = network - cast(Any, maximum_flow(network, 0, 1)).flow
        residual.eliminate_zeros()
        reached = np.zeros(self._size, bool)
        reached[breadth_first_order(residual, 0, return_predecessors=False)] = True
        kept = reached[self._value_nodes] & (self._held | ~reached[self._maker_nodes])
        return frozenset(self._values[kept].tolist())
