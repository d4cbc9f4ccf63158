"""The page: from a function, its arguments and a budget to a function that fits and its report.

    trace → Graph → costs → (does it fit as it is?) → possible at all? → solve → check
          → rewrite → compile → XLA's number; on a miss feed it back and solve again.

Where the user's own checkpoints recompute more than the budget needs, the page is first gone through
for the program without them. Facts flow down; the only thing that flows back is a measured number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NoReturn

from jaxtensile import _compat
from jaxtensile.errors import BudgetError, VerifyError
from jaxtensile.ir.plan import Costs, MemoryUse, Plan, Prepare, Program
from jaxtensile.passes.recompute.lowerbound import Bound
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.passes.solvers.by_name import named
from jaxtensile.passes.verify.check import check
from jaxtensile.planner.attempts import Attempts, Clock, Watch, nothing
from jaxtensile.planner.collecting import seldom
from jaxtensile.planner.outcome import BY_XLA, Made, cannot, report, unplanned, without_plan
from jaxtensile.planner.plan_cache import Entry, Plans, key_of
from jaxtensile.planner.remembered import remember, remembered
from jaxtensile.planner.rounds import Rounds
from jaxtensile.planner.smallest import Smallest
from jaxtensile.program.merge import merged
from jaxtensile.program.rewrite import rewrite
from jaxtensile.program.upperbound import all_values
from jaxtensile.rewrites.rewrite import on_device, traced_for
from jaxtensile.rewrites.undo import Undone, checkpoints_in_loops, undo
from jaxtensile.search import variants as ways
from jaxtensile.search.candidates import Candidates
from jaxtensile.search.parts import Chunks
from jaxtensile.search.recipe import Recipe, Unlike, recipe_of, replay
from jaxtensile.search.request import Evaluate, Fitted, Job
from jaxtensile.search.subject import Subject, bound_of, subject_of, with_state
from jaxtensile.search.variants import Variant, program_key
from jaxtensile.units import TIB, Bytes, Seconds, format_bytes
from jaxtensile.xla.compile import RECOMPUTES, Compiled

MERGING, CACHE, XLA = "the merging of equal operations", "the plan cache", "what XLA recomputes"
CHEAP = 0.01
"""Plans that take no more of a step are not compared with what XLA recomputes by itself: that is one compile more."""
SAVES = 0.9
"""Share of the predicted bytes of the program as it is, above which one with its state on the host is compared with
it."""
LARGE = 8
"""Times the device's memory: up to that the program as it is is compiled, to be named by an error."""
TIGHT = 2.0
"""Budgets below so many times the lower bound may be hopeless."""
STEEPEST = 0.7
"""From one sketch to the next, bytes become at most so much fewer."""


@seldom()
def fit(
    job: Job,
    prepare: Prepare | None = None,
    watch: Watch = nothing,
    *,
    baseline: bool = False,
    plans: Plans | None = None,
    aim: Bytes | None = None,
) -> Fitted:
    """Fit one job. ``prepare``: the solver, the job's own if None; ``baseline``: compile the plain program even
    when it surely does not fit; ``plans``: of earlier processes, where this one's is kept too; ``aim``: as many bytes
    in the model are taken to fit, and the first plan that does is good enough, as somebody waits for it.

    What fails by a fault of ours is left out; where all does, it is the program as written, or ``PlanningError``.
    """
    with job.faults.telling(job.name, _compat.function_source(job.jaxpr)):
        return job.faults.without(
            lambda: _fit(job, prepare, watch, baseline, plans, aim), lambda error: without_plan(job, error)
        )


def _fit(
    job: Job, prepare: Prepare | None, watch: Watch, baseline: bool, plans: Plans | None, aim: Bytes | None
) -> Fitted:
    if all_values(job.jaxpr) is None:
        note = "its sizes are symbolic, or of a type that does not say them: it is passed on as it is"
        told = unplanned(job, (note,))
        return Fitted(jitted=job.make(None, job.options), evaluate=None, options=job.options, report=told)
    page = _opened(job, prepare or named(job.solver), Clock(watch), baseline)
    page.aim = aim
    fitted = job.faults.spared(CACHE, lambda: page.recalled(plans), lambda: None)
    if fitted is not None:
        return fitted
    if page.without is not None:
        with job.faults.of(ways.UNDONE):
            fitted = page.undone(*page.without)
        if fitted is not None:
            return fitted
    return page.as_written()


@seldom()
def follow(job: Job, entry: Entry | None, watch: Watch = nothing, *, baseline: bool = False) -> Fitted:
    """What another process has planned for the same job: ``entry``, or None for the user's function as it is.

    Nothing is decided here: it is that program under those options, compiled, or an error: ``Unlike`` and
    ``VerifyError`` where it does not go with this job, ``BudgetError`` where it is larger here.
    """
    page = _opened(job, named(job.solver), Clock(watch), baseline)
    if entry is None:
        page.within(page.attempts.own())
        return page.unchanged()
    variant, plan, program = page.replayed(entry.recipe)
    made = page.attempts.again(variant, plan, entry.choice, only=True)
    if made is None:
        raise VerifyError(f"XLA refuses to compile the plan of {job.name} here")
    page.within(made.compiled)
    return page.planned(made, program.bound, 1)


@seldom()
def renew(job: Job, at_most: Seconds, unlike: int, watch: Watch = nothing) -> Fitted | None:
    """The plan for a job whose rates are known better than when it was fitted; None when there is no better one.

    Better: of another key than ``unlike`` and with a step of at most ``at_most`` predicted seconds. What is not
    does not get compiled, and the user's function is not run.
    """
    with job.faults.telling(job.name, _compat.function_source(job.jaxpr)):
        return job.faults.without(lambda: _renew(job, at_most, unlike, watch), _raised)


def _renew(job: Job, at_most: Seconds, unlike: int, watch: Watch) -> Fitted | None:
    page = _opened(job, named(job.solver), Clock(watch), False)
    as_it_is = rewrite(page.program.traced, Program.unchanged(page.program.traced.graph))
    make = job.make
    page.attempts.job = replace(page.job, make=lambda evaluate, options: make(evaluate or as_it_is, options))

    def worth(variant: Variant, plan: Plan) -> bool:
        return program_key(variant, plan) != unlike and ways.step_time(variant, plan).at() <= at_most

    return page.renewed(worth)


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """A plan by the model alone: what it needs, and how long a step takes."""

    use: MemoryUse
    seconds: Seconds
    aim: Bytes
    """Asked for so many bytes, the model finds it again."""


@seldom()
def sketches(job: Job, count: int, watch: Watch = nothing) -> tuple[Sketch, ...]:
    """Up to ``count`` plans, the largest of them the program with nothing recomputed; nothing is compiled.

    Ascending in bytes, each shorter than those below it. The job's budget plays no part, and nothing is tried that is
    only worth its time once nothing else fits: smaller plans may be found by ``fit``. Where all planning fails by a
    fault of ours, it is the program as written, compiled.
    """
    with job.faults.telling(job.name, _compat.function_source(job.jaxpr)):
        return job.faults.without(lambda: _sketches(job, count, watch), lambda _: (_as_compiled(job),))


def _as_compiled(job: Job) -> Sketch:
    use = without_plan(replace(job, budget=TIB)).report.compiled
    return Sketch(use=use, seconds=0.0, aim=use.device)


def _raised(error: Exception) -> NoReturn:
    raise error


def _sketches(job: Job, count: int, watch: Watch) -> tuple[Sketch, ...]:
    page = _opened(replace(job, budget=TIB), named(job.solver), Clock(watch), False)
    start, program = page.lightest()
    written = page.written()
    candidates = page.candidates(start, [written] if start is not written else [])
    top = program.predicted.device
    found: list[Sketch] = []

    bottom = max(page.program.bound.nbytes, 1)
    step = max((bottom / top) ** (1 / max(count - 1, 1)), STEEPEST)
    for k in range(count):
        aim = int(top * step**k)
        with page.clock("solve"):
            variant, plan = candidates.readily(aim)
        use, seconds = plan.predicted, ways.step_time(variant, plan).at()
        if not found or (use.device < found[-1].use.device and seconds > found[-1].seconds):
            found.append(Sketch(use=use, seconds=seconds, aim=max(aim, use.device)))
        if plan.predicted.device > aim:
            break
    return tuple(reversed(found))


def _opened(job: Job, prepare: Prepare, clock: Clock, baseline: bool) -> _Page:
    """The page of a job."""
    with clock("graph"):
        faults, flat = job.faults, traced_for(job, job.jaxpr)
        traced = faults.spared(MERGING, lambda: merged(flat), lambda: flat)
        host = replace(job, host_budget=0 if ways.OFFLOAD in faults else job.host_budget)
        there = replace(host, place=None), ()
        job, notes = faults.spared(ways.STATE, lambda: with_state(host, traced), lambda: there)
        program = subject_of(job, traced)
        wanted, unused = job.undo and job.shards == 1, job.keep_unused
        undone = faults.spared(
            ways.UNDONE, lambda: undo(traced, job.jaxpr, keep_unused=unused) if wanted else None, lambda: None
        )
        if undone is not None:
            undone = replace(undone, traced=on_device(job, undone.traced))
        lighter = subject_of(job, undone.traced) if undone is not None else None
    page = _Page(job, prepare, clock, baseline, program, (*notes, *_of_checkpoints(job, program)))
    if undone is not None and lighter is not None and lighter.bound.nbytes <= job.budget:
        page.without = undone, lighter
    return page


def _of_checkpoints(job: Job, program: Subject) -> Iterator[str]:
    """What the user's own checkpoints cost, where they stay."""
    if not job.undo and job.shards == 1:
        without = job.faults.spared(ways.UNDONE, lambda: undo(program.traced, job.jaxpr), lambda: None)
        flops = program.traced.graph.flops
        if without is not None and flops:
            again = (flops - without.traced.graph.flops) / flops
            yield f"its own checkpoints recompute {again:.1%} of its matrix FLOPs: undo=True spares what has room"
    count = checkpoints_in_loops(job.jaxpr)
    if count:
        what = "a checkpoint inside of a loop is" if count == 1 else f"{count} checkpoints inside of loops are"
        yield f"{what} honoured as written, unless a line above says that it is undone: without it the plan decides"


class _Page:
    """One job on its way down the page, and what has been compiled of it."""

    def __init__(
        self, job: Job, prepare: Prepare, clock: Clock, baseline: bool, program: Subject, notes: tuple[str, ...]
    ) -> None:
        self.job, self.prepare, self.clock, self.baseline, self.program = job, prepare, clock, baseline, program
        self.notes = notes
        self.attempts = Attempts(job, clock, program.predicted.device)
        self.known_costs: Costs | None = None
        self.known_written: Variant | None = None
        self.known: dict[tuple[Variant, ...], Candidates] = {}
        self.plans: Plans | None = None
        """Where a plan is to be kept for later processes."""
        self.without: tuple[Undone, Subject] | None = None
        """The program without the user's checkpoints, where it has some and may fit."""
        self.lighter: Variant | None = None
        """The program without the user's checkpoints, where that was tried."""
        self.aim: Bytes | None = None
        """Bytes in the model that are taken to fit, where a plan is wanted soon."""

    def costs(self) -> Costs:
        """Of the program as written."""
        if self.known_costs is None:
            with self.clock("costs"):
                self.known_costs = op_costs(self.program.traced.graph, self.job.device)
        return self.known_costs

    def written(self) -> Variant:
        """The program as the user wrote it."""
        if self.known_written is None:
            self.known_written = ways.written(self.job, self.program.traced, self.costs(), self.prepare)
        return self.known_written

    def candidates(self, start: Variant, others: Sequence[Variant] = ()) -> Candidates:
        """Asked nothing yet; what was rewritten and laid out for the same ones before is known."""
        key = start, *others
        with self.clock("loops"):
            if key not in self.known:
                self.known[key] = Candidates(start, others)
            return self.known[key].anew()

    def cheapest(self, candidates: Candidates) -> tuple[Variant, Plan]:
        return self.rounds().cheapest(candidates, self.aim or self.job.budget)

    def may_fit(self, program: Subject) -> bool:
        """Whether XLA is worth asking about a program as it is."""
        return program.may_fit(self.job) if self.aim is None else program.predicted.device <= self.aim

    def rounds(self) -> Rounds:
        """Across shards the plain program says how many bytes in the model are one on a device."""
        if self.aim is not None:
            return Rounds(self.attempts, self.aim / self.job.budget, soon=True)
        plain, scale = self.attempts.plain, 1.0
        if self.job.shards > 1 and plain is not None and plain.memory is not None:
            scale = self.program.predicted.device / max(plain.device, 1)
        return Rounds(self.attempts, scale)

    def recalled(self, plans: Plans | None) -> Fitted | None:
        """What was planned before for the same question, or named as what it takes; None where nothing that was fits
        here."""
        smallest = remembered(self.job, self.program.traced.graph)
        if smallest is not None and smallest[0] == self.job.budget:
            fitted = self.again(smallest[1])
            if fitted is not None:
                return fitted
        if plans is None:
            return None
        with self.clock("recall"):
            found = plans.find(key_of(self.job, self.program.traced.graph, self.aim))
        notes, self.plans = self.notes, plans
        if found is None:
            return None
        self.notes = (*notes, f"the plan of an earlier process, from {plans.folder}")
        fitted = self.again(found, plans)
        if fitted is None:
            self.notes = notes
        return fitted

    def again(self, entry: Entry, plans: Plans | None = None) -> Fitted | None:
        """The program of an entry, of ``plans`` if it is from there; None where it does not fit here."""
        with self.clock("recall"):
            try:
                variant, plan, program = self.replayed(entry.recipe)
            except (Unlike, VerifyError) as error:
                return plans.pass_over(entry.key, str(error)) if plans is not None else None
        made = self.attempts.again(variant, plan, entry.choice)
        if made is None or self.attempts.misplaced(made) or made.compiled.device > self.job.budget:
            return None
        self.plans = None  # it is there
        return self.fitted(made, program.bound, 1)

    def replayed(self, recipe: Recipe) -> tuple[Variant, Plan, Subject]:
        """The variant and the checked plan of a recipe, and the program that it starts from.

        Raises ``Unlike`` or ``VerifyError`` where the recipe does not go with this job.
        """
        start, program = self.lightest() if recipe.undone else (self.written(), self.program)
        variant, plan = replay(recipe, start)
        check(variant.problem.graph, plan.program)
        return variant, plan, program

    def lightest(self) -> tuple[Variant, Subject]:
        """The program without the user's checkpoints, where it has some and may fit; else as it was written."""
        if self.without is None:
            return self.written(), self.program
        undone, lighter = self.without
        return ways.undone(self.job, undone, self.costs(), self.prepare), lighter

    def within(self, compiled: Compiled) -> None:
        """``BudgetError`` for what was found to fit elsewhere and does not here."""
        needs, budget = compiled.device, self.job.budget
        if compiled.memory is None or needs > budget:
            raise BudgetError(
                f"the program that was agreed on for {self.job.name} needs {format_bytes(needs)} here, of "
                f"{format_bytes(budget)}: {compiled.refusal or 'this process compiles it differently'}; "
                "raise the budget, or give all processes the same devices and versions",
                needs=needs,
                has=budget,
            )

    def as_written(self) -> Fitted:
        """The program as the user wrote it, as it is or planned; ``BudgetError`` when it cannot fit."""
        job, program = self.job, self.program
        bound = self.bound()
        possible = job.shards > 1 or bound.nbytes <= job.budget

        @cache
        def ahead() -> tuple[Candidates, tuple[Variant, Plan] | None]:
            candidates = self.candidates(self.written())
            first = self.cheapest(candidates) if possible and job.shards == 1 else None
            return candidates, first

        # Where nothing may be found, no program is compiled for the report alone before something is.
        tight = job.shards == 1 and job.budget < TIGHT * bound.nbytes and not self.may_fit(program)
        baseline = self.baseline and not tight
        if baseline and job.state:
            self.attempts.own()
        if job.state and self.may_fit(program):
            start = self.written()
            meanwhile = ahead if program.predicted.device > job.budget else None
            made = self.attempts.unplanned(start, meanwhile)
            if made.compiled.device <= job.budget:
                return self.unchanged() if self.saves_nothing(made) else self.planned(made, bound, 0)
        elif not job.state and (baseline or job.shards > 1 or self.may_fit(program)):
            # By the model it does not fit: plan while XLA has its say.
            plain = self.attempts.own(ahead if program.predicted.device > job.budget else None)
            if plain.device <= job.budget:
                return self.unchanged()
        candidates, first = ahead()
        # Below the bound before any search: no plan can need less than what single ops need at once.
        best, count = None, 0
        if possible:
            rounds = self.rounds()
            start = self.written()
            lighter, others = self.lighter or start, [start] if self.lighter else []
            if first is not None and rounds.all_hopeless(candidates, first):
                best, count = Smallest(rounds).glance(self.candidates(lighter, others))
            if best is None or not rounds.hopeless(best.variant, best.compiled.device):
                best, more = rounds.all(candidates, first)
                count += more
                if best is None or best.compiled.device > job.budget:
                    best, more = Smallest(rounds).found(self.candidates(lighter, others), best)
                    count += more
        best = self.or_by_xla(best)
        if best is None or best.compiled.device > job.budget:
            fitted = self.smallest_again()
            if fitted is not None:
                return fitted
            best = self.smallest(candidates, best)
            if best is None or best.compiled.device > job.budget:
                with self.clock("solve"):
                    raise cannot(job, candidates, bound, best)
        return self.fitted(best, bound, count)

    def smallest_again(self) -> Fitted | None:
        """The program that an error has named, where the search for a larger budget did not find as small a one."""
        found = remembered(self.job, self.program.traced.graph)
        if found is None or found[0] > self.job.budget:
            return None
        return self.again(found[1])

    def smallest(self, candidates: Candidates, best: Made | None) -> Made | None:
        """The smallest program that was compiled, for the error to name, and to be found again: one that was planned,
        or the user's own where that is no larger."""
        job, rounds = self.job, self.rounds()
        # What no machine holds is not for compilers either: XLA:CPU ends the process for arrays of 2**50 bytes.
        held = self.program.bound.nbytes <= job.device.capacity
        if best is None and job.shards == 1 and held:
            best, _ = Smallest(rounds).glance(candidates)
        attempts, start = self.attempts, self.written()
        if best is not None and best.compiled.memory is None:
            best = None
        least = LARGE * job.device.capacity if best is None else best.compiled.device
        worth = held and self.program.may_fit(replace(job, budget=least))
        if not job.state and (attempts.plain is not None or worth):
            plain = attempts.own()
            if plain.memory is not None and (best is None or plain.device <= best.compiled.device):
                best = attempts.plainly(start)
        if best is not None and not attempts.misplaced(best):
            graph = self.program.traced.graph
            remember(job, graph, best.compiled.device, self.entry(best))
        return best

    def or_by_xla(self, best: Made | None) -> Made | None:
        """The plan, or what XLA recomputes under ``jax.jit`` by itself, where that fits and costs less."""
        job, plain = self.job, self.attempts.plain
        fits = best is not None and best.compiled.device <= job.budget
        cost = best.variant.seconds + best.plan.overhead if best is not None and fits else math.inf
        needs = plain.device if plain is not None else self.program.plain.device
        if cost <= CHEAP * sum(self.costs().seconds) or needs <= RECOMPUTES * job.device.capacity:
            return best
        with job.faults.of(XLA):
            made = self.attempts.by_xla(self.written())
        return best if made is None or made.compiled.again.seconds >= cost else made

    def saves_nothing(self, made: Made) -> bool:
        """Whether the program needs no fewer bytes with its state on the host than without: a branch, say, takes all of
        it in at once."""
        needs, memory = made.compiled.device, made.compiled.memory
        if memory is None or not memory.host:
            return False  # a CPU has one memory
        if needs < SAVES * self.program.plain.device or self.attempts.own().device > needs:
            return False
        self.notes = (*self.notes, "offload_state= has no effect: with its state on the host it needs no fewer bytes")
        return True

    def bound(self) -> Bound:
        """How few bytes the program needs at least: as it is, or below that in as many parts as there may be."""
        job, program = self.job, self.program
        if program.bound.nbytes <= job.budget or not job.chunk or job.shards > 1:
            return program.bound
        chunks = Chunks(self.written())
        finest = chunks.at(chunks.parts[-1]) if chunks.parts else None
        return program.bound if finest is None else self.less(program.bound, finest)

    def less(self, bound: Bound, variant: Variant) -> Bound:
        """The bound, or that of a program in parts, which may be lower."""
        return min(bound, bound_of(self.job, variant.traced), key=lambda b: b.nbytes)

    def undone(self, undone: Undone, lighter: Subject) -> Fitted | None:
        """The cheapest of what fits with and without the user's checkpoints; None when nothing was found."""
        job = self.job
        costs = self.costs()
        with self.clock("costs"):
            start = self.lighter = ways.undone(job, undone, costs, self.prepare)

        @cache
        def ahead() -> tuple[Candidates, tuple[Variant, Plan]]:
            candidates = self.candidates(start, [self.written()])
            return candidates, self.cheapest(candidates)

        if self.may_fit(lighter):
            meanwhile = ahead if lighter.predicted.device > job.budget else None
            if not undone.barriers and not job.state:
                # Nothing keeps XLA from merging what they recompute: it does so in the user's own function.
                if self.attempts.merged(meanwhile).device <= job.budget:
                    return self.unchanged()
            else:
                made = self.attempts.unplanned(start, meanwhile)
                if made.compiled.device <= job.budget:
                    return self.planned(made, lighter.bound, 0)
        candidates, first = ahead()
        rounds = self.rounds()
        best, count = (None, 0) if rounds.all_hopeless(candidates, first) else rounds.all(candidates, first)
        if best is None or best.compiled.device > job.budget:
            return None
        return self.fitted(best, lighter.bound, count)

    def renewed(self, worth: Callable[[Variant, Plan], bool]) -> Fitted | None:
        """The cheapest of what is worth it and fits, with and without the user's checkpoints; None without such."""
        job, written = self.job, self.written()
        start, program = self.lightest()
        others = [written] if start is not written else []
        rounds = self.rounds()
        rounds.worth = worth
        best, count = rounds.all(self.candidates(start, others), None)
        if best is None or best.compiled.device > job.budget:
            return None
        return self.planned(best, program.bound, count)

    def fitted(self, made: Made, bound: Bound, rounds: int) -> Fitted:
        """The user's own function, where that is what was made, else what was made of it."""
        as_it_is = made.evaluate is None and made.choice != BY_XLA
        return self.unchanged() if as_it_is else self.planned(made, bound, rounds)

    def unchanged(self) -> Fitted:
        """The user's own function, which fits."""
        plain = self.attempts.plain
        assert plain is not None
        told = self.report(None, plain, self.program.bound, 0)
        return Fitted(jitted=plain.jitted, evaluate=None, options=plain.options, report=told)

    def planned(self, made: Made, bound: Bound, rounds: int) -> Fitted:
        """The program that was made of it, which fits."""
        if self.baseline:
            self.attempts.own()
        compiled = made.compiled
        if made.variant.parts > 1:
            bound = self.less(bound, made.variant)
        if self.plans is not None:
            plans = self.plans
            with self.clock("keep"):
                self.job.faults.spared(CACHE, lambda: plans.keep(self.entry(made)), lambda: None)
        told = self.report(made, compiled, bound, rounds)
        state = frozenset(leaf.argument for leaf in self.job.state)
        return Fitted(
            jitted=compiled.jitted,
            evaluate=made.evaluate,
            options=compiled.options,
            report=told,
            state=state,
            time=ways.step_time(made.variant, made.plan) if self.job.shards == 1 else None,
            key=program_key(made.variant, made.plan),
        )

    def entry(self, made: Made) -> Entry:
        """A plan as later processes find it."""
        return Entry(
            key=key_of(self.job, self.program.traced.graph, self.aim),
            name=self.job.name,
            choice=made.choice,
            recipe=recipe_of(made.variant, made.plan),
        )

    def report(self, made: Made | None, compiled: Compiled, bound: Bound, rounds: int) -> Any:
        job, program, plain = self.job, self.program, self.attempts.plain
        seconds = self.clock.seconds
        told = job.faults.spared(
            "the report",
            lambda: report(job, program.traced, made, program.plain, plain, compiled, bound, rounds, seconds),
            lambda: unplanned(job, compiled.notes, compiled.memory, seconds),
        )
        return replace(told, notes=(*told.notes, *self.notes, *job.faults.notes()))


__all__ = ["Evaluate", "Fitted", "Job", "Sketch", "fit", "follow", "renew", "sketches"]
