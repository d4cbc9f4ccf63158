"""The residuals to keep at a given price per byte: an exact minimum cut.

Every needed value is kept (price x bytes) or recomputed (seconds of its op). A recomputed op needs its operands too.
With x_v = "v is available after the boundary" and y_o = "op o runs again", minimise

    sum_v  price * bytes_v * [x_v and not y_maker(v)]  +  sum_o  seconds_o * [y_o]
    subject to  x_v = 1 for needed v,   y_o = 1  implies  x_u = 1 for every operand u of o.

All terms are submodular, so a minimum s-t cut is exact (Picard, "Maximal closure of a graph and applications to
combinatorial problems", 1976). PyTorch's min-cut partitioner cuts so with bytes alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jaxtensile.ir.ir import Graph
from jaxtensile.passes.recompute.stages import Boundary
from jaxtensile.switches import on

_CHEAP, _BELOW, _ABOVE = 0.05, 10, 100
"""Prices from this quantile of the ops' seconds per byte, divided by the second, to the highest times the third: from
almost no recomputation to almost all. A guess."""


def price_ladder(graph: Graph, cone: Sequence[int], seconds: Sequence[float], count: int) -> tuple[float, ...]:
    """``count`` prices in seconds per byte, from 'keep whatever costs anything' to 'recompute all that can be'.

    Spaced evenly over the orders of magnitude of the costs per byte of ``cone``: no unit, device or size is assumed.
    """
    rates = [
        seconds[o] / size
        for o in cone
        if seconds[o] > 0 and (size := sum(graph.values[r].nbytes for r in graph.ops[o].results))
    ]
    if not rates:
        return (1.0,)
    low, high = np.quantile(rates, _CHEAP) / _BELOW, max(rates) * _ABOVE
    return tuple(float(p) for p in np.geomspace(low, high, count))


_INFINITE = 2**31 - 1
"""A capacity that no cut pays: the largest 32-bit number, as scipy's flows are 32-bit."""
_TOTAL = 2**30
"""Bound of a cut's flow, to which capacities are scaled: half of what 32 bits hold."""
_EDGES = 1 << 15
"""Most edges of one flow: small cuts take a tenth of the time together. At half and double alike."""


class Network:
    """Edges, by tail and head, that the cut problems of one boundary share.

    Each value has one edge to its op, and one past that op, for when it is not made again.
    """

    def __init__(self, graph: Graph, boundary: Boundary) -> None:
        values, ops, always, cone = graph.values, graph.ops, boundary.always, boundary.cone
        maker = {r: o for o in cone for r in ops[o].results}
        op_node = {o: 2 + i for i, o in enumerate(cone)}
        first = 2 + len(op_node)
        value_node = {r: first + i for i, r in enumerate(maker)}
        self.size = first + len(value_node)
        self.reads = [(u, maker[u], o) for o in cone for u in ops[o].operands if u in maker]
        """Reads within the cone: value, the op that makes it, and the op that reads it."""
        self.pinned = frozenset(r for r, o in maker.items() if ops[o].pinned)
        self.made = [*maker]
        own = [r for r in maker if r not in always]
        self.values = np.array(own, np.int64)
        self.value_nodes = np.array([value_node[r] for r in own], np.int64)
        self.maker_nodes = np.array([op_node[maker[r]] for r in own], np.int64)
        needed = set(boundary.needed)
        self.needed_bytes = float(sum(values[v].nbytes for v in needed))
        head = [value_node[r] for r in maker if r in needed]
        rows = [0, len(head), len(head)]
        charged: list[tuple[int, int]] = []
        for o in cone:
            if not ops[o].pinned:
                charged.append((len(head), o))
                reads = {value_node[u] for u in ops[o].operands if u in value_node and u not in always}
                head += [1, *sorted(reads)]
            rows.append(len(head))
        at, charge = (np.array(c, np.int64) for c in (zip(*charged, strict=True) if charged else ((), ())))
        self.charged, self.charging = at, charge
        """The edges that cost what an op costs, and those ops; before ``past`` all others hold for ever."""
        self.past = len(head)
        for o in maker.values():
            head += [1, op_node[o]]
            rows.append(len(head))
        self.head, self.rows = np.array(head, np.int32), np.array(rows, np.int32)
        self.nbytes = np.array([0 if r in always else values[r].nbytes for r in maker], np.float64)

    def reached(self, capacities: np.ndarray) -> np.ndarray:
        """The nodes that the source still reaches beside a maximum flow, for each row of ``capacities``.

        All are one flow, between a source and a sink of its own: most of a small flow's time is scipy's overhead.
        """
        count, edges = capacities.shape
        size = count * self.size
        end = self.rows[2]  # of the sink's row, which gets an edge to the common sink
        head = np.insert(self.head, end, 0) + self.size * np.arange(count, dtype=np.int32)[:, None]
        head[:, end] = size + 1
        rows = self.rows[:-1] + (np.arange(len(self.rows) - 1) >= 2)
        rows = rows + (edges + 1) * np.arange(count, dtype=np.int32)[:, None]
        capacity = np.insert(capacities, end, _INFINITE, axis=1)
        total = count * (edges + 1)
        # scipy's sparse types are unknown to type checkers.
        network = cast(
            Any,
            csr_array(
                (
                    np.append(capacity, np.full(count, _INFINITE, np.int32)),
                    np.append(head, np.arange(count, dtype=np.int32) * self.size).astype(np.int32),
                    np.append(rows, [total, total + count, total + count]).astype(np.int32),
                ),
                shape=(size + 2, size + 2),
            ),
        )
        residual: Any = network - cast(Any, maximum_flow(network, size, size + 1)).flow
        residual.eliminate_zeros()
        reached = np.zeros(size + 2, bool)
        reached[breadth_first_order(residual, size, return_predecessors=False)] = True
        return reached[:size].reshape(count, self.size)


class ResidualCut:
    """The cut problem of one boundary, built once. ``keep(price)`` solves it, ``ladders`` many of one network.

    ``cuts``: steps across which nothing is recomputed. A value read beyond one (``crossing``) is kept if available at
    all.
    """

    def __init__(self, network: Network, seconds: Sequence[float], cuts: Sequence[int]) -> None:
        net = self.network = network
        self.crossing: frozenset[int] = frozenset(
            u for u, p, o in net.reads if bisect_right(cuts, p) != bisect_right(cuts, o)
        )
        stuck = self.crossing | net.pinned
        self._held = np.array([r in stuck for r in net.values.tolist()], bool)
        self._fixed = np.full(len(net.head), -1.0)  # seconds; -1: infinite
        self._fixed[net.charged] = np.array(seconds, np.float64)[net.charging]
        self._fixed[net.past :] = 0.0
        self._nbytes = np.zeros(len(net.head))
        through = np.array([r not in stuck for r in net.made], bool)
        self._nbytes[net.past :: 2] = np.where(through, 0.0, net.nbytes)
        self._nbytes[net.past + 1 :: 2] = np.where(through, net.nbytes, 0.0)

    def keep(self, price: float) -> frozenset[int]:
        """Values to keep when a byte costs ``price`` seconds."""
        return solved([(self, price)])[0]

    def capacities(self, price: float) -> np.ndarray:
        """Capacities of the edges, scaled to 32 bits."""
        scale = _TOTAL / max(price * self.network.needed_bytes, 1e-30)
        costs = np.where(self._fixed < 0, np.inf, (self._fixed + price * self._nbytes) * scale)
        capacity = np.minimum(costs, _INFINITE).astype(np.int32)
        capacity[(capacity == 0) & (self._fixed > 0)] = 1
        return capacity

    def kept(self, reached: np.ndarray) -> frozenset[int]:
        """Values to keep if the source still reaches the nodes ``reached``."""
        net = self.network
        stay = reached[net.value_nodes] & (self._held | ~reached[net.maker_nodes])
        return frozenset(net.values[stay].tolist())


def ladders(asked: Sequence[tuple[ResidualCut, Sequence[float]]]) -> list[list[frozenset[int]]]:
    """What cuts of one network keep, each at its ascending prices.

    A choice costs linearly in the price, so the minimum is concave: a choice best at two prices is best between them.
    """
    found: list[dict[int, frozenset[int]]] = [{} for _ in asked]
    open_ = [(n, 0, len(prices) - 1) for n, (_, prices) in enumerate(asked)]
    while open_:
        missing = list(dict.fromkeys((n, k) for n, *ends in open_ for k in ends if k not in found[n]))
        answers = solved([(asked[n][0], asked[n][1][k]) for n, k in missing])
        for (n, k), kept in zip(missing, answers, strict=True):
            found[n][k] = kept
        halves: list[tuple[int, int, int]] = []
        for n, low, high in open_:
            if found[n][low] == found[n][high] and on("price_bisection"):
                found[n].update((k, found[n][low]) for k in range(low + 1, high))
            elif high - low > 1:
                middle = (low + high) // 2
                halves += [(n, low, middle), (n, middle, high)]
        open_ = halves
    return [[kept[k] for k in range(len(prices))] for kept, (_, prices) in zip(found, asked, strict=True)]


def solved(problems: Sequence[tuple[ResidualCut, float]]) -> list[frozenset[int]]:
    """What each of the cuts of one network keeps at its price."""
    out: list[frozenset[int]] = []
    if problems:
        net = problems[0][0].network
        most = max(_EDGES // (len(net.head) + 1), 1)
        for start in range(0, len(problems), most):
            some = problems[start : start + most]
            reached = net.reached(np.array([cut.capacities(price) for cut, price in some]))
            out += [cut.kept(nodes) for (cut, _), nodes in zip(some, reached, strict=True)]
    return out
