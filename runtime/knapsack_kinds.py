"""The multiple-choice knapsack with several kinds of bytes: devices, and pinned host memory.

Invariant: as in ``knapsack``: the answer fits, and its cost is at most ``gap`` above the optimum.

A kind that even the most bytes fit decides nothing. What is left falls apart into groups of classes that share a kind,
each decided by itself: with one kind as in ``knapsack``; with several, prices per byte come from a subgradient ascent,
an answer is built up at those prices, exchanges of one or two items make it better, and a depth-first search that
prices bound proves it, or finds a better one. Its work is bounded: beyond, the best so far counts, and ``gap`` says how
far it may be from the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from typing import Final, NamedTuple

from jaxtensile.runtime.knapsack import NEAR, Choice, Row, cheapest
from jaxtensile.units import Bytes

STEPS, WORK = 40, 8_000
"""Of the ascent, in which every item is priced: so many at most, and so many prices."""
NODES: Final = 6_000
"""Of the search, for all groups of a question together: some 10 ms."""
PAIRS: Final = 20_000
"""Of items that are compared to be exchanged, at most."""
SMALL: Final = 1_000
"""Items of a group, up to which an answer is built up in two ways, and exchanges are tried."""

Sizes = tuple[Bytes, ...]
_Edges = tuple[tuple[Bytes, Bytes], ...]
"""Of a class, the fewest and the most bytes of each of its kinds."""
_Group = list[tuple[int, tuple[int, ...]]]
"""Classes, and the places among their kinds of those that are short."""


class Item(NamedTuple):
    """Bytes of each kind of its class, and what taking it costs."""

    sizes: Sizes
    cost: float


class Class(NamedTuple):
    """Items of which one is taken, and the kinds that their bytes are of."""

    kinds: tuple[int, ...]
    items: Sequence[Item]


class _Item(NamedTuple):
    """What an item takes beyond the least of its class, of each kind that is short, and its index there."""

    more: Sizes
    cost: float
    pick: int


class _Class(NamedTuple):
    kinds: tuple[int, ...]
    items: list[_Item]


def cheapest_of(
    classes: Sequence[Class], room: Sequence[Bytes], exact: int = 1 << 30, within: float = 0.0
) -> Choice | None:
    """The cheapest choice within ``room`` of every kind; None if the least does not fit, or none was found, which does
    not happen where the first items fit.

    ``exact``: classes that share one kind, up to which the optimum is looked for; ``within``: a relative gap that is
    good enough for more.
    """
    left, most = list(room), [0] * len(room)
    least: list[_Edges] = []
    for kinds, items in classes:
        if len(kinds) == 1:  # the usual case
            column = [item.sizes[0] for item in items]
            edges = ((min(column), max(column)),)
        else:
            edges = tuple((min(column), max(column)) for column in zip(*(item.sizes for item in items), strict=True))
        for k, (low, high) in zip(kinds, edges, strict=True):
            left[k] -= low
            most[k] += high - low
        least.append(edges)
    if min(left, default=0) < 0:
        return None
    short = [a > b for a, b in zip(most, left, strict=True)]
    picks, cost, gap, nodes = [0] * len(classes), 0.0, 0.0, NODES
    groups = _Groups(len(room))
    undecided: _Group = []
    for n, ((kinds, items), edges) in enumerate(zip(classes, least, strict=True)):
        spans = zip(kinds, edges, strict=True)
        places = tuple(j for j, (k, (low, high)) in enumerate(spans) if short[k] and low < high)
        if places:
            undecided.append((n, places))
            groups.join([kinds[j] for j in places])
        else:
            picks[n] = min(range(len(items)), key=lambda i: (items[i].cost, items[i].sizes))
            cost += items[picks[n]].cost
    together: dict[int, _Group] = {}
    for n, places in undecided:
        together.setdefault(groups.of(classes[n].kinds[places[0]]), []).append((n, places))
    for group in together.values():
        if len({classes[n].kinds[j] for n, places in group for j in places}) == 1:
            proved = len(group) <= exact and len(classes) <= 10 * exact
            found = _single(classes, group, least, left, 0.0 if proved else within)
        else:
            found, nodes = _several(_cut(classes, group, least), left, within, nodes)
        if found is None:
            return None
        for (n, _), pick in zip(group, found.picks, strict=True):
            picks[n] = pick
        cost += found.cost
        gap += found.gap * abs(found.cost)
    return Choice(tuple(picks), cost, gap / abs(cost) if gap and cost else 0.0)


def _single(
    classes: Sequence[Class], group: _Group, least: Sequence[_Edges], left: Sequence[Bytes], within: float
) -> Choice | None:
    """The answer for classes that share one kind, and no other that is short."""
    rows: list[list[Row]] = []
    for n, (j,) in group:
        low = least[n][j][0]
        rows.append([Row(sizes[j] - low, price, i) for i, (sizes, price) in enumerate(classes[n].items)])
    n, (j,) = group[0]
    return cheapest(rows, left[classes[n].kinds[j]], within)


def _cut(classes: Sequence[Class], group: _Group, least: Sequence[_Edges]) -> list[_Class]:
    """Classes with the kinds that are short alone."""
    cut: list[_Class] = []
    for n, places in group:
        kinds, items = classes[n]
        lows = [least[n][j][0] for j in places]
        more = [tuple([sizes[j] - low for j, low in zip(places, lows, strict=True)]) for sizes, _ in items]
        made = [_Item(m, item.cost, i) for i, (m, item) in enumerate(zip(more, items, strict=True))]
        cut.append(_Class(tuple(kinds[j] for j in places), made))
    return cut


class _Groups:
    """Kinds that are joined, by one of them (union-find)."""

    def __init__(self, count: int) -> None:
        self.above = list(range(count))

    def of(self, k: int) -> int:
        while self.above[k] != k:
            self.above[k] = k = self.above[self.above[k]]
        return k

    def join(self, kinds: Sequence[int]) -> None:
        first = self.of(kinds[0])
        for k in kinds[1:]:
            self.above[self.of(k)] = first


# ---- several kinds ---------------------------------------------------------------------------------


def _several(group: list[_Class], room: list[Bytes], within: float, nodes: int) -> tuple[Choice | None, int]:
    """The answer, and what it leaves of the ``nodes``."""
    renamed = {k: n for n, k in enumerate(sorted({k for c in group for k in c.kinds}))}
    firsts = [c.items[0].more for c in group]
    group = [_Class(tuple(renamed[k] for k in c.kinds), _undominated(c.items)) for c in group]
    left = [room[k] for k in renamed]
    prices, bound = _ascend(group, left)
    small = sum(len(c.items) for c in group) <= SMALL
    shares = [1 / max(r, 1) for r in left]
    worths = (prices, shares) if small else (shares,)
    best: list[int] | None = None
    for begin in (_smallest(group, left), _no_larger(group, firsts)):
        starts = [found for worth in worths if (found := _built(group, left, worth, begin)) is not None]
        best = min(starts, key=lambda at: _cost(group, at), default=None)
        if best is not None:
            break
    if best is not None and small:
        _exchange(group, left, best)
    cost = float("inf") if best is None else _cost(group, best)
    near = NEAR * abs(cost) if best is not None else 0.0
    if best is None or cost - bound > max(within * abs(cost), near):
        found, nodes, whole = _search(group, left, prices, bound, cost - near, nodes)
        if found is not None:
            best, cost = found, _cost(group, found)
        if whole:
            bound = cost
    if best is None:
        return None, nodes
    picks = tuple(c.items[i].pick for c, i in zip(group, best, strict=True))
    return Choice(picks, cost, max(cost - bound, 0.0) / abs(cost) if cost else 0.0), nodes


def _undominated(items: list[_Item]) -> list[_Item]:
    """Without those that another is no larger than in any kind, and cheaper than, or as cheap."""
    kept: list[_Item] = []
    for item in sorted(items, key=lambda i: (i.cost, i.more, i.pick)):
        if not any(all(a <= b for a, b in zip(old.more, item.more, strict=True)) for old in kept):
            kept.append(item)
    return kept


def _cost(group: list[_Class], at: Sequence[int]) -> float:
    return sum(c.items[i].cost for c, i in zip(group, at, strict=True))


def _left(group: list[_Class], room: list[Bytes], at: Sequence[int]) -> list[Bytes]:
    left = list(room)
    for c, i in zip(group, at, strict=True):
        for k, m in zip(c.kinds, c.items[i].more, strict=True):
            left[k] -= m
    return left


def _priced(c: _Class, prices: Sequence[float]) -> list[float]:
    if len(c.kinds) == 1:
        (p,) = (prices[k] for k in c.kinds)
        return [item.cost + p * item.more[0] for item in c.items]
    if len(c.kinds) == 2:
        p, q = (prices[k] for k in c.kinds)
        return [item.cost + p * item.more[0] + q * item.more[1] for item in c.items]
    own = [prices[k] for k in c.kinds]
    return [item.cost + sum(p * m for p, m in zip(own, item.more, strict=True)) for item in c.items]


def _ascend(group: list[_Class], room: list[Bytes]) -> tuple[list[float], float]:
    """Prices per byte, and the bound that they prove: the sum of what is cheapest at them, less the room's worth."""
    steps = max(3, min(STEPS, WORK // sum(len(c.items) for c in group)))
    cheap = sum(min(i.cost for i in c.items) for c in group)
    dear = sum(max(i.cost for i in c.items) for c in group)
    # First what a byte gains in the mean, for bytes that are short by some.
    gains, spans = [0.0] * len(room), [1] * len(room)
    for c in group:
        gain = (max(i.cost for i in c.items) - min(i.cost for i in c.items)) / len(c.kinds)
        for j, k in enumerate(c.kinds):
            gains[k] += gain
            spans[k] += max(i.more[j] for i in c.items)
    prices = [0.5 * g / s for g, s in zip(gains, spans, strict=True)]
    high, found = float("-inf"), prices
    target, ease = (cheap + dear) / 2, 1.0
    for _ in range(steps):
        used, value = [0] * len(room), 0.0
        for c in group:
            costs = _priced(c, prices)
            low = min(costs)
            value += low
            for k, m in zip(c.kinds, c.items[costs.index(low)].more, strict=True):
                used[k] += m
        value -= sum(p * r for p, r in zip(prices, room, strict=True))
        if value > high:
            high, found = value, prices
        else:
            ease *= 0.7
        over = [(u - r) / max(r, 1) for u, r in zip(used, room, strict=True)]
        norm = sum(o * o for o, p in zip(over, prices, strict=True) if o > 0 or p)
        if not norm:
            break
        move = ease * max(target - value, NEAR) / norm
        prices = [max(0.0, p + move * o / max(r, 1)) for p, o, r in zip(prices, over, room, strict=True)]
        target = max(target, value + (dear - cheap) * 0.02)
    return found, high


def _smallest(group: list[_Class], room: list[Bytes]) -> list[int]:
    """Of each class the item whose largest share of a room is the smallest."""

    def share(c: _Class, n: int) -> float:
        return max(m / max(room[k], 1) for k, m in zip(c.kinds, c.items[n].more, strict=True))

    return [min(range(len(c.items)), key=lambda n, c=c: share(c, n)) for c in group]


def _no_larger(group: list[_Class], firsts: Sequence[Sizes]) -> list[int]:
    """Of each class the cheapest item that is no larger than its first one."""
    return [
        next(n for n, item in enumerate(c.items) if all(a <= b for a, b in zip(item.more, first, strict=True)))
        for c, first in zip(group, firsts, strict=True)
    ]


def _built(group: list[_Class], room: list[Bytes], prices: Sequence[float], begin: list[int]) -> list[int] | None:
    """From ``begin`` up: of the changes that fit, the one that gains the most for what it takes. None where not even
    that fits."""
    worth = [[sum(prices[k] * m for k, m in zip(c.kinds, i.more, strict=True)) for i in c.items] for c in group]
    left, at = _left(group, room, begin), list(begin)
    if min(left) < 0:
        return None

    def step(k: int) -> tuple[float, int, int] | None:
        c, now = group[k], at[k]
        best: tuple[float, int, int] | None = None
        for n, item in enumerate(c.items):
            gain = c.items[now].cost - item.cost
            if gain <= 0:
                continue
            if all(m - o <= left[j] for j, m, o in zip(c.kinds, item.more, c.items[now].more, strict=True)):
                taken = max(worth[k][n] - worth[k][now], 0.0)
                rank = -gain / (taken + 1e-12 * gain)
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
            for j, m, o in zip(group[k].kinds, group[k].items[n].more, group[k].items[at[k]].more, strict=True):
                left[j] -= m - o
            at[k] = n
    return at


def _exchange(group: list[_Class], room: list[Bytes], at: list[int]) -> None:
    """Other items for one or two classes at a time, while that is cheaper and there is work left."""
    left, work = _left(group, room, at), PAIRS

    def moves(k: int) -> list[tuple[float, int, int, dict[int, Bytes]]]:
        c, now = group[k], group[k].items[at[k]]
        return [
            (i.cost - now.cost, k, n, {j: m - o for j, m, o in zip(c.kinds, i.more, now.more, strict=True) if m != o})
            for n, i in enumerate(c.items)
            if n != at[k]
        ]

    every = [moves(k) for k in range(len(group))]
    better = True
    while better and work > 0:
        better = False
        gaining = sorted((m for ms in every for m in ms if m[0] < 0), key=lambda m: m[0])
        for gain, k, n, more in gaining:
            short = {j for j, m in more.items() if m > left[j]}
            found: list[tuple[int, int, dict[int, Bytes]]] = []
            if not short:
                found = [(k, n, more)]
            else:
                low = 0.0
                for other, ms in enumerate(every):
                    if other == k or short.isdisjoint(group[other].kinds):
                        continue
                    work -= len(ms)
                    for dear, _, p, takes in ms:
                        if gain + dear < low - NEAR and all(
                            more.get(j, 0) + takes.get(j, 0) <= left[j] for j in {*more, *takes}
                        ):
                            low, found = gain + dear, [(k, n, more), (other, p, takes)]
                    if work <= 0:
                        break
            if found:
                for changed, item, takes in found:
                    at[changed] = item
                    for j, m in takes.items():
                        left[j] -= m
                for changed, *_ in found:
                    every[changed] = moves(changed)
                better = True
                break
            if work <= 0:
                break


def _search(
    group: list[_Class], room: list[Bytes], prices: Sequence[float], bound: float, best: float, nodes: int
) -> tuple[list[int] | None, int, bool]:
    """Depth first, the cheapest at the prices first: an answer below ``best`` if there is one, the nodes left, and
    whether all answers were seen. First come the classes in which another item is the most loss."""
    excess: list[list[tuple[float, int]]] = []
    for c in group:
        costs = _priced(c, prices)
        low = min(costs)
        excess.append(sorted((cost - low, n) for n, cost in enumerate(costs)))
    order = sorted(range(len(group)), key=lambda k: -excess[k][1][0] if len(excess[k]) > 1 else float("-inf"))
    # What the classes behind need at least of each kind.
    behind = [[0] * len(room)]
    for k in reversed(order):
        needs = list(behind[-1])
        for j, column in zip(group[k].kinds, zip(*(i.more for i in group[k].items), strict=True), strict=True):
            needs[j] += min(column)
        behind.append(needs)
    behind.reverse()
    left = [r - b for r, b in zip(room, behind[0], strict=True)]
    if min(left) < 0:
        return None, nodes, True
    slack, at, cost = best - bound, [0] * len(group), 0.0
    found: list[int] | None = None

    def down(depth: int, lost: float) -> bool:
        """Whether all below was seen."""
        nonlocal slack, found, nodes, cost, best
        if depth == len(order):
            if cost < best:
                best, found = cost - NEAR * abs(cost), list(at)
                slack = best - bound
            return True
        k = order[depth]
        c = group[k]
        free = [behind[depth][j] - behind[depth + 1][j] for j in c.kinds]
        whole = True
        for dear, n in excess[k]:
            if lost + dear >= slack:
                break
            if nodes <= 0:
                return False
            item = c.items[n]
            if any(m - f > left[j] for j, m, f in zip(c.kinds, item.more, free, strict=True)):
                continue
            nodes -= 1
            for j, m, f in zip(c.kinds, item.more, free, strict=True):
                left[j] -= m - f
            at[k] = n
            cost += item.cost
            whole = down(depth + 1, lost + dear) and whole
            cost -= item.cost
            for j, m, f in zip(c.kinds, item.more, free, strict=True):
                left[j] += m - f
        return whole

    whole = down(0, 0.0) if len(group) <= 400 else False  # as deep as Python goes
    return found, nodes, whole


__all__ = ["Class", "Item", "Sizes", "cheapest_of"]
