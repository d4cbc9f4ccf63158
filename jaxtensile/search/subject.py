"""What is known of a job's program before anything is planned: as it is, and once its state is on the host."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtensile.ir.ir import Graph
from jaxtensile.ir.plan import MemoryUse
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.recompute.lowerbound import Bound, lower_bound
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.program.trace import Traced
from jaxtensile.rewrites.state import choose
from jaxtensile.search import variants as ways
from jaxtensile.search.request import Job
from jaxtensile.units import Bytes
from jaxtensile.xla.compilers import compiler_of

SURELY_OVER = 1.25
"""The plain program is compiled unless the model puts it over the budget by this factor."""
SURELY_OVER_WITH_LOOPS = 2.0


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A traced program, what the model says of it as it is, and once its state is on the host."""

    traced: Traced
    plain: MemoryUse
    predicted: MemoryUse
    bound: Bound

    def may_fit(self, job: Job) -> bool:
        """Whether XLA is worth asking about it as it is."""
        loops = any(op.bodies for op in self.traced.graph.ops)
        return self.predicted.device <= (SURELY_OVER_WITH_LOOPS if loops else SURELY_OVER) * job.budget


def subject_of(job: Job, traced: Traced) -> Subject:
    """The program of a job, measured by the model."""
    placed, compiler = ways.streamed(job, traced), compiler_of(job.device)

    def use(graph: Graph, host: Bytes = 0) -> MemoryUse:
        return live_ranges(compiler.as_written(graph), together=True).use(host=host)

    plain = use(traced.graph)
    return Subject(
        traced=traced,
        plain=plain,
        predicted=plain if placed is traced else use(placed.graph, job.state_bytes),
        bound=bound_of(job, placed),
    )


def bound_of(job: Job, traced: Traced) -> Bound:
    """How few bytes the program needs at least; nothing is known where that fails."""
    return job.faults.spared(
        "the lower bound",
        lambda: lower_bound(traced.graph, traced.consts, bounded=job.device.backend.bounded),
        lambda: Bound(0, ()),
    )


def with_state(job: Job, traced: Traced) -> tuple[Job, tuple[str, ...]]:
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
