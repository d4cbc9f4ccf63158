"""The knapsack of several kinds of bytes: what trying all finds where that can be tried, near it in bounded work."""

from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtensile.runtime.decide import knapsack_kinds
from jaxtensile.runtime.decide.knapsack_kinds import NODES, cheapest_of, class_of

CLOSE = 1e-9
KINDS = 4
COSTS = st.one_of(st.integers(0, 4).map(float), st.floats(0, 10, allow_subnormal=False))


@st.composite
def questions(draw, most=5, kinds=KINDS):
    """Classes of some of the kinds, and rooms."""
    classes = []
    for _ in range(draw(st.integers(1, most))):
        order = draw(st.permutations(range(kinds)))[: draw(st.integers(1, kinds))]
        cuts = sorted(draw(st.sets(st.integers(1, len(order) - 1)))) if len(order) > 1 else []
        own = tuple(tuple(order[a:b]) for a, b in pairwise((0, *cuts, len(order))))
        item = st.tuples(st.tuples(*[st.integers(0, 12)] * len(own)), COSTS)
        classes.append(class_of(own, *zip(*draw(st.lists(item, min_size=1, max_size=4)), strict=True)))
    return classes, draw(st.tuples(*[st.integers(0, 40)] * kinds))


def used(classes, picks, kinds):
    total = [0] * kinds
    for c, pick in zip(classes, picks, strict=True):
        for kinds_, size in zip(c.kinds, c.sizes[pick], strict=True):
            for k in kinds_:
                total[k] += size
    return total


def tried(classes, room):
    fitting = (
        sum(c.costs[i] for c, i in zip(classes, picks, strict=True))
        for picks in product(*(range(len(c.costs)) for c in classes))
        if all(a <= b for a, b in zip(used(classes, picks, len(room)), room, strict=True))
    )
    return min(fitting, default=None)


def holds(classes, room, found):
    assert all(a <= b for a, b in zip(used(classes, found.picks, len(room)), room, strict=True))
    cost = sum(c.costs[i] for c, i in zip(classes, found.picks, strict=True))
    assert found.cost == pytest.approx(cost, abs=CLOSE)


@settings(max_examples=400)
@given(questions())
def test_it_is_what_trying_all_finds(question):
    classes, room = question
    found, best = cheapest_of(classes, room), tried(classes, room)
    assert (found is None) == (best is None)
    if found is not None:
        holds(classes, room, found)
        assert found.cost == pytest.approx(best, abs=CLOSE) and found.gap <= CLOSE


@settings(max_examples=200)
@given(questions(), st.integers(0, 8))
def test_with_little_work_it_is_as_near_as_it_says(question, nodes):
    """And there is an answer wherever the first items fit."""
    classes, room = question
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knapsack_kinds, "NODES", nodes)
        found = cheapest_of(classes, room)
    best = tried(classes, room)
    first = used(classes, [0] * len(classes), len(room))
    assert found is not None or best is None or any(a > b for a, b in zip(first, room, strict=True))
    if found is not None:
        holds(classes, room, found)
        assert best - CLOSE <= found.cost and found.cost * (1 - found.gap) <= best + CLOSE


def jobs(random, count, kinds, rungs=4, shared=True):
    """Ladders on one device each, of which those in the middle take of the last kind too; rooms for the first items and
    a part of what there is beyond."""
    classes, low, high = [], [0] * kinds, [0] * kinds
    for k in range(count):
        top, host = random.randrange(10**9, 40 * 10**9), random.randrange(10**8, 10**10)
        own = (k % (kinds - 1), kinds - 1)
        shares = [n / (rungs - 1) for n in range(rungs)]
        items = [(int(top * (0.3 + 0.7 * f)), int(host * 4 * f * (1 - f) * shared)) for f in shares]
        classes.append(class_of(tuple((k,) for k in own), items, [1 + (1 - f) ** 2 * random.random() for f in shares]))
        for kind, sizes in zip(own, zip(*items, strict=True), strict=True):
            low[kind] += min(sizes)
            high[kind] += max(sizes)
    return classes, [int(a + (b - a) * random.uniform(0.3, 0.7)) for a, b in zip(low, high, strict=True)]


def test_devices_that_share_nothing_are_decided_one_by_one(monkeypatch):
    """As well as each alone, and without a search over all of them."""
    monkeypatch.setattr(knapsack_kinds, "_several", lambda *_: pytest.fail("they share no kind that is short"))
    classes, room = jobs(Random(1), 24, 9, shared=False)
    found = cheapest_of(classes, room)
    assert found is not None and found.gap == 0
    for device in range(8):
        mine = [n for n, c in enumerate(classes) if c.kinds[0] == (device,)]
        alone = cheapest_of([classes[n] for n in mine], room)
        assert alone is not None and alone.picks == tuple(found.picks[n] for n in mine)


@pytest.mark.parametrize(("count", "kinds"), [(24, 2), (24, 9), (200, 9), (1000, 65)])
def test_work_is_bounded(count, kinds, monkeypatch):
    """By what was counted: nodes of the search, prices of the ascent; and what comes is near the bound."""
    spent, priced = [], [0]
    search, prices = knapsack_kinds._search, knapsack_kinds._costs

    def counted(*args):
        work = args[-1]
        before = work.nodes
        found = search(*args)
        spent.append(before - work.nodes)
        return found

    def counting(*args):
        for costs in prices(*args):
            priced[0] += len(costs)
            yield costs

    monkeypatch.setattr(knapsack_kinds, "_search", counted)
    monkeypatch.setattr(knapsack_kinds, "_costs", counting)
    classes, room = jobs(Random(count), count, kinds, rungs=8)
    found = cheapest_of(classes, room, 24, 5e-4)
    assert found is not None
    holds(classes, room, found)
    assert sum(spent) <= NODES
    assert priced[0] <= max(knapsack_kinds.WORK, knapsack_kinds.FEWEST * 8 * count) + 8 * count
    assert found.gap <= {24: 0.01, 200: 0.05, 1000: 0.1}[count]  # by a bound of fewer and fewer steps
