"""A program as rewritten before planning, and its cost over the program as written.

A variant starts as written, or without the user's checkpoints. Rewrites are applied with their sites, then loop stacks
are recomputed or put in host memory, and bodies planned as programs of their own. It is made on first use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from jaxtensile.ir.plan import Costs, MemoryUse, Plan, Prepare, Problem, Solve
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.offload.loops import LoopPlan
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.passes.seconds.steptime import LoopCopies, StepTime
from jaxtensile.passes.solvers.by_name import finished
from jaxtensile.program.bodies import Key, with_bodies
from jaxtensile.program.emit import emit
from jaxtensile.program.trace import Traced
from jaxtensile.rewrites.loops.loops import RECOMPUTATION, rewrite_loops
from jaxtensile.rewrites.microbatch import PARTS
from jaxtensile.rewrites.rewrite import Rewrite, Taken, traced_for
from jaxtensile.rewrites.state import on_host
from jaxtensile.rewrites.undo import Undone
from jaxtensile.search.request import Request
from jaxtensile.units import Bytes, Seconds

# What changes are called, beside the rewrites, where one of them is left out.
UNDONE = "the undoing of jax.checkpoint"
BODIES = "the planning of loop and branch bodies"
OFFLOAD = "offload to the host"
STATE = "the state on the host"
FINISHED = "the integer programme"


def no_finer(_: Bytes) -> list[Variant]:
    """Of a program without loops to rewrite."""
    return []


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """A rewritten program, and its cost over the program as written.

    ``base``: the program before its loops were rewritten. ``whole``: costs of the program as written. ``undone``: set
    if checkpoints were removed. ``taken``: rewrites applied, in order. ``idle``: part of the charge that no op carries.
    ``loops``: plans of loop pairs. ``inside``: plans of loop and branch bodies. ``host``: whether bytes may wait there.
    ``finer``: variants that recompute less than this one, for so many bytes more, cheapest first.
    """

    request: Request
    prepare: Prepare
    base: Traced
    whole: Costs
    charge: Seconds = 0.0
    seconds: Seconds = 0.0
    idle: Seconds = 0.0
    loops: tuple[LoopPlan, ...] = ()
    undone: Undone | None = None
    taken: tuple[Taken, ...] = ()
    inside: tuple[Inside, ...] = ()
    host: bool = True
    known: Costs | None = None
    finer: Callable[[Bytes], list[Variant]] = no_finer

    @property
    def aside(self) -> Bytes:
        """Bytes that its loops stack in host memory."""
        return sum(plan.aside for plan in self.loops)

    def has(self, rewrite: Rewrite) -> bool:
        """Whether a rewrite was applied."""
        return any(taken.rewrite is rewrite for taken in self.taken)

    @property
    def parts(self) -> int:
        """Number of parts of its batch."""
        return next((taken.sites[1] for taken in self.taken if taken.rewrite is PARTS), 1)

    @property
    def parts_inside(self) -> int:
        """The largest number of parts in a body."""
        return max((max(i.variant.parts, i.variant.parts_inside) for i in self.inside), default=1)

    @property
    def works_in_parts(self) -> bool:
        """Whether rows are worked on in parts, in all of the step or in bodies."""
        return self.parts > 1 or self.parts_inside > 1

    @property
    def blamed(self) -> str:
        """The rewrite to leave out if this variant fails: the last applied; empty without any."""
        made = (
            (BODIES, self.inside),
            (RECOMPUTATION, self.loops),
            *((taken.rewrite.title, True) for taken in reversed(self.taken)),
            (UNDONE, self.undone),
            (OFFLOAD, self.host and self.request.host_budget),
            (STATE, self.request.state),
        )
        return next((name for name, used in made if used), "")

    @property
    def as_it_is(self) -> bool:
        """Whether at most the user's checkpoints are rewritten, so that the compiler orders the ops."""
        return not (self.loops or self.inside or any(not taken.rewrite.reorders for taken in self.taken))

    @property
    def deep(self) -> bool:
        """Whether bodies are planned or rewritten, which the model knows least."""
        return bool(self.inside) or any(taken.rewrite.in_bodies for taken in self.taken)

    @cached_property
    def looped(self) -> Traced:
        """The program with its loops rewritten."""
        if not self.loops:
            return self.base
        with self.request.faults.of(RECOMPUTATION):
            changed = rewrite_loops(self.base, self.request.jaxpr, self.loops, load_index=self.request.load_index)
            return traced_for(self.request, changed)

    @cached_property
    def traced(self) -> Traced:
        """The program to plan."""
        traced = self.looped
        if self.inside:
            with self.request.faults.of(BODIES):
                new = {i.key: emit(i.variant.traced, i.plan.program) for i in self.inside}
                changed = with_bodies(traced, self.request.jaxpr, new)
                traced = traced_for(self.request, changed)
        return streamed(self.request, traced)

    @cached_property
    def problem(self) -> Problem:
        """The solver's problem: fit the request's budget."""
        request, graph = self.request, self.traced.graph
        known = self.known is not None and self.traced is self.base
        costs = self.known if self.known is not None and known else op_costs(graph, request.device)
        return Problem(
            graph=graph,
            costs=costs,
            budget=request.budget,
            link=request.link if self.host or request.state else None,
            host_budget=request.host_budget - self.aside if self.host else 0,
            state=request.state_bytes,
            stacks=self.aside,
        )

    @cached_property
    def plain(self) -> MemoryUse:
        """Its memory with nothing planned."""
        with self.request.faults.of(self.blamed):
            return live_ranges(self.traced.graph).use()

    @cached_property
    def solve(self) -> Solve:
        """The solver's answer for a budget."""
        faults, blamed = self.request.faults, self.blamed
        with faults.of(blamed):
            solve = self.prepare(self.problem)

        def at(budget: Bytes, /, *, least: bool = True) -> Plan:
            with faults.of(blamed):
                return solve(budget, least=least)

        return at

    def finished(self, plan: Plan, budget: Bytes) -> Plan:
        """The plan improved before it is compiled; only the default solver's plans are."""
        better = lambda: finished(self.prepare, self.problem, budget, plan)  # noqa: E731
        return self.request.faults.spared(FINISHED, better, lambda: plan)


@dataclass(frozen=True, kw_only=True)
class Inside:
    """The plan of one body, as a program of its own, after the loops were rewritten.

    ``held``: barriers keep the order of its schedule.
    """

    key: Key
    trips: int
    variant: Variant
    plan: Plan
    held: bool = False

    @property
    def charge(self) -> Seconds:
        return self.trips * charge_of(self.variant, self.plan)

    @property
    def seconds(self) -> Seconds:
        return self.trips * (self.variant.seconds + self.plan.overhead)


def streamed(request: Request, traced: Traced) -> Traced:
    """``traced`` with the request's state on the host."""
    if not request.state:
        return traced
    with request.faults.of(STATE):
        return on_host(traced, request.state, op_costs(traced.graph, request.device).seconds, request.way)


def charge_of(variant: Variant, plan: Plan) -> Seconds:
    """Cost of a plan over the program as written: work, and waits for copies."""
    costs = variant.problem.costs
    return variant.charge + plan.wait * costs.per_second + plan.program.again(costs.charge)


def step_time(variant: Variant, plan: Plan) -> StepTime:
    """Time of a step under the plan."""
    request, graph = variant.request, variant.base.graph
    copies: list[LoopCopies] = []
    for loop in variant.loops:
        if loop.hosted:
            front = graph.ops[loop.pair.forward]
            forward = sum(op_costs(front.bodies[0], request.device, body=True).seconds)
            per_trip = loop.aside // front.trip_count
            copies.append(LoopCopies(trips=front.trip_count, count=len(loop.hosted), nbytes=per_trip, forward=forward))
    problem = variant.problem
    streams = problem.link is not None and plan.offload_bytes > problem.stacks
    return StepTime(
        work=sum(variant.whole.seconds)
        + variant.seconds
        + plan.overhead
        - plan.wait
        - sum(loop.wait for loop in variant.loops),
        link=request.way if copies or streams else None,
        program=plan.program if streams else None,
        seconds=problem.costs.seconds if streams else (),
        loops=tuple(copies),
    )


def program_key(variant: Variant, plan: Plan) -> int:
    """Hash of a program, equal in this process for equal programs."""
    ops = tuple((op.primitive, op.operands, op.results) for op in plan.program.graph.ops)
    inside = tuple((i.key, program_key(i.variant, i.plan)) for i in variant.inside)
    taken = tuple((taken.rewrite.key, taken.sites) for taken in variant.taken)
    return hash((variant.undone is not None, taken, variant.loops, inside, plan.program.origin, ops))
