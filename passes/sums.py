"""Which values does XLA store because a sum over few rows reads them?

XLA:GPU adds up few rows of few columns in one kernel that keeps little of the device busy. What is made of totals, as
what batch norm centres by its mean, is not computed in there when others read it as well.
"""

from __future__ import annotations

import math

from jaxtensile.ir import Graph, Op

ROWS = 4096
"""Rows that XLA:GPU adds up in one go; more it adds up in two (``ReductionDimensionRaceFreeBound`` in
``xla/service/gpu/reduction_utils.cc``), the first of which keeps the whole device busy."""
COLUMNS = 3072
"""Columns up to which adding up rows in one go keeps little of the device busy, which is no place to compute what
others read as well: batch norm, H200, jax 0.10.2: 2048 are too few, 4096 are enough."""


def read_by_slow_sums(graph: Graph, read_by: list[list[int]], alike: frozenset[str]) -> list[bool]:
    """For each value whether it is made with the totals of an earlier sum, and read by a sum over few rows of few
    columns, as it is or on the way there: what is centred, in batch norm. ``alike``: primitives that make an element of
    every element."""
    values = graph.values
    few = {op.id for op in graph.ops if _sums_few_rows(graph, op)}
    slow = [False] * len(values)
    if not few:
        return slow
    passing_on = alike | {"broadcast_in_dim"}
    total, spread = set[int](), set[int]()
    """Made of sums over rows alone, and the same for every row."""
    for op in graph.ops:
        if op.id in few:
            total.update(op.results)
        elif len(op.results) == 1 and op.primitive in passing_on:
            from_totals = total.intersection(op.operands)
            if from_totals or not spread.isdisjoint(op.operands):
                r = op.results[0]
                count = math.prod(values[r].shape)
                wider = any(math.prod(values[v].shape) < count for v in from_totals)
                if from_totals and not wider:
                    total.add(r)
                if wider or not spread.isdisjoint(op.operands):
                    spread.add(r)
    for op in reversed(graph.ops):
        if len(op.results) != 1:
            continue
        r = op.results[0]
        if op.id in few or (slow[r] and op.primitive in passing_on and len(read_by[r]) == 1):
            whole = {v for v in op.operands if math.prod(values[v].shape) >= math.prod(values[r].shape)}
            if len(whole) == 1:
                slow[whole.pop()] = True
    return [a and v in spread for v, a in enumerate(slow)]


def _sums_few_rows(graph: Graph, op: Op) -> bool:
    """Whether it adds up few rows of few columns."""
    if op.primitive != "reduce_sum" or not op.operands:
        return False
    source, result = graph.values[op.operands[0]].shape, graph.values[op.results[0]].shape
    columns = math.prod(result)
    by_columns = bool(result) and result[-1] == source[-1] and result != source[: len(result)]
    return by_columns and columns <= COLUMNS and math.prod(source) <= ROWS * columns
