"""Nodes: what is looked through, what is kept in any case, and what the rest costs whatever is decided."""

from hypothesis import given
from hypothesis import strategies as st

from graphs import Builder, network, solid_chain, train_steps
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.recompute.nodes import Nodes, others
from jaxtensile.passes.recompute.stages import boundary_at
from oracles import one_boundary


def nodes_of(graph):
    live = live_ranges(graph)
    boundary = one_boundary(graph, 0)
    return Nodes(graph, live, boundary), boundary, live


def test_every_value_of_a_solid_chain_is_a_node_of_its_own():
    graph = solid_chain([8, 4, 8, 4], [1, 1, 1, 1])
    nodes, boundary, _ = nodes_of(graph)
    assert set(nodes.maker) == set(boundary.needed) == nodes.solid
    assert all(nodes.single(o) for o in nodes.makes)
    assert all(nodes.first[v] == nodes.last[v] >= boundary.step for v in nodes.maker)


def test_the_logistic_of_a_product_is_looked_through():
    graph, *_ = network(4, gated=True)
    nodes, boundary, _ = nodes_of(graph)
    made = {r: graph.ops[o].primitive for o in boundary.cone for r in graph.ops[o].results}
    seen = {v: u for v, (u, *_) in nodes.of.items() if made[v] == "logistic"}
    assert seen
    assert all(made[u] == "dot_general" for u in seen.values())
    assert not seen.keys() & nodes.maker.keys()


@given(train_steps(), st.data())
def test_what_is_not_decided_is_part_of_the_plain_program(graph, data):
    live = live_ranges(graph)
    boundary = one_boundary(graph, 0)
    if boundary is None or not boundary.needed:
        return
    nodes = Nodes(graph, live, boundary)
    step = data.draw(st.integers(0, len(graph.ops) - 1))
    assert 0 <= others(nodes, live)[step] <= live.temp + max(v.nbytes for v in graph.values)
    assert nodes.first.keys() <= nodes.maker.keys()
    # What a fused op of several readers reads is surely needed up to the step before the first of them.
    assert all(boundary.step <= nodes.first[v] <= nodes.last[v] + 1 for v in nodes.first)
    roots = {v for op in graph.ops[boundary.step :] if live.kernels.is_root[op.id] for v in op.operands}
    assert all(nodes.first[v] <= nodes.last[v] for v in nodes.first if v in roots)


def test_bytes_that_a_kept_value_frees_are_not_sure():
    """x -> y -> tanh, the exponential of which is read after the boundary: y waits for it unless the tanh is kept."""
    b = Builder()
    x, w = b.input(64, 64), b.input(64, 64)
    y = b.dot(x, w)
    z = b.op("tanh", y)
    top = b.dot(b.op("exp", z), w)
    for _ in range(3):
        top = b.dot(top, w)
    graph = b.graph(b.dot(top, b.op("neg", z)))
    live, boundary = live_ranges(graph), boundary_at(graph, 4)
    nodes = Nodes(graph, live, boundary)
    sometimes = []
    sure = others(nodes, live, sometimes)
    assert z in nodes.maker and live.kernels.home[z] == -1
    assert [(s.value, s.stored) for s in sometimes] == [(y, frozenset({z}))]
    assert all(a <= b for a, b in zip(sure, others(nodes, live), strict=True))
