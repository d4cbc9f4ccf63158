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
from typing import Final, Literal, get_args

from jaxtensile.runtime.knapsack_kinds import Item, Sizes, cheapest_of
from jaxtensile.runtime.leases import Charge
from jaxtensile.units import Bytes

Objective = Literal["slowdown", "fair", "priority", "fcfs"]
OBJECTIVES: Final[tuple[Objective, ...]] = get_args(Objective)

EXACT: Final = 24
"""So many jobs of one class get an optimum; more get what is proved to be within ``WITHIN`` of it, in milliseconds."""
WITHIN: Final = 5e-4


@dataclass(frozen=True, slots=True)
class Option:
    """One rung that a job may be put on."""

    rung: int
    needs: tuple[Charge, ...]
    """Of each of the claim's resources."""
    slowdown: float
    """Seconds per step ÷ those of the fastest rung of all."""
    level: Bytes
    """On each device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
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
    """Claims, the bytes their options take of each kind, and the bytes there are."""

    claims: tuple[Claim, ...]
    options: tuple[tuple[int, ...], ...]
    """Which of the options may be taken; the first is the least."""
    sizes: dict[int, tuple[Sizes, ...]]
    room: Sizes


def divide(claims: Sequence[Claim], rooms: Mapping[str, Room], objective: Objective) -> Shares | None:
    """The option of each claim; None if not even the first ones fit.

    With gated rooms the whole division is made once for each size that the largest temp may have, and the best counts.
    """
    best: Shares | None = None
    for problem in _problems(claims, rooms):
        shares = _divide(problem, objective)
        if shares is not None and (best is None or ahead(claims, shares, best, objective)):
            best = shares
    return best


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


def _problems(claims: Sequence[Claim], rooms: Mapping[str, Room]) -> Iterator[_Problem]:
    """What there is to decide: once, or for each size of the largest temp where rooms are gated."""
    names = sorted({r for c in claims for r in c.resources})
    column = {name: k for k, name in enumerate(names)}
    gated = [rooms[name].gated for name in names]
    blank = [0] * len(names)
    temps = [0]
    if any(gated):
        outside = max(rooms[name].temp for name in names if rooms[name].gated)
        inside = {max(_temps(c, o, rooms)) for c in claims for o in c.options}
        temps = sorted({max(outside, t) for t in inside})
    for temp in temps:
        sizes: dict[int, tuple[Sizes, ...]] = {}
        allowed: list[tuple[int, ...]] = []
        for c in claims:
            columns = [column[r] for r in c.resources]
            rows: list[Sizes] = []
            for o in c.options:
                row = blank[:]
                for k, need in zip(columns, o.needs, strict=True):
                    row[k] = need.persistent if gated[k] else need.persistent + need.temp
                rows.append(tuple(row))
            sizes[c.id] = tuple(rows)
            fit = range(len(c.options))
            if any(gated):
                able = [n for n in fit if max(_temps(c, c.options[n], rooms)) <= temp]
                # The least on the devices, whatever it takes of the host, as without turns.
                fit = sorted(able, key=lambda n: (sum(s for s, g in zip(rows[n], gated, strict=True) if g), rows[n], n))
            allowed.append(tuple(fit))
        if all(allowed):
            room = tuple(rooms[name].free - (temp if rooms[name].gated else 0) for name in names)
            yield _Problem(tuple(claims), tuple(allowed), sizes, room)


def _temps(claim: Claim, option: Option, rooms: Mapping[str, Room]) -> list[Bytes]:
    return [0, *(n.temp for r, n in zip(claim.resources, option.needs, strict=True) if rooms[r].gated)]


def _divide(problem: _Problem, objective: Objective) -> Shares | None:
    shares: Shares = {c.id: options[0] for c, options in zip(problem.claims, problem.options, strict=True)}
    floors = [problem.sizes[k][n] for k, n in shares.items()]
    left = [room - sum(column) for room, column in zip(problem.room, zip(*floors, strict=True), strict=True)]
    if min(left, default=0) < 0:
        return None
    allowed = {c.id: options for c, options in zip(problem.claims, problem.options, strict=True)}
    for group in _classes(problem.claims):
        if objective == "slowdown":
            left = _least_slowdown(group, allowed, problem.sizes, shares, left)
        elif objective == "fair":
            left = _max_min(group, allowed, problem.sizes, shares, left)
        else:
            left = _in_turn(_turns(group, objective), allowed, problem.sizes, shares, left)
    return shares


def _least_slowdown(
    group: Sequence[Claim],
    allowed: Mapping[int, tuple[int, ...]],
    sizes: Mapping[int, tuple[Sizes, ...]],
    shares: Shares,
    left: list[Bytes],
) -> list[Bytes]:
    floors = [sizes[c.id][shares[c.id]] for c in group]
    room = [a + sum(column) for a, column in zip(left, zip(*floors, strict=True), strict=True)]
    classes = [[Item(sizes[c.id][n], c.weight * c.options[n].slowdown) for n in allowed[c.id]] for c in group]
    choice = cheapest_of(classes, room, 0.0 if len(group) <= EXACT else WITHIN)
    assert choice is not None, "the first options fit"
    for c, pick in zip(group, choice.picks, strict=True):
        shares[c.id] = allowed[c.id][pick]
    chosen = [sizes[c.id][shares[c.id]] for c in group]
    return [a - sum(column) for a, column in zip(room, zip(*chosen, strict=True), strict=True)]


def _max_min(
    group: Sequence[Claim],
    allowed: Mapping[int, tuple[int, ...]],
    sizes: Mapping[int, tuple[Sizes, ...]],
    shares: Shares,
    left: list[Bytes],
) -> list[Bytes]:
    """Whoever has the least surplus goes up to the next larger one, until none fits. Nobody goes up from the best
    possible least surplus before all are there, so where larger levels need more the least one is the largest."""
    by_id = {c.id: c for c in group}
    above = {
        c.id: sorted(allowed[c.id], key=lambda n: (c.options[n].level, sizes[c.id][n]), reverse=True) for c in group
    }
    heap = [(_surplus(c, shares[c.id]), c.arrived, c.id) for c in group]
    heapify(heap)
    while heap:
        _, arrived, k = heap[0]
        options, now = by_id[k].options, shares[k]
        while above[k]:
            new = above[k].pop()
            if options[new].level <= options[now].level:
                continue
            rest = [f + a - b for f, a, b in zip(left, sizes[k][now], sizes[k][new], strict=True)]
            if min(rest) >= 0:
                shares[k], left = new, rest
                heapreplace(heap, (_surplus(by_id[k], new), arrived, k))
                break
        else:
            heappop(heap)
    return left


def _in_turn(
    turns: Sequence[Claim],
    allowed: Mapping[int, tuple[int, ...]],
    sizes: Mapping[int, tuple[Sizes, ...]],
    shares: Shares,
    left: list[Bytes],
) -> list[Bytes]:
    for c in turns:
        now = sizes[c.id][shares[c.id]]
        for n in sorted(allowed[c.id], key=lambda n: c.options[n].slowdown):
            rest = [f + a - b for f, a, b in zip(left, now, sizes[c.id][n], strict=True)]
            if min(rest) >= 0:
                shares[c.id], left = n, rest
                break
    return left
