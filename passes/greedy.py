"""The default solver: price the bytes, cut, lay out, measure; raise the price until it fits.

One mountain at a time: the step over budget with the most idle bytes is the turn; a bisection
over the price per byte finds the cheapest kept set whose predicted peak fits, for several
spacings of the stages; left-over bytes are then spent on the stages that save the most time.
Repeats on what is left over budget, so recomputed stages are planned again (nested
checkpointing) when one round is not enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtensile.passes.emit import emit, recomputed_ops
from jaxtensile.passes.liveness import Liveness, live_ranges
from jaxtensile.passes.mincut import ResidualCut
from jaxtensile.passes.stages import Mountain, find_turn, mountain_at, waists
from jaxtensile.plan import Action, Keep, MemoryUse, Plan, Problem, Program, Remat

_PRICES = tuple(10.0**e for e in (-16, -14.5, -13.5, -13, -12.5, -12, -11.5, -11, -10.5, -10, -9.5, -9, -8, -7))
_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class _Trial:
    """One kept set, laid out and measured."""

    kept: frozenset[int]
    cuts: tuple[int, ...]
    program: Program
    live: Liveness
    seconds: float

    @property
    def device(self) -> int:
        return self.live.device


def solve(problem: Problem) -> Plan:
    """Fit the problem's budget by recomputation; the least found when it cannot be met."""
    program = Program.unchanged(problem.graph)
    live = live_ranges(program.graph)
    for _ in range(_ROUNDS):
        if live.device <= problem.budget:
            break
        trial = _one_mountain(problem, program, live)
        if trial is None or trial.device >= live.device:
            break
        program, live = trial.program, trial.live
    return _as_plan(problem, program, live)


def _one_mountain(problem: Problem, program: Program, live: Liveness) -> _Trial | None:
    graph = program.graph
    fixed = live.argument + live.output - live.alias
    turn = find_turn(graph, live, max(problem.budget - fixed, 0))
    if turn is None:
        return None
    mountain = mountain_at(graph, turn)
    if not mountain.needed:
        return None
    seconds = [problem.costs.charge[o] if o >= 0 else 0.0 for o in program.origin]
    all_cuts = waists(graph, mountain)
    best: _Trial | None = None
    for cuts in _spacings(all_cuts):
        search = _Search(problem.budget, program, live, mountain, seconds, cuts, all_cuts)
        found = search.cheapest()
        if best is None or _better(found, best, problem.budget):
            best = found
    return best


def _better(a: _Trial, b: _Trial, budget: int) -> bool:
    if a.device <= budget and b.device <= budget:
        return a.seconds < b.seconds
    return a.device < b.device


def _spacings(cuts: Sequence[int]) -> list[tuple[int, ...]]:
    """All waists, every second, every fourth, …, none."""
    out = [tuple(cuts)]
    step = 2
    while step <= len(cuts):
        out.append(tuple(cuts[step - 1 :: step]))
        step *= 2
    if cuts:
        out.append(())
    return out


class _Search:
    """Bisection over the price for one spacing of the stages."""

    def __init__(
        self,
        budget: int,
        program: Program,
        live: Liveness,
        mountain: Mountain,
        seconds: Sequence[float],
        cuts: tuple[int, ...],
        all_cuts: Sequence[int],
    ) -> None:
        self.budget, self.program, self.live, self.mountain = budget, program, live, mountain
        self.seconds, self.cuts, self.all_cuts = seconds, cuts, all_cuts
        self.cut = ResidualCut(program.graph, mountain, seconds, cuts)
        self.tried: dict[frozenset[int], _Trial] = {}

    def measure(self, kept: frozenset[int]) -> _Trial:
        known = self.tried.get(kept)
        if known is None:
            graph = self.program.graph
            program = emit(self.program, self.live.kernels, self.mountain, kept, self.all_cuts)
            again = recomputed_ops(graph, self.mountain, kept)
            known = _Trial(kept, self.cuts, program, live_ranges(program.graph), sum(self.seconds[o] for o in again))
            self.tried[kept] = known
        return known

    def at(self, i: int) -> _Trial:
        return self.measure(self.cut.keep(_PRICES[i]))

    def cheapest(self) -> _Trial:
        low, high = 0, len(_PRICES) - 1
        first = self.at(low)
        if first.device <= self.budget:
            return self.fill(first, None)
        last = self.at(high)
        if last.device > self.budget:
            return self.least(first, last)
        over, fits = first, last
        while high - low > 1:
            middle = (low + high) // 2
            trial = self.at(middle)
            if trial.device <= self.budget:
                high, fits = middle, trial
            else:
                low, over = middle, trial
        price_low, price_high = _PRICES[low], _PRICES[high]
        for _ in range(4):
            trial = self.measure(self.cut.keep(math.sqrt(price_low * price_high)))
            if trial.kept in (over.kept, fits.kept):
                break
            if trial.device <= self.budget:
                price_high, fits = math.sqrt(price_low * price_high), trial
            else:
                price_low, over = math.sqrt(price_low * price_high), trial
        return self.fill(fits, over)

    def least(self, first: _Trial, last: _Trial) -> _Trial:
        """Nothing fits: the smallest peak over all prices."""
        trials = [first, last, *(self.at(i) for i in range(2, len(_PRICES) - 1, 2))]
        fitting = [t for t in trials if t.device <= self.budget]
        return min(fitting, key=lambda t: t.seconds) if fitting else min(trials, key=lambda t: (t.device, t.seconds))

    def fill(self, fits: _Trial, over: _Trial | None) -> _Trial:
        """Spend what is left of the budget: first whole stages, then single values."""
        if over is not None:
            fits = self._by_stage(fits, over)
        return self._by_value(fits)

    def _by_stage(self, fits: _Trial, over: _Trial) -> _Trial:
        from bisect import bisect_right

        graph = self.program.graph
        made = {r: o for o in self.mountain.cone for r in graph.ops[o].results}
        again_fits = recomputed_ops(graph, self.mountain, fits.kept)
        again_over = recomputed_ops(graph, self.mountain, over.kept)
        gain: dict[int, float] = {}
        price: dict[int, int] = {}
        for o in again_fits ^ again_over:
            s = bisect_right(self.all_cuts, o)
            gain[s] = gain.get(s, 0.0) + (self.seconds[o] if o in again_fits else -self.seconds[o])
        for v in fits.kept ^ over.kept:
            s = bisect_right(self.all_cuts, made[v])
            size = graph.values[v].nbytes
            price[s] = price.get(s, 0) + (size if v in over.kept else -size)
        stages = [s for s in set(gain) | set(price) if gain.get(s, 0.0) > 0]
        stages.sort(key=lambda s: (-gain[s] / max(price.get(s, 0), 1), -s))

        def mixed(count: int) -> _Trial:
            chosen = set(stages[:count])
            kept = {v for v in fits.kept if bisect_right(self.all_cuts, made[v]) not in chosen}
            kept |= {v for v in over.kept if bisect_right(self.all_cuts, made[v]) in chosen}
            return self.measure(frozenset(kept))

        low, high, best = 0, len(stages), fits
        while high - low > 1:
            middle = (low + high) // 2
            trial = mixed(middle)
            if trial.device <= self.budget:
                low = middle
                best = trial if trial.seconds < best.seconds else best
            else:
                high = middle
        return best

    def _by_value(self, fits: _Trial) -> _Trial:
        graph = self.program.graph
        for _ in range(3):
            slack = self.budget - fits.device
            again = recomputed_ops(graph, self.mountain, fits.kept)
            offers = [
                (self.seconds[o] / max(sum(graph.values[r].nbytes for r in graph.ops[o].results), 1), o)
                for o in again
                if self.seconds[o] > 0 and not graph.ops[o].pinned
            ]
            offers.sort(reverse=True)
            added: set[int] = set()
            for _, o in offers:
                size = sum(graph.values[r].nbytes for r in graph.ops[o].results)
                if size <= slack and self.live.kernels.is_root[o]:
                    added.update(graph.ops[o].results)
                    slack -= size
            if not added:
                break
            trial = self.measure(fits.kept | added)
            if trial.device > self.budget or trial.seconds >= fits.seconds:
                break
            fits = trial
        return fits


def _as_plan(problem: Problem, program: Program, live: Liveness) -> Plan:
    clones = program.clones()
    seconds = sum(problem.costs.seconds[program.origin[op.id]] for op in clones)
    return Plan(
        program=program,
        actions=_actions(problem, program),
        predicted=MemoryUse(argument=live.argument, output=live.output, temp=live.temp, alias=live.alias),
        overhead=seconds,
        recompute_flops=sum(op.flops for op in clones),
        solver="greedy",
    )


def _actions(problem: Problem, program: Program) -> tuple[Action, ...]:
    """Keep or Remat for every value of the original that a second version of something replaces or passes."""
    graph = problem.graph
    recipe: dict[int, int] = {}
    kept: dict[int, None] = {}
    originals = len(graph.values)
    for op in program.graph.ops:
        o = program.origin[op.id]
        if o < 0:
            kept.update(dict.fromkeys(program.version_of[v] for v in op.operands))
        elif any(r >= originals for r in op.results):
            for r in op.results:
                recipe[program.version_of[r]] = o
    inputs = set(graph.inputs)
    from jaxtensile.ir import OpId, ValueId

    keeps = [Keep(ValueId(v), graph.values[v].nbytes) for v in kept if v not in recipe and v not in inputs]
    remats = [Remat(ValueId(v), graph.values[v].nbytes, OpId(o)) for v, o in recipe.items()]
    return (*keeps, *remats)
