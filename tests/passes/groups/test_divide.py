"""The cut points of a step: the dynamic programme against trying every division."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtensile.passes.groups.divide import SLACK, cut, divide, shortest
from jaxtensile.passes.groups.segments import Segments

small = st.integers(0, 9)


@st.composite
def tables(draw):
    """Any costs of segments over a few points; the work is a sum over ops, as it always is."""
    n = draw(st.integers(1, 6))
    points = tuple(itertools.accumulate(draw(st.lists(st.integers(1, 3), min_size=n, max_size=n)), initial=0))
    work = np.concatenate([[0], np.cumsum(draw(st.lists(small, min_size=n, max_size=n)))]).astype(float)
    seconds, added, nbytes = (np.full((n + 1, n + 1), np.inf) for _ in range(3))
    for i, j in itertools.combinations(range(n + 1), 2):
        seconds[i, j], added[i, j], nbytes[i, j] = work[j] - work[i], draw(small), draw(small)
    return Segments(points, seconds, added, nbytes)


def every(table, count, longest=np.inf, most=np.inf):
    """Every allowed division into at most ``count`` groups: its added seconds, its longest group, and its cuts."""
    inner = range(1, len(table.points) - 1)
    for k in range(count):
        for chosen in itertools.combinations(inner, k):
            pairs = list(itertools.pairwise((0, *chosen, len(table.points) - 1)))
            long = max(table.seconds[p] for p in pairs)
            if long <= longest and max(table.nbytes[p] for p in pairs) <= most:
                yield sum(table.added[p] for p in pairs), long, tuple(table.points[c] for c in chosen)


@settings(max_examples=300, deadline=None)
@given(tables(), st.integers(1, 5), small, small)
def test_it_finds_what_trying_everything_finds(table, count, longest, most):
    known = list(every(table, count, longest, most))
    found = divide(table, count, longest, most)
    if found is None:
        assert not known
        return
    least = min(added for added, _, _ in known)
    assert next(added for added, _, cuts in known if cuts == found) == least
    assert len(found) == min(len(cuts) for added, _, cuts in known if added == least)  # no cut for nothing


@settings(max_examples=300, deadline=None)
@given(tables(), st.integers(1, 5), small)
def test_the_longest_group_is_hardly_longer_than_it_must_be(table, count, most):
    known = list(every(table, count, most=most))
    longest, found = shortest(table, count, most), cut(table, count, most)
    if not known:
        assert longest == np.inf and found is None
        return
    assert longest == min(long for _, long, _ in known)
    allowed = list(every(table, count, longest * (1 + SLACK), most))
    assert found is not None
    assert next(added for added, _, cuts in allowed if cuts == found) == min(added for added, _, _ in allowed)
