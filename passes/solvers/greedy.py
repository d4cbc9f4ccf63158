"""The default solver: find the boundary, choose segments and what they keep, lay out, measure.

A boundary is the step over budget with the most idle bytes; if that does not lower the peak, the one with the most at
the peak. For several longest segments, ``segments`` picks what to keep in the bytes available. The schedule is emitted,
and its overshoot is taken off the bytes. The cheapest that fits wins. What is still over budget is planned again,
recomputed stages included (nested checkpointing).

If values may wait on the host, larger budgets are solved too, and ``offload`` covers the rest. A second of waiting for
copies is charged as a second of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import inf

from jaxtensile.ir.ir import Graph
from jaxtensile.ir.plan import Plan, Problem, Program, Solve
from jaxtensile.passes.lifetimes.liveness import Liveness, live_ranges
from jaxtensile.passes.offload.offload import offload
from jaxtensile.passes.recompute.local_search import local_search
from jaxtensile.passes.recompute.segments import Choice, Needs
from jaxtensile.passes.recompute.stages import find_boundary
from jaxtensile.passes.solvers.answer import answer
from jaxtensile.passes.solvers.trials import Around, Explored, Trial
from jaxtensile.switches import on
from jaxtensile.units import Bytes, Seconds

_BOUNDARIES, _WORK = 12, 96
"""Limits for one budget: boundaries solved, and ops laid out per op of the program (XLA compiles one meanwhile).
Without the second, Llama at 18,207 MB spent 115 s. The first is a guess."""
_AWAY = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
"""Shares of the bytes that must leave the device for copies; the rest is recomputed. A guess: finer for few copies."""
_FIRST = (1, 1 / 4, 1 / 16)
"""Shares tried first, then the best's neighbours while they improve. Same plans as all, up to four times as soon."""
_NOTICED = 0.01
"""Copies of a smaller share of the bytes that must leave change little. A guess."""
_FAR_BELOW = 0.7
"""Easier budgets are skipped if copies lead below the least without a budget by this factor. In 400 random graphs
easier budgets led to 0.78 of it at least."""
_REPAIRS, _VAIN = 8, 3
"""Trials with segments of one length, and most in a row no smaller than the start. Guesses. At half and double no plan
changes with the first."""
_STRIDE = 4
"""Factor on the last cut in bytes where that changed nothing. A guess."""
_PEAK = 1 / 64
"""Share of the temporaries by which steps at the peak may be below it. A guess. At half and double no plan
changes."""
_WORTHWHILE = 0.01
"""Share of a step that a cheaper trial over budget must save to be followed too. A guess."""
_GROWTHS = 4
"""Trials with more bytes after one that fits, while over ``_LEFT`` of its temporaries are free. A guess: at half
DLRM at 0.5 does 0.12 % of a step more."""
_LEFT = 0.01
"""Share of a trial's temporaries that may stay free. A guess."""
_EASIER = (1 / 8, 1 / 4, 1 / 2)
"""Shares of the plain temporaries aimed at when a budget is missed. A guess. At half and double no plan changes."""
_HOPELESS = 1.1
"""A budget is not searched if the least without one is over it by this factor: searches for a budget end some 7 % lower
at best."""
_DEAR, _LOWER = 0.25, (1 / 64, 1 / 32)
"""A plan that misses, or costs over this share of a step, is compared with plans for budgets lower by these shares.
Guesses."""
PROGRAMS = 4
"""Programs of one job whose searches are kept, beside its bodies. A guess."""


def solve(problem: Problem) -> Plan:
    """Fit the problem's budget by recomputation; else the least found."""
    return prepare(problem)(problem.budget)


def prepare(problem: Problem, searches: Callable[[Graph, tuple[Seconds, ...]], Searches] | None = None) -> Solve:
    """``solve`` for several budgets of one problem. ``searches``: those of a program at a price; None: anew."""
    of, graph, costs = searches or cache(Searches), problem.graph, problem.costs
    known = of(graph, costs.charge)
    live = known.unchanged.live

    @lru_cache(maxsize=2)
    def copied(budget: Bytes) -> Trial:
        # Whoever is told that nothing fits asks once more for the least, which copies do not depend on. Which
        # plans without deep changes fit is asked again after other budgets.
        return _with_copies(problem, budget, known.search, live)

    def found(budget: Bytes, least: bool) -> Trial:
        best = known.cheapest(budget, least)
        if problem.link is not None and problem.host_budget and live.device > budget:
            moved = copied(budget)
            best = moved if moved.copies and _better(moved, best, budget) else best
        if best.device > budget and least and not (best.copies and best.device < _FAR_BELOW * known.search(0).device):
            best = min(best, known.least, key=lambda t: t.device)
            # Where nothing fits, the price is of no account.
            if best.device > budget and costs.seconds != costs.charge and on("by_seconds"):
                best = min(best, of(graph, costs.seconds).least, key=lambda t: t.device)
        return best

    @cache
    def smallest() -> Trial:
        return found(0, True)

    def at(budget: Bytes, /, *, least: bool = True) -> Plan:
        # Lower budgets do not always lead lower: what is found without one may be all there is. What was asked before
        # plays no part, or what an error names would be met or not as it happens.
        best = found(budget, least) if budget > 0 else smallest()
        if best.device > budget > 0 and least and on("lowest_of_all"):
            best = min(best, smallest(), key=lambda t: t.device)
        return answer(problem, best.program, best.live, "greedy", copies=best.copies, wait=best.wait)

    return at


class Solver:
    """``prepare`` for all programs of one job. Equal programs share searches, even if they differ in what may wait on
    the host."""

    def __init__(self, programs: int | None = PROGRAMS) -> None:
        self._searches = lru_cache(maxsize=programs)(Searches)

    def __call__(self, problem: Problem) -> Solve:
        return prepare(problem, self._searches)


class Searches:
    """Plans of one program by recomputation alone; work independent of the budget is done once."""

    def __init__(self, graph: Graph, charge: tuple[Seconds, ...]) -> None:
        program = Program.unchanged(graph)
        live = live_ranges(graph)
        self.unchanged = Trial(frozenset(), (program, live), 0.0)
        self._explored, self._whole = Explored(charge, self.unchanged), sum(charge)
        # Which boundary comes first depends on the budget, and an easier one may lead lower.
        self._easier = [live.device - int((1 - share) * live.temp) for share in _EASIER]
        self._found: dict[tuple[Bytes, Seconds, bool], Trial] = {}

    @cached_property
    def least(self) -> Trial:
        """The lowest trial without a budget, for the least budget that is not hopeless, and for easier ones. Then
        somewhat lower budgets while they lead lower (Mixer: 2,078 MB, then 1,914)."""
        near = int(self.search(0).device / _HOPELESS) + 1
        easier = self._easier if on("easier_budgets") else ()
        best = min((self.search(budget) for budget in (0, near, *easier)), key=lambda t: t.device)
        step = max(1, int(_LOWER[0] * self.unchanged.temp))
        while (
            best.device > step and on("lower_least") and (lower := self.search(best.device - step)).device < best.device
        ):
            best = lower
        return best

    def cheapest(self, budget: Bytes, least: bool) -> Trial:
        """The cheapest result for ``budget`` and, if that is dear or misses, for slightly lower budgets.

        The order of boundaries is luck, so lower budgets may give cheaper plans (``_LOWER``). After a miss they are
        tried only with ``least``.
        """
        best = self.search(budget)
        for share in _LOWER if budget > 0 else ():
            fits = best.device <= budget
            if (best.price <= _DEAR * self._whole if fits else not least) or not on("lower_budgets"):
                break
            lower = max(budget - int(share * self.unchanged.temp), 0)
            other = self.search(lower, best.price if fits else inf, best.device <= _HOPELESS * lower)
            if fits and other.device > budget:
                break  # still less leads no lower
            best = other if _better(other, best, budget) else best
        return best

    def search(self, budget: Bytes, below: Seconds = inf, hopeful: bool = False) -> Trial:
        """The best plan over boundary after boundary: around each the lowest trial first, then a cheaper one.

        ``search(0)`` if it and the first boundary stay far above ``budget``. ``below``: price limit; boundaries only
        add to prices. ``hopeful``: a plan near ``budget`` is known.
        """
        key = budget, below, hopeful
        return self._found[key] if key in self._found else self._found.setdefault(key, self._search(*key))

    def _search(self, budget: Bytes, below: Seconds, hopeful: bool) -> Trial:
        explored, unchanged = self._explored, self.unchanged
        left, work = _BOUNDARIES, _WORK * len(unchanged.profile)

        def boundary(here: Trial, above: Bytes = 0) -> list[Trial]:
            nonlocal left, work
            trials, laid = _one_boundary(explored, budget, here, above)
            work -= laid
            left = left - 1 if work > 0 else 0
            return trials

        def around(here: Trial) -> list[Trial]:
            trials = boundary(here)
            vain = here is not unchanged and not any(t.device < here.device for t in trials)
            if left and vain and on("peak_boundary"):
                # What waits longest does not make the peak: the boundary there.
                trials = boundary(here, here.device - int(_PEAK * here.temp))
            return trials

        def descend(here: Trial, best: Trial, trials: list[Trial]) -> Trial:
            for trial in trials:
                worth = trial.price < (below if best.device > budget else best.price)
                if trial.device < here.device and worth:
                    explored.keep(trial)
                    best = trial if _better(trial, best, budget) else best
                    best = descend(trial, best, around(trial)) if trial.device > budget and left else best
                explored.let_go(trial)
            return best

        if unchanged.device <= budget:
            return unchanged
        first = around(unchanged)
        if not hopeful and budget not in (0, *self._easier) and self._is_hopeless(first, budget):
            return self.search(0)
        return descend(unchanged, unchanged, first)

    def _is_hopeless(self, first: list[Trial], budget: Bytes) -> bool:
        """Whether the first boundary and ``search(0)`` both stay far above ``budget``."""
        far = _HOPELESS * budget
        nearest = min((t.device for t in first), default=self.unchanged.device)
        return nearest > far and on("hopeless_budgets") and self.search(0).device > far


def _with_copies(problem: Problem, budget: Bytes, search: Callable[[Bytes], Trial], plain: Liveness) -> Trial:
    """The best plan for larger budgets that copies bring down to ``budget``."""
    link, over = problem.link, plain.device - budget
    assert link is not None
    most = min(problem.host_budget, over)
    worth = problem.costs.per_second

    @cache
    def away(start: Trial) -> Trial:
        seconds = [problem.costs.seconds[o] if o >= 0 else 0.0 for o in start.program.origin]
        off = offload(start.program, seconds, link, budget, problem.host_budget)
        charge = off.program.again(problem.costs.charge)
        laid = off.program, off.live
        return Trial(start.kept, laid, charge, copies=off.copies, wait=off.wait, worth=worth)

    def at(share: float) -> Trial:
        return away(search(budget + int(share * most)))

    def rank(share: float) -> tuple[bool, float]:
        found = at(share)
        fits = found.device <= budget and bool(found.copies)
        return (not fits, found.price if fits else found.device)

    # With more copies less is recomputed and longer waited: the price falls, and then it rises.
    shares = [s for s in _AWAY if s == 1 or (s * most >= _NOTICED * over and on("mixed_copies"))]
    k = shares.index(min((s for s in _FIRST if s in shares), key=rank))
    for step in (-1, 1):
        while 0 <= k + step < len(shares) and rank(shares[k + step]) < rank(shares[k]):
            k += step
    return at(shares[k])


def _one_boundary(explored: Explored, budget: Bytes, start: Trial, above: Bytes) -> tuple[list[Trial], int]:
    """The best trials around one boundary of ``start``, and the number of ops laid out.

    The boundary is over the budget and ``above``. First comes the cheapest trial that fits, else the lowest. Then, if
    any, a cheaper one over budget, which another boundary keeps from fitting. Empty if nothing waits across the
    boundary. Remembered ops count too: the number decides when a search ends.
    """
    level = max(budget, above) - (start.device - start.temp)
    step = find_boundary(start.program.graph, start.live, max(level, 0))
    known = explored.around(start, step) if step is not None else None
    if known is None:
        return [], 0
    around = _Around(budget, known)
    menu, charge = known.menu, known.charge
    fits = [found for span in menu.spans if (found := around.with_span(span)) is not None]
    if fits:
        around.grow(min(fits, key=lambda f: f.trial.price))
        local_search(budget, start.program, menu.boundary, menu.again, charge, around.measure, around.best)
    trials = around.known.values()
    lowest = around.best if fits else min(trials, key=lambda t: t.device)
    # Trials that keep different values and need the same bytes: what they need them for lies elsewhere.
    times = Counter(t.device for t in trials)
    worse = budget if lowest.device <= budget else lowest.device
    dearer = lowest.price - _WORTHWHILE * sum(charge)
    stuck = [t for t in trials if times[t.device] > 1 and worse < t.device < start.device and t.price < dearer]
    found = [lowest, *([min(stuck, key=lambda t: (t.device, t.price))] if stuck and on("second_trial") else [])]
    for trial in trials:
        if trial not in found:
            explored.let_go(trial)
    return found, sum(len(trial.profile) for trial in trials)


@dataclass(frozen=True, slots=True)
class _Fit:
    """A trial that fits, and the inputs of its choice."""

    trial: Trial
    span: int
    capacity: Bytes
    needs: Needs


class _Around:
    """The trials around one boundary for one budget."""

    def __init__(self, budget: Bytes, around: Around) -> None:
        self.budget, self.around, self.menu = budget, around, around.menu
        self.known: dict[frozenset[int], Trial] = {}
        self.fixed = around.start.device - around.start.temp
        # What the boundary needs beside the kept values; the rest of the budget is for keeping.
        first = self.measure(self.menu.least(self.menu.spans[0]))
        self.base = self.fixed + max(first.profile[: first.barrier], default=0) - self.menu.size(first.kept)

    @property
    def fits(self) -> list[Trial]:
        return [t for t in self.known.values() if t.device <= self.budget]

    @property
    def best(self) -> Trial:
        """The cheapest that fits."""
        return min(self.fits, key=lambda t: t.price)

    def measure(self, kept: frozenset[int]) -> Trial:
        trial = self.known[kept] = self.around.measure(kept)
        return trial

    def choose(self, span: int, capacity: Bytes, needs: Needs) -> Choice | None:
        """The cheapest choice by ``needs``; None if none, or if none is cheaper than what fits."""
        choice = self.menu.choose(span, capacity, self.budget - self.fixed, needs)
        if choice is None or (self.fits and self.around.price(choice.kept) >= self.best.price):
            return None
        return choice

    def tried(self, choice: Choice, needs: Needs) -> Trial:
        """Measure a choice. If it does not fit, ``needs`` learns from it."""
        trial = self.measure(choice.kept)
        if trial.device > self.budget:
            needs.learn(self.menu, choice, trial.clones, trial.profile)
        return trial

    def with_span(self, span: int) -> _Fit | None:
        """Segments of at most ``span`` stages until a trial fits; if none does, the smallest is measured."""
        capacity = self.budget - self.base
        last: frozenset[int] | None = None
        less = vain = 0
        needs = Needs()
        for _ in range(_REPAIRS):
            choice = self.choose(span, capacity, needs)
            if choice is None:
                break
            trial = self.tried(choice, needs)
            if trial.device <= self.budget:
                return _Fit(trial, span, capacity, needs)
            vain = vain + 1 if trial.device >= self.around.start.device else 0
            if vain == _VAIN:
                break
            forward, _ = next(iter(trial.clones), (len(trial.profile), -1))
            over = self.fixed + max(trial.profile[:forward]) - self.budget
            # At the boundary only keeping less helps; what a segment needs when it is made again is known from now on.
            # Where that changes nothing, a larger step.
            same = (less * _STRIDE if less else trial.device - self.budget) if choice.kept == last else 0
            less = same or max(over, 0)
            last = choice.kept
            if less:
                capacity = min(capacity, self.menu.size(choice.kept)) - less
        if not self.fits:
            self.measure(self.menu.least(span))
        return None

    def grow(self, fit: _Fit) -> None:
        """Keep more while bytes are left: the boundary's other bytes were an estimate."""
        trial, capacity = fit.trial, fit.capacity
        high: int | None = None
        for _ in range(_GROWTHS):
            room = self.budget - trial.device
            if not trial.charge or room <= _LEFT * trial.temp or not on("grow"):
                return
            more = capacity + room if high is None else (capacity + high) // 2
            choice = self.choose(fit.span, more, fit.needs)
            if choice is None:
                return
            grown = self.tried(choice, fit.needs)
            if grown.device <= self.budget:
                capacity, trial = more, grown
            else:
                high = more


def _better(a: Trial, b: Trial, budget: Bytes) -> bool:
    if a.device <= budget and b.device <= budget:
        return a.price < b.price
    return a.device < b.device
