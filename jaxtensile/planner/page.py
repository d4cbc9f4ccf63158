"""Everything known of one request while it is planned, and its report: the planner's only state.

One thread plans a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

from jaxtensile.clock import Clock, Watch, nothing
from jaxtensile.errors import BudgetError
from jaxtensile.ir.plan import Costs, Plan, Prepare
from jaxtensile.passes.recompute.lowerbound import Bound
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.passes.solvers.by_name import named
from jaxtensile.planner.build_report import report, unplanned
from jaxtensile.planner.plan_cache import Entry, Plans, key_of
from jaxtensile.planner.rounds import Rounds
from jaxtensile.planner.trial_compiles import TrialCompiles
from jaxtensile.program.counted import counted
from jaxtensile.program.cse import cse
from jaxtensile.program.hoist_invariants import hoist_invariants
from jaxtensile.program.trace import Traced
from jaxtensile.rewrites.rewrite import on_device, traced_for
from jaxtensile.rewrites.undo import Undone, checkpoints_in_loops, undo
from jaxtensile.search import variants
from jaxtensile.search.candidates import Candidates
from jaxtensile.search.made import BY_XLA, Made
from jaxtensile.search.modelled import Modelled, bound_of, modelled, with_state
from jaxtensile.search.parts import Chunks
from jaxtensile.search.recipe import recipe_of
from jaxtensile.search.request import Fitted, Request
from jaxtensile.search.variant import OFFLOAD, STATE, UNDONE, Variant, program_key, step_time
from jaxtensile.switches import on
from jaxtensile.units import Bytes, format_bytes
from jaxtensile.xla.compile import Compiled

MERGING: Final = "the merging of equal operations"
COUNTING: Final = "batch dimensions for counted indices"
HOISTING: Final = "the moving of invariants in front of loops"
CACHE: Final = "the plan cache"


def opened(
    request: Request,
    watch: Watch = nothing,
    prepare: Prepare | None = None,
    baseline: bool = False,
    clock: Clock | None = None,
) -> Page:
    """The page of a request before anything is planned. ``clock``: one that counts what came before, too."""
    clock, prepare = clock or Clock(watch), prepare or named(request.solver)
    if request.sizes is not None:
        with clock("sizes"):
            request = request.with_sizes()
    with clock("graph"):
        faults, flat = request.faults, traced_for(request, request.jaxpr)
        if request.whole and on("counted_indices"):  # for work in parts, which is not divided among devices
            request, flat = _moved(request, flat, COUNTING, counted)
        if request.device.backend.hoists_invariants and request.local is None and on("hoist_invariants"):
            request, flat = _moved(request, flat, HOISTING, hoist_invariants)
        traced = faults.spared(MERGING, lambda: cse(flat) if on("cse") else flat, lambda: flat)
        host = replace(request, host_budget=0 if OFFLOAD in faults else request.host_budget)
        there = replace(host, place=None), ()
        request, notes = faults.spared(STATE, lambda: with_state(host, traced), lambda: there)
        program = modelled(request, traced)
        undone = undone_of(request, traced) if request.sized else None
        if undone is not None:
            undone = replace(undone, traced=on_device(request, undone.traced))
        lighter = modelled(request, undone.traced) if undone is not None else None
    page = Page(request, prepare, clock, baseline, program, (*request.notes, *notes, *of_checkpoints(request, program)))
    if undone is not None and lighter is not None and lighter.bound.nbytes <= request.budget:
        page.without = undone, lighter
    return page


def _moved(request: Request, flat: Traced, title: str, change: Callable[[Traced, Any], Any]) -> tuple[Request, Traced]:
    """The request and its program after a change that planning begins with."""
    jaxpr = request.jaxpr
    moved = request.faults.spared(title, lambda: change(flat, jaxpr), lambda: jaxpr)
    return (request, flat) if moved is jaxpr else (replace(request, jaxpr=moved), traced_for(request, moved))


def undone_of(request: Request, traced: Traced) -> Undone | None:
    """``traced`` without the user's checkpoints; None if it has none that may be undone."""
    wanted, unused = request.undo and on("undo"), request.keep_unused
    return request.faults.spared(
        UNDONE, lambda: undo(traced, request.jaxpr, keep_unused=unused) if wanted else None, lambda: None
    )


def of_checkpoints(request: Request, program: Modelled) -> Iterator[str]:
    """Notes on the cost of the user's own checkpoints that stay."""
    if not request.undo and request.sized:
        without = request.faults.spared(UNDONE, lambda: undo(program.traced, request.jaxpr), lambda: None)
        flops = program.traced.graph.flops
        if without is not None and flops:
            again = (flops - without.traced.graph.flops) / flops
            yield f"its own checkpoints recompute {again:.1%} of its matrix FLOPs: undo=True spares what has room"
    count = checkpoints_in_loops(request.jaxpr)
    if count:
        what = "a checkpoint inside of a loop is" if count == 1 else f"{count} checkpoints inside of loops are"
        yield f"{what} honoured as written, unless a line above says that it is undone: without it the plan decides"


class Page:
    """One request in planning, and its compiled programs."""

    def __init__(
        self,
        request: Request,
        prepare: Prepare,
        clock: Clock,
        baseline: bool,
        program: Modelled,
        notes: tuple[str, ...],
    ) -> None:
        self.request, self.prepare, self.clock, self.baseline, self.program = request, prepare, clock, baseline, program
        self.notes = notes
        self.compiles = TrialCompiles(request, clock, program.predicted.device)
        self.known_costs: Costs | None = None
        self.known_written: Variant | None = None
        self.known: dict[tuple[Variant, ...], Candidates] = {}
        self.plans: Plans | None = None
        """Where to keep a plan for later processes."""
        self.without: tuple[Undone, Modelled] | None = None
        """The program without the user's checkpoints, if it has some and may fit."""
        self.lighter: Variant | None = None
        """The same, if it was tried."""
        self.aim: Bytes | None = None
        """Model bytes assumed to fit, if a plan is wanted soon."""
        self.keeps: Callable[[Made], bool] = lambda _: True
        """Whether a plan that fits is kept for later processes."""
        self.made: Made | None = None
        """The planned program that was told of last."""

    def follows(self, earlier: Page) -> None:
        """Take over what an earlier page of the same program compiled."""
        self.compiles.plain = earlier.compiles.plain

    def costs(self) -> Costs:
        """Costs of the program as written."""
        if self.known_costs is None:
            with self.clock("costs"):
                self.known_costs = op_costs(self.program.traced.graph, self.request.device)
        return self.known_costs

    def written(self) -> Variant:
        """The program as the user wrote it."""
        if self.known_written is None:
            self.known_written = variants.written(self.request, self.program.traced, self.costs(), self.prepare)
        return self.known_written

    def candidates(self, start: Variant, others: Sequence[Variant] = ()) -> Candidates:
        """Fresh candidates, which reuse earlier rewrites and layouts of the same variants."""
        key = start, *others
        with self.clock("loops"):
            if key not in self.known:
                self.known[key] = Candidates(start, others)
            return self.known[key].anew()

    def cheapest(self, candidates: Candidates) -> tuple[Variant, Plan]:
        return self.rounds.cheapest(candidates, self.goal)

    @property
    def goal(self) -> Bytes:
        """Model bytes that a plan should need at most, before anything is compiled."""
        return self.request.budget if self.aim is None else self.aim

    def may_fit(self, program: Modelled) -> bool:
        """Whether to ask XLA about a program as it is."""
        return program.may_fit(self.request) if self.aim is None else program.predicted.device <= self.aim

    @cached_property
    def rounds(self) -> Rounds:
        """The rounds that compile its candidates."""
        return Rounds(self.compiles, self.program.predicted.device, self.aim)

    @property
    def scale(self) -> float:
        """Bytes of the model per byte on one device; 1 on a single device."""
        return self.rounds.scale if not self.request.sized and self.aim is None else 1.0

    def bound(self) -> Bound:
        """Lower bound of the program's bytes: as it is, or, if over the budget, in the most parts allowed."""
        request, program = self.request, self.program
        if program.bound.nbytes <= request.budget or not request.chunk or not request.whole:
            return program.bound
        chunks = Chunks(self.written())
        finest = chunks.at(chunks.parts[-1]) if chunks.parts else None
        return program.bound if finest is None else self.less(program.bound, finest)

    def less(self, bound: Bound, variant: Variant) -> Bound:
        """The lower of ``bound`` and the bound of a program in parts."""
        return min(bound, bound_of(self.request, variant.traced), key=lambda b: b.nbytes)

    def lightest(self) -> tuple[Variant, Modelled]:
        """The program without the user's checkpoints, if it has some and may fit; else as written."""
        if self.without is None:
            return self.written(), self.program
        undone, lighter = self.without
        return variants.undone(self.request, undone, self.costs(), self.prepare), lighter

    def within(self, compiled: Compiled) -> None:
        """Raise ``BudgetError`` for a program that fits in another process but not here."""
        needs, budget = compiled.device, self.request.budget
        if compiled.memory is None or needs > budget:
            raise BudgetError(
                f"the program that was agreed on for {self.request.name} needs {format_bytes(needs)} here, of "
                f"{format_bytes(budget)}: {compiled.refusal or 'this process compiles it differently'}; "
                "raise the budget, or give all processes the same devices and versions",
                needs=needs,
                has=budget,
            )

    def fitted(self, made: Made, bound: Bound, rounds: int) -> Fitted:
        """The user's own function if it is unchanged, else the planned program."""
        as_it_is = made.evaluate is None and made.choice != BY_XLA
        return self.unchanged() if as_it_is else self.planned(made, bound, rounds)

    def unchanged(self) -> Fitted:
        """The user's own function, which fits."""
        plain = self.compiles.own_in_full()
        told = self.report(None, plain, self.program.bound, 0)
        return Fitted(jitted=plain.jitted, evaluate=None, options=plain.options, report=told)

    def planned(self, made: Made, bound: Bound, rounds: int) -> Fitted:
        """The planned program, which fits."""
        self.made = made = self.compiles.in_full(made)
        if self.baseline:
            self.compiles.own()
        compiled = made.compiled
        if made.variant.parts > 1:
            bound = self.less(bound, made.variant)
        if made.fits and self.keeps(made):
            self.keep(made, self.request.budget)
        told = self.report(made, compiled, bound, rounds)
        state = frozenset(leaf.argument for leaf in self.request.state)
        return Fitted(
            jitted=compiled.jitted,
            evaluate=made.evaluate,
            options=compiled.options,
            report=told,
            state=state,
            time=step_time(made.variant, made.plan) if self.request.shards == 1 else None,
            key=program_key(made.variant, made.plan),
        )

    def keep(self, made: Made, budget: Bytes) -> None:
        """Keep a plan for later processes that ask for ``budget``."""
        if (plans := self.plans) is not None:
            with self.clock("keep"):
                self.request.faults.spared(CACHE, lambda: plans.keep(self.entry(made, budget)), lambda: None)

    def entry(self, made: Made, budget: Bytes | None = None) -> Entry:
        """A plan as the plan cache stores it, for this budget or another one."""
        asked = self.request if budget is None else replace(self.request, budget=budget)
        return Entry(
            key=key_of(asked, self.program.traced.graph, self.aim),
            name=self.request.name,
            choice=made.choice,
            recipe=recipe_of(made.variant, made.plan),
        )

    def report(self, made: Made | None, compiled: Compiled, bound: Bound, rounds: int) -> Any:
        request, program, plain = self.request, self.program, self.compiles.plain
        seconds = self.clock.seconds
        told = request.faults.spared(
            "the report",
            lambda: report(
                request, program.traced, made, program.plain, plain, compiled, bound, rounds, seconds, self.scale
            ),
            lambda: unplanned(request, compiled.notes, compiled.memory, seconds),
        )
        return replace(told, notes=(*told.notes, *self.notes, *request.faults.notes()))
