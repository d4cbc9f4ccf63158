"""A rewritten and planned program as data, and its replay.

Invariant: a replay gives the recorded variant and plan, or raises ``Unlike``. The same code repeats every step, loops
must be linked as they were, and the result must have the recorded graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from jaxtensile.ir.ir import Graph, Op, OpId, ValueId
from jaxtensile.ir.plan import Action, Keep, MemoryUse, Offload, Plan, Program, Remat
from jaxtensile.passes.offload.loops import LoopPlan, find_pairs
from jaxtensile.program.bodies import bodies_of
from jaxtensile.search.loop_variants import looping
from jaxtensile.search.registry import at, named
from jaxtensile.search.variant import Inside, Variant
from jaxtensile.search.variants import body_alone, with_inside


class Unlike(ValueError):
    """The recipe belongs to another program."""


class Step(msgspec.Struct, frozen=True, array_like=True):
    """An op of a planned program: the original op that it repeats (-1: ``primitive``, inserted), on these values."""

    origin: int
    primitive: str
    operands: tuple[int, ...]
    results: tuple[int, ...]


class Schedule(msgspec.Struct, frozen=True, array_like=True):
    """A planned program; a bare number is an original op on its own values.

    ``versions``: (original value, memory space) of each further value.
    """

    steps: tuple[int | Step, ...]
    versions: tuple[tuple[int, str], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...]
    output_slots: tuple[int | None, ...]


class Planned(msgspec.Struct, frozen=True):
    """A plan; ``actions``: (kind, value, bytes, recipe or whether it is hidden)."""

    schedule: Schedule
    actions: tuple[tuple[str, int, int, int], ...]
    predicted: MemoryUse
    overhead: float
    recompute_flops: float
    solver: str
    offload_bytes: int
    wait: float
    gap: float | None
    bound: float | None


class Recipe(msgspec.Struct, frozen=True):
    """The rewrites, by key with their sites as plain data, the plan, and ``graph``: the rewritten program's
    fingerprint."""

    undone: bool
    host: bool
    taken: tuple[tuple[str, Any], ...]
    loops: tuple[LoopPlan, ...]
    inside: tuple[InBody, ...]
    graph: str
    plan: Planned


class InBody(msgspec.Struct, frozen=True):
    """The recipe of one body: its op, and its index there."""

    op: int
    body: int
    recipe: Recipe


_KINDS: Final = {"keep": Keep, "remat": Remat, "offload": Offload}
_NAMES: Final = {kind: name for name, kind in _KINDS.items()}


def fingerprint(graph: Graph) -> str:
    """Hash of a graph, the same in every process."""
    return hashlib.sha256(msgspec.msgpack.encode(graph, order="deterministic")).hexdigest()


def recipe_of(variant: Variant, plan: Plan) -> Recipe:
    """The recipe of ``variant`` and its plan."""
    return Recipe(
        undone=variant.undone is not None,
        host=variant.host,
        taken=tuple((taken.rewrite.key, msgspec.to_builtins(taken.sites)) for taken in variant.taken),
        loops=variant.loops,
        inside=tuple(InBody(*i.key, recipe_of(i.variant, i.plan)) for i in variant.inside),
        graph=fingerprint(variant.traced.graph),
        plan=_written(variant.traced.graph, plan),
    )


def replay(recipe: Recipe, start: Variant) -> tuple[Variant, Plan]:
    """The variant and plan of a recipe.

    ``start``: the program as written, or without its checkpoints if the recipe says so. Raises ``Unlike`` if the recipe
    does not match it.
    """
    try:
        return _replayed(recipe, start)
    except (LookupError, ValueError, TypeError, AttributeError, AssertionError) as error:
        raise error if isinstance(error, Unlike) else Unlike(f"{type(error).__name__}: {error}") from None


def _replayed(recipe: Recipe, start: Variant) -> tuple[Variant, Plan]:
    if (start.undone is not None) != recipe.undone:
        raise Unlike("its checkpoints are undone in one and not in the other")
    variant = replace(start, host=recipe.host)
    for key, sites in recipe.taken:
        rewrite = named(key)
        found = at(variant, rewrite, msgspec.convert(sites, rewrite.form))
        if found is None:
            raise Unlike(f"{rewrite.title} comes to nothing")
        variant = found
    if recipe.loops:
        pairs = find_pairs(variant.base.graph)
        if any(plan.pair not in pairs for plan in recipe.loops):
            raise Unlike("its loops are linked in another way")
        variant = looping(variant)(recipe.loops)
    if recipe.inside:
        variant = with_inside(variant, [_inside(variant, inner) for inner in recipe.inside])
    if fingerprint(variant.traced.graph) != recipe.graph:
        raise Unlike("the rewritten program is another one")
    return variant, _plan(variant.traced.graph, recipe.plan)


def _inside(variant: Variant, inner: InBody) -> Inside:
    body = bodies_of(variant.looped, inner.op)[inner.body]
    made, plan = _replayed(inner.recipe, body_alone(variant, body))
    return Inside(key=(inner.op, inner.body), trips=body.trips, variant=made, plan=plan)


# ---- plans --------------------------------------------------------------------------------------


def _written(graph: Graph, plan: Plan) -> Planned:
    program = plan.program
    return Planned(
        schedule=Schedule(
            steps=tuple(_step(graph, op, program.origin[op.id]) for op in program.graph.ops),
            versions=tuple(
                (program.version_of[value.id], value.space) for value in program.graph.values[len(graph.values) :]
            ),
            inputs=program.graph.inputs,
            outputs=program.graph.outputs,
            donated=tuple(sorted(program.graph.donated)),
            output_slots=program.graph.output_slots,
        ),
        actions=tuple(map(_told, plan.actions)),
        predicted=plan.predicted,
        overhead=plan.overhead,
        recompute_flops=plan.recompute_flops,
        solver=plan.solver,
        offload_bytes=plan.offload_bytes,
        wait=plan.wait,
        gap=plan.gap,
        bound=plan.bound,
    )


def _step(graph: Graph, op: Op, origin: int) -> int | Step:
    old = graph.ops[origin] if origin >= 0 else None
    if old is not None and (old.operands, old.results) == (op.operands, op.results):
        return origin
    return Step(origin, "" if old is not None else op.primitive, op.operands, op.results)


def _told(action: Action) -> tuple[str, int, int, int]:
    last = action.recipe if isinstance(action, Remat) else int(isinstance(action, Offload) and action.hidden)
    return _NAMES[type(action)], action.value, action.nbytes, last


def _plan(graph: Graph, planned: Planned) -> Plan:
    return Plan(
        program=_program(graph, planned.schedule),
        actions=tuple(_action(*told) for told in planned.actions),
        predicted=planned.predicted,
        overhead=planned.overhead,
        recompute_flops=planned.recompute_flops,
        solver=planned.solver,
        offload_bytes=planned.offload_bytes,
        wait=planned.wait,
        gap=planned.gap,
        bound=planned.bound,
    )


def _action(kind: str, value: int, nbytes: int, last: int) -> Action:
    if kind == "keep":
        return Keep(ValueId(value), nbytes)
    return Remat(ValueId(value), nbytes, OpId(last)) if kind == "remat" else Offload(ValueId(value), nbytes, bool(last))


def _program(graph: Graph, schedule: Schedule) -> Program:
    count = len(graph.values)
    values = list(graph.values)
    for v, space in schedule.versions:
        values.append(replace(graph.values[v], id=ValueId(len(values)), space=space))
    ops: list[Op] = []
    origin: list[int] = []
    for step in schedule.steps:
        if isinstance(step, int):
            step = Step(step, "", graph.ops[step].operands, graph.ops[step].results)
        ops.append(_op(graph, step, len(ops)))
        origin.append(step.origin)
    laid = Graph(
        values=tuple(values),
        ops=tuple(ops),
        inputs=_ids(schedule.inputs),
        outputs=_ids(schedule.outputs),
        donated=frozenset(_ids(schedule.donated)),
        output_slots=tuple(None if v is None else ValueId(v) for v in schedule.output_slots),
        fuser=graph.fuser,
    )
    return Program(laid, tuple(origin), (*range(count), *(v for v, _ in schedule.versions)))


def _op(graph: Graph, step: Step, id: int) -> Op:
    if step.origin < 0:
        return Op(id=OpId(id), primitive=step.primitive, operands=_ids(step.operands), results=_ids(step.results))
    return graph.ops[step.origin].on(id, step.operands, step.results)


def _ids(numbers: Sequence[Any]) -> tuple[ValueId, ...]:
    return tuple(map(ValueId, numbers))


__all__ = ["Recipe", "Unlike", "fingerprint", "recipe_of", "replay"]
