"""Copies to the host: the same values, fewer bytes at the peak, one copy at a time, and a price that is waiting."""

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import Builder, graphs
from jaxtensile.ir.plan import TO_DEVICE, TO_HOST, Link, Program
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.offload import insertion
from jaxtensile.passes.offload import offload as module
from jaxtensile.passes.offload.offload import insert, offload
from jaxtensile.passes.verify.check import check
from jaxtensile.units import GIB, MIB

FAST = Link(bandwidth=1e15, latency=0.0)
SIDE = 1024  # of f32 matrices of 4 MiB


def climb(layers=8):
    """x_k = cumsum(x_{k-1}) up, and down again one x_k after the other: each waits, the first the longest."""
    b = Builder()
    xs = [b.input(SIDE, SIDE)]
    for _ in range(layers):
        xs.append(b.op("cumsum", xs[-1]))
    g = b.op("cumsum", xs[-1])
    for x in reversed(xs[1:-1]):
        g = b.op("triangular_solve", g, x)
        g = b.op("cumsum", g)
    return Program.unchanged(b.graph(g))


def seconds_of(program, each=1e-3):
    return [each] * len(program.graph.ops)


@pytest.mark.parametrize("share", [0.8, 0.6, 0.5])
def test_fewer_bytes_for_no_time_over_a_fast_link(share):
    program = climb()
    live = live_ranges(program.graph)
    budget = live.device - int((1 - share) * live.temp)
    off = offload(program, seconds_of(program), FAST, budget, GIB)
    check(program.graph, off.program)
    assert off.live.device <= budget < live.device
    assert off.wait == 0 and all(c.hidden for c in off.copies)
    assert off.live.device == live_ranges(off.program.graph).device
    moved = [op.primitive for op in off.program.graph.ops if op.primitive in (TO_HOST, TO_DEVICE)]
    assert moved.count(TO_HOST) == moved.count(TO_DEVICE) == len(off.copies) > 0


def test_a_budget_that_is_met_needs_no_copies():
    program = climb()
    off = offload(program, seconds_of(program), FAST, live_ranges(program.graph).device, GIB)
    assert off.program is program and off.copies == () and off.wait == 0


def test_host_bytes_are_bounded():
    program = climb()
    off = offload(program, seconds_of(program), FAST, 0, 9 * MIB)
    assert 0 < sum(c.nbytes for c in off.copies) <= 9 * MIB
    assert offload(program, seconds_of(program), FAST, 0, 0).copies == ()


def test_a_slower_link_costs_more():
    program = climb(16)
    live = live_ranges(program.graph)
    budget = live.device - live.temp // 2
    waits = [
        offload(program, seconds_of(program), Link(bandwidth=b, latency=1e-5), budget, GIB).wait
        for b in (1e12, 1e10, 1e9, 1e8)
    ]
    assert waits == sorted(waits) and waits[0] == 0 < waits[-1]
    # Everything that moves must pass the link twice, and only that much work can hide it.
    work = sum(seconds_of(program))
    off = offload(program, seconds_of(program), Link(bandwidth=1e8, latency=0.0), budget, GIB)
    moved = sum(c.nbytes for c in off.copies) / 1e8
    assert max(moved - work, 0) <= off.wait <= 2 * moved


def test_hidden_copies_take_turns():
    """Copies planned as hidden fit between their steps, one at a time in each direction."""
    program = climb(24)
    seconds = seconds_of(program)
    link = Link(bandwidth=4 * MIB / 2.5e-3, latency=0.0)  # a copy takes two and a half ops
    live = live_ranges(program.graph)
    off = offload(program, seconds, link, live.device - live.temp // 5, GIB)
    assert off.copies and all(c.hidden for c in off.copies) and off.wait == 0
    at = [0.0, *accumulate(seconds)]
    for first, last in ((lambda c: c.after + 1, lambda c: c.done), (lambda c: c.begin, lambda c: c.until)):
        free = 0.0
        for c in sorted(off.copies, key=last):
            free = max(free, at[first(c)]) + 2.5e-3
            assert free <= at[last(c)] + 1e-9


def test_both_ends_are_tied_to_their_steps():
    """The copy out is asked for before ``done`` runs; the copy in starts from a barrier just before ``begin``."""
    program = climb()
    live = live_ranges(program.graph)
    off = offload(program, seconds_of(program), FAST, live.device - live.temp // 2, GIB)
    graph, origin = off.program.graph, off.program.origin
    where = {o: i for i, o in enumerate(origin) if o >= 0}
    barriers = [op for op in graph.ops if op.primitive == "optimization_barrier"]
    for op in barriers:
        assert any(graph.values[v].space == "host" for v in op.operands)
        tie = op.results[-1]
        assert graph.values[tie].space == "device" and any(tie in reader.operands for reader in graph.ops)
    for c in off.copies:
        out = next(
            op for op in graph.ops if op.primitive == TO_HOST and off.program.version_of[op.results[0]] == c.value
        )
        back = next(
            op for op in graph.ops if op.primitive == TO_DEVICE and off.program.version_of[op.results[0]] == c.value
        )
        assert where[c.after] < out.id < where[c.done] < back.id < where[c.until]
        assert any(out.results[0] in b.operands and b.id < where[c.done] for b in barriers)


@pytest.mark.parametrize("change", [{"dtype": "key<fry>"}, {"space": "host"}])
def test_keys_and_what_is_on_the_host_stay(change):
    program = climb()
    graph = program.graph
    values = tuple(replace(v, **change) if v.id in {op.results[0] for op in graph.ops} else v for v in graph.values)
    program = Program.unchanged(replace(graph, values=values))
    assert offload(program, seconds_of(program), FAST, 0, GIB).copies == ()


def test_small_buffers_stay(monkeypatch):
    monkeypatch.setattr(module, "SMALLEST", 4 * MIB + 1)
    program = climb()
    assert offload(program, seconds_of(program), FAST, 0, GIB).copies == ()


def centred(layers=6):
    """Layers whose input is read centred, as in a batch norm: the centred one has no buffer in either direction."""
    b = Builder()
    x, ws = b.input(SIDE, SIDE), [b.input(SIDE, SIDE) for _ in range(layers)]
    found = []
    for w in ws:
        z = b.dot(x, w)
        mean = b.op("broadcast_in_dim", b.op("reduce_sum", z, shape=(SIDE,)), shape=(SIDE, SIDE))
        off_mean = b.op("sub", z, mean)
        scale = b.op(
            "broadcast_in_dim", b.op("reduce_sum", b.op("mul", off_mean, off_mean), shape=(SIDE,)), shape=(SIDE, SIDE)
        )
        x = b.op("cumsum", b.op("mul", off_mean, scale))
        found.append((z, off_mean))
    g = b.op("cumsum", x)
    for w, (_, off_mean) in zip(reversed(ws), reversed(found), strict=True):
        g = b.dot(b.op("mul", g, off_mean), w)
    return Program.unchanged(b.graph(g)), [z for z, _ in found]


def test_what_is_read_through_fused_values_is_made_from_what_comes_back():
    program, inputs = centred()
    live = live_ranges(program.graph)
    assert all(live.kernels.home[z] == z for z in inputs)
    off = offload(program, seconds_of(program), FAST, live.device - live.temp // 3, GIB)
    check(program.graph, off.program)
    assert {c.value for c in off.copies} <= set(inputs) and off.copies
    assert off.live.device <= live.device - live.temp // 3
    kernels = live_ranges(off.program.graph).kernels
    assert off.program.clones()
    assert not any(kernels.is_root[op.id] for op in off.program.clones()), "no kernel runs twice"
    # Nobody reads the buffer that left once its copy is back.
    graph = off.program.graph
    for copy in off.copies:
        left = [r for r in live_ranges(graph).ranges if r.value == copy.value]
        back = next(
            op.id
            for op in graph.ops
            if op.primitive == TO_DEVICE and off.program.version_of[op.results[0]] == copy.value
        )
        assert left and left[0].stop <= back


def test_a_value_made_while_its_source_is_away_is_made_where_it_is_read():
    b = Builder()
    x = b.input(SIDE, SIDE)
    z = b.op("cumsum", x)
    y = b.op("cumsum", z)
    late = None
    for k in range(8):
        y = b.op("cumsum", y)
        if k == 4:
            late = b.op("neg", z)  # fuses into the product at the end
    program = Program.unchanged(b.graph(b.op("reduce_sum", b.op("mul", late, y), shape=(SIDE,))))
    copy = insertion.Copy(value=z, nbytes=4 * MIB, after=1, done=3, begin=8, until=11, hidden=True)
    planned = insert(program, [copy])
    check(program.graph, planned)
    assert [op.primitive for op in planned.graph.ops].count("neg") == 1 and not planned.clones()
    where = {op.primitive: op.id for op in planned.graph.ops}
    assert where[TO_DEVICE] < where["neg"] < where["mul"]


@given(graphs(most_ops=30), st.floats(0, 1), st.sampled_from([1e15, 1e6, 1e4]))
@settings(max_examples=150)
def test_any_program_stays_the_same_program(graph, share, bandwidth):
    program = Program.unchanged(graph)
    live = live_ranges(graph)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SMALLEST", 1)
        patch.setattr(insertion, "_SOME", 1)
        link = Link(bandwidth, 1e-6)
        off = offload(program, seconds_of(program), link, int(share * live.device), GIB)
        check(graph, off.program)
        busy = 2 * sum(link.latency + c.nbytes / link.bandwidth for c in off.copies)
        assert 0 <= off.wait <= 1.000001 * busy, "who waits does so for a copy, out or back"
        assert off.live.argument == live.argument and off.live.output == live.output
        assert insert(program, ()).graph == graph


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 6)), max_size=12),
    st.integers(0, 40),
    st.integers(1, 8),
)
def test_a_channel_finds_the_nearest_free_time(copies, step, length):
    """Beside a channel of which every tick is written down."""
    channel, busy = module.Channel(), set()

    def free(start, length):
        return busy.isdisjoint(range(start, start + length))

    def earliest(ready, length):
        return next(t for t in range(ready, 1000) if free(t, length))

    def latest(due, length):
        return next(t for t in range(due - length, -1000, -1) if free(t, length))

    for leaves, when, ticks in copies:
        start = channel.earliest(when, ticks) if leaves else channel.latest(when, ticks)
        assert start == (earliest if leaves else latest)(when, ticks)
        channel.take(start, ticks)
        busy.update(range(int(start), int(start) + ticks))
    assert channel.earliest(step, length) == earliest(step, length)
    assert channel.latest(step, length) == latest(step, length)
