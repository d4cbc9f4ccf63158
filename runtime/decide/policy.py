"""The division of bytes among jobs: one rung for each.

Floors first, then class by class, then the surplus inside a class by an objective:

    slowdown   the least sum of weight × (seconds per step ÷ those of the job's fastest rung)
    fair       the largest least surplus, bytes above the floor ÷ weight; then the next larger one
    priority   the heaviest first, then the first come: each the fastest rung that leaves the others their floors
    fcfs       the first come first, likewise

Where steps run at once and some copy, ``slowdown`` counts what the copies of all cost all (``decide.links``): a sum
of slowdowns is that of steps beside each other. Such a sum is no sum over jobs, so prices of the busiest kind of
seconds are added to the options; the division that is best beside each other of some prices is taken.

Invariant: the division fits, and every job has at least its first option. Lower classes get more than that only after
higher ones. Nothing here knows leases, time or messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heapreplace
from math import inf
from typing import Final

from msgspec import Struct

from jaxtensile.runtime.decide.events import Objective
from jaxtensile.runtime.decide.knapsack_kinds import Class, Groups, Kinds, Sizes, cheapest_of, class_of, used
from jaxtensile.runtime.decide.leases import Charge
from jaxtensile.runtime.decide.links import ALONE, Loads, added, stretch
from jaxtensile.units import Bytes

EXACT: Final = 24
"""Most jobs sharing one kind of bytes that get an optimum; more get an answer proved within ``WITHIN``, in
milliseconds. A guess."""
TEMPS, TURNS = 12, 1_200
"""With gated rooms: most sizes of the largest temp to divide for, largest first, and claims in all of these. Guesses
that bound the time."""
WITHIN: Final = 5e-4
"""Relative gap of an answer for more jobs than ``EXACT``: far below what a step's time varies by. A guess."""
KEPT: Final = 1 << 11
"""Claims with cached classes, as a coordinator's claims mostly repeat: twice the 1,000 jobs of
``benchmarks/coordinator``. Bounds memory."""
PRICES: Final = (1.0, 0.5, 2.0)
"""Prices of a kind of seconds that are tried, as factors of what it cost before. A guess: for three jobs of four rungs
they find the best of all divisions (``tests/runtime/decide/test_links.py``)."""
PRICED: Final = 3
"""Rounds of prices at most: each takes as many knapsacks as there are prices. A guess."""
PRICED_JOBS: Final = 32
"""Jobs in all knapsacks with prices of one part, so that a decision ends in time; for more than 32 copies are not
counted (``benchmarks/coordinator/divide``)."""
CLOSE: Final = 1e-9
"""Relative difference below which sums of slowdowns are equal: above the rounding of sums over jobs."""


class Option(Struct, frozen=True, eq=False, gc=False):
    """One rung that a job may be put on. Options compare by identity, which caches rely on."""

    rung: int
    needs: tuple[Charge, ...]
    """The charge on each of the claim's resources."""
    slowdown: float
    """Seconds per step ÷ those of the fastest rung of all."""
    level: Bytes
    """Bytes on each device."""
    loads: Loads = ALONE
    """Of a step on each of the devices."""


class Claim(Struct, frozen=True, kw_only=True, gc=False):
    """A job as the policy sees it. ``options`` ascend in bytes; the first is what it gets in any case."""

    id: int
    priority: int
    weight: float
    arrived: int
    resources: tuple[str, ...]
    options: tuple[Option, ...]
    floor: Bytes
    """Bytes above which a level is surplus."""
    beside: tuple[str, ...] = ()
    """The devices on which its steps run beside those of others; empty where nobody there copies."""


@dataclass(frozen=True, slots=True)
class Room:
    """The bytes of a resource for all claims together."""

    free: Bytes
    gated: bool = False
    """One step at a time: only the largest temp counts."""
    temp: Bytes = 0
    """The largest temp of jobs that are not decided about."""


Shares = dict[int, int]
"""The index of an option, by claim."""


@dataclass(frozen=True, slots=True)
class _Problem:
    """Claims, the bytes of their options, and the bytes there are."""

    claims: Sequence[Claim]
    classes: dict[int, Class]
    """Each claim's options as a class; kinds are indices of ``room``."""
    options: dict[int, Sequence[int]]
    """The options that may be taken; the first is the least."""
    room: list[Bytes]


def divide(
    claims: Sequence[Claim],
    rooms: Mapping[str, Room],
    objective: Objective,
    stay: Shares | None = None,
    gain: float = 0.0,
) -> Shares | None:
    """The option of each claim; None if not even the first ones fit.

    ``stay``: a division. A class keeps its part if it is proved that no other is better by ``gain``, relative to its
    sum of slowdowns. With gated rooms, parts that share no room are divided separately, for several sizes of their
    largest temp; the best counts.
    """
    names = sorted({r for c in claims for r in c.resources})
    column, room = {name: k for k, name in enumerate(names)}, [rooms[name] for name in names]
    classes: dict[int, Class] = {}
    temps: dict[int, list[Bytes]] = {}
    for c in claims:
        places = [column[name] for name in c.resources]
        made, temps[c.id] = _class(c.options, c.weight, tuple([room[k].gated for k in places]))
        classes[c.id] = _placed(made, places)
    if not any(r.gated for r in room):
        every: dict[int, Sequence[int]] = {c.id: range(len(c.options)) for c in claims}
        return _divide(_Problem(claims, classes, every, [r.free for r in room]), objective, stay, gain)
    groups = Groups(len(room))
    for made in classes.values():
        groups.join([k for ks in made.kinds for k in ks])
    parts: dict[int, list[Claim]] = {}
    for c in claims:
        parts.setdefault(groups.of(kinds[0][0]) if (kinds := classes[c.id].kinds) else -1, []).append(c)
    shares: Shares = {}
    for part in parts.values():
        found = _divide_turns(part, classes, temps, room, objective, stay, gain)
        if found is None:
            return None
        shares.update(found)
    return shares


def _divide_turns(
    claims: Sequence[Claim],
    classes: Mapping[int, Class],
    temps: Mapping[int, list[Bytes]],
    rooms: Sequence[Room],
    objective: Objective,
    stay: Shares | None,
    gain: float,
) -> Shares | None:
    """The option of each claim of a part, for the best size of the largest temp."""
    mine = sorted({k for c in claims for ks in classes[c.id].kinds for k in ks})
    number = {k: n for n, k in enumerate(mine)}
    own = {c.id: _placed(classes[c.id], number) for c in claims}
    best: Shares | None = None
    for tries, problem in enumerate(_gated(claims, own, temps, [rooms[k] for k in mine])):
        if best is not None:
            # A smaller temp allows less: where even all that it allows is no better, nothing behind is.
            wished = {c.id: _wish(c, problem.options[c.id], objective) for c in claims}
            if tries >= min(TEMPS, 1 + TURNS // len(claims)) or not ahead(claims, wished, best, objective):
                break
        shares = _divide(problem, objective, stay, gain, best)
        if shares is not None and (best is None or ahead(claims, shares, best, objective)):
            best = shares
    return best


def _wish(claim: Claim, allowed: Sequence[int], objective: Objective) -> int:
    """The option a claim would get if there were room for all."""
    if objective == "fair":
        return max(allowed, key=lambda n: claim.options[n].level)
    return min(allowed, key=lambda n: claim.options[n].slowdown)


def ahead(claims: Sequence[Claim], new: Shares, old: Shares, objective: Objective, by: float = 0.0) -> bool:
    """Whether a division is better than another, in the highest class that differs. ``by``: the minimum gain, relative
    to the old sum of slowdowns; if the objective is no sum, to one gaining job's step time."""
    for group in _classes(claims):
        if all(new[c.id] == old[c.id] for c in group):
            continue
        if objective == "slowdown":
            now, then = _total(group, new, claims), _total(group, old, claims)
            if abs(now - then) <= CLOSE * then:
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


def _total(group: Sequence[Claim], shares: Shares, claims: Sequence[Claim]) -> float:
    """The sum of slowdowns of a class, beside all claims."""
    if not any(c.beside for c in claims):
        return sum(c.weight * _slowdown(c, shares) for c in group)
    longer = {name: stretch(loads) for name, loads in _loaded(claims, shares).items()}
    return sum(c.weight * _slowdown(c, shares) * max([longer[d] for d in c.beside], default=1.0) for c in group)


def _loaded(claims: Sequence[Claim], shares: Shares) -> dict[str, Loads]:
    """What is asked of each device on which steps run at once."""
    loads: dict[str, list[Loads]] = {}
    for c in claims:
        for name in c.beside:
            loads.setdefault(name, []).append(c.options[shares[c.id]].loads)
    return {name: added(of_all) for name, of_all in loads.items()}


def _surplus(claim: Claim, option: int) -> float:
    return (claim.options[option].level - claim.floor) / claim.weight


def _rank(group: Sequence[Claim], shares: Shares, objective: Objective) -> list[float]:
    """The values that the objective compares; larger is better."""
    if objective == "fair":
        return sorted(_surplus(c, shares[c.id]) for c in group)
    return [-_slowdown(c, shares) for c in _turns(group, objective)]


def _turns(group: Sequence[Claim], objective: Objective) -> list[Claim]:
    if objective == "priority":
        return sorted(group, key=lambda c: (-c.weight, c.arrived))
    return sorted(group, key=lambda c: c.arrived)


@lru_cache(KEPT)
def _class(options: tuple[Option, ...], weight: float, gated: tuple[bool, ...]) -> tuple[Class, list[Bytes]]:
    """A claim as a class, with the largest temp of each option where steps take turns. Its kinds are indices of its
    resources, without those that it needs nothing of."""
    kinds: list[tuple[int, ...]] = []
    columns: list[list[Bytes]] = []
    last: tuple[Charge, ...] = ()
    temps = [0] * len(options)
    for j, (turns, needs) in enumerate(zip(gated, zip(*[o.needs for o in options], strict=True), strict=True)):
        if needs == last and kinds and turns == gated[j - 1]:  # the devices of a job are mostly alike
            kinds[-1] += (j,)
            continue
        taken = [n.persistent + n.temp for n in needs]
        if any(taken):
            kinds.append((j,))
            last = needs
            if turns:
                taken = [n.persistent for n in needs]
                temps = [max(temp, n.temp) for temp, n in zip(temps, needs, strict=True)]
            columns.append(taken)
    sizes = [*zip(*columns, strict=True)] or [()] * len(options)
    return class_of(tuple(kinds), sizes, [weight * o.slowdown for o in options]), temps


def _placed(made: Class, places: Sequence[int] | Mapping[int, int]) -> Class:
    """A class with renumbered kinds."""
    return Class(tuple([tuple([places[k] for k in ks]) for ks in made.kinds]), *made[1:])


def _gated(
    claims: Sequence[Claim],
    classes: dict[int, Class],
    temps: Mapping[int, list[Bytes]],
    rooms: Sequence[Room],
) -> Iterator[_Problem]:
    """A problem for each size of the largest temp with which the first options fit, the largest first."""
    gated = [r.gated for r in rooms]
    outside = max([r.temp for r in rooms], default=0)
    order: dict[int, list[tuple[tuple[Bytes, Sizes], int]]] = {}
    """Options by their device bytes, whatever their host bytes, as without turns."""
    steps: list[tuple[Bytes, int, int]] = []
    for c in claims:
        counts = [len(ks) * gated[ks[0]] for ks in classes[c.id].kinds]
        order[c.id] = [((sum(map(int.__mul__, row, counts)), row), n) for n, row in enumerate(classes[c.id].sizes)]
        steps.extend([(max(outside, temp), c.id, n) for n, temp in enumerate(temps[c.id])])
    steps.sort()
    # From the smallest temp up: what the first options leave of each kind.
    first: dict[int, tuple[tuple[Bytes, Sizes], int]] = {}
    left, fitting = [r.free for r in rooms], list[Bytes]()
    for k, (temp, claim, n) in enumerate(steps):
        new, old = order[claim][n], first.get(claim)
        if old is None or new < old:
            first[claim] = new
            _take(left, classes[claim].kinds, new[0][1])
            if old is not None:
                _take(left, classes[claim].kinds, old[0][1], -1)
        last = k + 1 == len(steps) or steps[k + 1][0] > temp
        if last and len(first) == len(claims) and all(a >= temp * g for a, g in zip(left, gated, strict=True)):
            fitting.append(temp)
    for temp in reversed(fitting):
        yield _Problem(
            claims,
            classes,
            {c.id: tuple(n for _, n in sorted(order[c.id]) if temps[c.id][n] <= temp) for c in claims},
            [r.free - (temp if r.gated else 0) for r in rooms],
        )


def _divide(
    problem: _Problem, objective: Objective, stay: Shares | None, gain: float, best: Shares | None = None
) -> Shares | None:
    """The option of each claim. None if the first ones do not fit, or if the bounds show that none is better than
    ``best``."""
    shares: Shares = {k: options[0] for k, options in problem.options.items()}
    left = _without(problem, problem.claims, shares, problem.room)
    if min(left, default=0) < 0:
        return None
    for group in _classes(problem.claims):
        if objective == "slowdown":
            alone = len(group) == len(problem.claims)
            room = problem.room if alone else _without(problem, group, shares, left, -1)
            if not _least_slowdown(group, problem, shares, room, stay, gain, best):
                return None
            if not alone:
                left = _without(problem, group, shares, room)
        elif objective == "fair":
            _max_min(group, problem, shares, left)
        else:
            _in_turn(_turns(group, objective), problem, shares, left)
    return shares


def _without(
    problem: _Problem, claims: Sequence[Claim], shares: Shares, left: Sequence[Bytes], sign: int = 1
) -> list[Bytes]:
    """The room left beside the claims; ``sign`` -1: without them."""
    classes = [problem.classes[c.id] for c in claims]
    sizes = [made.sizes[shares[c.id]] for c, made in zip(claims, classes, strict=True)]
    (taken,) = used([made.kinds for made in classes], len(left), sizes)
    return [a - sign * n for a, n in zip(left, taken, strict=True)]


def _take(left: list[Bytes], kinds: Kinds, sizes: Sizes, sign: int = 1) -> None:
    """Subtract an option's bytes; ``sign`` -1: add them."""
    for ks, size in zip(kinds, sizes, strict=True):
        for k in ks:
            left[k] -= sign * size


def _exchanged(left: list[Bytes], problem: _Problem, claim: int, old: int, new: int) -> bool:
    """Put a claim on another option, if it fits; whether it did."""
    kinds, sizes, *_ = problem.classes[claim]
    a, b = sizes[old], sizes[new]
    if any(left[k] + m < n for ks, m, n in zip(kinds, a, b, strict=True) for k in ks):
        return False
    _take(left, kinds, a, -1)
    _take(left, kinds, b)
    return True


def _least_slowdown(
    group: Sequence[Claim],
    problem: _Problem,
    shares: Shares,
    room: Sequence[Bytes],
    stay: Shares | None,
    gain: float,
    best: Shares | None,
) -> bool:
    """Set the shares of a class, which has ``room``. False if none are better than ``best``."""
    if any(c.beside for c in group):
        return _least_beside(group, problem, shares, room, stay, gain, best)
    classes: list[Class] = []
    for c in group:
        made, allowed = problem.classes[c.id], problem.options[c.id]
        if not isinstance(allowed, range):
            made = class_of(made.kinds, [made.sizes[n] for n in allowed], [made.costs[n] for n in allowed])
        classes.append(made)
    below = inf
    if best is not None:
        stays = stay is not None and all(stay[c.id] == best[c.id] for c in group)
        below = _total(group, best, problem.claims) * (1 - gain if stays else 1 + CLOSE)
    elif (
        stay is not None
        and all(stay[c.id] in problem.options[c.id] for c in group)
        and min(_without(problem, group, stay, room), default=0) >= 0
    ):
        below = _total(group, stay, problem.claims) * (1 - gain)
    choice = cheapest_of(classes, room, EXACT, WITHIN, below)
    if choice is None:
        assert below < inf, "the first options fit"
        if best is not None or stay is None:
            return False
        shares.update({c.id: stay[c.id] for c in group})
        return True
    for c, pick in zip(group, choice.picks, strict=True):
        shares[c.id] = problem.options[c.id][pick]
    return True


def _least_beside(
    group: Sequence[Claim],
    problem: _Problem,
    shares: Shares,
    room: Sequence[Bytes],
    stay: Shares | None,
    gain: float,
    best: Shares | None,
) -> bool:
    """As ``_least_slowdown``, where steps run at once and some copy."""

    def total(picked: Shares) -> float:
        return _total(group, {**shares, **picked}, problem.claims)

    def priced(prices: Mapping[str, Loads]) -> Shares:
        """The division with the least sum of slowdowns and of what its seconds cost at those prices."""
        classes: list[Class] = []
        for c in group:
            made, allowed = problem.classes[c.id], problem.options[c.id]
            if isinstance(allowed, range) and not any(d in prices for d in c.beside):
                classes.append(made)
                continue
            costs = [
                made.costs[n]
                + sum(sum(map(float.__mul__, c.options[n].loads, prices[d])) for d in c.beside if d in prices)
                for n in allowed
            ]
            classes.append(class_of(made.kinds, [made.sizes[n] for n in allowed], costs))
        choice = cheapest_of(classes, room, EXACT, WITHIN, inf)
        assert choice is not None, "the first options fit"
        return {c.id: problem.options[c.id][pick] for c, pick in zip(group, choice.picks, strict=True)}

    found = [priced({})]
    if stay is not None and all(stay[c.id] in problem.options[c.id] for c in group):
        kept = {c.id: stay[c.id] for c in group}
        if min(_without(problem, group, kept, room), default=0) >= 0:
            found.append(kept)
    leader, tries = min(found, key=total), PRICED_JOBS // len(group)
    for _ in range(PRICED if tries else 0):
        busiest = {
            name: loads for name, loads in _loaded(problem.claims, {**shares, **leader}).items() if stretch(loads) > 1
        }
        cost = {
            name: sum(c.weight * _slowdown(c, {**shares, **leader}) for c in group if name in c.beside) / stretch(loads)
            for name, loads in busiest.items()
        }
        # Once where the busiest kind is priced alone, and once where all are by how busy they are.
        ways = [(factor, even) for factor in PRICES for even in (False, True)][:tries]
        tries -= len(ways)
        tried = [
            priced({name: _price(loads, cost[name] * factor, even) for name, loads in busiest.items()})
            for factor, even in ways
        ]
        better = min([leader, *tried], key=total)
        if total(better) >= total(leader) * (1 - CLOSE):
            break
        leader = better
    if len(found) > 1 and total(leader) > total(found[1]) * (1 - gain):
        leader = found[1]
    if best is not None and total(leader) >= total({c.id: best[c.id] for c in group}):
        return False
    shares.update(leader)
    return True


def _price(loads: Loads, cost: float, even: bool) -> Loads:
    """The price of each kind of seconds of a device that is loaded so."""
    most = max(loads)
    return Loads(*[cost * (load / most if even else float(load == most)) for load in loads])


def _max_min(group: Sequence[Claim], problem: _Problem, shares: Shares, left: list[Bytes]) -> None:
    """Raise the claim with the least surplus to its next larger option, until none fits. None passes the best possible
    least surplus before all reach it. So, if larger levels need more bytes, the least surplus is the largest."""
    by_id = {c.id: c for c in group}
    above = {
        c.id: sorted(
            problem.options[c.id], key=lambda n: (c.options[n].level, problem.classes[c.id].sizes[n]), reverse=True
        )
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
