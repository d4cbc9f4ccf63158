"""What holds for every plan, and small programs that all solvers are held against."""

from hypothesis import strategies as st

from graphs import solid_chain
from jaxtensile.ir.plan import Keep, Remat
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.verify.check import check
from oracles import same_outputs


def check_plan(graph, budget, plan):
    """Everything that holds for every plan."""
    check(graph, plan.program)
    assert same_outputs(graph, plan.program)
    before, after = live_ranges(graph), live_ranges(plan.program.graph)
    assert plan.predicted.device == after.device
    assert not plan.predicted.exact
    assert after.device <= before.device
    assert plan.predicted.argument == before.argument
    assert plan.predicted.output == before.output
    clones = plan.program.clones()
    assert plan.recompute_flops == sum(op.flops for op in clones)
    assert plan.changes_nothing == (plan.program.graph.ops == graph.ops)
    if before.device <= budget:
        assert plan.changes_nothing
        assert plan.actions == ()
        assert plan.overhead == 0.0
    for action in plan.actions:
        assert action.nbytes == graph.values[action.value].nbytes
        if isinstance(action, Remat):
            assert action.value in graph.ops[action.recipe].results
        else:
            assert isinstance(action, Keep)
            assert action.value not in graph.inputs


FEW = 8


@st.composite
def chains(draw):
    n = draw(st.integers(3, FEW))
    sizes = draw(st.lists(st.integers(1, 40), min_size=n, max_size=n))
    work = draw(st.lists(st.integers(1, 40), min_size=n, max_size=n))
    skips = draw(st.lists(st.tuples(st.integers(1, n), st.integers(1, n)), max_size=2))
    return solid_chain(sizes, work, skips=skips), work
