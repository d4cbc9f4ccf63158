"""The variants that a search starts from: as written, without checkpoints, or one body; and changes to others.

Invariant: costs count from the program as written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import fsum

from jaxtensile.ir.plan import Costs, Plan, Prepare
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.order.control import controlled
from jaxtensile.passes.order.own_copies import with_own_copies
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.passes.solvers.answer import answer
from jaxtensile.passes.solvers.by_name import for_bodies
from jaxtensile.program.bodies import Body
from jaxtensile.program.trace import Traced
from jaxtensile.rewrites.undo import Undone
from jaxtensile.search.request import Request
from jaxtensile.search.variant import Inside, Variant, no_finer


def written(request: Request, traced: Traced, costs: Costs, prepare: Prepare) -> Variant:
    """The program as the user wrote it."""
    return Variant(request=request, prepare=prepare, base=traced, whole=costs, known=costs)


def undone(request: Request, program: Undone, costs: Costs, prepare: Prepare) -> Variant:
    """The program without its checkpoints; ``costs``: of the program as written."""
    return priced(Variant(request=request, prepare=prepare, base=program.traced, whole=costs, undone=program))


def priced(start: Variant) -> Variant:
    """``start`` with its cost over the program as written."""
    own, whole = op_costs(start.base.graph, start.request.device), start.whole
    charge, seconds = fsum(own.charge) - fsum(whole.charge), fsum(own.seconds) - fsum(whole.seconds)
    return replace(start, known=own, charge=charge + start.idle, seconds=seconds)


def body_alone(start: Variant, body: Body, traced: Traced | None = None) -> Variant:
    """A loop or branch body of ``start`` as a program of its own; ``traced``: the body, if known."""
    request = start.request
    own = replace(
        request,
        jaxpr=body.closed,
        donated=body.donated,
        keep_unused=True,
        host_budget=0,
        place=None,
        state=(),
        local=request.local.inside(body.closed, body.graph) if request.local is not None else None,
    )
    traced = body.traced() if traced is None else traced
    costs = op_costs(traced.graph, request.device, body=True)
    return written(own, traced, costs, for_bodies(start.prepare))


def with_inside(start: Variant, found: Sequence[Inside]) -> Variant:
    """``start`` with planned bodies."""
    made = replace(
        start,
        inside=tuple(found),
        charge=start.charge + sum(i.charge for i in found) - sum(i.charge for i in start.inside),
        seconds=start.seconds + sum(i.seconds for i in found) - sum(i.seconds for i in start.inside),
        finer=no_finer,
    )
    made.__dict__["looped"] = start.looped  # the same, and known
    return made


def held_in_order(variant: Variant, plan: Plan) -> Plan:
    """The plan, with barriers alone: own copies for the ops that make copies of their operands, else control
    dependencies. Unchanged if there are neither, or if the compiler's schedule ignores barriers."""
    if not variant.request.device.backend.heeds_barriers:
        return plan
    program = with_own_copies(plan.program)
    if program is plan.program:
        program = controlled(program)
    if program is plan.program:
        return plan
    return answer(variant.problem, program, live_ranges(program.graph), "order alone")
