"""Segments: the dynamic programme against exhaustive search on climbs small enough for it."""

from bisect import bisect_right
from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from jaxtensile.ir.ir import Graph, Op, OpId, Value, ValueId
from jaxtensile.passes.recompute.clones import recomputed_ops
from jaxtensile.passes.recompute.segments import Menu, Needs
from jaxtensile.passes.recompute.stages import Boundary, boundary_at


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
    step = len(ops)
    for i in reversed(range(n)):
        values.append(Value(id=ValueId(len(values)), nbytes=1, shape=(1,), dtype="float32"))
        ops.append(op(len(ops), [len(values) - 2, i + 1], [len(values) - 1]))
    graph = Graph(values=tuple(values), ops=tuple(ops), inputs=(ValueId(0),), outputs=(ValueId(len(values) - 1),))
    return graph, step


def op(i, operands, results):
    return Op(
        id=OpId(i),
        primitive="dot_general",
        operands=tuple(ValueId(v) for v in operands),
        results=tuple(ValueId(v) for v in results),
        flops=1.0,
    )


def charge_of(graph, boundary, kept, charge):
    return sum(charge[o] for o in recomputed_ops(graph, boundary, frozenset(kept)))


def exhaustive(graph, boundary, charge, capacity):
    """Least charge over every subset of the residuals that fits ``capacity``."""
    values = [r for o in boundary.cone for r in graph.ops[o].results]
    subsets = chain.from_iterable(combinations(values, k) for k in range(len(values) + 1))
    fitting = [s for s in subsets if sum(graph.values[v].nbytes for v in s) <= capacity]
    return min(charge_of(graph, boundary, s, charge) for s in fitting)


@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=8),
    st.lists(st.floats(0.1, 4.0), min_size=8, max_size=8),
    st.floats(0.0, 1.0),
)
def test_the_choice_fits_and_is_close_to_the_optimum(sizes, costs, share):
    graph, step = train_step(sizes)
    boundary = boundary_at(graph, step)
    charge = [*costs[: len(sizes)], *([0.0] * (len(graph.ops) - len(sizes)))]
    capacity = int(share * sum(sizes))
    menu = Menu(graph, boundary, charge)
    choice = menu.choose(menu.spans[-1], capacity)
    best = exhaustive(graph, boundary, charge, capacity)
    if choice is None:  # whole segments only: less than the smallest option cannot be chosen
        assert capacity < menu.size(menu.least(menu.spans[-1]))
        return
    kept = choice.kept
    assert menu.size(kept) <= capacity
    got = charge_of(graph, boundary, kept, charge)
    assert got >= best - 1e-9
    # Options come from convex hulls: the loss against the true knapsack is at most one stage's work.
    assert got <= best + sum(sorted(costs[: len(sizes)])[-2:]) + 1e-9


def test_everything_is_kept_when_there_is_room():
    graph, step = train_step([10, 20, 30, 20])
    menu = Menu(graph, boundary_at(graph, step), [1.0] * 4 + [0.0] * (len(graph.ops) - 4))
    assert menu.choose(menu.spans[-1], 1000).kept == {1, 2, 3, 4}


def test_nothing_is_kept_when_it_must_be():
    graph, step = train_step([10, 20, 30, 20])
    boundary = boundary_at(graph, step)
    menu = Menu(graph, boundary, [1.0] * 4 + [0.0] * (len(graph.ops) - 4))
    assert menu.least(menu.spans[-1]) == frozenset()
    assert recomputed_ops(graph, boundary, frozenset()) == {0, 1, 2, 3}


def test_what_is_read_across_a_cut_is_kept():
    """No op that runs again reads what another segment would have to make again."""
    graph, step = train_step([20, 5, 20, 5, 20, 5], extra_reads=((2, 5),))
    boundary: Boundary = boundary_at(graph, step)
    menu = Menu(graph, boundary, [1.0] * 6 + [0.0] * (len(graph.ops) - 6))
    over = 0
    for capacity in (5, 10, 15, 20, 25, 30, 40, 60):
        for span in menu.spans:
            choice = menu.choose(span, capacity)
            if choice is None:
                continue
            cuts = [menu.cuts[i - 1] for i, _, _ in choice.parts[1:]]
            for o in recomputed_ops(graph, boundary, choice.kept):
                for u in graph.ops[o].operands:
                    if u in menu.again.made and u not in boundary.always:
                        apart = bisect_right(cuts, menu.made(u)) != bisect_right(cuts, o)
                        assert u in choice.kept or not apart
                        over += apart
    assert over
    across = menu._across(menu._segment_of([3]))
    kept, again = menu._completed(frozenset(), across)  # a mixture of answers, which may keep none of it
    assert across == {3: [3], 4: [2]} and kept == {2, 3} and again == recomputed_ops(graph, boundary, kept)


class Given(Needs):
    """What segments need, as told instead of learned."""

    def __init__(self, told):
        super().__init__()
        self.told = told

    def of(self, i, j, kept):
        return self.told[i % len(self.told)]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=4), st.integers(0, 150), st.integers(0, 150))
def test_what_a_segment_needs_finds_room_above_what_is_kept_before_it(told, capacity, room):
    graph, step = train_step([10, 20, 10, 30, 20, 10, 20, 30])
    boundary = boundary_at(graph, step)
    charge = [1.0] * 8 + [0.0] * (len(graph.ops) - 8)
    menu = Menu(graph, boundary, charge)
    for span in menu.spans:
        free = menu.choose(span, capacity)
        choice = menu.choose(span, capacity, room, Given(told))
        if choice is None:
            continue
        assert menu.size(choice.kept) <= capacity
        assert free is not None
        assert charge_of(graph, boundary, free.kept, charge) <= charge_of(graph, boundary, choice.kept, charge)
        again = recomputed_ops(graph, boundary, choice.kept)
        for i, j, _ in choice.parts:
            if any(bisect_right(menu.cuts, o) in range(i, j) for o in again):
                before = {v for v in choice.kept if bisect_right(menu.cuts, menu.made(v)) < i}
                assert menu.size(before) + told[i % len(told)] <= room


def test_what_was_measured_is_learned():
    """Segment 2 needs 50 bytes beside the 30 kept before it: with 70 bytes of room less is kept, or 2 kept whole."""
    graph, step = train_step([10] * 6)
    boundary = boundary_at(graph, step)
    menu = Menu(graph, boundary, [1.0] * 6 + [0.0] * (len(graph.ops) - 6))
    span = menu.spans[-1]
    choice = menu.choose(span, 40)
    again = sorted(recomputed_ops(graph, boundary, choice.kept), reverse=True)
    profile = [0] * 10 + [90] * len(again)
    needs = Needs()
    needs.learn(menu, choice, [(10 + k, o) for k, o in enumerate(again)], profile)
    for i, j, kept in choice.parts:
        before = menu.size({v for v in choice.kept if bisect_right(menu.cuts, menu.made(v)) < i})
        if any(bisect_right(menu.cuts, o) in range(i, j) for o in again):
            assert needs.of(i, j, kept) == 90 - before
        else:
            assert needs.of(i, j, kept) == 0
    other = menu.choose(span, 40, 89, needs)
    assert other is None or other.kept != choice.kept
