"""In which ways may a program be rewritten before it is planned, and what does each cost?

The ways: as it is, without the user's checkpoints, with products made slice by slice, and each with
more and more of what its loops stack recomputed instead, or with that in host memory; and with the bodies
of loops and branches planned as programs of their own. A program is rewritten when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, TypeVar

from jaxtensile import _compat
from jaxtensile.devices.profiles import DeviceProfile
from jaxtensile.faults import leaves_out
from jaxtensile.ir.ir import Graph
from jaxtensile.ir.plan import Costs, Link, MemoryUse, Plan, Prepare, Problem, Solve
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.offload.loops import InnerPlan, Ladder, LoopPlan, Way, find_pairs, repeated
from jaxtensile.passes.order.apart import apart
from jaxtensile.passes.order.prompt import prompt
from jaxtensile.passes.seconds.cost import launches, op_costs
from jaxtensile.passes.seconds.steptime import LoopCopies, StepTime
from jaxtensile.passes.solvers.answer import answer
from jaxtensile.passes.solvers.by_name import finished, named
from jaxtensile.program.bodies import Body, Key, with_bodies
from jaxtensile.program.merge import rebuilt
from jaxtensile.program.rewrite import rewrite
from jaxtensile.program.trace import Traced, trace_jaxpr
from jaxtensile.rewrites.inward import find_moved, move_inward
from jaxtensile.rewrites.join import find_cond_pairs, join_conds
from jaxtensile.rewrites.levels import inner_ways, rewrite_inner, without_loops_between
from jaxtensile.rewrites.loops import rewrite_loops
from jaxtensile.rewrites.nest import nest_loops
from jaxtensile.rewrites.rows.chunk import in_chunks
from jaxtensile.rewrites.rows.stretch import Seed, Stretch, ends, find_stretch, stretch_of
from jaxtensile.rewrites.sink import sink
from jaxtensile.rewrites.split import sliced_products, split_products
from jaxtensile.rewrites.state import on_host
from jaxtensile.rewrites.undo import Undone
from jaxtensile.search.request import Job
from jaxtensile.units import Bytes, Seconds
from jaxtensile.xla.compilers import compiler_of

T = TypeVar("T")
LARGE = 1 / 16
"""From this share of the temporaries on products are worth slicing, loops nesting and bodies planning."""
FEW = 2
"""Ops named at most that end the rows."""
TRIED = 8
"""So many parts at least say whether parts help at all; the most there may be where those are fewer."""
MOST_ROWS = 2**31 - 1
"""A loop counts them with 32 bits."""
MOST_PARTS = 256
"""Work is done in so many parts at most."""

# What rewrites are called where one of them is left out.
UNDONE = "the undoing of jax.checkpoint"
SUNK = "the sinking of operations into loops"
PROMPT = "updates right behind their gradients"
SLICED = "products made slice by slice"
PARTS = "work on the batch in parts"
JOINED = "the joining of branches with their gradients"
INWARD = "the making of loop constants inside loops"
NESTED = "the nesting of loops"
LOOPS = "recomputation inside loops"
BODIES = "the planning of loop and branch bodies"
OFFLOAD = "offload to the host"
STATE = "the state on the host"
FINISHED = "the integer programme"
REWRITES = (UNDONE, SUNK, PROMPT, SLICED, PARTS, JOINED, INWARD, NESTED, LOOPS, BODIES, OFFLOAD, STATE)


def _none(_: Variant) -> None:
    """Of a rewrite that is left out."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """The program rewritten in one way, and what that costs over the program as written.

    ``base``: the program before its loops were rewritten; ``undone``: set where it has no checkpoints;
    ``prompt``: updates stand behind their gradients; ``sunk``: what lay between stacks and the loops that read them is
    in those loops; ``sliced``: products that are made slice by slice; ``chunked``: where the rows come from of the
    stretch that is done for some of them at a time, and in how many parts; ``joined``: branches that compute again what
    they handed on to their gradients; ``inward``: loops that make themselves what was made for them; ``nested``: (op,
    iterations of its inner loop) of loops that became loops of loops; ``inner``: what became of loops in the iterations
    of pairs of loops; ``inside``: what became of the bodies of its loops and branches; ``finer``: steps between this
    and the next dearer one.
    """

    job: Job
    prepare: Prepare
    base: Traced
    charge: Seconds = 0.0
    seconds: Seconds = 0.0
    loops: tuple[LoopPlan, ...] = ()
    undone: Undone | None = None
    prompt: bool = False
    sunk: bool = False
    sliced: int = 0
    chunked: tuple[Seed, int] | None = None
    joined: int = 0
    inward: int = 0
    nested: tuple[tuple[int, int], ...] = ()
    inner: tuple[InnerPlan, ...] = ()
    inside: tuple[Inside, ...] = ()
    host: bool = True
    known: Costs | None = None
    finer: Callable[[], list[Variant]] = list

    @property
    def aside(self) -> Bytes:
        """Bytes that its loops stack in host memory."""
        return sum(plan.aside for plan in self.loops)

    @property
    def blamed(self) -> str:
        """The rewrite that is left out where something of it fails: the last one that made it; empty without any."""
        job = self.job
        made = (
            (BODIES, self.inside),
            (NESTED, self.nested),
            (INWARD, self.inward),
            (JOINED, self.joined),
            (SLICED, self.sliced),
            (PARTS, self.chunked),
            (LOOPS, self.loops or self.inner),
            (PROMPT, self.prompt),
            (SUNK, self.sunk),
            (UNDONE, self.undone),
            (OFFLOAD, self.host and job.host_budget),
            (STATE, job.state),
        )
        return next((name for name, used in made if used), "")

    @property
    def as_it_is(self) -> bool:
        """Whether nothing of it is rewritten but the user's checkpoints: the order of its ops is the compiler's."""
        changed = self.sunk or self.sliced or self.chunked or self.joined or self.inward
        return not (changed or self.nested or self.inner or self.loops or self.inside)

    @property
    def deep(self) -> bool:
        """Whether bodies are planned, or other programs than they were: what the model knows least."""
        return bool(self.inside or self.nested or self.joined or self.inward)

    @cached_property
    def looped(self) -> Traced:
        """The program with its loops rewritten."""
        if not self.loops:
            return self.base
        with self.job.faults.of(LOOPS):
            changed = rewrite_loops(self.base, self.job.jaxpr, self.loops, load_index=self.job.load_index)
            return traced_for(self.job, changed)

    @cached_property
    def traced(self) -> Traced:
        """The program that is planned."""
        traced = self.looped
        if self.inside:
            with self.job.faults.of(BODIES):
                new = {i.key: rewrite(i.variant.traced, i.plan.program) for i in self.inside}
                changed = with_bodies(traced, self.job.jaxpr, new)
                traced = traced_for(self.job, changed)
        return streamed(self.job, traced)

    @cached_property
    def problem(self) -> Problem:
        """Fit it into the job's budget."""
        job, graph = self.job, self.traced.graph
        known = self.known is not None and self.traced is self.base
        costs = self.known if self.known is not None and known else op_costs(graph, job.device)
        return Problem(
            graph=graph,
            costs=costs,
            budget=job.budget,
            link=job.link if self.host or job.state else None,
            host_budget=job.host_budget - self.aside if self.host else 0,
            state=job.state_bytes,
            stacks=self.aside,
        )

    @cached_property
    def plain(self) -> MemoryUse:
        """What it needs with nothing planned."""
        with self.job.faults.of(self.blamed):
            return live_ranges(self.traced.graph).use()

    @cached_property
    def solve(self) -> Solve:
        """The solver's answer for a budget."""
        faults, blamed = self.job.faults, self.blamed
        with faults.of(blamed):
            solve = self.prepare(self.problem)

        def at(budget: Bytes, /, *, least: bool = True) -> Plan:
            with faults.of(blamed):
                return solve(budget, least=least)

        return at

    def finished(self, plan: Plan, budget: Bytes) -> Plan:
        """What the plan becomes before it is compiled; those of other solvers than the default one are left."""
        better = lambda: finished(self.prepare, self.problem, budget, plan)  # noqa: E731
        return self.job.faults.spared(FINISHED, better, lambda: plan)


@dataclass(frozen=True, kw_only=True)
class Inside:
    """How one body of the program with its loops rewritten was planned, as a program of its own.

    ``held``: barriers keep it in the order of its schedule.
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


def traced_for(job: Job, jaxpr: Any) -> Traced:
    """A program of the job as it is planned."""
    return on_device(job, trace_jaxpr(jaxpr, job.donated, keep_unused=job.keep_unused))


def on_device(job: Job, traced: Traced) -> Traced:
    """``traced`` with what its ops need by themselves on the job's device."""
    graph = compiler_of(job.device).with_workspaces(traced.graph)
    return traced if graph is traced.graph else replace(traced, graph=graph)


def streamed(job: Job, traced: Traced) -> Traced:
    """``traced`` with the job's state on the host."""
    if not job.state:
        return traced
    with job.faults.of(STATE):
        return on_host(traced, job.state, op_costs(traced.graph, job.device).seconds, job.way)


def written(job: Job, traced: Traced, costs: Costs, prepare: Prepare) -> Variant:
    """The program as the user wrote it."""
    return Variant(job=job, prepare=prepare, base=traced, known=costs)


def undone(job: Job, program: Undone, costs: Costs, prepare: Prepare) -> Variant:
    """The program without its checkpoints; ``costs`` are those of the program as written."""
    start = Variant(job=job, prepare=prepare, base=program.traced, undone=program)
    return _priced(start, costs)


def _large(start: Variant) -> Bytes:
    return max(int(LARGE * live_ranges(start.base.graph).temp), 1)


@leaves_out(PROMPT, _none)
def prompted(start: Variant, costs: Costs) -> Variant | None:
    """``start`` with each update behind its own gradient; None where no large gradient waits for others, where the
    updates wait for state from the host, and for compilers that do not keep to the order that barriers give."""
    follows = start.job.device.platform == "cuda" and not start.job.state
    order = None if not follows else prompt(start.base.graph, least=_large(start) // 4)
    if order is None:
        return None
    return _priced(replace(start, base=rebuilt(start.base, {}, order)[0], prompt=True), costs)


@leaves_out(SLICED, _none)
def sliced(start: Variant, costs: Costs) -> Variant | None:
    """``start`` with large products made in the slices in which they are read; None when there are none."""
    chosen = sliced_products(start.base, _large(start))
    if not chosen:
        return None
    jaxpr = _if_types_allow(lambda: split_products(start.base, start.job.jaxpr, chosen))
    if jaxpr is None:
        return None
    base = traced_for(start.job, jaxpr)
    return _priced(replace(start, base=base, sliced=len(chosen)), costs)


@leaves_out(PARTS, _none)
def _stretch(start: Variant) -> Stretch | None:
    return find_stretch(start.base, _large(start))


class Chunks:
    """``start`` with its batch, or whatever has many rows, worked on in parts of equally many rows. Made when first
    asked for."""

    def __init__(self, start: Variant, costs: Costs) -> None:
        self.start, self._costs = start, costs
        self._made: dict[int, Variant | None] = {}

    @cached_property
    def stretch(self) -> Stretch | None:
        """What is done in parts."""
        return _stretch(self.start)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """The numbers of parts there may be."""
        rows = self.stretch.seed.rows if self.stretch is not None else 1
        most = min(rows, MOST_PARTS) if rows <= MOST_ROWS else 1
        return tuple(k for k in range(2, most + 1) if rows % k == 0)

    @property
    def helps(self) -> bool:
        """Whether a few parts need fewer bytes, by the model."""
        made = self.at(next((k for k in self.parts if k >= TRIED), self.parts[-1])) if self.parts else None
        return made is not None and live_ranges(made.base.graph).temp < live_ranges(self.start.base.graph).temp

    def at(self, parts: int) -> Variant | None:
        """In so many parts; None where it cannot be."""
        if parts not in self._made:
            own = self.stretch
            self._made[parts] = None if own is None else _in_parts(self.start, self._costs, own, parts)
        return self._made[parts]


def why_not_in_parts(job: Job, traced: Traced) -> str:
    """Why a program that may be worked on in parts cannot be; empty where it can, or was not asked to."""
    if not job.chunk:
        return ""
    if job.shards > 1:
        return "chunk=True has no effect on arguments that are sharded over several devices"
    least = max(int(LARGE * live_ranges(traced.graph).temp), 1)
    if job.faults.spared(PARTS, lambda: find_stretch(traced, least), lambda: None) is not None:
        return ""
    named = [f"{traced.graph.ops[o].primitive} at {traced.source(o)}" for o in ends(traced, least)]
    told = list(dict.fromkeys(named))[:FEW]
    why = f"{' and '.join(told)} cannot be done for some rows of an array" if told else "nothing large has any"
    return f"chunk=True found no rows to work on in parts: {why}"


def with_chunks(start: Variant, costs: Costs, seed: Seed, parts: int) -> Variant | None:
    """``start`` with the stretch of a seed in parts; None where there is none."""
    own = stretch_of(start.base, seed)
    return None if own is None else _in_parts(start, costs, own, parts)


@leaves_out(PARTS, _none)
def _in_parts(start: Variant, costs: Costs, own: Stretch, parts: int) -> Variant | None:
    job = start.job
    mixed = job.device.platform != "cpu"
    jaxpr = _if_types_allow(lambda: in_chunks(start.base, job.jaxpr, own, parts, mixed=mixed))
    if jaxpr is None:
        return None
    base = traced_for(job, jaxpr)
    made = _priced(replace(start, base=base, chunked=(own.seed, parts)), costs)
    # Kernels are started while others run: what it takes to start them counts once it takes longer than they do.
    starting = launches(base.graph, job.device)
    idle = max(2 * starting - sum((made.known or costs).seconds), 0.0)
    return replace(made, charge=made.charge + idle * costs.per_second)


@leaves_out(SUNK, _none)
def sunk(start: Variant, costs: Costs) -> Variant | None:
    """``start`` with what lies between stacks and loops in those loops; None where nothing does."""
    jaxpr = _if_types_allow(lambda: sink(start.base, start.job.jaxpr))
    if jaxpr is None:
        return None
    base = traced_for(start.job, jaxpr)
    return _priced(replace(start, base=base, sunk=True), costs)


@leaves_out(JOINED, _none)
def joined(start: Variant, costs: Costs) -> Variant | None:
    """``start`` with branches that hand much on to their gradients computed there again; None when none do."""
    pairs = find_cond_pairs(start.base.graph, _large(start))
    if not pairs:
        return None
    jaxpr = _if_types_allow(lambda: join_conds(start.base, start.job.jaxpr, pairs))
    if jaxpr is None:
        return None
    base = traced_for(start.job, jaxpr)
    return _priced(replace(start, base=base, joined=len(pairs)), costs)


@leaves_out(INWARD, _none)
def inward(start: Variant, costs: Costs) -> Variant | None:
    """``start`` with loops that make themselves what was made for them; None when there are none."""
    # What counts is large beside what is left once the loops stack as little as they can.
    least = _with_loops(replace(start, host=False))[-1]
    moved = find_moved(start.base.graph, max(int(LARGE * least.plain.temp) // 4, 1))
    if not moved:
        return None

    def change() -> Any:
        jaxpr = move_inward(start.base, start.job.jaxpr, moved)
        return without_loops_between(trace_jaxpr(jaxpr), jaxpr)

    jaxpr = _if_types_allow(change)
    if jaxpr is None:
        return None
    base = traced_for(start.job, jaxpr)
    return _priced(replace(start, base=base, inward=len(moved)), costs)


@leaves_out(NESTED, lambda _: [])
def nested(start: Variant, costs: Costs) -> list[Variant]:
    """``start`` with the loops that stack large values as loops of loops."""
    ways = _ladder(start.base.graph, start.job.device, None).nests(_large(start))
    made = (_if_types_allow(lambda inner=inner: with_nests(start, costs, inner)) for inner in ways)
    return [variant for variant in made if variant is not None]


def with_nests(start: Variant, costs: Costs, inner: Mapping[int, int]) -> Variant:
    """``start`` with loops as loops of loops; ``inner``: op → iterations of its inner loop."""
    jaxpr = nest_loops(start.base, start.job.jaxpr, inner)
    base = traced_for(start.job, jaxpr)
    return _priced(replace(start, base=base, nested=tuple(sorted(inner.items()))), costs)


def _if_types_allow(change: Callable[[], T]) -> T | None:
    """What it makes; None on meshes with explicit axes, where it takes an operation that their types do not allow."""
    try:
        return change()
    except _compat.ShardingTypeError:
        return None


def _priced(start: Variant, costs: Costs) -> Variant:
    """``start`` with what it costs over a program of ``costs``."""
    own = op_costs(start.base.graph, start.job.device)
    charge, seconds = sum(own.charge) - sum(costs.charge), sum(own.seconds) - sum(costs.seconds)
    return replace(start, known=own, charge=charge, seconds=seconds)


@leaves_out(LOOPS, lambda start: [start])
def with_loops(start: Variant) -> list[Variant]:
    """``start`` as it is, and with more and more of what its loops stack recomputed instead; then the same where more
    and more of that is done for the loops in their iterations. Each is cheapest first."""
    device = start.job.device
    ways = inner_ways(start.base, lambda graph: _ladder(graph, device, None), _large(start))
    made = (_if_types_allow(lambda way=way: with_inner(start, way)) for way in ways)
    return [v for base in (start, *made) if base is not None for v in _with_loops(base)]


def with_inner(start: Variant, plans: tuple[InnerPlan, ...]) -> Variant:
    """``start`` with loops in the iterations of pairs of loops rewritten."""
    jaxpr = rewrite_inner(start.base, start.job.jaxpr, plans)
    base = traced_for(start.job, jaxpr)
    before, own = (op_costs(graph, start.job.device) for graph in (start.base.graph, base.graph))
    charge, seconds = sum(own.charge) - sum(before.charge), sum(own.seconds) - sum(before.seconds)
    costs = {"known": own, "charge": start.charge + charge, "seconds": start.seconds + seconds}
    return replace(start, base=base, inner=plans, **costs)


def _with_loops(start: Variant) -> list[Variant]:
    """``start`` as it is, and with more and more of what its loops stack recomputed instead; cheapest first."""
    graph = start.base.graph
    # Asked only where there are loops: the device may have to be tried for the answer. What it says is of plain loops.
    link = start.job.loop_link if start.host and not start.nested and find_pairs(graph) else None
    ladder, faults = _ladder(graph, start.job.device, link), start.job.faults
    room = start.job.host_budget
    at = looping(start)

    def between(more: Way, less: Way) -> Callable[[], list[Variant]]:
        return cache(lambda: faults.spared(LOOPS, lambda: [at(way) for way in ladder.between(more, less)], list))

    def less_away(rung: Way) -> Callable[[], list[Variant]]:
        found = cache(lambda: [v for v in map(at, ladder.aways(rung)) if v.aside <= room])
        return lambda: faults.spared(LOOPS, found, list)

    def all_away(rung: Way) -> Variant:
        """With all that it keeps on the host, or with what there is room for."""
        every = at(ladder.away(rung))
        return every if every.aside <= room else at(ladder.away(rung, room / every.aside))

    rungs = sorted((at(way) for way in ladder.rungs), key=lambda v: v.charge)
    away = [replace(all_away(r.loops), finer=less_away(r.loops)) for r in rungs] if link is not None else []
    above = [rungs[0], *rungs]
    return [
        *(
            replace(rung, finer=between(more.loops, rung.loops)) if i else rung
            for i, (more, rung) in enumerate(zip(above, rungs, strict=False))
        ),
        *(v for v in away if 0 < v.aside <= room),
    ]


def looping(start: Variant) -> Callable[[Way], Variant]:
    """For a way to rewrite its loops: ``start`` rewritten that way."""
    graph, device = start.base.graph, start.job.device
    costs = cache(lambda forward: op_costs(repeated(graph.ops[forward]), device, body=True))
    worth = cache(lambda: (start.known or op_costs(graph, device)).per_second)

    def at(way: Way) -> Variant:
        charge, seconds = start.charge, start.seconds
        for plan in way:
            front = graph.ops[plan.pair.forward]
            body = costs(plan.pair.forward)
            charge += front.trip_count * sum(body.charge[o] for o in plan.again)
            charge += plan.wait * worth() if plan.wait else 0.0
            seconds += front.trip_count * sum(body.seconds[o] for o in plan.again) + plan.wait
        return replace(start, loops=way, charge=charge, seconds=seconds)

    return at


def body_alone(job: Job, body: Body, traced: Traced | None = None) -> tuple[Variant, Costs]:
    """A body of one of the job's loops or branches as a program of its own, and its costs; ``traced``: the body."""
    own = replace(job, jaxpr=body.closed, donated=body.donated, keep_unused=True, host_budget=0, place=None, state=())
    traced = on_device(own, body.traced()) if traced is None else traced
    costs = op_costs(traced.graph, job.device, body=True)
    # The default solver: others may take a minute for each body, or want a program of one kind.
    return written(own, traced, costs, named("auto")), costs


def with_inside(start: Variant, found: Sequence[Inside]) -> Variant:
    """``start`` with bodies of its loops and branches planned."""
    made = replace(
        start,
        inside=tuple(found),
        charge=start.charge + sum(i.charge for i in found) - sum(i.charge for i in start.inside),
        seconds=start.seconds + sum(i.seconds for i in found) - sum(i.seconds for i in start.inside),
        finer=list,
    )
    made.__dict__["looped"] = start.looped  # the same, and known
    return made


def _ladder(graph: Graph, device: DeviceProfile, link: Link | None) -> Ladder:

    def costs(body: Graph) -> Costs:
        return op_costs(body, device, body=True)

    return Ladder(graph, lambda body: costs(body).charge, link, lambda body: costs(body).seconds)


def charge_of(variant: Variant, plan: Plan) -> Seconds:
    """What a plan of ``variant`` costs over the program as written: work, and waiting for copies."""
    costs = variant.problem.costs
    return variant.charge + plan.wait * costs.per_second + plan.program.again(costs.charge)


def separated(variant: Variant, plan: Plan) -> Plan:
    """A plan that changes nothing, but for ops that make their own copies of what they read; the same one where there
    are none, or the compiler heeds no barriers when it schedules."""
    if variant.job.device.platform != "cuda":
        return plan
    program = apart(plan.program)
    return plan if program is plan.program else answer(variant.problem, program, live_ranges(program.graph), "greedy")


def step_time(variant: Variant, plan: Plan, written: Seconds) -> StepTime:
    """Of the variant under its plan; ``written``: seconds of the program as written."""
    job, graph = variant.job, variant.base.graph
    copies: list[LoopCopies] = []
    for loop in variant.loops:
        if loop.hosted:
            front = graph.ops[loop.pair.forward]
            forward = sum(op_costs(front.bodies[0], job.device, body=True).seconds)
            per_trip = loop.aside // front.trip_count
            copies.append(LoopCopies(trips=front.trip_count, count=len(loop.hosted), nbytes=per_trip, forward=forward))
    problem = variant.problem
    streams = problem.link is not None and plan.offload_bytes > problem.stacks
    return StepTime(
        work=written + variant.seconds + plan.overhead - plan.wait - sum(loop.wait for loop in variant.loops),
        link=job.way if copies or streams else None,
        program=plan.program if streams else None,
        seconds=problem.costs.seconds if streams else (),
        loops=tuple(copies),
    )


def program_key(variant: Variant, plan: Plan) -> int:
    """Equal, in this process, for equal programs."""
    ops = tuple((op.primitive, op.operands, op.results) for op in plan.program.graph.ops)
    inside = tuple((i.key, program_key(i.variant, i.plan)) for i in variant.inside)
    return hash(
        (
            (variant.undone is not None, variant.sunk, variant.sliced, variant.chunked, variant.joined),
            (variant.inward, variant.nested, variant.inner, variant.loops, inside, plan.program.origin, ops),
        )
    )
