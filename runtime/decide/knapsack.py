"""The multiple-choice knapsack: one item of each class, all within the room, at the least total cost.

After Pisinger (European Journal of Operational Research 83, 1995). The classes' lower hulls give the optimum of the
linear relaxation, whose price per byte prices every item. An item dearer than the gap between the relaxation and a good
answer is in no better one. A dynamic programme over the rest keeps the labels (bytes, cost) that none beats in both.
``knapsack_kinds`` handles several kinds of bytes.

Invariant: the answer fits, at most ``gap`` (relative) above the optimum: 0 if the search ended (an optimum of the sum
in floats), else the distance to a proved bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Final, NamedTuple

from jaxtensile.units import Bytes

LABELS: Final = 4_096
"""Partial answers kept at most, those with the best bounds. A guess that bounds the time."""
HURRIED: Final = 128
"""``LABELS`` if an answer need not be the best. A guess."""
NEAR: Final = 1e-12
"""Relative difference below which costs are equal: sums of some thousand doubles differ by less."""


class Row(NamedTuple):
    """An item: its bytes, its cost, and its index in its class."""

    size: Bytes
    cost: float
    pick: int


class Choice(NamedTuple):
    """One item's index per class, the sum of costs, and how far, relative, another may be below it."""

    picks: tuple[int, ...]
    cost: float
    gap: float


class _Label(NamedTuple):
    """A partial answer, and its predecessor."""

    size: Bytes
    cost: float
    pick: int
    before: _Label | None


class Relaxed(NamedTuple):
    """The linear relaxation of a question; its answer is searched from it."""

    rows: list[list[Row]]
    """Of each class, without dominated items."""
    chosen: list[Row]
    """The items of the relaxation."""
    price: float
    """Per byte; 0: ``chosen`` is the answer."""
    room: Bytes
    left: Bytes
    priced: list[list[float]]
    """The rows' costs at that price."""
    least: list[float]
    bound: float
    """No choice costs less."""


def cheapest(classes: Sequence[Sequence[Row]], room: Bytes, within: float = 0.0) -> Choice | None:
    """The cheapest choice of at most ``room`` bytes; None if there is none.

    ``within``: a sufficient relative gap. 100 classes of 8 take some 3 ms to 5e-4, ten times that to 0.
    """
    relaxed = relax(classes, room)
    return None if relaxed is None else completed(relaxed, within)


def relax(classes: Sequence[Sequence[Row]], room: Bytes) -> Relaxed | None:
    """The relaxation; None if there is no choice."""
    rows = [_undominated(c) for c in classes]
    left = room - sum(c[0].size for c in rows)
    if left < 0:
        return None
    if sum(c[-1].size for c in rows) <= room:
        chosen, price = [c[-1] for c in rows], 0.0
    else:
        chosen, price, left = _relax(rows, left)
    priced = [[row.cost + price * row.size for row in c] for c in rows]
    least = [min(p) for p in priced]
    return Relaxed(rows, chosen, price, room, left, priced, least, sum(least) - price * room)


def completed(relaxed: Relaxed, within: float = 0.0) -> Choice:
    """The answer to a relaxation's question."""
    rows, start, price, room, left, priced, least, bound = relaxed
    if not price:
        return _choice(start, 0.0)
    chosen = _exchange(rows, start, left)
    best = sum(row.cost for row in chosen)
    # What is dearer at the price than the gap is in no better answer.
    gap = best - bound - NEAR * abs(best)
    if gap <= within * abs(best):
        return _choice(chosen, max(gap / abs(best), 0.0) if gap > 0 else 0.0)
    core = [
        [row for row, cost in zip(c, p, strict=True) if cost - low < gap]
        for c, p, low in zip(rows, priced, least, strict=True)
    ]
    if not all(core):
        return _choice(chosen, 0.0)
    found, whole = _search(core, least, price, room, bound, best, start, within)
    choice = _choice(found or chosen, 0.0)
    return choice if whole else choice._replace(gap=max(choice.cost - bound, 0.0) / abs(choice.cost))


def _choice(rows: Sequence[Row], gap: float) -> Choice:
    return Choice(tuple(row.pick for row in rows), sum(row.cost for row in rows), gap)


def _undominated(rows: Sequence[Row]) -> list[Row]:
    """The rows by ascending size, each cheaper than all smaller ones."""
    ordered = sorted(rows)
    kept = [ordered[0]]
    for row in ordered:
        if row.cost < kept[-1].cost:
            kept.append(row)
    return kept


def _hull(rows: list[Row]) -> list[Row]:
    """The rows that are best at some price per byte."""
    hull: list[Row] = []
    for row in rows:
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (b.cost - a.cost) * (row.size - b.size) < (row.cost - b.cost) * (b.size - a.size):
                break
            hull.pop()
        hull.append(row)
    return hull


def _relax(classes: list[list[Row]], left: Bytes) -> tuple[list[Row], float, Bytes]:
    """The linear relaxation: steps along the hulls while they fit, most gain per byte first. Returns its items, the
    gain per byte of the first misfit, and the bytes left."""
    hulls = [_hull(c) for c in classes]
    steps = sorted(
        ((b.cost - a.cost) / (b.size - a.size), k, n)
        for k, hull in enumerate(hulls)
        for n, (a, b) in enumerate(pairwise(hull))
    )
    at = [0] * len(classes)
    price = 0.0
    for slope, k, n in steps:
        size = hulls[k][n + 1].size - hulls[k][n].size
        if size <= left and at[k] == n:
            at[k] = n + 1
            left -= size
        elif not price:
            price = -slope
    return [hull[n] for hull, n in zip(hulls, at, strict=True)], price, left


def _exchange(classes: list[list[Row]], relaxed: list[Row], left: Bytes) -> list[Row]:
    """A good answer: exchange the items of one or two classes while that is cheaper."""
    chosen = list(relaxed)
    while True:
        # What each change adds to the bytes and the cost; beside it, the cheapest of those that fit with it.
        changes = sorted(
            (row.size - now.size, row.cost - now.cost, k, row)
            for k, (rows, now) in enumerate(zip(classes, chosen, strict=True))
            for row in rows
            if row is not now
        )
        gain, found = -NEAR, ()
        first = second = None  # the cheapest of those that fit, and the cheapest of another class
        small = 0
        for change in reversed(changes):
            size, cost, k, _ = change
            while small < len(changes) and changes[small][0] + size <= left:
                other = changes[small]
                small += 1
                if first is None or other[1] < first[1]:
                    first, second = other, first if first is not None and first[2] != other[2] else second
                elif other[2] != first[2] and (second is None or other[1] < second[1]):
                    second = other
            if size <= left and cost < gain:
                gain, found = cost, (change,)
            partner = first if first is not None and first[2] != k else second
            if partner is not None and partner[2] != k and cost + partner[1] < gain:
                gain, found = cost + partner[1], (change, partner)
        if not found:
            return chosen
        for size, _, k, row in found:
            left -= size
            chosen[k] = row


def _search(
    core: list[list[Row]],
    least: list[float],
    price: float,
    room: Bytes,
    bound: float,
    best: float,
    relaxed: list[Row],
    within: float,
) -> tuple[list[Row] | None, bool]:
    """Dynamic programme over the core: an answer better than ``best``, or None, and whether all were seen. It stops at
    one within ``within``. Classes in which another item loses least come first."""
    alone = [k for k, rows in enumerate(core) if len(rows) == 1]
    rest = sorted(
        (sorted(row.cost + price * row.size for row in rows)[1] - least[k], k, rows)
        for k, rows in enumerate(core)
        if len(rows) > 1
    )
    # Behind each class: fewest and most bytes, and the bytes and cost of the relaxation's items.
    fewest = [*accumulate((rows[0].size for _, _, rows in reversed(rest)), initial=0)][-2::-1]
    most = [*accumulate((rows[-1].size for _, _, rows in reversed(rest)), initial=0)][-2::-1]
    sizes = [*accumulate((relaxed[k].size for _, k, _ in reversed(rest)), initial=0)][-2::-1]
    costs = [*accumulate((relaxed[k].cost for _, k, _ in reversed(rest)), initial=0)][-2::-1]
    paid = sum(least[k] for k in alone)
    labels: list[_Label] = [_Label(sum(core[k][0].size for k in alone), sum(core[k][0].cost for k in alone), -1, None)]
    near = NEAR * abs(best)
    ceiling, winner, depth, whole = best - near, None, 0, True
    most_labels = LABELS if not within else min(LABELS, HURRIED)
    for n, (_, k, rows) in enumerate(rest):
        if ceiling - bound <= within * abs(ceiling):
            whole = not within and whole
            break
        paid += least[k]
        roof, floor, reach, cost_on = room - fewest[n], room - most[n], room - sizes[n], costs[n]
        slack = ceiling - bound + paid
        grown: list[_Label] = []
        for label in labels:
            size, cost = label.size, label.cost
            for row in rows:
                new = size + row.size
                if new > roof:
                    break
                dear = cost + row.cost
                # Above the relaxation so far, and for the bytes that nothing behind can use any more.
                if dear + price * (new if new > floor else floor) < slack:
                    grown.append(found := _Label(new, dear, row.pick, label))
                    if new <= reach and dear + cost_on < ceiling:
                        ceiling, winner, depth = dear + cost_on - near, found, n + 1
                        slack = ceiling - bound + paid
        grown.sort(key=itemgetter(0, 1))
        labels = []
        cheap = float("inf")
        for label in grown:
            if label.cost < cheap:
                labels.append(label)
                cheap = label.cost
        if len(labels) > most_labels:
            whole = False
            labels = sorted(labels, key=lambda a: a.cost + price * a.size)[:most_labels]
    if winner is None:
        return None, whole
    picks = [row.pick for row in relaxed]
    for k in alone:
        picks[k] = core[k][0].pick
    label: _Label | None = winner
    for _, k, _ in reversed(rest[:depth]):
        assert label is not None
        picks[k], label = label.pick, label.before
    by_index = [{row.pick: row for row in (*rows, old)} for rows, old in zip(core, relaxed, strict=True)]
    return [known[i] for known, i in zip(by_index, picks, strict=True)], whole
