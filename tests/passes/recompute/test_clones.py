"""Emitted programs compute the same values; clones stand behind barriers; what is dropped is gone."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import Builder, graphs, train_steps
from jaxtensile.ir.plan import Program
from jaxtensile.passes.lifetimes.fusion import fuse
from jaxtensile.passes.recompute.clones import Recomputation, recomputed_ops, with_clones
from jaxtensile.passes.recompute.stages import boundary_at, cut_points
from jaxtensile.passes.verify.check import check
from oracles import completed, recomputed_by_hand, same_outputs

BARRIER = "optimization_barrier"
N = 100


@st.composite
def decisions(draw, source):
    """A program, a boundary of it, a kept set, and cuts."""
    graph = draw(source)
    boundary = boundary_at(graph, draw(st.integers(1, len(graph.ops))))
    values = sorted({r for o in boundary.cone for r in graph.ops[o].results} - boundary.always)
    kept = draw(st.sets(st.sampled_from(values))) if values else set()
    all_cuts, narrow = cut_points(graph, boundary)
    cuts = draw(st.sampled_from([all_cuts, narrow, []]))
    return graph, boundary, completed(graph, boundary, frozenset(kept)), cuts


def emitted(graph, boundary, kept, cuts):
    return with_clones(Program.unchanged(graph), fuse(graph), boundary, kept, cuts)


@given(decisions(graphs()))
@settings(max_examples=150)
def test_the_same_values_come_out(decision):
    graph, *rest = decision
    assert same_outputs(graph, emitted(graph, *rest))


@given(decisions(train_steps(pinned=True)))
@settings(max_examples=60)
def test_the_same_values_come_out_of_train_steps(decision):
    graph, *rest = decision
    assert same_outputs(graph, emitted(graph, *rest))


@given(decisions(train_steps()), st.data())
@settings(max_examples=40)
def test_an_emitted_program_can_be_planned_again(decision, data):
    graph, *rest = decision
    once = emitted(graph, *rest)
    boundary = boundary_at(once.graph, data.draw(st.integers(1, len(once.graph.ops))))
    kept = completed(once.graph, boundary, frozenset(boundary.needed[:: data.draw(st.integers(1, 4))]))
    cuts, _ = cut_points(once.graph, boundary)
    twice = with_clones(once, fuse(once.graph), boundary, kept, cuts)
    assert same_outputs(graph, twice)
    check(graph, twice)


@given(decisions(train_steps()))
@settings(max_examples=60)
def test_what_is_recomputed_stands_behind_a_barrier(decision):
    """Otherwise XLA merges the clone with the original; what fuses into its readers may merge before it does."""
    graph, boundary, kept, cuts = decision
    program = emitted(graph, boundary, kept, cuts)
    again = recomputed_ops(graph, boundary, kept)
    is_kernel = fuse(graph).is_root
    maker = {r: op for op in program.graph.ops for r in op.results}
    fresh = set()
    for i, op in enumerate(program.graph.ops):
        if i < boundary.step or program.origin[i] not in again:
            continue
        fresh.add(op.id)
        for v in op.operands if is_kernel[program.origin[i]] else ():
            assert v in maker, f"clone {op} reads an input directly"
            assert maker[v].primitive == BARRIER or maker[v].id in fresh, f"clone {op} reads {v} past the barrier"


def test_what_fuses_into_its_reader_needs_no_barrier():
    """exp runs inside the backward kernel with or without a plan; only the product's clone is a kernel."""

    b = Builder()
    a = b.op("cumsum", b.input(N))
    e = b.op("exp", a)
    step = b.op("cumsum", b.op("reduce_sum", e, shape=(1,)))
    back = b.op("cumsum", b.op("mul", e, a))
    graph = b.graph(step, back)
    boundary = boundary_at(graph, 3)

    def barriers(*kept):
        program = emitted(graph, boundary, completed(graph, boundary, frozenset(kept)), [])
        assert same_outputs(graph, program)
        return sum(op.primitive == BARRIER for op in program.graph.ops)

    assert not fuse(graph).is_root[1]
    assert barriers(a) == 0
    assert barriers() == 1


@given(decisions(graphs()))
@settings(max_examples=100)
def test_nothing_dropped_crosses_the_turn(decision):
    graph, boundary, kept, cuts = decision
    program = emitted(graph, boundary, kept, cuts)
    again = recomputed_ops(graph, boundary, kept)
    dropped = {r for o in again for r in graph.ops[o].results if r not in kept and r not in boundary.always}
    late = {v for op in program.graph.ops[boundary.step :] for v in op.operands} | set(program.graph.outputs)
    assert not late & dropped


@given(decisions(graphs()))
@settings(max_examples=100)
def test_recomputed_ops_are_the_least_that_suffice(decision):
    graph, boundary, kept, _ = decision
    made = {r: o for o in boundary.cone for r in graph.ops[o].results}
    assert recomputed_ops(graph, boundary, kept) == recomputed_by_hand(graph, boundary, made, kept)


@given(decisions(train_steps()))
@settings(max_examples=60)
def test_what_runs_again_beside_them_when_one_more_is_dropped(decision):
    graph, boundary, kept, _ = decision
    found = Recomputation(graph, boundary)
    for v in kept & set(boundary.needed):
        again = found.ops(kept)
        assert found.beside(again, kept, v) == found.ops(kept - {v}) - again


@given(decisions(graphs()))
@settings(max_examples=60)
def test_the_climb_is_as_it_was(decision):
    graph, boundary, *rest = decision
    program = emitted(graph, boundary, *rest)
    assert program.graph.ops[: boundary.step] == graph.ops[: boundary.step]
    assert program.origin[: boundary.step] == tuple(range(boundary.step))
    assert program.graph.inputs == graph.inputs
    assert program.graph.donated == graph.donated


def tower(layers, width=64):
    """y_k = tanh(y_{k-1} @ w_k), then every y_k read in reverse. The boundary is after the last tanh."""
    b = Builder()
    x = y = b.input(width, width)
    ws = [b.input(width, width) for _ in range(layers)]
    ys = []
    for w in ws:
        y = b.op("tanh", b.dot(y, w))
        ys.append(y)
    step = len(b.ops)
    g = b.op("neg", y)
    for y, w in zip(reversed(ys), reversed(ws), strict=True):
        g = b.dot(b.op("mul", g, y), w)
    return b.graph(b.op("add", g, x)), step, ys


def test_nothing_dropped_changes_nothing():
    graph, step, _ = tower(6)
    boundary = boundary_at(graph, step)
    kept = frozenset(boundary.needed)
    program = Program.unchanged(graph)
    assert with_clones(program, fuse(graph), boundary, kept, []) is program


@pytest.mark.parametrize("every", [2, 3, 6])
def test_one_barrier_per_stage(every):
    """Kept: each ``every``-th activation. Stages follow from what is kept: the rest of a stage is joined."""
    graph, step, ys = tower(12)
    boundary = boundary_at(graph, step)
    # The last activation is read right after the boundary: it is there whatever is decided.
    kept = frozenset(ys[every - 1 :: every]) & frozenset(boundary.needed)
    cuts = [2 * k for k in range(1, 12)]
    program = with_clones(Program.unchanged(graph), fuse(graph), boundary, kept, cuts)
    barriers = [op for op in program.graph.ops if op.primitive == BARRIER]
    assert len(barriers) == 12 // every
    assert same_outputs(graph, program)
    clones = program.clones()
    assert sum(op.flops for op in clones) == sum(op.flops for op in graph.ops[:step]) * (12 - 12 / every) / 12
    # A clone comes right where it is read, not all at the boundary: barriers and products of the descent alternate.
    kinds = [op.primitive for op in program.graph.ops[step:] if op.primitive in (BARRIER, "dot_general")]
    assert kinds.index(BARRIER) <= 1
    assert kinds[-1] == "dot_general"
    gaps = [i for i, k in enumerate(kinds) if k == BARRIER]
    assert all(b - a >= every for a, b in pairwise(gaps))


def test_a_barrier_is_tied_to_something_late():
    """With only old operands the clone could start before the descent: one buffer of the descent is among them."""
    graph, step, ys = tower(8)
    boundary = boundary_at(graph, step)
    kept = frozenset(ys[1::2]) & frozenset(boundary.needed)
    program = with_clones(Program.unchanged(graph), fuse(graph), boundary, kept, [2 * k for k in range(1, 8)])
    maker = {r: op.id for op in program.graph.ops for r in op.results}
    barriers = [op for op in program.graph.ops if op.primitive == BARRIER]
    for barrier in barriers[1:]:
        newest = max(maker.get(v, -1) for v in barrier.operands)
        assert newest >= step


def test_what_a_stage_recomputes_later_is_held_back():
    """Two arms in one stage, the second read after a product of the descent: its clones wait for that product."""
    b = Builder()
    x, v, w = b.input(64, 64), b.input(64, 64), b.input(64, 64)
    first, second = b.op("tanh", b.dot(x, v)), b.op("tanh", b.dot(x, w))
    g = b.op("neg", x)
    step = len(b.ops)
    for _ in range(3):
        g = b.dot(g, v)
    g = b.dot(b.op("mul", g, first), w)
    between = len(b.ops) - 1
    graph = b.graph(b.dot(b.op("mul", g, second), v))
    boundary = boundary_at(graph, step)
    assert {first, second} <= set(boundary.needed)
    program = with_clones(Program.unchanged(graph), fuse(graph), boundary, frozenset(), [])
    assert same_outputs(graph, program)
    barriers = [op for op in program.graph.ops if op.primitive == BARRIER]
    assert len(barriers) == 2
    made_by = {r: program.origin[op.id] for op in program.graph.ops for r in op.results}
    assert between in {made_by.get(v) for v in barriers[1].operands}
    clones = [op.id for op in program.clones() if op.primitive == "dot_general"]
    assert barriers[0].id < clones[0] < barriers[1].id < clones[1]


def test_a_stage_that_fuses_away_forces_only_what_is_kept_of_it():
    """Statistics of a softmax are kept, its numerators made again where they are read: no barrier for the logits."""
    b = Builder()
    x, w = b.input(64, 64), b.input(64, 64)
    logits = b.dot(x, w)
    top = b.op("broadcast_in_dim", b.op("reduce_max", logits, shape=(64,)), shape=(64, 1))
    exps = b.op("exp", b.op("sub", logits, top))
    total = b.op("reduce_sum", exps, shape=(64,))
    step = len(b.ops)
    g = b.op("cumsum", total)
    for _ in range(150):
        g = b.op("cumsum", g)
    graph = b.graph(b.dot(b.op("mul", exps, b.op("add", top, b.op("broadcast_in_dim", g, shape=(64, 1)))), w))
    boundary = boundary_at(graph, step)
    program = with_clones(
        Program.unchanged(graph), fuse(graph), boundary, completed(graph, boundary, frozenset({logits, top})), []
    )
    assert same_outputs(graph, program)
    read = {program.version_of[v] for op in program.graph.ops if op.primitive == BARRIER for v in op.operands}
    assert read == {top}


def test_what_waits_long_for_its_reader_is_made_before_the_next_stage():
    """A part of a gradient that is added much later: left to XLA, all that it is made from would wait instead."""
    b = Builder()
    x, w = b.input(64, 64), b.input(64, 64)
    ys = [x]
    for _ in range(8):
        ys.append(b.op("tanh", b.dot(ys[-1], w)))
    step = len(b.ops)
    wide = b.op("concatenate", b.dot(ys[-1], w), ys[-1], shape=(64, 128))
    part, short = b.op("split", wide, results=[(64, 64), (64, 64)])
    g = b.op("cumsum", short)
    for y in reversed(ys[1:]):
        for _ in range(20):
            g = b.op("cumsum", g)
        g = b.dot(b.op("mul", g, y), w)
    graph = b.graph(b.op("add", g, part))
    boundary = boundary_at(graph, step)
    kept = frozenset(ys[2::2]) & frozenset(boundary.needed)
    program = with_clones(Program.unchanged(graph), fuse(graph), boundary, kept, [2 * k for k in range(1, 8)])
    assert same_outputs(graph, program)
    first = next(op for op in program.graph.ops if op.primitive == BARRIER)
    controlled = {program.version_of[v] for v in first.operands}
    assert part in controlled and short not in controlled


@pytest.mark.parametrize("stored", [False, True])
def test_what_is_made_of_constants_for_a_buffer_is_held_behind_a_barrier(stored):
    """A mask that two loops read, made again for the second: with nothing to hold it XLA would keep the first."""
    b = Builder()
    x, w = b.input(1024, 1024), b.input(1024, 1024)
    numbers = b.op("iota", shape=(1024,))
    mask = b.op("broadcast_in_dim", b.op("ge", numbers, numbers), shape=(1024, 1024))
    reader = "cumsum" if stored else "mul"
    y = b.op("tanh", b.dot(b.op(reader, mask, x), w))
    step = len(b.ops)
    g = x
    for _ in range(6):
        g = b.dot(g, w)
    graph = b.graph(b.dot(b.op("mul", b.op(reader, mask, g), y), w))
    boundary = boundary_at(graph, step)
    assert mask in boundary.needed
    program = with_clones(Program.unchanged(graph), fuse(graph), boundary, frozenset(), [])
    assert same_outputs(graph, program)
    made = {r: op for op in program.graph.ops for r in op.results}
    held = [v for op in program.graph.ops if op.primitive == BARRIER for v in op.operands if v in made]
    assert any(made[v].primitive == "iota" for v in held) == stored
    if stored:
        first, second = (op for op in program.graph.ops if program.origin[op.id] == made[mask].id)
        assert first.id < step < second.id
        (compared,) = (made[v] for v in second.operands)
        assert all(made[v].primitive == BARRIER for v in compared.operands)


@pytest.mark.parametrize("read_again", [False, True])
def test_a_part_is_made_before_the_next_stage_if_the_whole_dies_with_it(read_again):
    """Part of a product that is read once a stage has opened: fused there, the whole would wait."""
    b = Builder()
    x, w, wide = b.input(64, 64), b.input(64, 64), b.input(64, 256)
    y = b.op("tanh", b.dot(x, w))
    step = len(b.ops)
    c = x
    for _ in range(10):
        c = b.op("cumsum", c)
    whole = b.dot(c, wide)
    part, rest = b.op("split", whole, results=[(64, 64), (64, 192)])
    at_once = b.op("cumsum", rest)
    g = b.op("add", b.dot(b.op("mul", c, y), w), part)
    for _ in range(300):
        at_once = b.op("cumsum", at_once)
    ends = [g, at_once]
    if read_again:
        ends.append(b.op("reduce_sum", whole, shape=()))
    graph = b.graph(*ends)
    boundary = boundary_at(graph, step)
    program = with_clones(Program.unchanged(graph), fuse(graph), boundary, frozenset(), [])
    assert same_outputs(graph, program)
    first = next(op for op in program.graph.ops if op.primitive == BARRIER)
    assert (part in {program.version_of[v] for v in first.operands}) == (not read_again)


def test_fused_ops_of_the_descent_are_made_where_they_are_read():
    """``s`` fuses into all its readers: once per stage that reads it, after that stage's barrier."""
    b = Builder()
    x = y = b.input(64, 64)
    ws = [b.input(64, 64) for _ in range(8)]
    ys = []
    for w in ws:
        y = b.op("tanh", b.dot(y, w))
        ys.append(y)
    step = len(b.ops)
    s = b.op("neg", x)
    g = b.op("neg", y)
    for y, w in zip(reversed(ys), reversed(ws), strict=True):
        g = b.dot(b.op("mul", b.op("mul", g, y), s), w)
    graph = b.graph(g)
    assert not fuse(graph).is_root[step]
    boundary = boundary_at(graph, step)
    kept = frozenset(ys[1::2]) & frozenset(boundary.needed)
    program = with_clones(Program.unchanged(graph), fuse(graph), boundary, kept, [2 * k for k in range(1, 8)])
    assert same_outputs(graph, program)
    barriers = [op.id for op in program.graph.ops if op.primitive == BARRIER]
    assert len(barriers) == 4
    assert 4 <= sum(o == step for o in program.origin) <= 5
    made = {r: op.id for op in program.graph.ops for r in op.results}
    for op in program.graph.ops[step:]:
        for v in op.operands:
            if program.version_of[v] == s:
                assert not [i for i in barriers if made[v] < i < op.id]
