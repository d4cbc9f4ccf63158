"""Segments: the dynamic programme against exhaustive search on climbs small enough for it."""

from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtensile.ir import Graph, Op, OpId, Value, ValueId
from jaxtensile.passes.emit import recomputed_ops
from jaxtensile.passes.segments import Menu
from jaxtensile.passes.stages import Mountain, mountain_at


def train_step(sizes, extra_reads=()):
    """x -> v1 -> … -> vn, then a descent that reads them in reverse; ``extra_reads``: (i, j) makes v_j read v_i too."""
    n = len(sizes)
    values = [Value(id=ValueId(0), nbytes=1, shape=(1,), dtype="float32")]
    ops = []
    for i, size in enumerate(sizes):
        operands = [i, *(a for a, b in extra_reads if b == i + 1 and a < i)]
        values.append(Value(id=ValueId(i + 1), nbytes=size, shape=(size,), dtype="float32"))
        ops.append(op(len(ops), operands, [i + 1]))
    for _ in range(200):  # a long top, so that every residual idles
        values.append(Value(id=ValueId(len(values)), nbytes=1, shape=(1,), dtype="float32"))
        ops.append(op(len(ops), [len(values) - 2 if len(values) > n + 2 else n], [len(values) - 1]))
    turn = len(ops)
    for i in reversed(range(n)):
        values.append(Value(id=ValueId(len(values)), nbytes=1, shape=(1,), dtype="float32"))
        ops.append(op(len(ops), [len(values) - 2, i + 1], [len(values) - 1]))
    graph = Graph(values=tuple(values), ops=tuple(ops), inputs=(ValueId(0),), outputs=(ValueId(len(values) - 1),))
    return graph, turn


def op(i, operands, results):
    return Op(
        id=OpId(i),
        primitive="dot_general",
        operands=tuple(ValueId(v) for v in operands),
        results=tuple(ValueId(v) for v in results),
        flops=1.0,
    )


def charge_of(graph, mountain, kept, charge):
    return sum(charge[o] for o in recomputed_ops(graph, mountain, frozenset(kept)))


def exhaustive(graph, mountain, charge, capacity):
    """Least charge over every subset of the residuals that fits ``capacity``."""
    values = [r for o in mountain.cone for r in graph.ops[o].results]
    subsets = chain.from_iterable(combinations(values, k) for k in range(len(values) + 1))
    fitting = [s for s in subsets if sum(graph.values[v].nbytes for v in s) <= capacity]
    return min(charge_of(graph, mountain, s, charge) for s in fitting)


@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=8),
    st.lists(st.floats(0.1, 4.0), min_size=8, max_size=8),
    st.floats(0.0, 1.0),
)
def test_the_choice_fits_and_is_close_to_the_optimum(sizes, costs, share):
    graph, turn = train_step(sizes)
    mountain = mountain_at(graph, turn)
    charge = [*costs[: len(sizes)], *([0.0] * (len(graph.ops) - len(sizes)))]
    capacity = int(share * sum(sizes))
    menu = Menu(graph, mountain, charge)
    kept = menu.choose(menu.spans[-1], capacity)
    best = exhaustive(graph, mountain, charge, capacity)
    if kept is None:  # whole segments only: less than the smallest option cannot be chosen
        assert capacity < menu.size(menu.least(menu.spans[-1]))
        return
    assert menu.size(kept) <= capacity
    got = charge_of(graph, mountain, kept, charge)
    assert got >= best - 1e-9
    # Options come from convex hulls: the loss against the true knapsack is at most one stage's work.
    assert got <= best + sum(sorted(costs[: len(sizes)])[-2:]) + 1e-9


def test_everything_is_kept_when_there_is_room():
    graph, turn = train_step([10, 20, 30, 20])
    menu = Menu(graph, mountain_at(graph, turn), [1.0] * 4 + [0.0] * (len(graph.ops) - 4))
    assert menu.choose(menu.spans[-1], 1000) == {1, 2, 3, 4}


def test_nothing_is_kept_when_it_must_be():
    graph, turn = train_step([10, 20, 30, 20])
    mountain = mountain_at(graph, turn)
    menu = Menu(graph, mountain, [1.0] * 4 + [0.0] * (len(graph.ops) - 4))
    assert menu.least(menu.spans[-1]) == frozenset()
    assert recomputed_ops(graph, mountain, frozenset()) == {0, 1, 2, 3}


@pytest.mark.parametrize("capacity", [40, 60, 80])
def test_a_value_read_across_a_cut_is_completed(capacity):
    graph, turn = train_step([20, 5, 20, 5, 20, 5], extra_reads=((2, 5),))
    mountain: Mountain = mountain_at(graph, turn)
    menu = Menu(graph, mountain, [1.0] * 6 + [0.0] * (len(graph.ops) - 6))
    for span in menu.spans:
        kept = menu.choose(span, capacity)
        if kept is not None:
            assert menu.completed(kept, []) == kept
