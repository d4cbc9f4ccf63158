"""The multiple-choice knapsack with several kinds of bytes: devices, and pinned host memory.

The cheapest items are taken if they fit. Otherwise classes that share scarce kinds form groups, decided separately:
with one kind as in ``knapsack``, with several as follows.

1. Prices per byte of each kind, at which about all bytes are taken, give a bound.
2. Each class takes the cheapest fitting item at these prices; classes that lose most otherwise go first.
3. Exchanges of one or two items improve this.
4. A depth-first search, pruned by the bound, proves it or finds better.

All work is counted and bounded. Beyond the bound, the best so far is the answer.

Invariant: as in ``knapsack``: the answer fits, at most ``gap`` above the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Final, NamedTuple

from jaxtensile.runtime.decide.knapsack import NEAR, Choice, Relaxed, Row, completed, relax
from jaxtensile.units import Bytes

FEWEST, STEPS, WORK = 8, 40, 32_000
"""Search for prices: fewest steps, most steps, and items priced in all of them. A guess that bounds the time."""
FEW: Final = 4
"""If at most one in so many scarce kinds is exceeded by the cheapest items, the exceeded kinds are tried alone first. A
guess."""
MANY: Final = 10
"""Times ``exact``: with more classes in the whole question, no group is searched for its optimum. A guess."""
PRICE, SPEED = 0.5, 2.0
"""Start of the search for prices: the price as a share of a byte's mean gain, and a price's step, an exponent per
relative excess. Guesses."""
FASTER, SLOWER = 1.2, 0.6
"""Factors on a price's step while its direction stays, and when it turns, as in Rprop (1.2 and 0.5 there). Guesses near
these."""
DEEPEST: Final = 400
"""Classes of a group that is searched: each is a nested call, and Python goes 1,000 deep."""
NODES: Final = 1_000
"""Nodes of the search, for all groups of a question: 1,500 gave about the same answers in more time."""
PAIRS: Final = 6_000
"""Item pairs compared for exchanges, for all groups: 10,000 gave about the same answers in more time."""

Sizes = tuple[Bytes, ...]
Kinds = tuple[tuple[int, ...], ...]
"""For each column of sizes, the kinds that need those bytes: the devices of a job are mostly alike."""


class Class(NamedTuple):
    """Items of which one is taken, with derived values; made by ``class_of``."""

    kinds: Kinds
    sizes: Sequence[Sizes]
    """Bytes of each item, by column."""
    costs: Sequence[float]
    low: Sizes
    """The fewest bytes of each column, taken in any case."""
    span: Sizes
    """The most bytes less the fewest, by column."""
    cheap: int
    """The first of the cheapest items."""
    rows: Sequence[tuple[float, ...]]
    """Costs and sizes as floats, which multiply twice as fast."""


def class_of(kinds: Kinds, sizes: Sequence[Sizes], costs: Sequence[float]) -> Class:
    """A class from its items."""
    columns = [*zip(*sizes, strict=True)]
    low = tuple(map(min, columns))
    span = tuple(map(int.__sub__, map(max, columns), low))
    rows = tuple(zip(costs, *[map(float, column) for column in columns], strict=True))
    return Class(kinds, tuple(sizes), tuple(costs), low, span, costs.index(min(costs)), rows)


class _Priced(NamedTuple):
    """A group with the prices of its kinds and their bound."""

    group: list[Class]
    left: list[Bytes]
    """Bytes of every kind beyond the fewest."""
    prices: list[float]
    costs: list[list[float]]
    """Costs of the items including their bytes' prices."""
    bound: float


def cheapest_of(
    classes: Sequence[Class],
    room: Sequence[Bytes],
    exact: int = 1 << 30,
    within: float = 0.0,
    below: float = math.inf,
) -> Choice | None:
    """The cheapest choice within ``room`` of every kind. None if the least does not fit, or none was found, never if
    the first items fit.

    ``exact``: most classes sharing one kind that get the optimum. ``within``: a sufficient relative gap for more.
    ``below``: None as soon as every choice is proved to cost at least this.
    """
    every = [c.kinds for c in classes]
    items = [c.sizes[c.cheap] for c in classes]
    most, least, wished = used(every, len(room), [c.span for c in classes], [c.low for c in classes], items)
    left, after = [*map(int.__sub__, room, least)], [*map(int.__sub__, room, wished)]
    if min(left, default=0) < 0:
        return None
    if min(after, default=0) >= 0:
        return _decided(classes, [], left, most, exact, within, below)
    # Kinds that the cheapest items do not exceed may be exceeded by others: where few are exceeded, that is seen then.
    short = [a > b for a, b in zip(most, left, strict=True)]
    exceeded = [n < 0 for n in after]
    if FEW * sum(exceeded) <= sum(short):
        few = _together(classes, exceeded)
        ample = [n if e < 0 else m for n, e, m in zip(left, after, most, strict=True)]
        found = _decided(classes, few, ample, most, exact, within, below)
        if found is None:
            return None
        (taken,) = used(every, len(room), [c.sizes[n] for c, n in zip(classes, found.picks, strict=True)])
        if all(map(int.__le__, taken, room)):
            return found
    return _decided(classes, _together(classes, short), left, most, exact, within, below)


def _together(classes: Sequence[Class], short: Sequence[bool]) -> list[tuple[list[int], set[int]]]:
    """The groups of classes that share scarce kinds, with these kinds."""
    groups = Groups(len(short))
    live: dict[tuple[int, ...], list[int]] = {}
    undecided: list[tuple[int, list[list[int]]]] = []
    for n, c in enumerate(classes):
        own: list[list[int]] = []
        for ks, s in zip(c.kinds, c.span, strict=True):
            if s:
                if (some := live.get(ks)) is None:
                    some = live[ks] = [k for k in ks if short[k]]
                    groups.join(some)
                if some:
                    own.append(some)
        if own:
            undecided.append((n, own))
            if len(own) > 1:
                groups.join([ks[0] for ks in own])
    together: dict[int, tuple[list[int], set[int]]] = {}
    for n, own in undecided:
        numbers, kinds = together.setdefault(groups.of(own[0][0]), ([], set()))
        numbers.append(n)
        for ks in own:
            kinds.update(ks)
    return [*together.values()]


def _decided(
    classes: Sequence[Class],
    groups: Sequence[tuple[list[int], set[int]]],
    left: list[Bytes],
    most: Sequence[Bytes],
    exact: int,
    within: float,
    below: float,
) -> Choice | None:
    """The cheapest item of each class in no group, and the answers of the groups."""
    picks = [c.cheap for c in classes]
    # First the bounds of all groups, which may be enough.
    known = sum([c.costs[n] for c, n in zip(classes, picks, strict=True)])
    found: list[tuple[list[int], Relaxed | _Priced]] = []
    for numbers, kinds in groups:
        if known >= below:
            return None
        free = sum([classes[n].costs[picks[n]] for n in numbers])
        if len(kinds) == 1:
            (k,) = kinds
            bounded = relax([_rows(classes[n], k) for n in numbers], left[k])
            assert bounded is not None, "the least fits"
        else:
            own = [most[k] if k in kinds else 0 for k in range(len(left))]
            bounded = _priced([classes[n] for n in numbers], left, own, below - known + free)
        known += bounded.bound - free
        found.append((numbers, bounded))
    if known >= below:
        return None
    gap, work = 0.0, _Work(sum(len(classes[n].costs) for numbers, _ in found for n in numbers))
    ahead = sum(abs(bounded.bound) for _, bounded in found)
    spare = within * ahead
    for numbers, bounded in found:
        if isinstance(bounded, Relaxed):
            proved = len(numbers) <= exact and len(classes) <= MANY * exact
            # What others have left of the gap that is good enough is for those behind.
            choice = completed(bounded, 0.0 if proved else max(spare / ahead, within))
        else:
            choice = _several(bounded, within, work)
        if choice is None:
            return None
        for n, pick in zip(numbers, choice.picks, strict=True):
            picks[n] = pick
        gap += choice.gap * abs(choice.cost)
        spare -= choice.gap * abs(choice.cost)
        ahead -= abs(bounded.bound)
    cost = sum([c.costs[n] for c, n in zip(classes, picks, strict=True)])
    return Choice(tuple(picks), cost, gap / abs(cost) if gap and cost else 0.0)


def _rows(c: Class, k: int) -> list[Row]:
    """The rows of a class for its only scarce kind."""
    j = next(j for j, ks in enumerate(c.kinds) if k in ks)
    n = c.low[j]
    return [Row(size[j] - n, cost, i) for i, (size, cost) in enumerate(zip(c.sizes, c.costs, strict=True))]


class _Work:
    """Work left for a question."""

    __slots__ = ("nodes", "pairs")

    def __init__(self, items: int) -> None:
        self.nodes, self.pairs = NODES, max(PAIRS - items, 0)  # all else takes longer with more items


def used(kinds: Sequence[Kinds], count: int, *sizes: Sequence[Sizes]) -> list[list[Bytes]]:
    """Bytes of each of ``count`` kinds taken by items, for each of several choices; ``kinds``: of their classes."""
    sets: dict[tuple[int, ...], int] = {}  # there are fewer sets of kinds than classes
    owns = [[sets.setdefault(ks, len(sets)) for ks in own] for own in kinds]
    totals: list[list[Bytes]] = []
    for chosen in sizes:
        taken = [0] * len(sets)
        for own, size in zip(owns, chosen, strict=True):
            for i, n in zip(own, size, strict=True):
                taken[i] += n
        total = [0] * count
        for ks, n in zip(sets, taken, strict=True):
            for k in ks:
                total[k] += n
        totals.append(total)
    return totals


class Groups:
    """Joined kinds, each named by one of them (union-find)."""

    def __init__(self, count: int) -> None:
        self.above = list(range(count))

    def of(self, k: int) -> int:
        while self.above[k] != k:
            self.above[k] = k = self.above[self.above[k]]
        return k

    def join(self, kinds: Sequence[int]) -> None:
        for k in kinds[1:]:
            self.above[self.of(k)] = self.of(kinds[0])


# ---- several kinds ---------------------------------------------------------------------------------


def _priced(group: list[Class], left: list[Bytes], spans: Sequence[Bytes], enough: float) -> _Priced:
    """Prices per byte and their bound: the sum of the cheapest, less the rooms' worth. A price rises by its share of
    excess bytes, faster if it rose before. ``spans``: by kind, bytes beyond the fewest that the classes could take; 0
    outside the group, without a price."""
    sets: dict[tuple[int, ...], int] = {}
    """Sets of kinds with equal bytes: fewer than classes."""
    owns = [tuple([sets.setdefault(ks, len(sets)) for ks in c.kinds]) for c in group]
    mine = [k for k, span in enumerate(spans) if span]

    def worths(prices: list[float]) -> list[float]:
        return [sum([prices[k] for k in ks]) for ks in sets]

    def spread(taken: list[float]) -> list[float]:
        """Bytes by kind, from bytes by set."""
        used = [0.0] * len(left)
        for ks, t in zip(sets, taken, strict=True):
            for k in ks:
                used[k] += t
        return used

    # First what a byte gains in the mean.
    gains, lows = [0.0] * len(sets), [0.0] * len(sets)
    for c, own in zip(group, owns, strict=True):
        gain = (max(c.costs) - c.costs[c.cheap]) / sum(map(len, c.kinds))
        for i, n in zip(own, c.low, strict=True):
            gains[i] += gain
            lows[i] += n
    prices = [PRICE * g / s if s else 0.0 for g, s in zip(spread(gains), spans, strict=True)]
    room = [a + b for a, b in zip(left, spread(lows), strict=True)]
    speed, last = [SPEED] * len(left), [0.0] * len(left)
    found, high = prices, -math.inf
    for _ in range(max(FEWEST, min(STEPS, WORK // sum(len(c.rows) for c in group)))):
        taken, value = [0.0] * len(sets), -sum([prices[k] * room[k] for k in mine])
        for c, own, costs in zip(group, owns, _costs(group, owns, worths(prices)), strict=True):
            low = min(costs)
            value += low
            row = c.rows[costs.index(low)]
            for j, i in enumerate(own, 1):
                taken[i] += row[j]
        if value > high:
            found, high = prices, value
            if high >= enough:
                break
        prices, used = list(prices), spread(taken)
        for k in mine:
            over = (used[k] - room[k]) / spans[k]
            if last[k]:
                speed[k] *= FASTER if last[k] * over > 0 else SLOWER
            last[k] = over
            prices[k] *= math.exp(max(-1.0, min(1.0, speed[k] * over)))
    return _Priced(group, left, found, [*_costs(group, owns, worths(found))], high)


def _costs(group: list[Class], owns: Sequence[tuple[int, ...]], worths: Sequence[float]) -> Iterator[list[float]]:
    """Each item's cost with its bytes, at a price per set of kinds; ``owns``: the sets of each class's columns."""
    for c, sets in zip(group, owns, strict=True):
        rows = c.rows
        if len(sets) == 1:
            p = worths[sets[0]]
            yield [c + p * a for c, a in rows]
        elif len(sets) == 2:
            p, q = worths[sets[0]], worths[sets[1]]
            yield [c + p * a + q * b for c, a, b in rows]
        else:
            own = [worths[i] for i in sets]
            yield [row[0] + sum(map(float.__mul__, own, row[1:])) for row in rows]


def _several(asked: _Priced, within: float, work: _Work) -> Choice | None:
    """The answer for a group."""
    group, left, prices, costs, bound = asked
    best: list[int] | None = None
    for begin in (_fitting, _smallest, _no_larger):
        at = begin(group, left, costs)
        if at is not None and min(after := _after(group, left, at)) >= 0:
            _fill(group, after, prices, at)
            _exchange(group, after, at, work)
            best = at
            break
    cost = math.inf if best is None else _cost(group, best)
    near = NEAR * abs(cost) if best is not None else 0.0
    if best is None or cost - bound > max(within * abs(cost), near):
        found, whole = _search(group, left, costs, bound, cost - near, work)
        if found is not None:
            best, cost = found, _cost(group, found)
        if whole:
            bound = cost
    if best is None:
        return None
    return Choice(tuple(best), cost, max(cost - bound, 0.0) / abs(cost) if cost else 0.0)


def _cost(group: list[Class], at: Sequence[int]) -> float:
    return sum(c.rows[i][0] for c, i in zip(group, at, strict=True))


def _after(group: list[Class], left: list[Bytes], at: Sequence[int]) -> list[Bytes]:
    """The bytes left with these items."""
    after = list(left)
    for c, i in zip(group, at, strict=True):
        _take(after, c.kinds, c.sizes[i], c.low)
    return after


def _take(left: list[Bytes], kinds: Kinds, new: Sizes, old: Sizes) -> None:
    """Replace ``old`` sizes by ``new`` ones."""
    for ks, m, o in zip(kinds, new, old, strict=True):
        if m != o:
            for k in ks:
                left[k] -= m - o


def _most(left: list[Bytes], kinds: Kinds, old: Sizes) -> list[Bytes]:
    """The largest sizes that fit in place of the ``old`` ones."""
    return [min([left[k] for k in ks]) + o for ks, o in zip(kinds, old, strict=True)]


def _fitting(group: list[Class], left: list[Bytes], costs: list[list[float]]) -> list[int] | None:
    """The cheapest fitting item of each class, bytes included; classes that lose most by another item come first. None
    if no item fits for a class."""
    ranked: list[tuple[float, int, list[tuple[float, int]]]] = []
    for k, mine in enumerate(costs):
        order = sorted(zip(mine, range(len(mine)), strict=True))
        ranked.append((order[0][0] - order[1][0] if len(order) > 1 else 0.0, k, order))
    ranked.sort()
    left, at = list(left), [0] * len(group)
    for _, k, order in ranked:
        c = group[k]
        most = _most(left, c.kinds, c.low)
        for _, n in order:
            if all(map(int.__le__, c.sizes[n], most)):
                break
        else:
            return None
        at[k] = n
        _take(left, c.kinds, c.sizes[n], c.low)
    return at


def _smallest(group: list[Class], left: list[Bytes], _: object) -> list[int]:
    """The item of each class with the smallest largest share of the bytes left."""

    def share(c: Class, n: int) -> float:
        rows = zip(c.kinds, c.sizes[n], c.low, strict=True)
        return max((m - o) / max(left[k], 1) for ks, m, o in rows for k in ks)

    return [min(range(len(c.rows)), key=lambda n, c=c: share(c, n)) for c in group]


def _no_larger(group: list[Class], _: list[Bytes], costs: list[list[float]]) -> list[int]:
    """The cheapest item of each class, bytes included, among those no larger than its first."""
    return [
        min((n for n, s in enumerate(c.sizes) if all(map(int.__le__, s, c.sizes[0]))), key=mine.__getitem__)
        for c, mine in zip(group, costs, strict=True)
    ]


def _fill(group: list[Class], left: list[Bytes], prices: Sequence[float], at: list[int]) -> None:
    """Repeat the fitting change with the most gain for its bytes, until none fits."""
    worths = [[sum([prices[k] for k in ks]) for ks in c.kinds] for c in group]

    def step(k: int) -> tuple[float, int, int] | None:
        c, now = group[k], at[k]
        cost = c.rows[now][0]
        most = _most(left, c.kinds, c.sizes[now])
        best: tuple[float, int, int] | None = None
        for n, sizes in enumerate(c.sizes):
            gain = cost - c.rows[n][0]
            if gain > 0 and all(map(int.__le__, sizes, most)):
                taken = sum([w * (m - o) for w, m, o in zip(worths[k], sizes, c.sizes[now], strict=True)])
                rank = -gain / (max(taken, 0.0) + NEAR * gain)
                if best is None or rank < best[0]:
                    best = rank, k, n
        return best

    heap = [s for k in range(len(group)) if (s := step(k)) is not None]
    heapify(heap)
    while heap:
        old = heap[0]
        now = step(old[1])
        if now is None:
            heappop(heap)
        elif now[0] > old[0] or now[2] != old[2]:
            heapreplace(heap, now)  # what it was is not possible any more
        else:
            _, k, n = now
            _change(group, left, at, k, n)


def _change(group: list[Class], left: list[Bytes], at: list[int], k: int, n: int) -> None:
    c = group[k]
    _take(left, c.kinds, c.sizes[n], c.sizes[at[k]])
    at[k] = n


def _exchange(group: list[Class], left: list[Bytes], at: list[int], work: _Work) -> None:
    """Exchange the items of one or two classes while that is cheaper and work is left."""
    sharing: list[list[int]] = [[] for _ in left]
    for k, c in enumerate(group):
        for ks in c.kinds:
            for j in ks:
                sharing[j].append(k)

    def partner(k: int, n: int) -> tuple[int, int] | None:
        """The change that makes room for this item at the least loss: of another class, or the item itself if it
        fits."""
        c = group[k]
        after = list(left)
        _take(after, c.kinds, c.sizes[n], c.sizes[at[k]])
        over = {j for ks in c.kinds for j in ks if after[j] < 0}
        if not over:
            return k, n
        gain = c.rows[at[k]][0] - c.rows[n][0] - NEAR
        found: tuple[int, int] | None = None
        for other in min((sharing[j] for j in over), key=len):
            d = group[other]
            if other == k or not over.issubset([j for ks in d.kinds for j in ks]):
                continue
            work.pairs -= len(d.rows)
            now = at[other]
            dear = d.rows[now][0]
            most = _most(after, d.kinds, d.sizes[now])
            for p, sizes in enumerate(d.sizes):
                if d.rows[p][0] - dear < gain and all(map(int.__le__, sizes, most)):
                    gain, found = d.rows[p][0] - dear, (other, p)
        return found

    better = True
    while better:
        better = False
        for k, c in enumerate(group):
            for n, (cost, *_) in enumerate(c.rows):
                if work.pairs <= 0:
                    return
                if cost < c.rows[at[k]][0] and (found := partner(k, n)) is not None:
                    for changed, item in {found, (k, n)}:
                        _change(group, left, at, changed, item)
                    better = True


def _search(
    group: list[Class], left: list[Bytes], costs: list[list[float]], bound: float, best: float, work: _Work
) -> tuple[list[int] | None, bool]:
    """Depth-first search, cheapest item first with its bytes. An answer below ``best``, or None, and whether all were
    seen. Classes in which another item loses most come first."""
    if len(group) > DEEPEST:
        return None, False
    excess: list[list[tuple[float, int]]] = []
    for mine in costs:
        low = min(mine)
        excess.append(sorted((cost - low, n) for n, cost in enumerate(mine)))
    order = sorted(range(len(group)), key=lambda k: -excess[k][1][0] if len(excess[k]) > 1 else -math.inf)
    left, at = list(left), [0] * len(group)
    slack, cost = best - bound, 0.0
    found: list[int] | None = None

    def down(depth: int, lost: float) -> bool:
        """Whether everything below was seen."""
        nonlocal slack, found, cost, best
        if depth == len(order):
            if cost < best:
                best, found = cost - NEAR * abs(cost), list(at)
                slack = best - bound
            return True
        k = order[depth]
        c = group[k]
        whole, most = True, _most(left, c.kinds, c.low)
        for dear, n in excess[k]:
            if lost + dear >= slack:
                break
            if work.nodes <= 0:
                return False
            if not all(map(int.__le__, c.sizes[n], most)):
                continue
            work.nodes -= 1
            _take(left, c.kinds, c.sizes[n], c.low)
            at[k] = n
            cost += c.rows[n][0]
            whole = down(depth + 1, lost + dear) and whole
            cost -= c.rows[n][0]
            _take(left, c.kinds, c.low, c.sizes[n])
        return whole

    whole = down(0, 0.0)
    return found, whole


__all__ = ["Class", "Groups", "Kinds", "Sizes", "cheapest_of", "class_of", "used"]
