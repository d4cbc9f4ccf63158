"""The cut is the best kept set there is: compared with trying them all."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphs import Builder, graphs, train_steps
from jaxtensile.passes.recompute.clones import recomputed_ops
from jaxtensile.passes.recompute.mincut import Network, ResidualCut, ladders, price_ladder
from jaxtensile.passes.recompute.stages import Boundary, boundary_at
from oracles import best_kept_set, cost_of

KINDS = ("exp", "dot_general", "add", "reshape")


def by_hand(graph, step):
    """The boundary at a turn with no idle window: everything read after the boundary is needed."""
    made = {r: op.id for op in graph.ops[:step] for r in op.results}
    late = {v for op in graph.ops[step:] for v in op.operands}
    always = frozenset((*graph.inputs, *graph.outputs))
    needed = tuple(v for v in made if v in late and v not in always)
    cone, todo = set(), [made[v] for v in needed]
    while todo:
        o = todo.pop()
        if o not in cone:
            cone.add(o)
            if not graph.ops[o].pinned:
                todo.extend(made[u] for u in graph.ops[o].operands if u in made and u not in always)
    return Boundary(step, needed, always, tuple(sorted(cone)))


@st.composite
def problems(draw):
    """A graph with few values before the boundary, costs, a price, and cuts."""
    graph = draw(graphs(primitives=KINDS, most_ops=12, structure=False))
    pins = draw(st.sets(st.integers(0, len(graph.ops) - 1), max_size=2))
    graph = replace(graph, ops=tuple(replace(op, pinned=op.id in pins) for op in graph.ops))
    if draw(st.booleans()):  # ops with two results: one may be kept, the other recomputed
        graph = draw(graphs(primitives=(*KINDS, "split"), most_ops=9, structure=True))
    boundary = by_hand(graph, draw(st.integers(1, len(graph.ops))))
    free = [r for o in boundary.cone for r in graph.ops[o].results if r not in boundary.always]
    assume(boundary.needed and len(free) <= 8)
    seconds = [float(draw(st.integers(0, 50))) for _ in graph.ops]
    cuts = sorted(draw(st.sets(st.integers(0, boundary.step), max_size=2)))
    return graph, boundary, seconds, draw(st.sampled_from([0.01, 0.1, 0.5, 1.0, 4.0])), cuts


@given(problems())
@settings(max_examples=120)
def test_the_kept_set_is_optimal(problem):
    graph, boundary, seconds, price, cuts = problem
    cut = ResidualCut(Network(graph, boundary), seconds, cuts)
    kept = cut.keep(price)
    again = recomputed_ops(graph, boundary, kept)
    assert not any(graph.ops[o].pinned for o in again)
    best = best_kept_set(graph, boundary, seconds, price, stuck=cut.crossing)
    assert cost_of(graph, seconds, price, kept, again) == pytest.approx(best, rel=1e-6, abs=1e-6)


@given(problems())
@settings(max_examples=60)
def test_nothing_is_recomputed_across_a_cut(problem):
    graph, boundary, seconds, price, cuts = problem
    cut = ResidualCut(Network(graph, boundary), seconds, cuts)
    kept = cut.keep(price)
    made = {r: o for o in boundary.cone for r in graph.ops[o].results}
    for o in recomputed_ops(graph, boundary, kept):
        for u in graph.ops[o].operands:
            if u in made and u not in kept and u not in boundary.always:
                between = [w for w in cuts if made[u] < w <= o]
                assert not between, f"op {o} reads {u} across {between}"


@given(train_steps(), st.integers(0, 3))
@settings(max_examples=40)
def test_a_higher_price_keeps_no_more_bytes(graph, seed):
    boundary = boundary_at(graph, 2 * len(graph.ops) // 5)
    assume(boundary.needed)
    random = np.random.default_rng(seed)
    seconds = [float(s) for s in random.uniform(0, 1e-3, len(graph.ops))]
    cut = ResidualCut(Network(graph, boundary), seconds, [])
    sizes = [sum(graph.values[v].nbytes for v in cut.keep(p)) for p in np.geomspace(1e-12, 1e-3, 19)]
    assert sizes == sorted(sizes, reverse=True)


@given(train_steps(), st.integers(0, 3), st.integers(1, 20))
@settings(max_examples=40)
def test_many_prices_keep_what_each_does(graph, seed, count):
    boundary = boundary_at(graph, 2 * len(graph.ops) // 5)
    assume(boundary.needed)
    random = np.random.default_rng(seed)
    seconds = [float(s) for s in random.uniform(0, 1e-3, len(graph.ops))]
    cut, prices = (
        ResidualCut(Network(graph, boundary), seconds, []),
        [float(p) for p in np.geomspace(1e-9, 1e-3, count)],
    )
    for kept, price in zip(ladders([(cut, prices)])[0], prices, strict=True):
        cost, alone = (
            cost_of(graph, seconds, price, k, recomputed_ops(graph, boundary, k)) for k in (kept, cut.keep(price))
        )
        assert cost == pytest.approx(alone, rel=1e-6)


def chain():
    """x → dot a (dear, 64 B) → exp b (cheap, 64 B) → reduce c (cheap, 4 B); b and c are read late."""
    b = Builder()
    x = b.input(16)
    a = b.op("dot_general", x)
    e = b.op("exp", a)
    c = b.op("reduce_sum", e, shape=())
    step = len(b.ops)
    out = b.op("mul", e, b.op("exp", b.op("neg", c)))
    graph = b.graph(out)
    return graph, by_hand(graph, step), (a, e, c), [100.0, 2.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("price", "kept"),
    [
        (0.001, "ec"),  # bytes cost nothing: keep what is asked for
        (0.2, "ec"),  # c's second is more than its 4 bytes
        (0.5, "e"),  # now c is recomputed from e; e and a are as large, so a is no better
        (100.0, ""),  # bytes cost everything
    ],
)
def test_a_chain_by_hand(price, kept):
    graph, boundary, (a, e, c), seconds = chain()
    names = {a: "a", e: "e", c: "c"}
    chosen = ResidualCut(Network(graph, boundary), seconds, []).keep(price)
    assert "".join(sorted((names[v] for v in chosen), key="aec".index)) == kept


def test_what_comes_cheap_from_less_is_recomputed():
    """A wide value made from a narrow one: the narrow one is kept although nobody asked for it."""
    b = Builder()
    x = b.input(4)
    narrow = b.op("dot_general", x)
    wide = b.op("broadcast_in_dim", narrow, shape=(64,))
    graph = b.graph(b.op("neg", b.op("exp", b.op("add", wide, wide))))
    boundary = by_hand(graph, 2)
    assert boundary.needed == (wide,)
    assert ResidualCut(Network(graph, boundary), [50.0, 0.1, 0, 0, 0], []).keep(0.1) == {narrow}


def test_effects_are_kept_at_any_price():
    b = Builder()
    x = b.input(64)
    noise = b.op("random_seed", x, pinned=True)
    y = b.op("broadcast_in_dim", noise, shape=(2, 64))
    graph = b.graph(b.op("neg", y))
    cut = ResidualCut(Network(graph, by_hand(graph, 2)), [0.0, 1.0, 0.0], [])
    assert cut.keep(1e9) == {noise}
    assert cut.keep(1e-9) == {y}


def test_prices_span_what_the_ops_cost_per_byte():
    b = Builder()
    y = b.op("exp", b.op("dot_general", b.input(100)))
    graph = b.graph(y)
    prices = price_ladder(graph, (0, 1), [4e-3, 2e-3], 9)
    assert len(prices) == 9
    assert list(prices) == sorted(prices)
    assert prices[0] < 2e-3 / 400
    assert prices[-1] > 10 * 4e-3 / 400
    assert price_ladder(graph, (0, 1), [0.0, 0.0], 9) == (1.0,)
