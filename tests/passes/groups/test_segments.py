"""What segments take: each figure against its plain definition."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import network, train_steps
from jaxtensile.devices.profiles import profile
from jaxtensile.passes.groups.form import form, made_again
from jaxtensile.passes.groups.segments import POINTS, segments
from jaxtensile.passes.lifetimes.fusion import fuse
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.seconds.cost import op_costs

H200 = profile("nvidia-h200")
LAUNCH = 1.0


def table_of(graph, points=None):
    kernels = fuse(graph)
    again = made_again(graph, kernels)
    seconds = op_costs(graph, H200).seconds
    return segments(graph, kernels, seconds, again, launch=LAUNCH, bandwidth=1e12, points=points), again, seconds


@settings(max_examples=30, deadline=None)
@given(train_steps(), st.data())
def test_every_figure_is_what_it_says(graph, data):
    n = len(graph.ops)
    table, again, seconds = table_of(graph, points=range(n + 1))
    inner = st.lists(st.integers(1, n - 1), max_size=4, unique=True) if n > 1 else st.just([])
    ends = (0, *sorted(data.draw(inner)), n)
    pairs = list(itertools.pairwise(ends))
    assert sum(table.seconds[p] for p in pairs) == pytest.approx(sum(seconds))
    # Added is a launch for each group, and what the groups themselves run again.
    groups = form(graph, again, ends[1:-1])
    repeated = sum(seconds[o] for g, (i, _) in zip(groups, pairs, strict=True) for o in g.ops if o < i)
    assert sum(table.added[p] for p in pairs) == pytest.approx(LAUNCH * len(pairs) + repeated)
    # A group holds what crosses its ends all the time: never less than the program at that moment, and all of it whole.
    live = live_ranges(graph)
    base = live.argument + live.output - live.alias
    later = sum(graph.values[v].nbytes for v in graph.donated)  # read behind what is to take over their memory
    assert base + live.temp <= table.nbytes[0, n] <= base + live.temp + later
    waiting = sum(r.nbytes for r in live.ranges if r.start < ends[len(ends) // 2] < r.stop)
    for p in pairs:
        assert table.nbytes[p] >= sum(graph.values[v].nbytes for v in graph.inputs if v not in graph.donated)
        if ends[len(ends) // 2] in p and 0 < ends[len(ends) // 2] < n:
            assert table.nbytes[p] >= waiting


def test_there_are_few_points_where_few_bytes_wait():
    graph, _, _ = network(layers=120, gated=False)
    assert len(graph.ops) > POINTS
    table, _, seconds = table_of(graph)
    assert table.points[0] == 0 and table.points[-1] == len(graph.ops)
    assert list(table.points) == sorted(set(table.points)) and len(table.points) <= POINTS
    ends = np.cumsum(seconds)
    gaps = [ends[b - 1] - (ends[a - 1] if a else 0) for a, b in itertools.pairwise(table.points)]
    assert max(gaps) <= 2 * ends[-1] / (POINTS - 1) + max(seconds)
