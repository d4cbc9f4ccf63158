"""The page: from a function, its arguments and a budget to a function that fits and its report.

    trace → Graph → costs → (does it fit as it is?) → possible at all? → solve → check
          → rewrite → compile → XLA's number; on a miss feed it back and solve again.

Where the user's own checkpoints recompute more than the budget needs, the page is first gone through
for the program without them. Facts flow down; the only thing that flows back is a measured number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax

from jaxtensile import variants as ways
from jaxtensile.candidates import Candidates
from jaxtensile.compile import Compiled, Options, compile_program, planned_options
from jaxtensile.job import Evaluate, Fitted, Job
from jaxtensile.outcome import Made, cannot, report
from jaxtensile.passes.answer import answer
from jaxtensile.passes.check import check
from jaxtensile.passes.cost import op_costs
from jaxtensile.passes.liveness import live_ranges
from jaxtensile.passes.lowerbound import Bound, lower_bound
from jaxtensile.passes.solvers import named
from jaxtensile.plan import Costs, MemoryUse, Plan, Prepare, Program
from jaxtensile.rewrite import rewrite
from jaxtensile.state import choose
from jaxtensile.trace import Traced, trace_jaxpr
from jaxtensile.undo import Undone, undo
from jaxtensile.units import Bytes, Seconds
from jaxtensile.variants import Variant, program_key

Watch = Callable[[str], None]

ROUNDS = 4
"""Plans that are compiled at most, each under every choice of compiler options until one fits.

Twice as many where the program without the user's checkpoints is tried first, and in vain.
"""
SPARE, LIFTS = 0.03, 2
"""After a miss and a plan that fits: share of the budget that is worth a plan between them, and how many at most."""
ROUNDS_IF_CLOSE, CLOSE = 6, 1.1
"""Plans at most once one came within this factor of the budget."""
FLATTEST = 0.4
"""A byte less in the model is taken to be at least this share of a byte less in XLA's allocation."""
REFUSED = 0.9
"""After a compiler ran out of memory without a figure, aim this much lower."""
SURELY_OVER = 1.25
"""The plain program is compiled unless the model puts it over the budget by this factor."""
SURELY_OVER_WITH_LOOPS = 2.0


def nothing(_: str) -> None:
    """The default ``watch``."""


def fit(job: Job, prepare: Prepare | None = None, watch: Watch = nothing, *, baseline: bool = False) -> Fitted:
    """Fit one job. ``prepare``: the solver, the job's own if None; ``baseline``: compile the plain program even
    when it surely does not fit."""
    page, undone, lighter = _opened(job, prepare or named(job.solver), _Clock(watch), baseline)
    if undone is not None and lighter is not None:
        fitted = page.undone(undone, lighter)
        if fitted is not None:
            return fitted
    return page.as_written()


def renew(job: Job, at_most: Seconds, unlike: int, watch: Watch = nothing) -> Fitted | None:
    """The plan for a job whose rates are known better than when it was fitted; None when there is no better one.

    Better: of another key than ``unlike`` and with a step of at most ``at_most`` predicted seconds. What is not
    does not get compiled, and the user's function is not run.
    """
    page, undone, lighter = _opened(job, named(job.solver), _Clock(watch), False)
    as_it_is = rewrite(page.program.traced, Program.unchanged(page.program.traced.graph))
    make = job.make
    page.job = replace(page.job, make=lambda evaluate, options: make(evaluate or as_it_is, options))
    page.worth = lambda variant, plan: (
        program_key(variant, plan) != unlike
        and ways.step_time(variant, plan, sum(page.costs().seconds)).at() <= at_most
    )
    return page.renewed(undone, lighter)


def _opened(job: Job, prepare: Prepare, clock: _Clock, baseline: bool) -> tuple[_Page, Undone | None, _Subject | None]:
    """The page of a job, and the program without the user's checkpoints where it has some and may fit."""
    with clock("graph"):
        traced = trace_jaxpr(job.jaxpr, job.donated, keep_unused=job.keep_unused)
        job, notes = _with_state(job, traced)
        program = _program(job, traced)
        undone = undo(program.traced) if job.undo and job.shards == 1 else None
        lighter = _program(job, undone.traced) if undone is not None else None
    if lighter is not None and lighter.bound.nbytes > job.budget:
        undone = lighter = None
    return _Page(job, prepare, clock, baseline, program, notes), undone, lighter


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """A traced program, what the model says of it as it is, and once its state is on the host."""

    traced: Traced
    plain: MemoryUse
    predicted: MemoryUse
    bound: Bound

    def may_fit(self, job: Job) -> bool:
        """Whether XLA is worth asking about it as it is."""
        loops = any(op.bodies for op in self.traced.graph.ops)
        return self.predicted.device <= (SURELY_OVER_WITH_LOOPS if loops else SURELY_OVER) * job.budget


def _program(job: Job, traced: Traced) -> _Subject:
    placed = ways.streamed(job, traced)
    plain = live_ranges(traced.graph).use()
    return _Subject(
        traced=traced,
        plain=plain,
        predicted=plain if placed is traced else live_ranges(placed.graph).use(host=job.state_bytes),
        bound=lower_bound(placed.graph, placed.consts, job.device.platform),
    )


def _with_state(job: Job, traced: Traced) -> tuple[Job, tuple[str, ...]]:
    """The job with the arguments that may wait on the host between calls there, and what to say of the others."""
    if job.place is None:
        return job, ()
    if job.shards > 1:
        return job, ("offload_state: arguments that are sharded over several devices stay there",)
    state, stay = choose(traced, op_costs(traced.graph, job.device).charge, job.names, job.state_budget)
    notes: list[str] = []
    if stay:
        notes.append(
            f"offload_state: {len(stay)} arguments ({stay[0]}, ...) stay on the device, because jax.jit would give "
            "their buffers to other outputs than those that replace them: return the state in the arguments' order"
        )
    elif not state:
        notes.append("offload_state: no donated argument of 1 MiB or more is needed by the update alone")
    return job.with_state(state), tuple(notes)


class _Page:
    """One job on its way down the page, and what has been compiled of it."""

    def __init__(
        self, job: Job, prepare: Prepare, clock: _Clock, baseline: bool, program: _Subject, notes: tuple[str, ...]
    ) -> None:
        self.job, self.prepare, self.clock, self.baseline, self.program = job, prepare, clock, baseline, program
        self.notes = notes
        self.plain: Compiled | None = None
        self.changed_as_it_is: dict[bool, Compiled] = {}
        """Of the program with its state on the host or without its checkpoints (True), and nothing else changed."""
        self.known_costs: Costs | None = None
        self.worth: Callable[[Variant, Plan], bool] = lambda _, __: True
        """Whether a plan is worth a compile."""

    def costs(self) -> Costs:
        """Of the program as written."""
        if self.known_costs is None:
            with self.clock("costs"):
                self.known_costs = op_costs(self.program.traced.graph, self.job.device)
        return self.known_costs

    def compile_plain(self, meanwhile: Callable[[], object] | None = None) -> Compiled:
        """The user's own function, compiled once."""
        if self.plain is None:
            job = self.job
            with self.clock("compile plain"):
                self.plain = compile_program(lambda o: job.make(None, o), job.args, job.kwargs, job.options, meanwhile)
        return self.plain

    def candidates(self, start: Variant, others: Sequence[Variant] = ()) -> Candidates:
        with self.clock("loops"):
            return Candidates(start, self.costs(), others)

    def cheapest(self, candidates: Candidates, aim: Bytes) -> tuple[Variant, Plan]:
        with self.clock("solve"):
            return candidates.cheapest(aim)

    def as_written(self) -> Fitted:
        """The program as the user wrote it, as it is or planned; ``BudgetError`` when it cannot fit."""
        job, program = self.job, self.program
        possible = job.shards > 1 or program.bound.nbytes <= job.budget

        @cache
        def ahead() -> tuple[Candidates, tuple[Variant, Plan] | None]:
            candidates = self.candidates(ways.written(job, program.traced, self.costs(), self.prepare))
            # Across shards the model's figures are scaled by the plain program's, which is not known yet.
            first = self.cheapest(candidates, job.budget) if possible and job.shards == 1 else None
            return candidates, first

        if self.baseline and job.state:
            self.compile_plain()
        if job.state and program.may_fit(job):
            start = ways.written(job, program.traced, self.costs(), self.prepare)
            meanwhile = ahead if program.predicted.device > job.budget else None
            made = self.compile_as_it_is(start, meanwhile)
            if made.compiled.device <= job.budget:
                return self.planned(made, program.bound, 0)
        elif not job.state and (self.baseline or job.shards > 1 or program.may_fit(job)):
            # By the model it does not fit: plan while XLA has its say.
            plain = self.compile_plain(ahead if program.predicted.device > job.budget else None)
            if plain.device <= job.budget:
                return self.unchanged()
        candidates, first = ahead()
        # Below the bound before any search: no plan can need less than what single ops need at once.
        best, rounds = self.rounds(candidates, first) if possible else (None, 0)
        if possible and (best is None or best.compiled.device > job.budget):
            best, more = self.smallest(best)
            rounds += more
        if best is None or best.compiled.device > job.budget:
            with self.clock("solve"):
                raise cannot(job, candidates, program.bound, best)
        return self.planned(best, program.bound, rounds)

    def undone(self, undone: Undone, lighter: _Subject) -> Fitted | None:
        """The cheapest of what fits with and without the user's checkpoints; None when nothing was found."""
        job = self.job
        costs = self.costs()
        with self.clock("costs"):
            start = ways.undone(job, undone, costs, self.prepare)

        @cache
        def ahead() -> tuple[Candidates, tuple[Variant, Plan]]:
            candidates = self.candidates(start, [ways.written(job, self.program.traced, costs, self.prepare)])
            return candidates, self.cheapest(candidates, job.budget)

        if lighter.may_fit(job):
            meanwhile = ahead if lighter.predicted.device > job.budget else None
            if not undone.barriers and not job.state:
                # Nothing keeps XLA from merging what they recompute: it does so in the user's own function.
                self.changed_as_it_is[True] = self.compile_plain(meanwhile)
                if self.changed_as_it_is[True].device <= job.budget:
                    return self.unchanged()
            else:
                made = self.compile_as_it_is(start, meanwhile)
                if made.compiled.device <= job.budget:
                    return self.planned(made, lighter.bound, 0)
        best, rounds = self.rounds(*ahead())
        if best is None or best.compiled.device > job.budget:
            return None
        return self.unchanged() if best.evaluate is None else self.planned(best, lighter.bound, rounds)

    def renewed(self, undone: Undone | None, lighter: _Subject | None) -> Fitted | None:
        """The cheapest of what is worth it and fits, with and without the user's checkpoints; None without such."""
        job, costs, program = self.job, self.costs(), self.program
        start = written = ways.written(job, program.traced, costs, self.prepare)
        if undone is not None and lighter is not None:
            start, program = ways.undone(job, undone, costs, self.prepare), lighter
        others = [written] if start is not written else []
        best, rounds = self.rounds(self.candidates(start, others), None)
        if best is None or best.compiled.device > job.budget:
            return None
        return self.planned(best, program.bound, rounds)

    def compile_as_it_is(self, variant: Variant, meanwhile: Callable[[], object] | None = None) -> Made:
        """The program with its state on the host, or without checkpoints, and with nothing else changed."""
        job = self.job
        program = Program.unchanged(variant.traced.graph)
        evaluate = rewrite(variant.traced, program)
        args, kwargs = job.arguments()
        with self.clock("compile undone" if variant.undone is not None else "compile streamed"):
            compiled = compile_program(lambda o: job.make(evaluate, o), args, kwargs, job.options, meanwhile)
        self.changed_as_it_is[variant.undone is not None] = compiled
        plan = answer(variant.problem, program, live_ranges(program.graph), "none")
        return Made(compiled=compiled, variant=variant, plan=plan, evaluate=evaluate)

    def rounds(self, candidates: Candidates, first: tuple[Variant, Plan] | None) -> tuple[Made | None, int]:
        """What comes closest to the budget, and how many plans were compiled.

        Where plans with bytes on the host do not fit, or are refused, recomputation alone has as many rounds:
        a ``host_budget`` costs compiles and never a fit.
        """
        budget = self.job.budget
        best, rounds, tried = self.some_rounds(candidates, first)
        if not tried or (best is not None and best.compiled.device <= budget):
            return best, rounds
        candidates.forget_host()
        first = self.cheapest(candidates, budget)
        if first[1].predicted.device > SURELY_OVER_WITH_LOOPS * budget:
            return best, rounds
        second, more, _ = self.some_rounds(candidates, first)
        made = [m for m in (best, second) if m is not None]
        return min(made, key=lambda m: m.compiled.device, default=None), rounds + more

    def some_rounds(self, candidates: Candidates, first: tuple[Variant, Plan] | None) -> tuple[Made | None, int, bool]:
        """Plan, compile, and on a miss plan again for what XLA added: the smallest, how many were compiled, and
        whether bytes on the host were among what was tried."""
        job, clock = self.job, self.clock
        choices = planned_options(job.device.platform, job.options)
        scale = self.scale
        aim = int(job.budget * scale)
        if job.device.platform == "cpu":
            aim -= job.state_bytes  # its host memory is its device memory
        best: Made | None = None
        rounds, hosted = 0, False
        seen: list[tuple[Bytes, Bytes]] = []
        keys: set[int] = set()
        while rounds < (ROUNDS if best is None or best.compiled.device > CLOSE * job.budget else ROUNDS_IF_CLOSE):
            (variant, plan), first = first or self.cheapest(candidates, aim), None
            if not self.worth(variant, plan):
                break
            with clock("check"):
                check(variant.problem.graph, plan.program)
            if plan.changes_nothing and variant.as_it_is:
                known = self.as_it_is(variant)
                if variant.undone is None and known is None and plan.predicted.device <= aim:
                    # With its checkpoints it may fit as it is, at the least price.
                    if job.state:
                        made = self.compile_as_it_is(variant)
                    else:
                        made = Made(compiled=self.compile_plain(), variant=variant, plan=plan, evaluate=None)
                    if made.compiled.device <= job.budget:
                        return made, rounds, hosted
                # The model thinks that the program fits as it is, XLA knows better: aim as much lower.
                plain = self.as_it_is(variant)
                over = 1 / REFUSED if plain is None or plain.memory is None else plain.device / job.budget
                lower = int(plan.predicted.device / over) if plain is not None and over > 1.0 else aim
                if lower >= aim or lower >= plan.predicted.device:
                    break
                aim = lower
                continue
            if (key := program_key(variant, plan)) in keys:
                break
            keys.add(key)
            rounds += 1
            hosted = hosted or plan.offload_bytes > job.state_bytes
            done = self.compile_planned(variant, plan, choices)
            if done is None:
                break
            made, choices = done
            if best is None or made.compiled.device < best.compiled.device:
                best = made
            if self.cancelled(made):
                best = None if best is made else best
                break
            if made.compiled.device <= job.budget:
                if seen:
                    best, more = self.cheaper(candidates, made, seen[-1], choices)
                    rounds += more
                break
            if made.compiled.memory is None:
                target = int(min(aim, plan.predicted.device) * REFUSED)
            else:
                seen.append((plan.predicted.device, int(made.compiled.device * scale)))
                target = _lower(seen, int(job.budget * scale))
            if plan.predicted.device > aim or target >= aim:
                break
            aim = target
        return best, rounds, hosted

    def smallest(self, missed: Made | None) -> tuple[Made | None, int]:
        """The program as written under the smallest plan there is, and how many were compiled.

        Which plans are compiled on the way to a budget depends on it, and so does how low they get; this one does
        not. So a budget of its bytes is met, and lower ones that were met by luck are not promised.
        """
        job = self.job
        candidates = self.candidates(ways.written(job, self.program.traced, self.costs(), self.prepare))
        choices = planned_options(job.device.platform, job.options)
        best: Made | None = None
        rounds, known = 0, set[int]()
        for host in (True, False) if job.host_budget else (False,):
            if not host:
                candidates.forget_host()
            with self.clock("solve"):
                variant, plan = candidates.smallest()
            key = program_key(variant, plan)
            if key in known or (plan.changes_nothing and variant.as_it_is):
                continue
            known.add(key)
            with self.clock("check"):
                check(variant.problem.graph, plan.program)
            rounds += 1
            made = self.compile_planned(variant, plan, choices)
            if made is None or self.cancelled(made[0]):
                continue
            found, order = made
            if best is None or found.compiled.device < best.compiled.device:
                best = found
            if found.compiled.device <= job.budget:
                if missed is None or missed.compiled.memory is None:
                    return found, rounds
                over = missed.plan.predicted.device, int(missed.compiled.device * self.scale)
                found, more = self.cheaper(candidates, found, over, order)
                return found, rounds + more
        return best or missed, rounds

    def compile_planned(
        self, variant: Variant, plan: Plan, choices: list[Options]
    ) -> tuple[Made, list[Options]] | None:
        """The plan, compiled, and the choices with the better ones first; None for copies that XLA does not compile."""
        try:
            with self.clock("compile planned"):
                return _compile(self.job, variant, plan, choices)
        except jax.errors.JaxRuntimeError:
            if plan.offload_bytes <= self.job.state_bytes:
                raise
            return None

    @property
    def scale(self) -> float:
        """Bytes in the model per byte on one device: the model knows nothing of shards."""
        if self.job.shards > 1 and self.plain is not None and self.plain.memory is not None:
            return self.program.predicted.device / max(self.plain.device, 1)
        return 1.0

    def cheaper(
        self, candidates: Candidates, fits: Made, missed: tuple[Bytes, Bytes], choices: list[Options]
    ) -> tuple[Made, int]:
        """A plan with less work between one that missed, of (predicted, compiled) bytes, and one that fits with bytes
        to spare; the one that fits if there is no such, and how many were compiled."""
        job, scale = self.job, self.scale
        budget = job.budget * scale
        for tried in range(LIFTS):
            predicted, compiled = fits.plan.predicted.device, fits.compiled.device * scale
            if budget - compiled <= SPARE * budget or missed[0] <= predicted or missed[1] <= compiled:
                return fits, tried
            aim = predicted + int((budget - compiled) / (missed[1] - compiled) * (missed[0] - predicted))
            variant, plan = self.cheapest(candidates, aim)
            less = ways.charge_of(variant, plan) < ways.charge_of(fits.variant, fits.plan)
            same = plan.changes_nothing and variant.as_it_is
            if same or not less or plan.predicted.device > aim or not self.worth(variant, plan):
                return fits, tried
            with self.clock("check"):
                check(variant.problem.graph, plan.program)
            done = self.compile_planned(variant, plan, choices)
            if done is None or done[0].compiled.memory is None or self.cancelled(done[0]):
                return fits, tried + 1
            made, _ = done
            if made.compiled.device <= job.budget:
                fits = made
            else:
                missed = plan.predicted.device, int(made.compiled.device * scale)
        return fits, LIFTS

    def cancelled(self, made: Made) -> bool:
        """Whether the compiler dropped every copy of a plan with copies: what is left is no plan."""
        memory, there = made.compiled.memory, self.job.state_bytes
        return made.plan.offload_bytes > there and memory is not None and memory.host <= there

    def as_it_is(self, variant: Variant) -> Compiled | None:
        """What XLA said of the variant's program with nothing recomputed, if it was asked."""
        undone = variant.undone is not None
        return self.changed_as_it_is.get(undone) if undone or self.job.state else self.plain

    def unchanged(self) -> Fitted:
        """The user's own function, which fits."""
        plain = self.plain
        assert plain is not None
        told = self.report(None, plain, self.program.bound, 0)
        return Fitted(jitted=plain.jitted, evaluate=None, options=plain.options, report=told)

    def planned(self, made: Made, bound: Bound, rounds: int) -> Fitted:
        """The program that was made of it, which fits."""
        if self.baseline:
            self.compile_plain()
        compiled = made.compiled
        told = self.report(made, compiled, bound, rounds)
        state = frozenset(leaf.argument for leaf in self.job.state)
        return Fitted(
            jitted=compiled.jitted,
            evaluate=made.evaluate,
            options=compiled.options,
            report=told,
            state=state,
            time=ways.step_time(made.variant, made.plan, sum(self.costs().seconds)) if self.job.shards == 1 else None,
            key=program_key(made.variant, made.plan),
        )

    def report(self, made: Made | None, compiled: Compiled, bound: Bound, rounds: int) -> Any:
        program = self.program
        told = report(
            self.job, program.traced, made, program.plain, self.plain, compiled, bound, rounds, self.clock.seconds
        )
        return replace(told, notes=(*told.notes, *self.notes))


def _lower(seen: list[tuple[Bytes, Bytes]], budget: Bytes) -> Bytes:
    """What to aim at after misses: ``seen`` are (predicted, compiled) bytes, the latest last.

    By as much lower as the last one missed by, or as the line through the last two says if that is
    lower: where the model's error grows with what is dropped, the first alone would never arrive.
    """
    (p, c) = seen[-1]
    target = min(p, budget) - max(c - budget, 0)
    if len(seen) > 1:
        (q, d) = seen[-2]
        slope = min(max((d - c) / (q - p), FLATTEST), 1.0) if q > p else 1.0
        target = min(target, int(p - (c - budget) / slope))
    return target


def _compile(job: Job, variant: Variant, plan: Plan, choices: list[Options]) -> tuple[Made, list[Options]]:
    """Compile a plan under the first options that fit, else under the best; ``choices``, the better ones first.

    Which of the CPU's schedulers follows a plan is decided by trying: neither is always better.
    """
    evaluate = rewrite(variant.traced, plan.program)
    args, kwargs = job.arguments()
    tried: list[tuple[int, int, Compiled]] = []
    for i, options in enumerate(choices):
        compiled = compile_program(lambda o: job.make(evaluate, o), args, kwargs, options)
        tried.append((compiled.device, i, compiled))
        if compiled.device <= job.budget:
            break
    tried.sort(key=lambda t: t[:2])
    order = [choices[i] for _, i, _ in tried]
    made = Made(compiled=tried[0][2], variant=variant, plan=plan, evaluate=evaluate)
    return made, [*order, *(c for c in choices if c not in order)]


class _Clock:
    """Wall seconds per pipeline step, summed over rounds; tells ``watch`` what begins."""

    def __init__(self, watch: Watch) -> None:
        self.seconds: dict[str, float] = {}
        self.watch = watch
        self._within = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.watch(name)
        started = time.perf_counter()
        outer, self._within = self._within, 0.0
        try:
            yield
        finally:
            # What was done meanwhile has a name of its own.
            took = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + took - self._within
            self._within = outer + took


__all__ = ["Evaluate", "Fitted", "Job", "fit", "renew"]
