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
        self._maker: dict[int, int] = {r: o for o in mountain.cone for r in ops[o].results}
        self._op_node: dict[int, int] = {o: 2 + i for i, o in enumerate(mountain.cone)}
        first = 2 + len(self._op_node)
        self._value_node: dict[int, int] = {r: first + i for i, r in enumerate(self._maker)}
        self.crossing: frozenset[int] = frozenset(
            u
            for o in mountain.cone
            for u in ops[o].operands
            if u in self._maker and bisect_right(cuts, self._maker[u]) != bisect_right(cuts, o)
        )
        self._always = always
        self._stuck = {r for r, o in self._maker.items() if r in self.crossing or ops[o].pinned}
        needed = set(mountain.needed)
        edges: list[tuple[int, int, float, int]] = []
        for o in mountain.cone:
            op, node = ops[o], self._op_node[o]
            if not op.pinned:
                edges.append((node, 1, seconds[o], 0))
                for u in dict.fromkeys(op.operands):
                    if u in self._value_node and u not in always:
                        edges.append((node, self._value_node[u], -1.0, 0))
            for r in op.results:
                to = 1 if r in self._stuck or r in always else node
                edges.append((self._value_node[r], to, 0.0, 0 if r in always else values[r].nbytes))
                if r in needed:
                    edges.append((0, self._value_node[r], -1.0, 0))
        self._tail = np.array([e[0] for e in edges], np.int32)
        self._head = np.array([e[1] for e in edges], np.int32)
        self._fixed = np.array([e[2] for e in edges])  # seconds; -1: infinite
        self._nbytes = np.array([e[3] for e in edges], np.float64)
        self._size = 2 + len(self._op_node) + len(self._value_node)
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
        network = cast(Any, csr_array((capacity, (self._tail, self._head)), shape=(self._size, self._size)))
        residual: Any = network - cast(Any, maximum_flow(network, 0, 1)).flow
        residual.eliminate_zeros()
        reached = np.zeros(self._size, bool)
        reached[breadth_first_order(residual, 0, return_predecessors=False)] = True
        return frozenset(
            r
            for r, node in self._value_node.items()
            if reached[node]
            and r not in self._always
            and (r in self._stuck or not reached[self._op_node[self._maker[r]]])
        )
