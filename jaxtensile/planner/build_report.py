"""The Report of a program that fits, and the BudgetError of one that cannot.

Invariant: figures are those of the program as written and of the one that runs; ops and values are named by the user's
lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxtensile import switches
from jaxtensile.errors import BudgetError, Culprit, PlanningError
from jaxtensile.faults import REPORT, told
from jaxtensile.ir.ir import producers
from jaxtensile.ir.plan import Action, Keep, MemoryUse, Offload, Plan, Program, Remat
from jaxtensile.ir.timeline import Sites, Timeline, Track
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.offload.loops import LoopPlan, find_pairs
from jaxtensile.passes.recompute.lowerbound import Bound
from jaxtensile.passes.seconds.cost import op_costs, unknown_primitives
from jaxtensile.program.bodies import maker
from jaxtensile.program.trace import Traced, why_pinned
from jaxtensile.report.facts import Decision
from jaxtensile.report.report import Report
from jaxtensile.report.text import donated_for_nothing
from jaxtensile.rewrites.undo import Undone, undo
from jaxtensile.search.candidates import Candidates
from jaxtensile.search.made import BY_XLA, Made
from jaxtensile.search.modelled import argument_bytes
from jaxtensile.search.parts import Chunks, why_not_in_parts
from jaxtensile.search.request import Fitted, Request
from jaxtensile.search.variant import UNDONE, Variant, step_time
from jaxtensile.units import MIB, Bytes, Seconds, format_bytes, parse_bytes
from jaxtensile.xla.compile import Compiled, compile_program

NAMED = 4
"""Ops left alone that one note names at most. A guess: a line."""
MEANT = 1000
"""Bytes below which a budget lacks its unit, and the largest multiple of the need that a suggested unit may give. A
guess."""
MARGIN = 0.2
"""Share that XLA may add to the smallest plan's predicted bytes, if it was not compiled. A guess."""


SLIGHT = 0.01
"""Share of the largest buffer at the peak up to which others are not named. A guess."""


def cannot(
    request: Request, candidates: Candidates, bound: Bound, best: Made | None, scale: float = 1.0
) -> BudgetError:
    """The ``BudgetError``: the budget, the smallest one found, the ops that force it, and ways out.

    ``scale``: bytes of the model per byte on one device (``Rounds.scale``).
    """
    traced = candidates.written.traced
    fixed = argument_bytes(request, traced)
    if best is not None and best.compiled.memory is not None:
        needs, about = best.compiled.device, ""
        culprits = _at_the_peak(best.variant, best.plan)
    else:
        variant, plan = candidates.smallest()
        needs = max(int(plan.predicted.device / scale * (1 + MARGIN)), bound.nbytes)
        about = "about "
        graph = traced.graph
        culprits = tuple(
            Culprit(primitive=graph.ops[o].primitive, source=traced.source(o), nbytes=size) for o, size in bound.ops
        ) or _at_the_peak(variant, plan)
    culprits = tuple(replace(c, nbytes=int(c.nbytes / scale)) for c in culprits)
    needs = max(needs, request.budget + 1)
    each = f" on each of {request.shards} devices" if request.shards > 1 else ""
    if request.budget < fixed:
        because = f"the arguments alone are {format_bytes(fixed)}{each}"
    elif request.budget < bound.nbytes:
        because = f"no plan can need less than {format_bytes(bound.nbytes)}, for {', '.join(map(str, culprits[:1]))}"
    else:
        least = ", ".join(map(str, culprits)) or "nothing lives but arguments and results"
        because = f"at the peak of the smallest plan{each and f', about{each}'}, {least}"
    found = "reachable" if not about and needs <= bound.nbytes else "found"
    budget, least_budget = format_bytes(request.budget), format_bytes(needs, up=True)
    if budget == least_budget:
        budget, least_budget = (f"{n:,} bytes" for n in (request.budget, needs))
    smallest = f"the smallest {found}, {about}{least_budget}, for {request.name}"
    other = ", or plan with solver='auto'" if request.solver == "chain" else ""
    ways = ["raise the budget"]
    if request.chunk is False and request.whole:
        helps = Chunks(candidates.written).helps
        ways.append("work on the batch in parts (chunk=True)" if helps else "allow work in parts (chunk='auto')")
    if not request.undo and request.faults.spared(UNDONE, lambda: undo(traced, request.jaxpr), lambda: None):
        ways.append("let its own checkpoints be undone (undo=True)")
    ways.append("shrink the batch")
    if not any(request.donated):
        ways.append("donate the arguments that are updated")
    why = "; ".join(filter(None, (why_not_in_parts(request, traced), *request.notes)))
    return BudgetError(
        f"budget {budget} is below {smallest}: {because}; "
        f"{', '.join(ways)}, or shard the program{each and ' further'}{other}{_unit_left_out(request.budget, needs)}"
        f"{why and f' ({why})'}",
        needs=needs,
        has=request.budget,
        culprits=culprits,
    )


def _unit_left_out(budget: Bytes, needs: Bytes) -> str:
    """A hint at the unit that a budget of a few bytes probably lacks."""
    meant = next((unit for unit in ("MiB", "GiB") if needs <= budget * parse_bytes(f"1{unit}") <= MEANT * needs), "")
    return f" (did you mean {budget}{meant}?)" if budget < MEANT and meant else ""


def unplanned(
    request: Request, notes: tuple[str, ...], use: MemoryUse | None = None, seconds: Mapping[str, Seconds] | None = None
) -> Report:
    """Report on a program of which only ``use``, XLA's allocation, is known; None: nothing is."""
    unknown = MemoryUse(argument=0, output=0, temp=0, alias=0) if use is None else use
    return Report(
        name=request.name,
        target=request.device.name,
        budget=request.budget,
        baseline=unknown,
        predicted=unknown,
        compiled=unknown,
        lower_bound=0,
        actions=(),
        decisions=(),
        flops=0.0,
        recompute_flops=0.0,
        overhead=0.0,
        overhead_ratio=0.0,
        stages=0,
        rounds=0,
        unknown_primitives=(),
        solver="none",
        notes=(*notes, *switches.notes()),
        seconds=seconds or {},
    )


def _at_the_peak(variant: Variant, plan: Plan, most: int = 3) -> tuple[Culprit, ...]:
    """Buffers alive at the predicted peak, by the op and line that made them, largest first."""
    graph, origin = plan.program.graph, plan.program.origin
    peak, ranges, inside = live_ranges(graph).at_peak()
    made = producers(graph)
    held: Counter[tuple[str, str]] = Counter()
    for r in ranges:
        op, value = origin[made[r.value]], plan.program.version_of[r.value]
        key = maker(variant.traced, op, value) if op >= 0 else (graph.ops[made[r.value]].primitive, "a barrier")
        held[key] += r.nbytes
    if inside:
        source = variant.traced.source(origin[peak]) if origin[peak] >= 0 else "a barrier"
        held[graph.ops[peak].primitive, source] += inside
    largest = held.most_common(most)
    return tuple(Culprit(primitive=p, source=s, nbytes=n) for (p, s), n in largest if n > SLIGHT * largest[0][1])


def without_plan(request: Request, error: Exception | None = None) -> Fitted:
    """The program as written, after planning failed by ``error``. Raises ``PlanningError`` if it does not fit."""
    plain = compile_program(lambda options: request.make(None, options), request.args, request.kwargs, request.options)
    if plain.memory is None or plain.device > request.budget:
        raise too_large(request.name, error, plain, request.budget) from error
    notes = ("planning failed by a fault of jaxtensile: the program runs as it was written", *request.faults.notes())
    found = unplanned(request, (*plain.notes, *notes), plain.memory, {"XLA": plain.seconds})
    return Fitted(jitted=plain.jitted, evaluate=None, options=plain.options, report=found)


def too_large(name: str, error: Exception | None, plain: Compiled, budget: Bytes) -> PlanningError:
    """The error for function ``name``, whose planning failed by ``error`` and which does not fit as written."""
    known = plain.memory is not None
    why = told(error) if error is not None else "no plan"
    takes = f"takes {format_bytes(plain.device)}" if known else f"does not compile ({plain.refusal})"
    more = f"raise the budget to {format_bytes(plain.device)}" if known else "shrink the batch"
    return PlanningError(
        f"planning {name} failed ({why}), and as it was written it {takes}, of a budget of {format_bytes(budget)}: "
        f"{more}. {REPORT}",
        needs=plain.device if known else None,
        has=budget,
    )


def report(
    request: Request,
    traced: Traced,
    made: Made | None,
    predicted: MemoryUse,
    plain: Compiled | None,
    compiled: Compiled,
    bound: Bound,
    rounds: int,
    seconds: Mapping[str, Seconds],
    scale: float = 1.0,
) -> Report:
    """Report on ``traced``, the program as written; ``made`` is None if it runs as it is.

    ``scale``: bytes of the model per byte on one device (``Rounds.scale``).
    """
    assert compiled.memory is not None
    predicted = _scaled(predicted, scale)
    notes = [*switches.notes(), *(plain.notes if plain is not None else ()), *compiled.notes]
    if plain is not None and plain.refusal:
        notes.append(f"the plain program does not compile for this device: {plain.refusal}")
    if request.shards > 1:
        together = "" if request.sized else ", those of single values of all devices together"
        notes.append(f"arguments are sharded over {request.shards} devices; bytes are per device{together}")
        if request.host_budget:
            notes.append("host_budget= has no effect on arguments that are sharded over several devices")
    if rates := sorted(request.device.measured - {"capacity"}):
        notes.append(f"times from rates measured on {request.device.kinds[0]}: {', '.join(rates)}")
    if request.host_budget and not request.device.backend.offloads:
        notes.append(f"host_budget= has no effect on a {request.device.platform.upper()}: its memory is the host's")
    notes += _left_alone(traced)
    again = compiled.again
    costs = op_costs(traced.graph, request.device)
    step = sum(costs.seconds)
    sites = _sites(traced, costs.seconds)
    plain_track = _track(Program.unchanged(traced.graph), sites)
    common = {
        "name": request.name,
        "target": request.device.name,
        "budget": request.budget,
        "baseline": plain.memory if plain is not None and plain.memory is not None else predicted,
        "compiled": compiled.memory,
        "xla": again,
        "kernels": compiled.time,
        "plain_kernels": plain.time if plain is not None else None,
        "lower_bound": bound.nbytes,
        "flops": traced.graph.flops,
        "rounds": rounds,
        "unknown_primitives": unknown_primitives(traced.graph),
        "settings": request.settings,
        "seconds": seconds,
    }
    if made is None or made.choice == BY_XLA:
        notes += donated_for_nothing(traced.graph, live_ranges(traced.graph).copied, traced.source, compiled.device)
        return Report(
            predicted=predicted,
            actions=(),
            decisions=(),
            recompute_flops=again.flops,
            overhead=again.seconds,
            overhead_ratio=again.seconds / step if step else 0.0,
            stages=0,
            solver="none" if made is None else "XLA",
            timeline=Timeline(plain_track, None),
            step=step + again.seconds,
            notes=tuple(dict.fromkeys(notes)),
            **common,
        )
    variant, plan = made.variant, made.plan
    flops = variant.traced.graph.flops + plan.recompute_flops + again.flops
    actions, decisions = _chosen(variant, plan)
    kept: tuple[Action, ...] = ()
    if variant.undone is not None:
        kept = _kept_again(variant.undone, variant, plan)
        known = {action.value for action in plan.actions}
        new = tuple(action for action in kept if action.value not in known)
        decisions = (*_decisions(variant.base, new), *decisions)
        count = f"{len(kept)} values kept that it would recompute, " if variant.as_it_is else ""
        ratio = flops / traced.graph.flops if traced.graph.flops else 1.0
        notes.insert(0, f"jax.checkpoint undone: {count}matrix FLOPs x {ratio:.3f} of the program as written")
        kept = new
    if request.may_stack_on_host and find_pairs(variant.base.graph) and request.loop_link is None:
        notes.append("loops stack nothing in host memory: a test loop on this device did not get its values back")
    notes[:0] = [said for taken in reversed(variant.taken) if (said := taken.rewrite.describe(taken.sites))]
    if (inside := variant.parts_inside) > 1:
        notes.append(f"inside of its loops and branches rows are worked on in up to {inside} parts")
    elif variant.parts == 1 and (why := why_not_in_parts(request, traced)):
        notes.append(why)
    if request.state and not request.device.backend.own_memory:
        notes.append("a CPU has one memory: what waits in pinned host memory is counted as device bytes")
    overhead = plan.overhead + variant.seconds + again.seconds
    if variant.traced is not traced:
        sites = _sites(variant.traced, variant.problem.costs.seconds)
    return Report(
        predicted=_scaled(plan.predicted, scale),
        actions=(*kept, *actions),
        decisions=decisions,
        undone=variant.undone is not None,
        rewritten=not variant.as_it_is,
        parts=variant.parts,
        recompute_flops=flops - traced.graph.flops,
        offload_bytes=plan.offload_bytes,
        wait=plan.wait + sum(loop.wait for loop in variant.loops),
        state=request.state,
        overhead=overhead,
        overhead_ratio=overhead / step if step else 0.0,
        stages=_stages(variant, plan),
        solver=plan.solver,
        gap=plan.gap,
        timeline=Timeline(plain_track, _track(plan.program, sites)),
        step=step_time(variant, plan).at() + again.seconds,
        notes=tuple(dict.fromkeys(notes)),
        **common,
    )


def _scaled(use: MemoryUse, scale: float) -> MemoryUse:
    """The model's figures on one device, where ``scale`` is that of all together."""
    if scale == 1.0:
        return use
    parts = (int(n / scale) for n in (use.argument, use.output, use.temp, use.alias))
    argument, output, temp, alias = parts
    return replace(use, argument=argument, output=output, temp=temp, alias=alias)


def _left_alone(traced: Traced) -> list[str]:
    """Notes on what plans do not touch, and why: ops (except those that only make keys), and large constants."""
    found = Counter(
        f"{op.primitive} at {traced.source(op.id)} ({why})"
        for op in traced.graph.ops
        if (why := why_pinned(traced, op.id)) and why != "random state"
    )
    told = [f"{count} x {what}" if count > 1 else what for what, count in found.most_common(NAMED)]
    notes = (
        [f"left alone: {', '.join(told)}{f', and {len(found) - NAMED} more' * (len(found) > NAMED)}"] if told else []
    )
    values = traced.graph.values
    large = [size for v in traced.consts if (size := values[v].nbytes) >= MIB]
    if large:
        notes.append(
            f"arrays that the function closes over, {format_bytes(sum(large))} in {len(large)}, are constants of the "
            "program and in none of XLA's figures: give them as arguments"
        )
    return notes


def _sites(traced: Traced, seconds: tuple[Seconds, ...]) -> Sites:
    primitives = tuple(op.primitive for op in traced.graph.ops)
    return Sites(primitives=primitives, sources=traced.sources(), seconds=seconds)


def _track(program: Program, sites: Sites) -> Track:
    live = live_ranges(program.graph)
    base = live.device - live.temp
    return Track(sites=sites, origin=program.origin, device=tuple(base + b for b in live.profile), base=base)


def _chosen(variant: Variant, plan: Plan) -> tuple[tuple[Action, ...], tuple[Decision, ...]]:
    """Actions and decisions of loops, of bodies (on the bodies' values), and of the plan."""
    loops = _loop_actions(variant.base, variant.loops)
    bodies = [_chosen(inside.variant, inside.plan) for inside in variant.inside]
    actions = (*loops, *(a for acts, _ in bodies for a in acts), *plan.actions)
    own = _decisions(variant.traced, plan.actions, plan.program, variant.problem.costs.seconds)
    return actions, (*_decisions(variant.base, loops), *(d for _, decided in bodies for d in decided), *own)


def _stages(variant: Variant, plan: Plan) -> int:
    """Number of points where recomputation begins, loops and bodies included."""
    return plan.program.stages() + len(variant.loops) + sum(_stages(i.variant, i.plan) for i in variant.inside)


def _loop_actions(traced: Traced, loops: tuple[LoopPlan, ...]) -> tuple[Action, ...]:
    """Actions for the stacks that a loop no longer makes: recomputed by its body, or in host memory."""
    out: list[Action] = []
    for plan in loops:
        front = traced.graph.ops[plan.pair.forward]
        carries = front.carried[1]
        stacks, made = front.results[carries:], front.bodies[0].output_slots[carries:]
        for y in plan.dropped:
            stack, nbytes = stacks[y], traced.graph.values[stacks[y]].nbytes
            away = made[y] in plan.hosted
            out.append(Offload(stack, nbytes, hidden=not plan.wait) if away else Remat(stack, nbytes, front.id))
    return tuple(out)


def _kept_again(undone: Undone, variant: Variant, plan: Plan) -> tuple[Action, ...]:
    """Values kept, in memory or on the host, because the checkpoints are undone.

    Unknown if loops were rewritten too: that program has other values.
    """
    if not variant.as_it_is:
        return ()
    graph = undone.traced.graph
    again = {action.value for action in plan.actions if isinstance(action, Remat)}
    home = live_ranges(graph).kernels.home
    return tuple(Keep(v, graph.values[v].nbytes) for v in undone.kept if v not in again and home[v] == v)


_KINDS = {Keep: "keep", Remat: "recompute", Offload: "offload"}


def _decisions(
    traced: Traced, actions: tuple[Action, ...], program: Program | None = None, seconds: Sequence[Seconds] = ()
) -> tuple[Decision, ...]:
    """The actions in the user's terms, without values held only for a moment after the first barrier.

    ``seconds``: of each op, where they are known.
    """
    origin = program.origin if program is not None else ()
    early = set(origin[: origin.index(-1)] if -1 in origin else range(len(traced.graph.ops)))
    made = {r: op.id for op in traced.graph.ops for r in op.results}
    held = {r.value for r in live_ranges(traced.graph).at_peak()[1]} if actions else set()
    out: list[Decision] = []
    for action in actions:
        if action.value not in made or (isinstance(action, Keep) and made[action.value] not in early):
            continue
        value, op = traced.graph.values[action.value], made[action.value]
        primitive, source = maker(traced, op, action.value)
        out.append(
            Decision(
                kind=_KINDS[type(action)],
                primitive=primitive,
                dtype=value.dtype,
                shape=value.shape,
                nbytes=value.nbytes,
                source=source,
                stored=action.value in held,
                again=seconds[op] if seconds else None,
            )
        )
    return tuple(out)
