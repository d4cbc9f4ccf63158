"""Values that XLA:GPU stores because a sum over few rows reads them, as in batch norm.

XLA:GPU sums few rows of few columns in one kernel that leaves most of the device idle, so computing values inside it is
slow. Values with other readers are stored instead: those that batch norm centres by its mean, and those before a
network weighs channels by their means.

Measured on compiled networks for an H200, jax 0.10.2. In planned programs only the first is modelled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtensile.ir.ir import Graph, Op
from jaxtensile.switches import on

ROWS = 4096
"""Rows that XLA:GPU sums in one go; more take two (``ReductionDimensionRaceFreeBound`` in
``xla/service/gpu/reduction_utils.cc``), the first of which keeps the whole device busy."""
COLUMNS = 3072
"""Columns up to which a sum in one go leaves the device too idle to compute a step that others need too: batch norm:
2048 are too few, 4096 are enough."""
MORE = 4608
"""Columns more for each further step: of sums over each image and channel, 16,384 are too few for ``relu`` of centred,
scaled and shifted values and for ``silu``."""
_LONG = frozenset(
    """acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc exp exp2 expm1 lgamma log log1p
    logistic pow rem rsqrt sin sinh sqrt tan tanh""".split()
)
_LONG_STEPS = 4
"""Simple steps that a function of ``_LONG`` counts for: fits ``silu``, stored up to 28,000 columns where a scaled
``relu`` is up to 12,000 (docs/xla.md)."""
_SPREADING = "broadcast_in_dim"
_SUMS = frozenset({"reduce_sum", "reduce_window_sum"})


@dataclass(frozen=True, slots=True)
class _Sums:
    """``columns[o]``: columns of each op that sums few rows. ``added[v]``: columns of such a sum that reads ``v``,
    directly or through other ops; 0 if none."""

    columns: dict[int, int]
    added: list[int]


def read_by_slow_sums(
    graph: Graph, read_by: list[list[int]], alike: frozenset[str], views: frozenset[str]
) -> list[bool]:
    """For each value whether a slow sum that reads it takes longer to compute than to read it. ``alike``: elementwise
    primitives. ``views``: primitives that only rename a buffer."""
    values = graph.values
    sums = _few_rows(graph, read_by, alike | views)
    slow = [False] * len(values)
    if not sums.columns or not on("slow_sums"):
        return slow
    free = views | {"convert_element_type", _SPREADING}  # types are changed wherever it is
    steps = [0] * len(values)
    for op in graph.ops:
        if len(op.results) != 1 or op.primitive not in alike | views:
            continue
        r = op.results[0]
        count = math.prod(values[r].shape)
        steps[r] = sum(steps[v] for v in dict.fromkeys(op.operands) if math.prod(values[v].shape) == count)
        if op.primitive not in free:
            steps[r] += _LONG_STEPS if op.primitive in _LONG else 1
        slow[r] = 0 < sums.added[r] <= COLUMNS + MORE * (steps[r] - 1)
        if slow[r]:
            steps[r] = 0
    return slow


def centred(graph: Graph, read_by: list[list[int]], alike: frozenset[str], views: frozenset[str]) -> list[bool]:
    """``read_by_slow_sums`` only for values made with totals of an earlier slow sum, over so few columns that one step
    is long."""
    values = graph.values
    sums = _few_rows(graph, read_by, alike | views, most=COLUMNS)
    passing_on = alike | views | {_SPREADING}
    total, spread = set[int](), set[int]()
    """Made of sums over rows alone, and the same for every row."""
    for op in graph.ops if sums.columns else ():
        if op.id in sums.columns:
            total.update(op.results)
        elif len(op.results) == 1 and op.primitive in passing_on:
            from_totals = total.intersection(op.operands) if not total.isdisjoint(op.operands) else set[int]()
            if from_totals or not spread.isdisjoint(op.operands):
                r = op.results[0]
                count = math.prod(values[r].shape)
                wider = any(math.prod(values[v].shape) < count for v in from_totals)
                if from_totals and not wider:
                    total.add(r)
                if wider or not spread.isdisjoint(op.operands):
                    spread.add(r)
    slow = [False] * len(values)
    for v in spread if spread and on("centred_sums") else ():
        slow[v] = sums.added[v] > 0
    return slow


def _few_rows(graph: Graph, read_by: list[list[int]], passing_on: frozenset[str], most: int | None = None) -> _Sums:
    """Sums of few rows, of at most ``most`` columns, and what they read."""
    values = graph.values
    columns = {int(op.id): n for op in graph.ops if op.primitive in _SUMS and (n := _columns(graph, op))}
    if most is None:
        columns = {o: n for o, n in columns.items() if not _inside(graph, graph.ops[o])}
    else:
        columns = {o: n for o, n in columns.items() if n <= most and graph.ops[o].primitive == "reduce_sum"}
    added = [0] * len(values)
    passing_on = passing_on | {_SPREADING}
    for op in reversed(graph.ops) if columns else ():
        if len(op.results) != 1:
            continue
        r = op.results[0]
        passes = added[r] and op.primitive in passing_on and len(read_by[r]) == 1
        if n := columns.get(op.id, added[r] if passes else 0):
            whole = {v for v in op.operands if math.prod(values[v].shape) >= math.prod(values[r].shape)}
            if len(whole) == 1:
                added[whole.pop()] = n
    return _Sums(columns, added)


def _columns(graph: Graph, op: Op) -> int:
    """Columns of a sum of few rows; 0 for other ops."""
    if not op.operands:
        return 0
    source, result = graph.values[op.operands[0]].shape, graph.values[op.results[0]].shape
    columns = math.prod(result)
    by_columns = bool(result) and result[-1] == source[-1] and result != source[: len(result)]
    if op.primitive == "reduce_window_sum":  # one window over all that is added up
        by_columns = by_columns and result != source and all(r in (1, s) for r, s in zip(result, source, strict=True))
    return columns if by_columns and math.prod(source) <= ROWS * columns else 0


def _inside(graph: Graph, op: Op) -> bool:
    """Whether ``op`` sums an inner axis with several behind it, such as the channels of images."""
    source, result = graph.values[op.operands[0]].shape, graph.values[op.results[0]].shape
    behind = len(result) - 1
    return len(result) < len(source) and result[:behind] != source[:behind] and result != source[-len(result) :]
