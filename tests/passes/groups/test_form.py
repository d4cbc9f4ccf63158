"""The groups between cut points: checked by what each has when it runs, and by breaking them."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import Builder, graphs, train_steps
from jaxtensile.errors import VerifyError
from jaxtensile.passes.groups.form import form, made_again
from jaxtensile.passes.lifetimes.fusion import fuse
from jaxtensile.passes.verify.groups_check import check_groups


@st.composite
def divided(draw, programs):
    graph = draw(programs)
    places = st.lists(st.integers(1, max(len(graph.ops) - 1, 1)), max_size=4, unique=True)
    cuts = tuple(sorted(p for p in draw(places) if p < len(graph.ops)))
    return graph, cuts


def groups_of(graph, cuts):
    return form(graph, made_again(graph, fuse(graph)), cuts)


@settings(max_examples=200, deadline=None)
@given(divided(st.one_of(graphs(), train_steps(pinned=True))))
def test_the_groups_compute_the_program(case):
    graph, cuts = case
    groups = groups_of(graph, cuts)
    assert len(groups) == len(cuts) + 1
    check_groups(graph, groups, len(cuts) + 1)
    for group, (start, stop) in zip(groups, itertools.pairwise((0, *cuts, len(graph.ops))), strict=True):
        assert all(o < stop for o in group.ops)
        assert {o for o in group.ops if o >= start} >= {op.id for op in graph.ops[start:stop] if op.pinned}


@settings(max_examples=100, deadline=None)
@given(divided(train_steps()), st.data())
def test_the_checker_sees_what_is_broken(case, data):
    """Nothing that is taken away, handed on too late, or given away too early goes unseen."""
    graph, cuts = case
    groups = list(groups_of(graph, cuts))
    k = data.draw(st.integers(0, len(groups) - 1))
    group, later = groups[k], groups[k + 1 :]
    broken = [replace(group, ops=group.ops[:i] + group.ops[i + 1 :]) for i in range(len(group.ops))]
    broken += [replace(group, outputs=tuple(v for v in group.outputs if v != o), donated=0) for o in group.outputs]
    broken += [replace(group, inputs=tuple(v for v in group.inputs if v != i), donated=0) for i in group.inputs]
    broken += [replace(group, ops=group.ops[::-1])] if len(group.ops) > 1 else []
    needed = {v for g in later for v in g.inputs} | {*graph.outputs} | {*graph.inputs} - graph.donated
    for v in needed.intersection(group.inputs):
        others = tuple(w for w in group.inputs if w != v)
        broken += [replace(group, inputs=(v, *others), outputs=(o, *(w for w in group.outputs if w != o)), donated=1)
                   for o in group.outputs if graph.values[o].shape == graph.values[v].shape and o != v]  # fmt: skip
    if not broken:
        return
    groups[k] = data.draw(st.sampled_from(broken))
    with pytest.raises(VerifyError):
        check_groups(graph, groups)


def softmax():
    b = Builder()
    x, w = b.input(64, 64), b.input(64, 64)
    scores = b.dot(x, w)
    shifted = b.op("exp", b.op("mul", scores, scores))
    total = b.op("reduce_sum", shifted, shape=(64,))
    share = b.op("div", shifted, b.op("broadcast_in_dim", total, shape=(64, 64)))
    return b, w, scores, share


def test_what_a_kernel_computes_inside_itself_is_computed_again():
    b, w, scores, share = softmax()
    out = b.dot(share, w)
    graph = b.graph(out)
    again = made_again(graph, fuse(graph))
    cut = next(op.id for op in graph.ops if op.primitive == "reduce_sum") + 1
    if not again[next(op.id for op in graph.ops if op.primitive == "exp")]:
        pytest.skip("the model stores this exponential")
    first, second = form(graph, again, (cut,))
    assert scores in second.inputs  # and not its exponential, which no kernel stores
    assert {graph.ops[o].primitive for o in set(first.ops) & set(second.ops)} <= {"exp", "mul"}


def test_a_barriers_result_is_its_operand_in_a_later_group():
    b = Builder()
    x, w = b.input(8, 8), b.input(8, 8)
    y, z = b.dot(x, w), b.dot(w, x)
    held, other = b.op("optimization_barrier", y, z, results=[(8, 8), (8, 8)])
    out = b.dot(held, w)
    graph = b.graph(out, other)
    first, second = groups_of(graph, (3,))
    assert second.same == ((held, y),)
    assert y in second.inputs and y in first.outputs
    check_groups(graph, (first, second))
    with pytest.raises(VerifyError):
        check_groups(graph, (first, replace(second, same=((held, z),), inputs=(z, *second.inputs[1:]))))


def test_an_update_writes_over_what_the_caller_gave_away():
    b = Builder()
    w, x = b.input(64, 64), b.input(32, 64)
    y = b.dot(x, w)
    g = b.op("dot_general", y, y, shape=(64, 64), flops=1.0)
    new = b.op("sub", w, g)
    graph = b.graph(new, donated=(w,))
    first, second = groups_of(graph, (1,))
    assert not first.donated
    assert second.inputs[: second.donated] == (w,)
    assert second.outputs[: second.donated] == (new,)
    kept = replace(graph, donated=frozenset())
    assert all(w not in g.inputs[: g.donated] for g in groups_of(kept, (1,)))
