"""The default solver: find the turn, choose segments and what they keep, lay out, measure.

One mountain at a time: the step over budget with the most idle bytes is the turn. For several
longest segments, ``segments`` picks what to keep for the bytes there are; the schedule is emitted,
its peak predicted, and what it misses by is taken off the bytes. The cheapest that fits wins.
Repeats on what is left over budget, so recomputed stages are planned again (nested
checkpointing) when one round is not enough.

Where values may wait on the host, the same is done for larger budgets too, and ``offload`` takes
the program the rest of the way; recomputation and waiting for copies are compared in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtensile.ir import Graph
from jaxtensile.passes.answer import answer
from jaxtensile.passes.emit import emit, recomputed_ops
from jaxtensile.passes.liveness import Liveness, live_ranges
from jaxtensile.passes.offload import Copy, offload
from jaxtensile.passes.segments import Menu
from jaxtensile.passes.stages import find_turn, mountain_at
from jaxtensile.plan import Plan, Problem, Program
from jaxtensile.units import Bytes

_MOUNTAINS = 12
"""Turns that are solved for one budget."""
_AWAY = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Shares of what must leave the device that are given to copies; the rest is recomputed."""
_REPAIRS = 8
_STRIDE = 4
_WORTHWHILE = 0.01
"""A dearer plan is not given up for another turn to be solved unless this share of a step can be gained."""
_GROWTHS = 4
"""Trials with more bytes after one that fits, while more than ``_LEFT`` of its temporaries are left over."""
_LEFT = 0.01
_POLISHES, _WORTH = 8, 0.005
"""Single ops tried in the end as kept after all, and the share of the program's charge that is worth a try."""
_EASIER = (1 / 8, 1 / 4, 1 / 2)
"""When a budget is missed: shares of the plain program's temporaries that are aimed at instead."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """One kept set, laid out and measured."""

    kept: frozenset[int]
    program: Program
    live: Liveness
    charge: float
    copies: tuple[Copy, ...] = ()
    wait: float = 0.0

    @property
    def device(self) -> int:
        return self.live.device

    @property
    def price(self) -> float:
        """What solvers minimise: charge of what runs again and seconds of waiting for copies."""
        return self.charge + self.wait


def solve(problem: Problem) -> Plan:
    """Fit the problem's budget by recomputation; the least found when it cannot be met."""
    return prepare(problem)(problem.budget)


def prepare(problem: Problem) -> Callable[[Bytes], Plan]:
    """``solve`` for several budgets of one problem: what does not depend on the budget is done once."""
    program = Program.unchanged(problem.graph)
    live = live_ranges(program.graph)
    menus: dict[int, Menu] = {}
    unchanged = _Trial(frozenset(), program, live, 0.0)

    def search(budget: Bytes) -> _Trial:
        """Mountain after mountain, as low as each can be first, then as cheaply; the best end of all ways."""
        left = _MOUNTAINS

        def descend(here: _Trial, best: _Trial) -> _Trial:
            nonlocal left
            if _better(here, best, budget):
                best = here
            if here.device <= budget or not left:
                return best
            left -= 1
            for trial in _one_mountain(problem, budget, here, menus if here is unchanged else {}):
                if trial.device < here.device and (best.device > budget or trial.price < best.price):
                    best = descend(trial, best)
            return best

        return descend(unchanged, unchanged)

    def at(budget: Bytes) -> Plan:
        best = search(budget)
        for share in _EASIER:
            easier = live.device - int((1 - share) * live.temp)
            if budget < best.device and budget < easier:
                # Which turn comes first depends on the budget, and an easier one may lead lower.
                best = min(best, search(easier), key=lambda t: t.device)
        if problem.link is not None and problem.host_budget and live.device > budget:
            best = _with_copies(problem, budget, best, search, live)
        return answer(problem, best.program, best.live, "greedy", copies=best.copies, wait=best.wait)

    return at


def _with_copies(
    problem: Problem, budget: Bytes, best: _Trial, search: Callable[[Bytes], _Trial], plain: Liveness
) -> _Trial:
    """The better of ``best`` and of plans for larger budgets that copies to the host bring down to this one."""
    assert problem.link is not None
    most = min(problem.host_budget, plain.device - budget)
    for share in _AWAY:
        start = search(budget + int(share * most))
        seconds = [problem.costs.seconds[o] if o >= 0 else 0.0 for o in start.program.origin]
        off = offload(start.program, seconds, problem.link, budget, problem.host_budget)
        if off.copies:
            charge = off.program.again(problem.costs.charge)
            found = _Trial(start.kept, off.program, off.live, charge, off.copies, off.wait)
            if _better(found, best, budget):
                best = found
    return best


def _one_mountain(problem: Problem, budget: Bytes, start: _Trial, menus: dict[int, Menu]) -> list[_Trial]:
    """The best plan around one turn of the program that ``start`` is; ``menus``: known ones by turn.

    The lowest when none fits. Behind it the cheapest of those that another turn keeps from fitting, if
    there are such. Empty when nothing waits across the turn.
    """
    program, live, graph = start.program, start.live, start.program.graph
    turn = find_turn(graph, live, max(budget - (live.device - live.temp), 0))
    if turn is None:
        return []
    charge = [problem.costs.charge[o] if o >= 0 else 0.0 for o in program.origin]
    menu = menus.get(turn)
    if menu is None:
        mountain = mountain_at(graph, turn)
        if not mountain.needed:
            return []
        menu = menus[turn] = Menu(graph, mountain, charge)
    known: dict[frozenset[int], _Trial] = {}

    def measure(kept: frozenset[int]) -> _Trial:
        trial = known.get(kept)
        if trial is None:
            planned = emit(program, live.kernels, menu.mountain, kept, menu.waists)
            again = recomputed_ops(graph, menu.mountain, kept)
            trial = _Trial(kept, planned, live_ranges(planned.graph), start.charge + sum(charge[o] for o in again))
            known[kept] = trial
        return trial

    # What the turn needs beside the kept values; the rest of the budget is for keeping.
    first = measure(menu.least(menu.spans[0]))
    barrier = next((i for i, o in enumerate(first.program.origin) if o < 0), len(first.program.origin))
    base = first.device - first.live.temp + max(first.live.profile[:barrier], default=0) - menu.size(first.kept)
    fits: list[tuple[_Trial, Bytes, int]] = []
    for span in menu.spans:
        found = _with_span(budget, base, menu, span, measure)
        if found is not None:
            fits.append((*found, span))
    if fits:
        trial, capacity, span = min(fits, key=lambda f: f[0].price)
        _grow(budget, capacity, menu, span, measure, trial)
        best = min((t for t in known.values() if t.device <= budget), key=lambda t: t.price)
        _polish(budget, graph, menu, charge, measure, best)
    trials = known.values()
    lowest = min(trials, key=lambda t: t.device)
    if lowest.device <= budget:
        lowest = min((t for t in trials if t.device <= budget), key=lambda t: t.price)
    # Trials that keep different values and need the same bytes: what they need them for lies elsewhere.
    times = Counter(t.device for t in trials)
    worse = budget if lowest.device <= budget else lowest.device
    dearer = lowest.price - _WORTHWHILE * sum(charge)
    stuck = [t for t in trials if times[t.device] > 1 and worse < t.device < start.device and t.price < dearer]
    return [lowest, *([min(stuck, key=lambda t: (t.device, t.price))] if stuck else [])]


def _with_span(
    budget: Bytes, base: Bytes, menu: Menu, span: int, measure: Callable[[frozenset[int]], _Trial]
) -> tuple[_Trial, Bytes] | None:
    """Measure trials with segments of at most ``span`` stages until one fits, the smallest if none does.

    Returns the one that fits and the bytes it was given to keep.
    """
    capacity = budget - base
    last: frozenset[int] | None = None
    less = 0
    for _ in range(_REPAIRS):
        kept = menu.choose(span, capacity)
        if kept is None:
            break
        trial = measure(kept)
        if trial.device <= budget:
            return trial, capacity
        # What crosses the chosen cuts comes on top of the capacity, so a small step may change nothing.
        less = less * _STRIDE if kept == last else trial.device - budget
        last = kept
        capacity = min(capacity, menu.size(kept)) - less
    measure(menu.least(span))
    return None


def _polish(
    budget: Bytes,
    graph: Graph,
    menu: Menu,
    charge: Sequence[float],
    measure: Callable[[frozenset[int]], _Trial],
    best: _Trial,
) -> None:
    """Keep what is dearest to run again where it does no harm: segments are chosen for the turn's bytes alone,
    and a value that a low stage keeps may fit where the peak lies elsewhere."""
    worth = _WORTH * sum(charge)
    tried: set[int] = set()
    for _ in range(_POLISHES):
        again = recomputed_ops(graph, menu.mountain, best.kept) - tried
        o = max(again, key=lambda o: (charge[o], o), default=None)
        if o is None or charge[o] < worth:
            return
        tried.add(o)
        trial = measure(best.kept | {r for r in graph.ops[o].results if r not in menu.mountain.always})
        if trial.device <= budget and trial.price < best.price:
            best = trial


def _grow(
    budget: Bytes, capacity: int, menu: Menu, span: int, measure: Callable[[frozenset[int]], _Trial], fits: _Trial
) -> None:
    """Keep more while bytes are left: what the turn needs beside the kept values was only an estimate."""
    high: int | None = None
    for _ in range(_GROWTHS):
        room = budget - fits.device
        if not fits.charge or room <= _LEFT * fits.live.temp:
            return
        more = capacity + room if high is None else (capacity + high) // 2
        kept = menu.choose(span, more)
        if kept is None or kept == fits.kept:
            return
        trial = measure(kept)
        if trial.device <= budget:
            capacity, fits = more, trial
        else:
            high = more


def _better(a: _Trial, b: _Trial, budget: Bytes) -> bool:
    if a.device <= budget and b.device <= budget:
        return a.price < b.price
    return a.device < b.device
