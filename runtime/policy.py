"""Which rung of its ladder does each job get?

Invariant: what is given out fits into the rooms, everyone has at least the first of its options, and jobs of a higher
class are served before any of a lower one gets more than that. Nothing here knows leases, time or messages.

Floors first, then class by class, then the surplus inside a class by one of four objectives:

    slowdown   the least sum of weight × (seconds per step ÷ those of the job's fastest rung)
    fair       the largest least surplus, bytes above the floor ÷ weight; then the next larger one
    priority   the heaviest first, then the first come: each the fastest rung that leaves the others their floors
    fcfs       the first come first, likewise
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from math import inf
from typing import Final, Literal, get_args

from msgspec import Struct

from jaxtensile.runtime.knapsack_kinds import Class, Kinds, Sizes, cheapest_of
from jaxtensile.runtime.leases import Charge
from jaxtensile.units import Bytes

Objective = Literal["slowdown", "fair", "priority", "fcfs"]
OBJECTIVES: Final[tuple[Objective, ...]] = get_args(Objective)

EXACT: Final = 24
"""So many jobs that share one kind of bytes get an optimum; more get what is proved to be within ``WITHIN`` of it, in
milliseconds."""
TEMPS: Final = 12
"""Sizes of the largest temp for which a division is made at most, where rooms are gated: the largest first, until no
smaller one can be better, which is mostly at once."""
WITHIN: Final = 5e-4


class Option(Struct, frozen=True, gc=False):
    """One rung that a job may be put on."""

    rung: int
    needs: tuple[Charge, ...]
    """Of each of the claim's resources."""
    slowdown: float
    """Seconds per step ÷ those of the fastest rung of all."""
    level: Bytes
    """On each device."""


class Claim(Struct, frozen=True, kw_only=True):
    """A job as the policy sees it. ``options`` ascend in bytes; the first is what it gets in any case."""

    id: int
    priority: int
    weight: float
    arrived: int
    resources: tuple[str, ...]
    options: tuple[Option, ...]
    floor: Bytes
    """Bytes above which a level is surplus."""


@dataclass(frozen=True, slots=True)
class Room:
    """What there is of a resource for all claims together."""

    free: Bytes
    gated: bool = False
    """One step at a time: of the temporaries only the largest counts."""
    temp: Bytes = 0
    """The largest of those of jobs that are not decided about."""


Shares = dict[int, int]
"""The index of an option by claim."""


@dataclass(frozen=True, slots=True)
class _Problem:
    """Claims, the bytes their options take of their resources, and the bytes there are."""

    claims: Sequence[Claim]
    kinds: dict[int, Kinds]
    """The resources of each claim, by their places in ``room``; together those of which all options need the same."""
    sizes: dict[int, list[Sizes]]
    """Of each option, of each of these."""
    options: dict[int, Sequence[int]]
    """Which of the options may be taken; the first is the least."""
    room: list[Bytes]


def divide(
    claims: Sequence[Claim],
    rooms: Mapping[str, Room],
    objective: Objective,
    stay: Shares | None = None,
    gain: float = 0.0,
) -> Shares | None:
    """The option of each claim; None if not even the first ones fit.

    ``stay``: a division of which a class keeps its part where it is proved that none is better by ``gain``, relative
    to its sum of slowdowns. With gated rooms the whole division is made for sizes that the largest temp may have, and
    the best counts.
    """
    names = sorted({r for c in claims for r in c.resources})
    if not any(rooms[name].gated for name in names):
        return _divide(_ungated(claims, rooms, names), objective, stay, gain)
    best: Shares | None = None
    for tries, problem in enumerate(_gated(claims, rooms, names)):
        if best is not None:
            # A smaller temp allows less: where even all that it allows is no better, nothing behind is.
            wished = {c.id: _wish(c, problem.options[c.id], objective) for c in claims}
            if tries >= TEMPS or not ahead(claims, wished, best, objective):
                break
        shares = _divide(problem, objective, stay, gain)
        if shares is not None and (best is None or ahead(claims, shares, best, objective)):
            best = shares
    return best


def _wish(claim: Claim, allowed: Sequence[int], objective: Objective) -> int:
    """What a claim would get if there were room for all."""
    if objective == "fair":
        return max(allowed, key=lambda n: claim.options[n].level)
    return min(allowed, key=lambda n: claim.options[n].slowdown)


def ahead(claims: Sequence[Claim], new: Shares, old: Shares, objective: Objective, by: float = 0.0) -> bool:
    """Is one division better than another, in the highest class in which they differ? ``by``: relative to the old sum
    of slowdowns; or to the step time of a job that gains, where the objective is no sum."""
    for group in _classes(claims):
        if all(new[c.id] == old[c.id] for c in group):
            continue
        if objective == "slowdown":
            now, then = _total(group, new), _total(group, old)
            if abs(now - then) <= 1e-9 * then:
                continue
            return now < then * (1 - by)
        a, b = _rank(group, new, objective), _rank(group, old, objective)
        if a != b:
            return a > b and any(_slowdown(c, new) <= _slowdown(c, old) * (1 - by) for c in group)
    return False


def _classes(claims: Sequence[Claim]) -> Iterator[tuple[Claim, ...]]:
    """The claims of each class, the highest first."""
    for priority in sorted({c.priority for c in claims}, reverse=True):
        yield tuple(c for c in claims if c.priority == priority)


def _slowdown(claim: Claim, shares: Shares) -> float:
    return claim.options[shares[claim.id]].slowdown


def _total(group: Sequence[Claim], shares: Shares) -> float:
    return sum(c.weight * _slowdown(c, shares) for c in group)


def _surplus(claim: Claim, option: int) -> float:
    return (claim.options[option].level - claim.floor) / claim.weight


def _rank(group: Sequence[Claim], shares: Shares, objective: Objective) -> list[float]:
    """What the objective compares, larger is better."""
    if objective == "fair":
        return sorted(_surplus(c, shares[c.id]) for c in group)
    return [-_slowdown(c, shares) for c in _turns(group, objective)]


def _turns(group: Sequence[Claim], objective: Objective) -> list[Claim]:
    if objective == "priority":
        return sorted(group, key=lambda c: (-c.weight, c.arrived))
    return sorted(group, key=lambda c: c.arrived)


def _columns(claim: Claim, column: Mapping[str, int], gated: Sequence[bool]) -> tuple[Kinds, list[Sizes]]:
    """Of a claim the kinds and sizes of a problem. Resources of which nothing is needed are left out."""
    kinds: list[tuple[int, ...]] = []
    columns: list[list[Bytes]] = []
    last: tuple[Charge, ...] = ()
    for name, needs in zip(claim.resources, zip(*[o.needs for o in claim.options], strict=True), strict=True):
        k = column[name]
        if needs == last and kinds and gated[k] == gated[kinds[-1][0]]:  # the devices of a job are mostly alike
            kinds[-1] += (k,)
            continue
        taken = [n.persistent for n in needs] if gated[k] else [n.persistent + n.temp for n in needs]
        if any(taken):
            kinds.append((k,))
            columns.append(taken)
            last = needs
    return tuple(kinds), [*zip(*columns, strict=True)] or [()] * len(claim.options)


def _ungated(claims: Sequence[Claim], rooms: Mapping[str, Room], names: Sequence[str]) -> _Problem:
    column, gated = {name: k for k, name in enumerate(names)}, [False] * len(names)
    kinds: dict[int, Kinds] = {}
    sizes: dict[int, list[Sizes]] = {}
    for c in claims:
        kinds[c.id], sizes[c.id] = _columns(c, column, gated)
    return _Problem(claims, kinds, sizes, {c.id: range(len(c.options)) for c in claims}, [rooms[n].free for n in names])


def _gated(claims: Sequence[Claim], rooms: Mapping[str, Room], names: Sequence[str]) -> Iterator[_Problem]:
    """What there is to decide for each size of the largest temp for which the first options fit, the largest first."""
    column = {name: k for k, name in enumerate(names)}
    gated = [rooms[name].gated for name in names]
    outside = max(rooms[name].temp for name in names if rooms[name].gated)
    kinds: dict[int, Kinds] = {}
    sizes: dict[int, list[Sizes]] = {}
    order: dict[int, list[tuple[tuple[Bytes, Sizes], int]]] = {}
    """Options by what they take of the devices, whatever they take of the host, as without turns."""
    steps: list[tuple[Bytes, int, int]] = []
    for c in claims:
        kinds[c.id], sizes[c.id] = own, rows = _columns(c, column, gated)
        counts = [len(ks) * gated[ks[0]] for ks in own]
        order[c.id] = [((sum(map(int.__mul__, row, counts)), row), n) for n, row in enumerate(rows)]
        turns = [j for j, name in enumerate(c.resources) if gated[column[name]]]
        for n, o in enumerate(c.options):
            steps.append((max([outside, *[o.needs[j].temp for j in turns]]), c.id, n))
    steps.sort()
    # From the smallest temp up: what the first options leave of each kind.
    first: dict[int, tuple[tuple[Bytes, Sizes], int]] = {}
    left, fitting = [rooms[name].free for name in names], list[Bytes]()
    for k, (temp, claim, n) in enumerate(steps):
        new, old = order[claim][n], first.get(claim)
        if old is None or new < old:
            first[claim] = new
            _take(left, kinds[claim], new[0][1])
            if old is not None:
                _take(left, kinds[claim], old[0][1], -1)
        last = k + 1 == len(steps) or steps[k + 1][0] > temp
        if last and len(first) == len(claims) and all(a >= temp * g for a, g in zip(left, gated, strict=True)):
            fitting.append(temp)
    temps = {(claim, n): temp for temp, claim, n in steps}
    for temp in reversed(fitting):
        yield _Problem(
            claims,
            kinds,
            sizes,
            {c.id: tuple(n for _, n in sorted(order[c.id]) if temps[c.id, n] <= temp) for c in claims},
            [rooms[name].free - (temp if g else 0) for name, g in zip(names, gated, strict=True)],
        )


def _divide(problem: _Problem, objective: Objective, stay: Shares | None, gain: float) -> Shares | None:
    shares: Shares = {k: options[0] for k, options in problem.options.items()}
    left = list(problem.room)
    for c in problem.claims:
        _take(left, problem.kinds[c.id], problem.sizes[c.id][shares[c.id]])
    if min(left, default=0) < 0:
        return None
    for group in _classes(problem.claims):
        if objective == "slowdown":
            _least_slowdown(group, problem, shares, left, stay, gain)
        elif objective == "fair":
            _max_min(group, problem, shares, left)
        else:
            _in_turn(_turns(group, objective), problem, shares, left)
    return shares


def _take(left: list[Bytes], kinds: Kinds, sizes: Sizes, sign: int = 1) -> None:
    """What an option leaves; ``sign``: -1 where it is given back."""
    for ks, size in zip(kinds, sizes, strict=True):
        for k in ks:
            left[k] -= sign * size


def _exchanged(left: list[Bytes], problem: _Problem, claim: int, old: int, new: int) -> bool:
    """Put a claim on another option, if that fits."""
    kinds, a, b = problem.kinds[claim], problem.sizes[claim][old], problem.sizes[claim][new]
    if any(left[k] + m < n for ks, m, n in zip(kinds, a, b, strict=True) for k in ks):
        return False
    _take(left, kinds, a, -1)
    _take(left, kinds, b)
    return True


def _least_slowdown(
    group: Sequence[Claim],
    problem: _Problem,
    shares: Shares,
    left: list[Bytes],
    stay: Shares | None,
    gain: float,
) -> None:
    classes: list[Class] = []
    for c in group:
        sizes, allowed = problem.sizes[c.id], problem.options[c.id]
        _take(left, problem.kinds[c.id], sizes[shares[c.id]], -1)
        costs = [c.weight * c.options[n].slowdown for n in allowed]
        classes.append(Class(problem.kinds[c.id], [sizes[n] for n in allowed], costs))
    below, after = inf, [-1]
    if stay is not None and all(stay[c.id] in problem.options[c.id] for c in group):
        after = list(left)
        for c in group:
            _take(after, problem.kinds[c.id], problem.sizes[c.id][stay[c.id]])
        if min(after) >= 0:
            below = _total(group, stay) * (1 - gain)
    choice = cheapest_of(classes, left, EXACT, WITHIN, below)
    if choice is None:
        assert stay is not None and below < inf, "the first options fit"
        shares.update({c.id: stay[c.id] for c in group})
        left[:] = after
        return
    for c, pick in zip(group, choice.picks, strict=True):
        shares[c.id] = problem.options[c.id][pick]
        _take(left, problem.kinds[c.id], problem.sizes[c.id][shares[c.id]])


def _max_min(group: Sequence[Claim], problem: _Problem, shares: Shares, left: list[Bytes]) -> None:
    """Whoever has the least surplus goes up to the next larger one, until none fits. Nobody goes up from the best
    possible least surplus before all are there, so where larger levels need more the least one is the largest."""
    by_id = {c.id: c for c in group}
    above = {
        c.id: sorted(problem.options[c.id], key=lambda n: (c.options[n].level, problem.sizes[c.id][n]), reverse=True)
        for c in group
    }
    heap = [(_surplus(c, shares[c.id]), c.arrived, c.id) for c in group]
    heapify(heap)
    while heap:
        _, arrived, k = heap[0]
        options, now = by_id[k].options, shares[k]
        while above[k]:
            new = above[k].pop()
            if options[new].level > options[now].level and _exchanged(left, problem, k, now, new):
                shares[k] = new
                heapreplace(heap, (_surplus(by_id[k], new), arrived, k))
                break
        else:
            heappop(heap)


def _in_turn(turns: Sequence[Claim], problem: _Problem, shares: Shares, left: list[Bytes]) -> None:
    for c in turns:
        now = shares[c.id]
        for n in sorted(problem.options[c.id], key=lambda n: c.options[n].slowdown):
            if _exchanged(left, problem, c.id, now, n):
                shares[c.id] = n
                break
