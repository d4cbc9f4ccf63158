"""Graphs and programs as data: frozen, ordered, and with the queries that everything rests on."""

import dataclasses

import pytest
from hypothesis import given, settings

from graphs import Builder, graphs
from jaxtensile.ir.ir import Graph, Op, OpId, Value, ValueId, consumers, producers
from jaxtensile.ir.plan import MemoryUse, Plan, Program


def diamond():
    """x → a; a → b, c; (b, c, c) → d."""
    b = Builder()
    x = b.input(4)
    a = b.op("exp", x)
    left, right = b.op("neg", a), b.op("tanh", a)
    return b.graph(b.op("select_n", left, right, right))


def test_producers_and_consumers():
    graph = diamond()
    assert producers(graph) == [-1, 0, 1, 2, 3]
    assert consumers(graph) == [[0], [1, 2], [3], [3], []]


@given(graphs())
@settings(max_examples=60)
def test_producers_and_consumers_agree_with_the_ops(graph):
    made, read = producers(graph), consumers(graph)
    for v in graph.values:
        assert [op.id for op in graph.ops if v.id in op.results] == ([made[v.id]] if made[v.id] >= 0 else [])
        assert [op.id for op in graph.ops if v.id in op.operands] == read[v.id]
    assert {v for v, o in enumerate(made) if o < 0} == set(graph.inputs)


@given(graphs())
@settings(max_examples=20)
def test_a_graph_has_the_flops_of_its_ops(graph):
    assert graph.flops == sum(op.flops for op in graph.ops)


@pytest.mark.parametrize(
    ("noun", "field"),
    [
        (Value(id=ValueId(0), nbytes=4, shape=(1,), dtype="float32"), "nbytes"),
        (Op(id=OpId(0), primitive="exp", operands=(), results=()), "pinned"),
        (Graph(values=(), ops=(), inputs=(), outputs=()), "ops"),
        (MemoryUse(argument=1, output=2, temp=3, alias=1), "temp"),
    ],
    ids=lambda p: type(p).__name__ if not isinstance(p, str) else p,
)
def test_nouns_are_frozen_and_compare_by_content(noun, field):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(noun, field, None)
    assert not hasattr(noun, "__dict__")
    assert noun == dataclasses.replace(noun)
    assert hash(noun) == hash(dataclasses.replace(noun))


def test_memory_that_must_fit():
    assert MemoryUse(argument=100, output=60, temp=30, alias=50, host=1000).device == 140


def test_an_unchanged_program_has_no_clones():
    graph = diamond()
    program = Program.unchanged(graph)
    assert program.clones() == []
    assert (program.origin, program.version_of) == ((0, 1, 2, 3), (0, 1, 2, 3, 4))
    assert plan_of(program).changes_nothing


def with_clone(barrier):
    """The diamond with ``a`` made again for the second reader."""
    graph = diamond()
    n = len(graph.values)
    fresh = dataclasses.replace(graph.values[1], id=ValueId(n))
    again = dataclasses.replace(graph.ops[0], id=OpId(2), results=(ValueId(n),))
    later = [dataclasses.replace(op, id=OpId(op.id + 1)) for op in graph.ops[2:]]
    ops = (*graph.ops[:2], again, *later)
    return Program(
        dataclasses.replace(graph, values=(*graph.values, fresh), ops=ops), (0, 1, barrier, 2, 3), (*range(n), 1)
    )


def plan_of(program):
    use = MemoryUse(argument=0, output=0, temp=0, alias=0)
    return Plan(program=program, actions=(), predicted=use, overhead=0.0, recompute_flops=0.0, solver="test")


def test_clones_are_later_runs_of_one_op():
    program = with_clone(0)
    assert [op.id for op in program.clones()] == [2]
    assert not plan_of(program).changes_nothing


def test_a_barrier_alone_is_a_change():
    program = with_clone(-1)
    assert program.clones() == []
    assert not plan_of(program).changes_nothing
