"""The model's figures for a request's program before planning: as it is, and with its state on the host."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxtensile.devices.profiles import WEIGHTS
from jaxtensile.ir.ir import Graph
from jaxtensile.ir.plan import MemoryUse
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.recompute.lowerbound import Bound, lower_bound
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.program.trace import Traced
from jaxtensile.rewrites.state import choose
from jaxtensile.search.request import Request
from jaxtensile.search.variant import streamed
from jaxtensile.units import Bytes
from jaxtensile.xla.compilers import compiler_of

SURELY_OVER = 1.25
"""The plain program is compiled unless predicted over the budget by this factor: plans needed at least 0.88 of the
prediction (``rounds.SURELY``)."""
SURELY_OVER_WITH_LOOPS = 2.0
"""The same with loops or branches, whose bodies the model knows less. A guess."""


@dataclass(frozen=True, kw_only=True)
class Modelled:
    """A traced program, and the model's figures: as it is, and with its state on the host."""

    traced: Traced
    plain: MemoryUse
    predicted: MemoryUse
    bound: Bound

    def may_fit(self, request: Request) -> bool:
        """Whether to ask XLA about it as it is."""
        loops = any(op.bodies for op in self.traced.graph.ops)
        return self.predicted.device <= (SURELY_OVER_WITH_LOOPS if loops else SURELY_OVER) * request.budget


def modelled(request: Request, traced: Traced) -> Modelled:
    """The model's figures for a request's program."""
    placed, compiler = streamed(request, traced), compiler_of(request.device)

    def use(graph: Graph, host: Bytes = 0) -> MemoryUse:
        return live_ranges(compiler.as_written(graph), together=True).use(host=host)

    plain = use(traced.graph)
    return Modelled(
        traced=traced,
        plain=plain,
        predicted=plain if placed is traced else use(placed.graph, request.state_bytes),
        bound=bound_of(request, placed),
    )


def argument_bytes(request: Request, traced: Traced) -> Bytes:
    """Bytes of the arguments and constants that a program reads, on one device."""
    parts = {} if request.sized else dict(zip(traced.arguments, request.divided, strict=False))
    values = (traced.graph.values[v] for v in traced.graph.inputs)
    return sum(v.nbytes // parts.get(v.id, 1) for v in values if v.space != "host")


def bound_of(request: Request, traced: Traced) -> Bound:
    """Lower bound of the program's bytes on one device; 0 if its computation fails.

    Where XLA divides the program among devices, the arguments alone are sure: it may divide an op in other ways.
    """
    if not request.whole:
        constants = sum(traced.graph.values[v].nbytes for v in traced.consts if v in traced.graph.inputs)
        return Bound(max(argument_bytes(request, traced) - constants, 0), ())
    return request.faults.spared(
        "the lower bound",
        lambda: lower_bound(traced.graph, traced.consts, bounded=request.device.backend.bounded),
        lambda: Bound(0, ()),
    )


def with_state(request: Request, traced: Traced) -> tuple[Request, tuple[str, ...]]:
    """The request with arguments that may wait between calls on the host, and notes on the others."""
    if request.place is None:
        return request, ()
    if request.shards > 1:
        return request, ("offload_state: arguments that are sharded over several devices stay there",)
    # The update is what comes after the products, whatever plans are to be good at.
    by_products = replace(request.device, traffic_weight=WEIGHTS["flops"])
    state, stay = choose(traced, op_costs(traced.graph, by_products).charge, request.names, request.state_budget)
    notes: list[str] = []
    if stay:
        notes.append(
            f"offload_state: {len(stay)} arguments ({stay[0]}, ...) stay on the device, because jax.jit would give "
            "their buffers to other outputs than those that replace them: return the state in the arguments' order"
        )
    elif not state:
        notes.append("offload_state: no donated argument of 1 MiB or more is needed by the update alone")
    return request.with_state(state), tuple(notes)
