"""Exchanges: a dearer op kept in place of cheaper ones, never at the price of the budget."""

from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import Builder, solid_chain, train_steps
from jaxtensile.ir.plan import Program
from jaxtensile.passes.lifetimes.fusion import fuse
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.recompute.clones import Recomputation, with_clones
from jaxtensile.passes.recompute.local_search import local_search
from jaxtensile.passes.recompute.stages import boundary_at
from jaxtensile.passes.solvers.trials import Trial
from oracles import completed


class Bench:
    """One boundary of a graph: lays out kept sets and remembers them."""

    def __init__(self, graph, step, charge):
        self.graph, self.charge, self.start = graph, charge, Program.unchanged(graph)
        self.boundary, self.kernels = boundary_at(graph, step), fuse(graph)
        self.recomputation = Recomputation(graph, self.boundary)
        self.trials = []

    def measure(self, kept):
        program = with_clones(self.start, self.kernels, self.boundary, kept, [])
        again = self.recomputation.ops(kept)
        trial = Trial(kept, (program, live_ranges(program.graph)), sum(self.charge[o] for o in again))
        self.trials.append(trial)
        return trial

    def local_search(self, budget, kept):
        best = self.measure(kept)
        return best, local_search(
            budget, self.start, self.boundary, self.recomputation, self.charge, self.measure, best
        )


def test_one_dear_value_takes_the_place_of_two_cheap_ones():
    """Four values of 100; the first is dear. Three may wait: kept are the cheap ones, until they are exchanged."""
    graph = solid_chain([200, 100, 100, 100], [9.0, 1.0, 1.0, 1.0], top=200)
    step = 4 + 100
    bench = Bench(graph, step, [9.0, 1.0, 1.0, 1.0] + [0.0] * (len(graph.ops) - 4))
    assert set(bench.boundary.needed) == {1, 2, 3, 4}
    worst = bench.measure(frozenset({2, 3, 4}))
    before, after = bench.local_search(worst.device + 100 * 4, frozenset({2, 3, 4}))
    assert before.charge == 9.0
    assert after.device <= worst.device + 100 * 4
    assert 1 in after.kept and after.charge <= 2.0


def test_what_costs_less_than_it_is_worth_is_left():
    graph = solid_chain([100] * 4, [1.0] * 4, top=200)
    bench = Bench(graph, 104, [1e-6] * 4 + [1.0] * (len(graph.ops) - 4))
    before, after = bench.local_search(1 << 40, frozenset())
    assert after is before and len(bench.trials) == 1


def test_everything_worth_it_is_kept_when_there_is_room():
    graph = solid_chain([100] * 4, [1.0] * 4, top=200)
    bench = Bench(graph, 104, [1.0] * 4 + [0.0] * (len(graph.ops) - 4))
    _, after = bench.local_search(1 << 40, frozenset())
    assert after.charge == 0.0


@given(train_steps(), st.floats(0.2, 0.8), st.integers(1, 4), st.floats(0.5, 1.0))
@settings(max_examples=60)
def test_it_fits_and_is_never_dearer(graph, share, every, tight):
    charge = [1.0 + op.flops for op in graph.ops]
    bench = Bench(graph, max(int(share * len(graph.ops)), 1), charge)
    kept = completed(graph, bench.boundary, frozenset(bench.boundary.needed[::every]))
    budget = int(bench.measure(kept).device / tight)
    before, after = bench.local_search(budget, kept)
    assert after.device <= budget and after.charge <= before.charge
    assert after in bench.trials


def test_pinned_values_are_never_dropped():
    b = Builder()
    x = b.input(64)
    vs = [b.op("cumsum", x), b.op("debug_callback", x, results=[(64,)], pinned=True)[0], b.op("cumsum", x)]
    g = x
    for _ in range(300):
        g = b.op("cumsum", g, shape=(1,))
    for v in vs:
        g = b.op("cumsum", g, v, shape=(1,))
    graph = b.graph(g)
    charge = [5.0, 1.0, 1.0] + [0.0] * (len(graph.ops) - 3)
    bench = Bench(graph, 150, charge)
    kept = completed(graph, bench.boundary, frozenset(vs[1:]))
    budget = bench.measure(kept).device
    _, after = bench.local_search(budget, kept)
    assert vs[1] in after.kept | bench.boundary.always


def test_nothing_is_dropped_that_a_pinned_op_would_make_again():
    b = Builder()
    x = b.input(64)
    dear = b.op("cumsum", x)
    summed = b.op("psum", x, results=[(64,)], pinned=True)[0]
    cheap = b.op("cumsum", summed)
    g = x
    for _ in range(300):
        g = b.op("cumsum", g, shape=(1,))
    for v in (dear, cheap):
        g = b.op("cumsum", g, v, shape=(1,))
    graph = b.graph(g)
    bench = Bench(graph, 150, [5.0, 1.0, 1.0] + [0.0] * (len(graph.ops) - 3))
    kept = frozenset({cheap})
    budget = bench.measure(kept).device
    before, after = bench.local_search(budget, kept)
    assert len(bench.trials) > 2 and after is before  # to keep the dear one has no room
    assert all(1 not in bench.recomputation.ops(trial.kept) for trial in bench.trials)
