"""The ``Plan`` of the program that a solver found, with one action per value.

Invariant: every figure is read off the program and its liveness, whichever solver made it.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtensile.ir.ir import OpId, ValueId
from jaxtensile.ir.plan import Action, Keep, Offload, Plan, Problem, Program, Remat
from jaxtensile.passes.lifetimes.liveness import Liveness
from jaxtensile.passes.offload.offload import Copy
from jaxtensile.passes.offload.streaming import waiting
from jaxtensile.units import Seconds


def answer(
    problem: Problem,
    program: Program,
    live: Liveness,
    solver: str,
    *,
    copies: Sequence[Copy] = (),
    wait: Seconds = 0.0,
    gap: float | None = None,
    bound: Seconds | None = None,
) -> Plan:
    """``program`` as a plan. ``live``: its buffers. ``gap``, ``bound``: proven by the solver; None if nothing is."""
    away = sum(c.nbytes for c in copies) + problem.state + problem.stacks
    if problem.state and problem.link is not None:
        wait = waiting(program, problem.costs.seconds, problem.link)
    return Plan(
        program=program,
        actions=_actions(problem, program, copies),
        predicted=live.use(host=away),
        overhead=program.again(problem.costs.seconds) + wait,
        recompute_flops=program.again([op.flops for op in problem.graph.ops]),
        solver=solver,
        offload_bytes=away,
        wait=wait,
        gap=gap,
        bound=bound,
    )


def _actions(problem: Problem, program: Program, copies: Sequence[Copy]) -> tuple[Action, ...]:
    """Actions for original values that are recomputed, held for a recomputation, or copied."""
    values = problem.graph.values
    away = {program.version_of[c.value]: c for c in copies}
    inputs = set(problem.graph.inputs)
    recipe: dict[int, int] = {}
    held: dict[int, None] = {}
    for op in program.graph.ops:
        origin = program.origin[op.id]
        if origin < 0:
            held.update(dict.fromkeys(program.version_of[v] for v in op.operands))
        elif any(r >= len(values) for r in op.results):
            recipe.update((program.version_of[r], origin) for r in op.results)
    keeps = [Keep(ValueId(v), values[v].nbytes) for v in held if v not in recipe and v not in inputs and v not in away]
    offloads = [Offload(ValueId(v), values[v].nbytes, c.hidden) for v, c in away.items()]
    remats = [Remat(ValueId(v), values[v].nbytes, OpId(o)) for v, o in recipe.items()]
    return (*keeps, *offloads, *remats)
