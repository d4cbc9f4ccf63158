"""The page: from a function, its arguments and a budget to a function that fits and its report.

    trace → Graph → costs → (does it fit as it is?) → possible at all? → solve → check
          → rewrite → compile → XLA's number; on a miss feed it back and solve again.

Facts flow down; the only thing that flows back is a measured number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxtensile.compile import Compiled, Options, compile_program, planned_options
from jaxtensile.device import DeviceProfile
from jaxtensile.errors import BudgetError, Culprit
from jaxtensile.passes.check import check
from jaxtensile.passes.cost import op_costs, unknown_primitives
from jaxtensile.passes.greedy import prepare as greedy
from jaxtensile.passes.liveness import live_ranges
from jaxtensile.passes.loops import LoopPlan
from jaxtensile.passes.lowerbound import Bound, lower_bound
from jaxtensile.plan import Action, Keep, Link, MemoryUse, Offload, Plan, Problem, Program, Remat
from jaxtensile.report import Decision, Report
from jaxtensile.rewrite import rewrite
from jaxtensile.timeline import Sites, Timeline, Track
from jaxtensile.trace import Traced, trace_jaxpr
from jaxtensile.units import Bytes, Seconds, format_bytes
from jaxtensile.variants import Prepare, Variant, Variants

Evaluate = Callable[[list[Any]], list[Any]]
"""Flat arguments → flat outputs, on tracers."""
Make = Callable[[Evaluate | None, Options], Any]
"""A jit object that runs ``evaluate`` (None: the user's function as it is) under compiler options."""
Watch = Callable[[str], None]

ROUNDS = 4
"""Plans that are compiled at most, each under every choice of compiler options until one fits."""
ROUNDS_IF_CLOSE, CLOSE = 6, 1.1
"""Plans at most once one came within this factor of the budget."""
FLATTEST = 0.4
"""A byte less in the model is taken to be at least this share of a byte less in XLA's allocation."""
REFUSED = 0.9
"""After a compiler ran out of memory without a figure, aim this much lower."""
SURELY_OVER = 1.25
"""The plain program is compiled unless the model puts it over the budget by this factor."""
SURELY_OVER_WITH_LOOPS = 2.0

OFFLOADS = frozenset({"cuda"})
"""Platforms whose compiler keeps to the places of copies in straight-line code."""
LINK_SHARE = 0.8
"""Share of the link's peak rate that copies are planned for."""


def nothing(_: str) -> None:
    """The default ``watch``."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What ``fit`` works on: one call of one function for one device."""

    name: str
    jaxpr: Any
    donated: tuple[bool, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    budget: Bytes
    device: DeviceProfile
    shards: int
    make: Make
    options: Options
    keep_unused: bool = False
    host_budget: Bytes = 0

    @property
    def link(self) -> Link | None:
        """The way to host memory, where values may wait there."""
        if not self.host_budget or self.shards > 1 or self.device.platform not in OFFLOADS:
            return None
        return Link(bandwidth=self.device.link_bandwidth * LINK_SHARE, latency=self.device.link_latency)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The jit object that fits, what it evaluates (None: the user's function), and the report."""

    jitted: Any
    evaluate: Evaluate | None
    options: Options
    report: Report


def fit(job: Job, prepare: Prepare = greedy, watch: Watch = nothing, *, baseline: bool = False) -> Fitted:
    """Fit one job. ``baseline``: compile the plain program even when it surely does not fit."""
    clock = _Clock(watch)
    with clock("graph"):
        traced = trace_jaxpr(job.jaxpr, job.donated, keep_unused=job.keep_unused)
        graph = traced.graph
        live = live_ranges(graph)
        bound = lower_bound(graph, traced.consts, job.device.platform)
    predicted = MemoryUse(argument=live.argument, output=live.output, temp=live.temp, alias=live.alias)
    plain: Compiled | None = None
    ready: list[tuple[Variants, tuple[Variant, Plan] | None]] = []

    def plan_ahead() -> None:
        with clock("costs"):
            costs = op_costs(graph, job.device)
        problem = Problem(graph=graph, costs=costs, budget=job.budget, link=job.link, host_budget=job.host_budget)
        with clock("loops"):
            variants = Variants(traced, job.jaxpr, job.donated, job.device, problem, prepare)
        first = None
        if possible and job.shards == 1:
            with clock("solve"):
                first = variants.solve(job.budget)
        ready.append((variants, first))

    possible = job.shards > 1 or bound.nbytes <= job.budget
    loops = any(op.bodies for op in graph.ops)
    over = SURELY_OVER_WITH_LOOPS if loops else SURELY_OVER
    if baseline or job.shards > 1 or predicted.device <= over * job.budget:
        with clock("compile plain"):
            # By the model it does not fit: plan while XLA has its say.
            meanwhile = plan_ahead if predicted.device > job.budget else None
            plain = compile_program(lambda o: job.make(None, o), job.args, job.kwargs, job.options, meanwhile)
        if plain.device <= job.budget:
            return Fitted(
                jitted=plain.jitted,
                evaluate=None,
                options=plain.options,
                report=_report(job, traced, None, predicted, plain, plain, bound, 0, clock),
            )
    if not ready:
        plan_ahead()
    variants, first = ready[0]
    if not possible:
        # Before any search: no plan can need less than what single ops need at once.
        raise _cannot(job, variants, bound, None)
    return _rounds(job, variants, first, predicted, plain, bound, clock)


def _rounds(
    job: Job,
    variants: Variants,
    first: tuple[Variant, Plan] | None,
    predicted: MemoryUse,
    plain: Compiled | None,
    bound: Bound,
    clock: _Clock,
) -> Fitted:
    """Plan, compile, and on a miss plan again for what XLA added."""
    choices = planned_options(job.device.platform, job.options)
    scale = 1.0
    if job.shards > 1 and plain is not None and plain.memory is not None:
        scale = predicted.device / max(plain.device, 1)
    aim = int(job.budget * scale)
    best: _Made | None = None
    seen: list[tuple[Bytes, Bytes]] = []
    rounds = 0
    while rounds < (ROUNDS if best is None or best.compiled.device > CLOSE * job.budget else ROUNDS_IF_CLOSE):
        if first is None:
            with clock("solve"):
                first = variants.solve(aim)
        (variant, plan), first = first, None
        with clock("check"):
            check(variant.problem.graph, plan.program)
        if plan.changes_nothing and not variant.loops:
            # The model thinks that the program fits as it is, XLA knows better: aim as much lower.
            over = 1 / REFUSED if plain is None or plain.memory is None else plain.device / job.budget
            lower = int(predicted.device / over) if plain is not None and over > 1.0 else aim
            if lower >= aim or lower >= predicted.device:
                break
            aim = lower
            continue
        rounds += 1
        with clock("compile planned"):
            made, choices = _compile(job, variant, plan, choices)
        if best is None or made.compiled.device < best.compiled.device:
            best = made
        if plan.offload_bytes and made.compiled.memory is not None and not made.compiled.memory.host:
            # The compiler cancelled every copy: what is left is no plan, so go on without the host.
            variants = variants.without_host()
            best = None if best is made else best
            continue
        if made.compiled.device <= job.budget:
            break
        if made.compiled.memory is None:
            target = int(min(aim, plan.predicted.device) * REFUSED)
        else:
            seen.append((plan.predicted.device, int(made.compiled.device * scale)))
            target = _lower(seen, int(job.budget * scale))
        if plan.predicted.device > aim or target >= aim:
            break
        aim = target
    if best is None or best.compiled.device > job.budget:
        raise _cannot(job, variants, bound, best)
    return Fitted(
        jitted=best.compiled.jitted,
        evaluate=best.evaluate,
        options=best.compiled.options,
        report=_report(job, variants.traced, best, predicted, plain, best.compiled, bound, rounds, clock),
    )


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


@dataclass(frozen=True, kw_only=True)
class _Made:
    """One planned and compiled program."""

    compiled: Compiled
    variant: Variant
    plan: Plan
    evaluate: Evaluate


def _compile(job: Job, variant: Variant, plan: Plan, choices: list[Options]) -> tuple[_Made, list[Options]]:
    """Compile a plan under the first options that fit, else under the best; ``choices``, the better ones first.

    Which of the CPU's schedulers follows a plan is decided by trying: neither is always better.
    """
    evaluate = rewrite(variant.traced, plan.program)
    tried: list[tuple[Bytes, int, Compiled]] = []
    for i, options in enumerate(choices):
        compiled = compile_program(lambda o: job.make(evaluate, o), job.args, job.kwargs, options)
        tried.append((compiled.device, i, compiled))
        if compiled.device <= job.budget:
            break
    tried.sort(key=lambda t: t[:2])
    order = [choices[i] for _, i, _ in tried]
    made = _Made(compiled=tried[0][2], variant=variant, plan=plan, evaluate=evaluate)
    return made, [*order, *(c for c in choices if c not in order)]


def _cannot(job: Job, variants: Variants, bound: Bound, best: _Made | None) -> BudgetError:
    """Value, bound, way out: the smallest budget we can reach and the ops that force it."""
    traced = variants.traced
    fixed = sum(traced.graph.values[v].nbytes for v in traced.graph.inputs)
    if best is not None and best.compiled.memory is not None:
        needs = max(best.compiled.device, bound.nbytes)
        culprits = _at_the_peak(best.variant, best.plan)
    else:
        variant, plan = variants.solve(0)
        needs = max(int(plan.predicted.device * 1.05), bound.nbytes)
        graph = traced.graph
        culprits = tuple(
            Culprit(primitive=graph.ops[o].primitive, source=traced.source(o), nbytes=size) for o, size in bound.ops
        ) or _at_the_peak(variant, plan)
    needs = max(needs, job.budget + 1)
    if job.budget < fixed:
        because = f"the arguments alone are {format_bytes(fixed)}"
    elif job.budget < bound.nbytes:
        because = f"no plan can need less than {format_bytes(bound.nbytes)}, for {', '.join(map(str, culprits[:1]))}"
    else:
        because = f"at the peak of the smallest plan, {', '.join(map(str, culprits))}"
    return BudgetError(
        f"budget {format_bytes(job.budget)} is below the smallest reachable {format_bytes(needs)} of {job.name}: "
        f"{because}; raise the budget, shrink the batch, donate the arguments that are updated, or shard the program",
        needs=needs,
        has=job.budget,
        culprits=culprits,
    )


def _at_the_peak(variant: Variant, plan: Plan, most: int = 3) -> tuple[Culprit, ...]:
    """What lives at the predicted peak, by the op and line that made it, largest first."""
    graph, origin = plan.program.graph, plan.program.origin
    live = live_ranges(graph)
    if not live.profile:
        return ()
    peak = max(range(len(live.profile)), key=live.profile.__getitem__)
    made: dict[int, int] = {r: op.id for op in graph.ops for r in op.results}
    held: dict[tuple[str, str], int] = {}
    for r in live.ranges:
        if r.start <= peak < r.stop:
            o = origin[made[r.value]]
            key = (graph.ops[made[r.value]].primitive, variant.traced.source(o) if o >= 0 else "a barrier")
            held[key] = held.get(key, 0) + r.nbytes
    worst = sorted(held.items(), key=lambda item: -item[1])[:most]
    return tuple(Culprit(primitive=p, source=s, nbytes=n) for (p, s), n in worst)


def _report(
    job: Job,
    traced: Traced,
    made: _Made | None,
    predicted: MemoryUse,
    plain: Compiled | None,
    compiled: Compiled,
    bound: Bound,
    rounds: int,
    clock: _Clock,
) -> Report:
    assert compiled.memory is not None
    notes = [*(plain.notes if plain is not None else ()), *compiled.notes]
    if plain is not None and plain.refusal:
        notes.append(f"the plain program does not compile for this device: {plain.refusal}")
    if job.shards > 1:
        notes.append(f"arguments are sharded over {job.shards} devices; bytes are per device")
    costs = op_costs(traced.graph, job.device)
    sites = _sites(traced, costs.seconds)
    plain_track = _track(Program.unchanged(traced.graph), sites)
    common = {
        "name": job.name,
        "target": job.device.name,
        "budget": job.budget,
        "baseline": plain.memory if plain is not None and plain.memory is not None else predicted,
        "compiled": compiled.memory,
        "lower_bound": bound.nbytes,
        "flops": traced.graph.flops,
        "rounds": rounds,
        "unknown_primitives": unknown_primitives(traced.graph),
        "notes": tuple(dict.fromkeys(notes)),
        "seconds": clock.seconds,
    }
    if made is None:
        return Report(
            predicted=predicted,
            actions=(),
            decisions=(),
            recompute_flops=0.0,
            overhead=0.0,
            overhead_ratio=0.0,
            stages=0,
            solver="none",
            timeline=Timeline(plain_track, None),
            **common,
        )
    variant, plan = made.variant, made.plan
    loop_actions = _loop_actions(traced, variant.loops)
    overhead = plan.overhead + variant.seconds
    step = sum(costs.seconds)
    if variant.traced is not traced:
        sites = _sites(variant.traced, variant.problem.costs.seconds)
    return Report(
        predicted=plan.predicted,
        actions=(*loop_actions, *plan.actions),
        decisions=(*_decisions(traced, loop_actions), *_decisions(variant.traced, plan.actions, plan.program)),
        recompute_flops=plan.recompute_flops + variant.traced.graph.flops - traced.graph.flops,
        offload_bytes=plan.offload_bytes,
        overhead=overhead,
        overhead_ratio=overhead / step if step else 0.0,
        stages=plan.program.stages() + len(variant.loops),
        solver=plan.solver,
        timeline=Timeline(plain_track, _track(plan.program, sites)),
        **common,
    )


def _sites(traced: Traced, seconds: tuple[Seconds, ...]) -> Sites:
    """The ops of ``traced`` by name and line; equal lines are one string."""
    known: dict[str, str] = {}
    lines = (traced.source(op.id) for op in traced.graph.ops)
    return Sites(
        primitives=tuple(op.primitive for op in traced.graph.ops),
        sources=tuple(known.setdefault(line, line) for line in lines),
        seconds=seconds,
    )


def _track(program: Program, sites: Sites) -> Track:
    live = live_ranges(program.graph)
    base = live.device - live.temp
    return Track(sites=sites, origin=program.origin, device=tuple(base + b for b in live.profile), base=base)


def _loop_actions(traced: Traced, loops: tuple[LoopPlan, ...]) -> tuple[Action, ...]:
    """A stack that a loop no longer makes is recomputed by that loop's body."""
    out: list[Action] = []
    for plan in loops:
        front = traced.graph.ops[plan.pair.forward]
        stacks = front.results[front.carried[1] :]
        out.extend(Remat(stacks[y], traced.graph.values[stacks[y]].nbytes, front.id) for y in plan.dropped)
    return tuple(out)


_KINDS = {Keep: "keep", Remat: "recompute", Offload: "offload"}


def _decisions(traced: Traced, actions: tuple[Action, ...], program: Program | None = None) -> tuple[Decision, ...]:
    """The actions in the user's words, without what is only held for a moment after the first barrier."""
    origin = program.origin if program is not None else ()
    early = set(origin[: origin.index(-1)] if -1 in origin else range(len(traced.graph.ops)))
    made = {r: op.id for op in traced.graph.ops for r in op.results}
    home = live_ranges(traced.graph).kernels.home if actions else []
    out: list[Decision] = []
    for action in actions:
        if action.value not in made or (isinstance(action, Keep) and made[action.value] not in early):
            continue
        value, op = traced.graph.values[action.value], made[action.value]
        out.append(
            Decision(
                kind=_KINDS[type(action)],
                primitive=traced.graph.ops[op].primitive,
                dtype=value.dtype,
                shape=value.shape,
                nbytes=value.nbytes,
                source=traced.source(op),
                stored=home[action.value] == action.value,
            )
        )
    return tuple(out)


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
