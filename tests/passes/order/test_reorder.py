"""`passes.reorder`: XLA's schedules, by invariant on random programs and by hand on small ones."""

from itertools import permutations

import pytest
from hypothesis import given, settings

from graphs import Builder, graphs
from jaxtensile.passes.lifetimes.fusion import fuse
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.order.reorder import SCHEDULES, _depth_first, _in_order, _list_schedule, _Nodes, as_scheduled

QUICK = settings(max_examples=60, deadline=None, derandomize=True)


@QUICK
@given(graphs())
def test_every_order_has_every_op_after_what_it_reads(graph):
    nodes = _Nodes(graph, fuse(graph))
    for schedule in SCHEDULES:
        order = nodes.with_fused(schedule(nodes))
        assert sorted(order) == list(range(len(graph.ops)))
        there = set(graph.inputs)
        for i in order:
            assert set(graph.ops[i].operands) <= there
            there.update(graph.ops[i].results)


def test_what_is_behind_a_barrier_waits_for_it():
    b = Builder()
    early = b.op("dot_general", b.input(8))
    late = b.op("dot_general", early, shape=(800,))
    held, beside = b.op("optimization_barrier", early, late, results=[(8,), (800,)])
    again = b.op("dot_general", b.op("tanh", held), shape=(2,))
    graph = b.graph(again, b.op("dot_general", beside, again, shape=(8,)))
    nodes = _Nodes(graph, fuse(graph))
    for schedule in SCHEDULES:
        order = schedule(nodes)
        assert order.index(2) < order.index(4)


def test_rows_are_spread_by_one_kernel_where_none_waits_for_another():
    b = Builder()
    x, y, sizes = b.input(24), b.input(24), b.input(3, dtype="int32")
    spread = [b.op("spread", v, sizes, shape=(3, 24)) for v in (x, y)]
    made = b.op("dot_general", *spread, shape=(24,))
    later = b.op("spread", made, sizes, shape=(3, 24))
    graph = b.graph(b.op("dot_general", later, spread[0], shape=(24,)))
    assert _Nodes(graph, fuse(graph)).parts == {0: [1]}


@QUICK
@given(graphs())
def test_the_best_of_the_three_is_said_results_included(graph):
    found, traced = as_scheduled(graph)
    nodes = _Nodes(graph, fuse(graph, written=True))

    def needed(scheduled):
        """Temporaries and results, by adding up what is there at each op."""
        g, live = scheduled.graph, scheduled.live
        written, most = set(), 0
        for op in g.ops:
            written |= {live.kernels.home[v] for v in op.results} & {live.kernels.home[v] for v in g.outputs}
            written -= set(g.inputs)
            most = max(most, live.profile[op.id] + sum(g.values[v].nbytes for v in written if v >= 0))
        return most

    every = [_in_order(graph, nodes.with_fused(schedule(nodes)), nodes.kernels) for schedule in SCHEDULES]
    assert needed(found) == min(map(needed, every))
    assert traced.live.temp <= _in_order(graph, range(len(graph.ops)), nodes.kernels).live.temp
    for run in (found, traced):
        there = set(graph.inputs)
        for i in run.origin:
            assert set(graph.ops[i].operands) <= there
            there.update(graph.ops[i].results)
    assert sorted(found.origin) == list(range(len(graph.ops)))
    assert [graph.ops[i].results for i in found.origin] == [op.results for op in found.graph.ops]
    assert live_ranges(found.graph, fuse(found.graph, written=True)).temp == found.live.temp


@QUICK
@given(graphs())
def test_orders_change_when_bytes_are_there_and_not_which(graph):
    """Buffers are the same in every order, but for those that take over another's memory."""
    nodes = _Nodes(graph, fuse(graph))
    homes = fuse(graph).home
    for schedule in SCHEDULES:
        new = _in_order(graph, nodes.with_fused(schedule(nodes)), nodes.kernels)
        assert fuse(new.graph) == new.live.kernels
        assert new.live.argument == live_ranges(graph).argument
        assert [h >= 0 for h in new.live.kernels.home] == [h >= 0 for h in homes]


def test_results_are_written_early_where_that_needs_less():
    """A step that makes all gradients first and then all new weights."""
    b = Builder()
    weights, x = [b.input(100) for _ in range(4)], b.input(10)
    gradients = [b.op("cumsum", x, shape=(100,)) for _ in weights]
    graph = b.graph(*(b.op("sub", w, g) for w, g in zip(weights, gradients, strict=True)), donated=weights)
    assert live_ranges(graph).temp == 4 * 400
    assert as_scheduled(graph)[1].live.temp == 400


def wide(branches):
    """Products of one input, each reduced on its own: in the order of the trace all are there at once."""
    b = Builder()
    x = b.input(1000)
    products = [b.op("dot_general", x, shape=(1000 + i,)) for i in range(branches)]
    sums = [b.op("dot_general", p, shape=(1,)) for p in products]
    return b.graph(*sums)


def test_the_list_schedule_frees_what_it_can():
    graph = wide(4)
    nodes = _Nodes(graph, fuse(graph))
    order = _list_schedule(nodes)
    one_by_one = _in_order(graph, nodes.with_fused(order), nodes.kernels).live.temp
    least = min(
        _in_order(graph, p, nodes.kernels).live.temp
        for p in permutations(range(8))
        if all(p.index(i) < p.index(i + 4) for i in range(4))
    )
    assert one_by_one == least < live_ranges(graph).temp


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_schedule_is_the_same_whenever_asked(schedule):
    graph = wide(5)
    assert schedule(_Nodes(graph, fuse(graph))) == schedule(_Nodes(graph, fuse(graph)))


def test_of_like_kernels_the_one_that_can_run_most_lately_runs():
    """Both heads can run from the start; the tail of the one that ran is taken before the other head."""
    b = Builder()
    x = b.input(64)
    heads = [b.op("cumsum", x) for _ in range(2)]
    tails = [b.op("cumsum", h, shape=(128,)) for h in heads]
    order = _list_schedule(_Nodes(g := b.graph(*tails), fuse(g)))
    assert order == [1, 3, 0, 2]


def test_numbers_in_an_array_come_out_of_the_first_kernel_that_reads_them():
    """Of a pool: zeros that its gradient adds to, the ``relu`` that is compared with them, a copy for the gradient."""
    b = Builder()
    x = b.input(64, 64)
    zeros = b.op("broadcast_in_dim", shape=(64, 64))
    relu = b.op("max", b.op("cumsum", x), zeros)
    copied = b.op("written copy", zeros)
    out = b.op("scatter-add", copied, b.op("cumsum", relu), b.op("select_n", zeros, relu))
    nodes = _Nodes(g := b.graph(out), fuse(g))
    (kernel,) = (op.id for op in g.ops if op.primitive == "max")
    assert set(nodes.makes[kernel]) == {zeros, relu} and nodes.parts == {kernel: [0]}
    for schedule in SCHEDULES:
        order = nodes.with_fused(schedule(nodes))
        assert order.index(kernel) == order.index(0) + 1


def test_numbers_that_no_elementwise_kernel_reads_first_come_with_their_copies():
    b = Builder()
    x = b.input(64, 64)
    zeros = b.op("broadcast_in_dim", shape=(64, 64))
    copied = b.op("written copy", zeros)
    added = b.op("scatter-add", copied, x)
    late = b.op("max", b.op("cumsum", added), zeros)
    nodes = _Nodes(g := b.graph(b.op("cumsum", late)), fuse(g))
    assert nodes.parts == {0: [1]} and set(nodes.makes[0]) == {zeros, copied}


def test_what_is_little_of_something_large_does_not_keep_it():
    """The loss reads the logits that the gradient reads as well: depth first, it would be the last to do so."""
    b = Builder()
    logits = b.op("cumsum", b.input(64, 1024))
    loss = b.op("reduce_sum", logits, shape=())
    back = logits
    for _ in range(3):
        back = b.op("cumsum", back)
    nodes = _Nodes(g := b.graph(back, loss), fuse(g))
    order = _depth_first(nodes)
    assert order.index(1) == order.index(0) + 1
