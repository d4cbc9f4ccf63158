"""The multiple-choice knapsack with several kinds of bytes: devices, and pinned host memory.

Invariant: as in ``knapsack``: the answer fits, and its cost is at most ``gap`` above the optimum. Where only one kind
can be exceeded, which is the usual case, that kind is all there is to decide. Otherwise the prices per byte come from
a subgradient ascent, and the labels of the dynamic programme are compared in every kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from jaxtensile.runtime.knapsack import NEAR, Choice, Row, cheapest
from jaxtensile.units import Bytes

STEPS: Final = 40
"""Of the ascent."""
LABELS: Final = 1_000
"""Partial answers kept at most; each is compared with all others."""

Sizes = tuple[Bytes, ...]


class Item(NamedTuple):
    """Bytes of each kind, and what taking it costs."""

    sizes: Sizes
    cost: float


class _Label(NamedTuple):
    cost: float
    sizes: Sizes
    pick: int
    before: _Label | None


def cheapest_of(classes: Sequence[Sequence[Item]], room: Sequence[Bytes], within: float = 0.0) -> Choice | None:
    """The cheapest choice within ``room`` of every kind; None if none was found."""
    # Most and fewest bytes of each kind: where even the most fits, that kind decides nothing.
    edges = [[(max(column), min(column)) for column in zip(*(i.sizes for i in c), strict=True)] for c in classes]
    kinds = [k for k, most in enumerate(room) if sum(edge[k][0] for edge in edges) > most]
    if any(sum(edge[k][1] for edge in edges) > room[k] for k in kinds):
        return None
    if len(kinds) <= 1:
        k, most = (kinds[0], room[kinds[0]]) if kinds else (0, sum(edge[0][0] for edge in edges))
        return cheapest([[Row(i.sizes[k], i.cost, n) for n, i in enumerate(c)] for c in classes], most, within)
    cut = [[Item(tuple(i.sizes[k] for k in kinds), i.cost) for i in c] for c in classes]
    return _search(cut, tuple(room[k] for k in kinds), within)


def _search(classes: list[list[Item]], room: Sizes, within: float) -> Choice | None:
    prices, bound, best = _ascend(classes, room)
    priced = [[i.cost + _worth(prices, i.sizes) for i in c] for c in classes]
    least = [min(p) for p in priced]
    fewest = _behind([tuple(map(min, zip(*(i.sizes for i in c), strict=True))) for c in classes], len(room))
    cost = float("inf") if best is None else sum(c[i].cost for c, i in zip(classes, best, strict=True))
    if best is not None and cost - bound <= max(within, NEAR) * abs(cost):
        return Choice(tuple(best), cost, max(cost - bound, 0.0) / abs(cost) if cost else 0.0)
    ceiling, whole = cost - NEAR * abs(cost) if best is not None else cost, True
    labels: list[_Label] = [_Label(0.0, (0,) * len(room), -1, None)]
    paid = 0.0
    for k, items in enumerate(classes):
        paid += least[k]
        roof = tuple(r - f for r, f in zip(room, fewest[k], strict=True))
        grown: list[_Label] = []
        for label in labels:
            for n, item in enumerate(items):
                sizes = tuple(a + b for a, b in zip(label.sizes, item.sizes, strict=True))
                dear = label.cost + item.cost
                if all(s <= r for s, r in zip(sizes, roof, strict=True)) and (
                    bound + dear + _worth(prices, sizes) - paid < ceiling
                ):
                    grown.append(_Label(dear, sizes, n, label))
        grown.sort(key=lambda a: a[:3])
        labels = []
        for label in grown:
            if not any(all(a <= b for a, b in zip(old.sizes, label.sizes, strict=True)) for old in labels):
                labels.append(label)
                if len(labels) > 2 * LABELS:
                    break
        if len(labels) > LABELS:
            whole = False
            labels = sorted(labels, key=lambda a: a.cost + _worth(prices, a.sizes))[:LABELS]
    winner = min(labels, key=lambda a: a.cost, default=None)
    if winner is not None and winner.cost < ceiling:  # the last bound is not the cost: bytes may be left
        cost = winner.cost
        best = _path(winner)
    if best is None:
        return None
    return Choice(tuple(best), cost, 0.0 if whole or not cost else max(cost - bound, 0.0) / abs(cost))


def _worth(prices: Sequence[float], sizes: Sizes) -> float:
    return sum(p * s for p, s in zip(prices, sizes, strict=True))


def _behind(sizes: list[Sizes], kinds: int) -> list[Sizes]:
    """Sums over the classes behind each one."""
    sums = accumulate(
        reversed(sizes), lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)), initial=(0,) * kinds
    )
    return [*sums][-2::-1]


def _path(label: _Label) -> list[int]:
    picks: list[int] = []
    while label.before is not None:
        picks.append(label.pick)
        label = label.before
    return picks[::-1]


def _ascend(classes: list[list[Item]], room: Sizes) -> tuple[list[float], float, list[int] | None]:
    """Prices per byte, the bound that they prove, and an answer that fits, if the first items do."""
    kinds = range(len(room))
    best = _greedy(classes, room)
    cost = None if best is None else sum(c[i].cost for c, i in zip(classes, best, strict=True))
    prices, high, found = [0.0] * len(room), float("-inf"), [0.0] * len(room)
    for step in range(STEPS):
        used, value = [0] * len(room), 0.0
        for c in classes:
            item = min(c, key=lambda i: i.cost + _worth(prices, i.sizes))
            value += item.cost + _worth(prices, item.sizes)
            used = [u + s for u, s in zip(used, item.sizes, strict=True)]
        value -= _worth(prices, room)
        if value > high:
            high, found = value, list(prices)
        over = [(used[k] - room[k]) / max(room[k], 1) for k in kinds]
        norm = sum(o * o for o in over)
        if not norm:
            break
        target = cost if cost is not None else value + abs(value) * 0.05
        move = max(target - value, NEAR) / norm / (1 + step / 8)
        prices = [max(0.0, p + move * o / max(room[k], 1)) for k, (p, o) in enumerate(zip(prices, over, strict=True))]
    return found, high, best


def _greedy(classes: list[list[Item]], room: Sizes) -> list[int] | None:
    """From the first items up: of the changes that fit, the one that gains the most per share of the room."""
    at = [0] * len(classes)
    left = [r - sum(c[0].sizes[k] for c in classes) for k, r in enumerate(room)]
    if min(left) < 0:
        return None
    while True:
        best, change = 0.0, None
        for k, c in enumerate(classes):
            now = c[at[k]]
            for n, item in enumerate(c):
                more = [b - a for a, b in zip(now.sizes, item.sizes, strict=True)]
                if item.cost < now.cost and all(m <= f for m, f in zip(more, left, strict=True)):
                    share = sum(max(m, 0) / max(r, 1) for m, r in zip(more, room, strict=True))
                    gain = (now.cost - item.cost) / (share + 1e-9)
                    if gain > best:
                        best, change = gain, (k, n, more)
        if change is None:
            return at
        k, n, more = change
        at[k] = n
        left = [f - m for f, m in zip(left, more, strict=True)]
