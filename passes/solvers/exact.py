"""The cheapest plan around one boundary: an integer programme, its schedule, and the gap between them.

The search space: kept sets, the order in which ``with_clones`` demands clones, and bytes at single steps (``milp``).
Its answers are exactly the schedules that ``with_clones`` makes around the boundary. Only steps that a found schedule
violates become constraints. Rejected were:

* stages x ops, as in Checkmate (Jain et al., "Breaking the memory wall", 2020): quadratic in ops, hopeless beyond some
  sixty without rounding, and most schedules cannot be emitted;
* kept sets with one row per stage: a stage's needs depend on the stages that a dropped value joins.

May be kept: any of ``nodes``, buffers of the plain program, values that the descent reads, and values smaller than
their sources. Small values always are. Fused values that only recomputation reads never are. Bytes are those of
``liveness``. The bound foresees which fused values of the plain program a schedule stores, but not in every case.

The optimum is a lower bound on the charge, the measured schedule an upper one. If the schedule needs more bytes than
the model sees, bytes are set aside at that step until it fits, or the answer is excluded and the next best tried.
Several boundaries are solved in turn; what is proven is then unknown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from jaxtensile.ir.plan import Plan, Problem, Program
from jaxtensile.passes.lifetimes.liveness import Liveness, live_ranges
from jaxtensile.passes.recompute.clones import Recomputation, with_clones_listed
from jaxtensile.passes.recompute.nodes import Nodes
from jaxtensile.passes.recompute.stages import Boundary, boundary_at, cut_points, find_boundary
from jaxtensile.passes.solvers.answer import answer
from jaxtensile.passes.solvers.milp import INF, TOLERANCE, Model
from jaxtensile.units import Bytes, Seconds

TIME_LIMIT: Seconds = 60.0
"""Default seconds of search for one budget (else ``by_name.ALLOWANCE``). A guess."""
BOUNDARIES = 4
"""Most boundaries solved one after another. A guess."""
_REPAIRS = 40
"""Most schedules measured while bytes are set aside. A guess."""
_NEW_ROWS = 6
"""Steps over budget that become constraints at once. A guess."""
_EXCLUDED = 200
"""Most answers excluded one by one. A guess."""
_COARSE, _FINE = 1e-3, TOLERANCE
"""Gap of a solution, as a share of a step: while violated steps are sought, and then. The first is a guess."""
_RESERVE = 0.25
"""Share of the time kept for a schedule that fits, if the bound takes long. A guess."""
_BLURS = 3
"""Tolerances of a solution up to which charges count as equal. A guess."""
_PROVEN = 1e-5
"""Relative gap that counts as none, as ``by_name._PROVEN``."""


@dataclass(frozen=True)
class Trial:
    """One kept set, laid out and measured."""

    kept: frozenset[int]
    program: Program
    live: Liveness
    charge: Seconds

    @cached_property
    def at_peak(self) -> frozenset[int]:
        """Values of the problem with a version in memory at the peak."""
        return frozenset(self.program.version_of[r.value] for r in self.live.at_peak()[1])

    @property
    def device(self) -> Bytes:
        return self.live.device


@dataclass
class Search:
    """One boundary for one budget: the best schedules and the bound."""

    start: Trial
    boundary: Boundary
    cuts: list[int]
    charge: list[Seconds]
    budget: Bytes
    model: Model
    deadline: float
    bound: Seconds = 0.0
    best: Trial | None = None
    lowest: Trial | None = None
    known: dict[frozenset[int], Trial] = field(default_factory=dict[frozenset[int], Trial])

    @cached_property
    def again(self) -> Recomputation:
        """Ops to rerun for a kept set."""
        return Recomputation(self.start.program.graph, self.boundary)

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def run(self) -> None:
        """Bound, then repair, then close the gap."""
        self.model.look_at(max(self.boundary.step - 1, 0))
        if not self.bounded():
            self.repaired()
            self.closed()

    def bounded(self) -> bool:
        """Add violated steps until the optimum fits or no step is new; whether it fits."""
        tolerances = [_FINE, _COARSE]
        reserve = _RESERVE * self.left
        while self.left > reserve:
            found = self.model.solve(self.left - reserve, tolerance=tolerances[-1])
            self.bound = max(self.bound, found.bound)
            if found.kept is None:
                return False
            trial = self.measure(found.kept)
            if trial.device <= self.budget and len(tolerances) == 1:
                return True
            fresh = [s for s, _ in self.violated(trial) if not self.model.has(s)]
            if not fresh and len(tolerances) > 1:
                tolerances.pop()
            elif not fresh:
                return False
            for step in fresh[:_NEW_ROWS]:
                self.model.look_at(step)
        return False

    def repaired(self) -> None:
        """Set bytes aside where schedules need more than the model sees."""
        for _ in range(_REPAIRS):
            if self.left <= 0:
                break
            found = self.model.solve(self.left)
            short = found.kept is None and found.bound == INF
            if short:
                found = self.model.solve(self.left, short=True)
            if found.kept is None:
                break
            new = found.kept not in self.known
            trial = self.measure(found.kept)
            if trial.device <= self.budget or (short and not new):
                break
            for step, over in self.violated(trial)[:_NEW_ROWS]:
                if self.model.has(step):
                    self.model.set_aside(step, over)
                self.model.look_at(step)
        self.model.slack.clear()

    def closed(self) -> None:
        """Exclude the cheapest answers one by one while they do not fit."""
        for _ in range(_EXCLUDED):
            if self.left <= 0 or self.proven:
                break
            found = self.model.solve(self.left)
            # What was excluded is known: the bound is the least of it and of the rest.
            least = self.best.charge - self.start.charge if self.best else INF
            self.bound = max(self.bound, min(found.bound, least))
            if found.kept is None:
                break
            self.measure(found.kept)
            self.model.forbid(found.kept)

    @property
    def above(self) -> Seconds:
        """Charge of the best above the bound; 0 up to ``blur``."""
        assert self.best is not None
        above = self.best.charge - self.start.charge - self.bound
        return above if above > self.blur else 0.0

    @property
    def blur(self) -> Seconds:
        """Charge that counts as none."""
        cost = self.best.charge - self.start.charge if self.best else 0.0
        return max(_PROVEN * cost, _BLURS * TOLERANCE * sum(self.charge))

    @property
    def proven(self) -> bool:
        """Whether the best schedule is optimal."""
        return self.best is not None and not self.above

    @property
    def honest(self) -> bool:
        """Whether no schedule was found below the bound."""
        return self.best is None or self.bound <= self.best.charge - self.start.charge + self.blur

    @property
    def gap(self) -> float:
        """Gap between best and bound, as a share of the best's charge."""
        assert self.best is not None
        return self.above / (self.best.charge - self.start.charge) if self.above else 0.0

    def measure(self, kept: frozenset[int]) -> Trial:
        trial = self.known.get(kept)
        if trial is None:
            start, again = self.start, self.again.ops(kept)
            program, _ = with_clones_listed(start.program, start.live.kernels, self.boundary, kept, again, self.cuts)
            charge = self.start.charge + sum(self.charge[o] for o in again)
            trial = self.known[kept] = Trial(kept, program, live_ranges(program.graph), charge)
            if trial.device <= self.budget and (self.best is None or trial.charge < self.best.charge):
                self.best = trial
            if self.lowest is None or trial.device < self.lowest.device:
                self.lowest = trial
        return trial

    def violated(self, trial: Trial) -> list[tuple[int, Bytes]]:
        """Steps of the plain schedule where ``trial`` is over budget, and by how much: one per run, worst first."""
        graph, profile = trial.program.graph, trial.live.profile
        before = len(self.start.program.graph.values)
        made = {r: op.id for op in self.start.program.graph.ops for r in op.results}
        room = self.budget - (trial.device - trial.live.temp)
        worst: dict[int, Bytes] = {}
        step = len(self.start.program.graph.ops) - 1
        for op in reversed(graph.ops):
            # Clones and barriers belong to the op that demands them.
            if op.results and all(r < before for r in op.results):
                step = made[op.results[0]]
            if profile[op.id] > room:
                worst[step] = max(worst.get(step, 0), profile[op.id] - room)
        peaks = [s for s, over in worst.items() if over >= worst.get(s - 1, 0) and over > worst.get(s + 1, 0)]
        return sorted(((s, worst[s]) for s in peaks), key=lambda p: (-p[1], p[0]))


def solve(problem: Problem) -> Plan:
    """The cheapest schedule around the boundary that fits, with its gap."""
    return prepare(problem)(problem.budget)


def prepare(problem: Problem, time_limit: Seconds = TIME_LIMIT) -> Callable[[Bytes], Plan]:
    """``solve`` for several budgets of one problem, each within ``time_limit`` seconds."""
    program = Program.unchanged(problem.graph)
    unchanged = Trial(frozenset(), program, live_ranges(program.graph), 0.0)

    def at(budget: Bytes) -> Plan:
        here, deadline = unchanged, time.monotonic() + time_limit
        gap: float | None = 0.0
        bound: Seconds | None = 0.0
        for k in range(BOUNDARIES):
            if here.device <= budget:
                break
            search = search_around(problem, here, budget, deadline)
            if search is None:
                gap = bound = None
                break
            search.run()
            found = search.best or search.lowest
            if k == 0:
                bound = search.bound if search.honest else None
            gap = search.gap if search.best is not None and bound is not None and k == 0 else None
            if found is None or (found is not search.best and found.device >= here.device):
                break
            here = found
        return answer(problem, here.program, here.live, "exact", gap=gap, bound=bound)

    return at


def search_around(problem: Problem, here: Trial, budget: Bytes, deadline: float) -> Search | None:
    """The search around the highest boundary of ``here``; None if nothing waits across one."""
    graph, live = here.program.graph, here.live
    room = budget - (live.device - live.temp)
    step = find_boundary(graph, live, max(room, 0))
    if step is None:
        return None
    boundary = boundary_at(graph, step)
    if not boundary.needed:
        return None
    cuts, _ = cut_points(graph, boundary)
    charge = [problem.costs.charge[o] if o >= 0 else 0.0 for o in here.program.origin]
    nodes = Nodes(graph, live, boundary)
    model = Model(nodes, live, charge, room)
    return Search(here, boundary, cuts, charge, budget, model, deadline)
