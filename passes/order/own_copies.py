"""Which ops are kept from sharing the copies that XLA makes of what they read?

Compilers that know no products by groups spread the rows for each (``expanded``), once for all that read the same ones:
the copies of a forward pass wait for the gradients of the weights, and those of one layer's gradients are made in one
kernel, all at once. They are many times the rows, and cheap to make again. Behind a barrier of its own each product
makes its own, and ends them: then it needs its ``workspace`` and no more.

Measured on a step of six layers of 16 experts (H200, jax 0.10.2): 14.8 GB as written, 6.0 with a checkpoint around each
layer, 4.5 with these barriers and nothing done again.

Invariant: nothing runs again.
"""

from __future__ import annotations

from dataclasses import replace

from jaxtensile.ir.ir import producers
from jaxtensile.ir.plan import Program
from jaxtensile.passes.order.schedule import BARRIER, Schedule
from jaxtensile.switches import on


def with_own_copies(program: Program) -> Program:
    """The program with a barrier before each op with a workspace, over all that it reads; the same one where there is
    none, or where they stand."""
    graph = program.graph
    made = producers(graph)
    schedule = Schedule(graph.values, program.version_of)
    for op in graph.ops:
        operands = list(op.operands)
        barrier = graph.ops[op.id - 1] if op.id else op
        stands = barrier.primitive == BARRIER and all(made[v] == barrier.id for v in operands)
        if op.workspace and not stands and on("own_copies"):
            held = list(dict.fromkeys(operands))
            behind: dict[int, int] = dict(zip(held, schedule.put_barrier(held), strict=True))
            operands = [behind[v] for v in operands]
        schedule.put(op, operands, op.results, program.origin[op.id])
    if len(schedule.ops) == len(graph.ops):
        return program
    new = replace(graph, values=tuple(schedule.values), ops=tuple(schedule.ops))
    return Program(new, tuple(schedule.origin), tuple(schedule.version_of))
