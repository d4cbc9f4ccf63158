"""The checker accepts what the planner makes, and nothing that differs from it in one place."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import Builder, graphs, train_steps
from jaxtensile.errors import VerifyError
from jaxtensile.ir.ir import Graph, Op, OpId, ValueId
from jaxtensile.ir.plan import Costs, Problem, Program
from jaxtensile.passes.lifetimes.fusion import fuse
from jaxtensile.passes.recompute.clones import with_clones
from jaxtensile.passes.recompute.stages import boundary_at, cut_points
from jaxtensile.passes.solvers.greedy import solve
from jaxtensile.passes.verify.check import check, naive_peak
from oracles import completed, same_outputs


@st.composite
def planned(draw, source):
    """A graph and what ``with_clones`` makes of it for some turn and some kept set."""
    graph = draw(source)
    boundary = boundary_at(graph, draw(st.integers(1, len(graph.ops))))
    values = sorted({r for o in boundary.cone for r in graph.ops[o].results} - boundary.always)
    kept = draw(st.sets(st.sampled_from(values))) if values else set()
    kept = completed(graph, boundary, frozenset(kept))
    cuts, _ = cut_points(graph, boundary)
    return graph, with_clones(Program.unchanged(graph), fuse(graph), boundary, kept, cuts)


@given(graphs())
def test_every_graph_is_its_own_program(graph):
    check(graph, Program.unchanged(graph))


@given(planned(graphs()))
@settings(max_examples=150)
def test_what_is_emitted_is_accepted(pair):
    check(*pair)


@given(planned(train_steps(pinned=True)))
@settings(max_examples=50)
def test_emitted_train_steps_are_accepted(pair):
    check(*pair)


@given(train_steps(), st.floats(0, 1))
@settings(max_examples=30)
def test_what_is_solved_is_accepted(graph, share):
    costs = Costs(seconds=(1.0,) * len(graph.ops), charge=tuple(1e-6 + op.flops for op in graph.ops))
    check(
        graph, solve(Problem(graph=graph, costs=costs, budget=int(share * sum(v.nbytes for v in graph.values)))).program
    )


def example():
    """A graph with an effect and a loop, and a program for it with a barrier and a clone.

    Original: a = exp(x); print(a); s = scan(a, 0); b = dot(s, x); c = tanh(a); d = sub(b, c).
    Program: the same, but ``a`` is made again behind a barrier before ``c``.
    """
    b = Builder()
    x = b.input(8)
    a = b.op("exp", x)
    b.op("debug_callback", a, results=[], pinned=True)
    body = Builder()
    i = body.input(8)
    s = b.op("scan", a, bodies=(body.graph(body.op("neg", i)),), trip_count=5, slots=(a, -1), carried=(0, 1))
    y = b.op("dot_general", s, x, flops=64.0)
    c = b.op("tanh", a)
    d = b.op("sub", y, c)
    graph = b.graph(d, s, donated=[x])

    n = len(graph.values)
    barrier = Op(id=OpId(4), primitive="optimization_barrier", operands=(x, y), results=(ValueId(n), ValueId(n + 1)))
    again = replace(graph.ops[0], id=OpId(5), operands=(ValueId(n),), results=(ValueId(n + 2),))
    late_c = replace(graph.ops[4], id=OpId(6), operands=(ValueId(n + 2),))
    late_d = replace(graph.ops[5], id=OpId(7), operands=(ValueId(n + 1), c))
    new = [replace(graph.values[v], id=ValueId(n + k)) for k, v in enumerate((x, y, a))]
    planned = replace(graph, values=(*graph.values, *new), ops=(*graph.ops[:4], barrier, again, late_c, late_d))
    return graph, Program(planned, (0, 1, 2, 3, -1, 0, 4, 5), (*range(n), x, y, a))


def test_the_example_is_right():
    graph, program = example()
    assert same_outputs(graph, program)
    check(graph, program)


def op_changed(i, **fields):
    def change(program):
        ops = list(program.graph.ops)
        ops[i] = replace(ops[i], **fields)
        return replace(program, graph=replace(program.graph, ops=tuple(ops)))

    return change


def value_changed(i, **fields):
    def change(program):
        values = list(program.graph.values)
        values[i] = replace(values[i], **fields)
        return replace(program, graph=replace(program.graph, values=tuple(values)))

    return change


def graph_changed(**fields):
    return lambda program: replace(program, graph=replace(program.graph, **fields))


def entry_changed(table, i, value):
    def change(program):
        entries = list(getattr(program, table))
        entries[i] = value
        return replace(program, **{table: tuple(entries)})

    return change


def without(i, renumber=True):
    def change(program):
        ops = [op for op in program.graph.ops if op.id != i]
        if renumber:
            ops = [replace(op, id=OpId(k)) for k, op in enumerate(ops)]
        origin = tuple(o for k, o in enumerate(program.origin) if k != i)
        return replace(program, graph=replace(program.graph, ops=tuple(ops)), origin=origin)

    return change


def swapped(i, j):
    def change(program):
        ops, origin = list(program.graph.ops), list(program.origin)
        ops[i], ops[j] = replace(ops[j], id=OpId(i)), replace(ops[i], id=OpId(j))
        origin[i], origin[j] = origin[j], origin[i]
        return replace(program, graph=replace(program.graph, ops=tuple(ops)), origin=tuple(origin))

    return change


def with_effect_twice(program):
    graph = program.graph
    again = replace(graph.ops[1], id=OpId(len(graph.ops)))
    return replace(program, graph=replace(graph, ops=(*graph.ops, again)), origin=(*program.origin, 1))


X, A, S, Y, C, D = range(6)
WRONG = {
    "operands swapped": (op_changed(3, operands=(X, S)), "reads versions of"),
    "operand of another value": (op_changed(6, operands=(S,)), "reads versions of"),
    "operand missing": (op_changed(3, operands=(S,)), "reads versions of"),
    "operand unknown": (op_changed(3, operands=(S, 99)), "there are 9 values"),
    "negative operand": (op_changed(3, operands=(S, -1)), "there are 9 values"),
    "operand in the wrong position": (op_changed(2, slots=(-1, A)), "has the positions"),
    "position of another value": (op_changed(2, slots=(S, -1)), "its operands are"),
    "results of another op": (op_changed(5, results=(A,)), "a second time"),
    "result unknown": (op_changed(7, results=(99,)), "there are 9 values"),
    "use before definition": (swapped(4, 5), "before it is made"),
    "use of what is never made": (without(5), "before it is made"),
    "ids with a gap": (without(1, renumber=False), "ids are consecutive"),
    "effect missing": (without(1), "ops with effects"),
    "effect twice": (with_effect_twice, "ops with effects"),
    "effect declared harmless": (op_changed(1, pinned=False), "debug_callback"),
    "wrong origin": (entry_changed("origin", 5, 4), "it repeats op 4"),
    "origin out of range": (entry_changed("origin", 5, 6), "the original has 6 ops"),
    "origin below range": (entry_changed("origin", 5, -2), "the original has 6 ops"),
    "origin too few": (lambda p: replace(p, origin=p.origin[:-1]), "origins are given"),
    "op passed off as a barrier": (entry_changed("origin", 5, -1), "only a plain optimization_barrier"),
    "barrier passed off as an op": (entry_changed("origin", 4, 0), "it repeats op 0"),
    "barrier that mixes": (op_changed(4, operands=(Y, X)), "what is inserted changes nothing"),
    "barrier that swallows": (op_changed(4, operands=(X, Y, S)), "what is inserted changes nothing"),
    "barrier with an effect": (op_changed(4, pinned=True), "only a plain optimization_barrier"),
    "another primitive": (op_changed(5, primitive="exp2"), "it repeats op 0"),
    "other FLOPs": (op_changed(3, flops=32.0), "it repeats op 3"),
    "other trip count": (op_changed(2, trip_count=4), "it repeats op 2"),
    "other split of positions": (op_changed(2, carried=(1, 0)), "it repeats op 2"),
    "other body": (op_changed(2, bodies=()), "it repeats op 2"),
    "other bytes": (value_changed(8, nbytes=16), "it is a version of 1"),
    "other shape": (value_changed(8, shape=(4,)), "it is a version of 1"),
    "other type": (value_changed(8, dtype="int32"), "it is a version of 1"),
    "other memory": (value_changed(8, space="host"), "which it repeats, in"),
    "value id out of place": (value_changed(8, id=7), "ids are consecutive"),
    "version of another value": (entry_changed("version_of", 8, C), "makes versions of"),
    "version out of range": (entry_changed("version_of", 8, 6), "the original has 6 values"),
    "versions too few": (lambda p: replace(p, version_of=p.version_of[:-1]), "versions are given"),
    "input passed off as another value": (entry_changed("version_of", X, A), "is itself"),
    "wrong output": (graph_changed(outputs=(C, S)), "its outputs are versions of"),
    "outputs in another order": (graph_changed(outputs=(S, D)), "its outputs are versions of"),
    "output missing": (graph_changed(outputs=(D,)), "its outputs are versions of"),
    "output that is never made": (without(7), "the list of outputs"),
    "input missing": (graph_changed(inputs=()), "before it is made"),
    "input added": (graph_changed(inputs=(X, A)), "a second time"),
    "donation missing": (graph_changed(donated=frozenset()), "donates"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_differs_in_one_place_is_refused(name):
    graph, program = example()
    change, says = WRONG[name]
    with pytest.raises(VerifyError, match="please report it") as caught:
        check(graph, change(program))
    assert says in str(caught.value)


def test_effects_keep_their_order():
    b = Builder()
    x = b.input(4)
    b.op("debug_callback", x, results=[], pinned=True)
    b.op("debug_callback", x, results=[], pinned=True)
    graph = b.graph(b.op("neg", x))
    program = Program.unchanged(graph)
    check(graph, program)
    with pytest.raises(VerifyError, match="in this order"):
        check(graph, swapped(0, 1)(program))


def test_an_output_may_be_a_clone_and_an_unused_op_may_go():
    b = Builder()
    x = b.input(4)
    a = b.op("exp", x)
    b.op("neg", a)
    graph = b.graph(a)
    n = len(graph.values)
    again = replace(graph.ops[0], id=OpId(1), results=(ValueId(n),))
    new = replace(graph, values=(*graph.values, replace(graph.values[a], id=ValueId(n))), outputs=(ValueId(n),))
    check(graph, Program(replace(new, ops=(graph.ops[0], again)), (0, 0), (0, 1, 2, a)))


@given(planned(train_steps()), st.data())
@settings(max_examples=60)
def test_a_random_operand_exchanged_is_refused_or_harmless(pair, data):
    """Reading another version of the same value is the only exchange that passes."""
    graph, program = pair
    ops = [op for op in program.graph.ops if op.operands]
    op = data.draw(st.sampled_from(ops))
    place = data.draw(st.integers(0, len(op.operands) - 1))
    other = data.draw(st.sampled_from([v.id for v in program.graph.values]))
    operands = (*op.operands[:place], other, *op.operands[place + 1 :])
    changed = op_changed(op.id, operands=operands)(program)
    try:
        check(graph, changed)
    except VerifyError:
        return
    assert program.version_of[other] == program.version_of[op.operands[place]]
    assert same_outputs(graph, changed)


def test_naive_peak_of_a_chain():
    """x → a(4) → b(8) → c(16), a read again at the end; nothing reads d."""
    b = Builder()
    x = b.input(1)
    a = b.op("exp", x, shape=(1,))
    y = b.op("exp", a, shape=(2,))
    c = b.op("exp", y, shape=(4,))
    b.op("exp", x, shape=(8,))
    out = b.op("add", c, a, shape=(16,))
    assert naive_peak(b.graph(out)) == [4, 4 + 8, 4 + 8 + 16, 4 + 16 + 32, 4 + 16 + 64]
    assert naive_peak(Graph(values=(), ops=(), inputs=(), outputs=())) == []


def test_outputs_live_to_the_end():
    b = Builder()
    x = b.input(1)
    a = b.op("exp", x)
    b.op("neg", b.op("exp", x))
    assert naive_peak(b.graph(a)) == [4, 8, 12]
    assert naive_peak(b.graph(x)) == [4, 4, 8]


@given(graphs())
def test_a_larger_value_never_lowers_the_naive_peak(graph):
    grown = replace(graph, values=tuple(replace(v, nbytes=v.nbytes + 1) for v in graph.values))
    assert all(a <= b for a, b in zip(naive_peak(graph), naive_peak(grown), strict=True))
