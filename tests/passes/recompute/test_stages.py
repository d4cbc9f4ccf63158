"""Where a program boundaries, what waits across the boundary, and where it can be cut."""

from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphs import Builder, graphs, train_steps
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.recompute.stages import (
    boundary_at,
    buffer_steps,
    cut_points,
    find_boundary,
    idle_window,
    use_steps,
)


def tower(layers, widths=(64, 16, 64)):
    """Layers of products whose widths rise and fall; every result is read again in reverse.

    The values between layers (``widths[0]`` wide) are the widest but one; narrow ones are inside.
    """
    b = Builder()
    x = b.input(32, widths[-1])
    ys, y = [], x
    for _ in range(layers):
        for w in widths:
            y = b.op("dot_general", y, shape=(32, w))
            ys.append(y)
    step = len(b.ops)
    g = b.op("dot_general", y)
    for y in reversed(ys):
        g = b.op("dot_general", g, y)
    return b.graph(g), step, ys


@pytest.mark.parametrize(("ops", "window"), [(1, 2), (128, 2), (640, 10), (100_000, 64)])
def test_the_idle_window_grows_with_the_program(ops, window):
    b = Builder()
    x = b.input(1)
    graph = b.graph(x)
    assert idle_window(type(graph)(values=graph.values, ops=(None,) * ops, inputs=(x,), outputs=(x,))) == window


def test_steps_of_definition_and_use():
    b = Builder()
    x = b.input(1)
    a = b.op("cumsum", x)
    c = b.op("dot_general", a, a)
    graph = b.graph(b.op("dot_general", c, x))
    assert use_steps(graph) == [[-1, 0, 2], [0, 1], [1, 2], [2]]


@given(graphs())
@settings(max_examples=50)
def test_buffers_are_touched_where_they_are_made_and_read(graph):
    live = live_ranges(graph)
    steps, stop = buffer_steps(graph, live), {r.value: r.stop for r in live.ranges}
    for op in graph.ops:
        for b in live.kernels.reads[op.id]:
            copied = stop.get(live.owner[b], op.id + 1) <= op.id  # over the argument whose memory it gets
            assert copied or op.id in steps[live.owner[b]]
    for r in live.ranges:
        assert min(steps[r.value]) == r.start
        assert max(steps[r.value]) == r.stop - 1


def test_the_turn_of_a_tower_is_its_top():
    graph, step, _ = tower(6)
    live = live_ranges(graph)
    found = find_boundary(graph, live, 0)
    assert abs(found - step) <= idle_window(graph)
    assert live.profile[found] >= 0.9 * live.temp


def test_a_program_that_fits_has_no_turn():
    graph, _, _ = tower(6)
    live = live_ranges(graph)
    assert find_boundary(graph, live, live.temp) is None
    assert find_boundary(graph, live, live.temp - 1) is not None


def test_a_chain_has_no_turn():
    """Nothing idles: every value is read at once."""
    b = Builder()
    y = b.input(100)
    for _ in range(20):
        y = b.op("cumsum", y)
    graph = b.graph(y)
    assert find_boundary(graph, live_ranges(graph), 0) is None


@given(graphs(), st.data())
@settings(max_examples=150)
def test_a_mountain_is_what_it_says(graph, data):
    step = data.draw(st.integers(0, len(graph.ops)))
    boundary = boundary_at(graph, step)
    made = {r: op for op in graph.ops[:step] for r in op.results}
    late = {v for op in graph.ops[step:] for v in op.operands}
    window = idle_window(graph)
    for v in boundary.needed:
        uses = [op.id for op in graph.ops if v in op.operands]
        before = max([made[v].id, *(u for u in uses if u < step)])
        after = min(u for u in uses if u >= step)
        assert after - before > window
        assert v in late
        assert not made[v].pinned
    assert {*graph.inputs, *graph.outputs} <= boundary.always
    assert boundary.always.isdisjoint(boundary.needed)
    assert late & set(made) <= boundary.always | set(boundary.needed), "everything read late is decided upon"
    # The cone is closed: who is in it can be recomputed from always, effects and the cone.
    cone = set(boundary.cone)
    assert list(boundary.cone) == sorted(cone)
    assert all(o < step for o in cone)
    assert {made[v].id for v in boundary.needed} <= cone
    for o in cone:
        if not graph.ops[o].pinned:
            for u in graph.ops[o].operands:
                assert u in boundary.always or u not in made or made[u].id in cone


@given(train_steps(), st.floats(0.2, 0.6))
@settings(max_examples=60)
def test_waists_are_cuts_of_the_climb(graph, share):
    boundary = boundary_at(graph, max(int(share * len(graph.ops)), 1))
    assume(boundary.cone)
    every, narrow = cut_points(graph, boundary)
    assert every == sorted(set(every))
    assert set(narrow) <= set(every) <= set(boundary.cone)


def crossing(graph, boundary, cut):
    """Bytes that ops of the cone from ``cut`` on read from ops before it."""
    made = {r: o for o in boundary.cone for r in graph.ops[o].results}
    read = {u for o in boundary.cone if o >= cut for u in graph.ops[o].operands}
    return sum(graph.values[v].nbytes for v in read if v in made and made[v] < cut and v not in boundary.always)


def test_waists_of_a_tower_are_its_narrow_layers():
    graph, step, _ = tower(6, widths=(64, 16, 64))
    boundary = boundary_at(graph, step)
    every, narrow = cut_points(graph, boundary)
    narrow_value = 32 * 16 * 4
    assert len(every) >= 5
    assert {crossing(graph, boundary, w) for w in every} == {narrow_value}
    assert narrow == every


def test_a_wide_waist_is_not_narrow():
    """Valleys of 16, 16, 40, 16, 16: the one in the middle is a cut point for stages, not for segments."""
    b = Builder()
    y = b.input(64)
    ys = []
    for low in (16, 16, 16, 40, 16, 16, 16):
        for w in (64, low, 64):
            y = b.op("dot_general", y, shape=(w,))
            ys.append(y)
    step = len(b.ops)
    g = b.op("dot_general", y)
    for y in reversed(ys):
        g = b.op("dot_general", g, y)
    graph = b.graph(g)
    boundary = boundary_at(graph, step)
    every, narrow = cut_points(graph, boundary)
    widths = [crossing(graph, boundary, w) // 4 for w in every]
    assert 40 in widths
    assert [crossing(graph, boundary, w) // 4 for w in narrow] == [w for w in widths if w == 16]


def test_a_level_climb_is_cut_evenly():
    graph, step, _ = tower(12, widths=(32,))
    every, narrow = cut_points(graph, boundary_at(graph, step))
    assert every == narrow and len(every) >= 3
    gaps = {b - a for a, b in pairwise(every)}
    assert max(gaps) - min(gaps) <= 1
    assert all(0 < w < step for w in every)


@pytest.mark.parametrize("wide", [False, True], ids=["level", "valleys"])
def test_of_equally_narrow_steps_the_one_behind_a_product_is_taken(wide):
    """x -> x @ w -> … -> x: everything is as wide. Behind the product waits what is dear to make again."""
    b = Builder()
    x = b.input(32, 32)
    ws = [b.input(32, 32) for _ in range(12)]
    ys = []
    for w in ws:
        z = b.dot(x, w)
        y = b.op("exp", z)
        if wide:
            y = b.op("reduce_max", b.op("concatenate", y, y, shape=(64, 64)), shape=(32, 32))
        x = b.op("tanh", y)
        ys += [z, x]
    step = len(b.ops)
    g = b.op("neg", x)
    for y in reversed(ys):
        g = b.op("mul", g, y)
    graph = b.graph(g)
    every, narrow = cut_points(graph, boundary_at(graph, step))
    assert len(narrow) >= 3
    assert {graph.ops[w - 1].primitive for w in every} == {"dot_general"}


def test_a_mountain_of_nothing():
    b = Builder()
    x = b.input(4)
    graph = b.graph(b.op("exp", x))
    boundary = boundary_at(graph, 1)
    assert (boundary.needed, boundary.cone) == ((), ())
    assert cut_points(graph, boundary) == ([], [])
