"""Solvers by name. All map a problem, then a budget, to a ``Plan``.

* ``greedy``: fast at any size.
* ``exact``: an integer programme around one boundary, beside greedy, with a bound on the gap.
* ``chain``: a dynamic programme for chains.
* ``auto``: greedy, with small programs ``finished`` by the integer programme, without proof, if greedy's plan costs
  over a hundredth of a step, and enough to be worth the time. No clock decides: equal programs get equal plans on
  every machine.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Final

from jaxtensile.errors import SolverError
from jaxtensile.ir.ir import Graph
from jaxtensile.ir.plan import Plan, Prepare, Problem, Program, Solve
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.solvers import greedy
from jaxtensile.passes.solvers.answer import answer
from jaxtensile.switches import on
from jaxtensile.units import Bytes, Seconds

NAMES: Final = ("auto", "greedy", "exact", "chain")
TO_THE_HOST: Final = ("auto", "greedy")
"""Solvers that may offload residuals to host memory."""

ALLOWANCE: Final[Seconds] = 60.0
"""Seconds of ``exact`` for all plans of one program; each takes at most half of the rest. A guess."""
_PROVEN: Final = 1e-5
"""Relative gap that counts as none: ``milp.TOLERANCE`` of a step, for a plan that costs a hundredth of one."""
_SMALL: Final = 2000
"""Ops up to which the programme takes no longer than XLA's compile."""
_DEAR: Final = 0.01
"""Share of a step below which a plan is good enough. A guess."""
PAYS: Final[Seconds] = 2e-7
"""Seconds of a step, for each op, below which a plan is good enough: the programme takes about 2 ms an op, which then
are not saved in 10,000 steps."""
_LOWER: Final = 1 / 32
"""Where nothing fits, the share by which a lower budget is tried: a step with an SVD needs it. A guess."""
_CLOSE: Final = 1.25
"""Factor over the budget above which a plan is not improved. A guess."""


def named(name: str) -> Prepare:
    """The solver ``name`` for the programs of one job; ``SolverError`` with all names if there is none."""
    if name in ("auto", "greedy"):
        return Auto() if name == "auto" else greedy.Solver()
    if name == "exact":
        return _exact()
    if name == "chain":
        return _chain()
    raise SolverError(f"unknown solver {name!r}: use {', '.join(map(repr, NAMES[:-1]))} or {NAMES[-1]!r}")


class Auto(greedy.Solver):
    """Greedy; its plans of small programs are ``finished``."""

    def __init__(self, programs: int | None = greedy.PROGRAMS) -> None:
        super().__init__(programs)
        self.programs = programs
        self.vain: dict[tuple[Graph, tuple[Seconds, ...]], Bytes] = {}
        """Highest budget without a result, by program and charges; lower ones are skipped."""
        self.left: dict[tuple[Graph, tuple[Seconds, ...]], int] = {}
        """Variables left of the allowance."""

    @cached_property
    def for_bodies(self) -> Prepare:
        """The solver of loop and branch bodies. Many variants of a program have equal bodies: each is searched once."""
        return Auto(None) if self.programs else self


def for_bodies(solver: Prepare) -> Prepare:
    """The default solver, for bodies of the programs of ``solver``: others may take a minute for each body, or want a
    program of one kind."""
    return solver.for_bodies if isinstance(solver, Auto) else named("auto")


def finished(solver: Prepare, problem: Problem, budget: Bytes, plan: Plan) -> Plan:
    """``plan``, made by ``solver``, or a better one for ``budget``. Only for plans to be compiled: may take as long as
    a compile."""
    whole, fits = sum(problem.costs.charge), plan.predicted.device <= budget
    hosted = plan.offload_bytes > problem.state + problem.stacks
    if not isinstance(solver, Auto) or len(problem.graph.ops) > _SMALL or hosted:
        return plan
    enough = max(_DEAR * whole, PAYS * len(problem.graph.ops))
    if _price(problem, plan) <= enough if fits else plan.predicted.device > _CLOSE * budget:
        return plan
    if not on("integer_programme"):
        return plan
    from jaxtensile.passes.solvers.improve import allowance, improve

    if budget <= solver.vain.get(key := (problem.graph, problem.costs.charge), -1):
        return plan
    left = solver.left.get(key, allowance(problem))
    found, left = improve(problem, budget, left)
    if found is None and not fits and key not in solver.left:
        found, left = improve(problem, budget - int(_LOWER * budget), left + allowance(problem))
    solver.left[key] = left
    if found is None:
        solver.vain[key] = budget
        return plan
    return _cheaper(problem, budget, plan, found)


def _exact() -> Prepare:
    left = ALLOWANCE

    def prepare(problem: Problem) -> Solve:
        first = greedy.prepare(problem)
        live = live_ranges(problem.graph)

        known: dict[Bytes, Plan] = {}
        """Plans asked for with ``least=False``, which may be asked for again."""

        def exactly(budget: Bytes) -> Plan:
            nonlocal left
            from jaxtensile.passes.solvers import exact

            started = time.monotonic()
            found = exact.prepare(problem, left / 2)(budget)
            left = max(left - (time.monotonic() - started), 1.0)
            return found

        def at(budget: Bytes, /, *, least: bool = True) -> Plan:
            plan = first(budget, least=least)
            if budget < live.device - live.temp:
                return plan  # arguments and outputs alone are more
            found = known.pop(budget, None) or exactly(budget)
            if not least:
                known[budget] = found
            return _better(problem, budget, plan, found)

        return at

    return prepare


def _chain() -> Prepare:
    some = False

    def prepare(problem: Problem) -> Solve:
        from jaxtensile.passes.solvers import chain

        solve = lru_cache(maxsize=1)(chain.prepare(problem))

        def at(budget: Bytes, /, *, least: bool = True) -> Plan:
            nonlocal some
            try:
                plan = solve(budget)
            except SolverError:
                # Of the ways in which a program may be rewritten, not all need be chains.
                if not some:
                    raise
                program = Program.unchanged(problem.graph)
                return answer(problem, program, live_ranges(problem.graph), "chain")
            some = True
            return plan

        return at

    return prepare


def _price(problem: Problem, plan: Plan) -> float:
    return plan.program.again(problem.costs.charge) + plan.wait * problem.costs.per_second


def _cheaper(problem: Problem, budget: Bytes, plan: Plan, found: Plan) -> Plan:
    """The cheaper plan if both fit, else the smaller; ``plan`` if they are equal."""

    def rank(p: Plan) -> tuple[bool, float]:
        over = p.predicted.device > budget
        return over, p.predicted.device if over else _price(problem, p)

    return found if rank(found) < rank(plan) else plan


def _better(problem: Problem, budget: Bytes, plan: Plan, found: Plan) -> Plan:
    """The cheaper plan if both fit, else the smaller, with the bound of ``found``.

    The bound holds around one boundary. If a plan around several is below it, nothing is proven.
    """
    best = _cheaper(problem, budget, plan, found)
    price = _price(problem, plan)
    if best is found or found.bound is None or plan.predicted.device > budget or price < found.bound:
        return best
    gap = (price - found.bound) / price if price else 0.0
    return replace(plan, gap=gap if gap > _PROVEN else 0.0, bound=found.bound)
