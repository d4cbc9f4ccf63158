"""What was decided: the vocabulary between solvers, checker, rewriter and report.

Invariant: a ``Program`` computes the same outputs as the graph it was made from: each of its
ops is an op of the original on versions of the same values, or a barrier that changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from jaxtensile.ir.ir import Graph, Op, OpId, ValueId
from jaxtensile.units import Bytes, Flops, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of one executable, as XLA's memory analysis names them. ``exact``: XLA said so."""

    argument: Bytes
    output: Bytes
    temp: Bytes
    alias: Bytes
    host: Bytes = 0
    exact: bool = False

    @property
    def device(self) -> Bytes:
        """What must fit on the device: argument + output + temp - alias."""
        return self.argument + self.output + self.temp - self.alias


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What XLA computes again in a step: how many instructions (those of a loop once), their products, and predicted
    seconds."""

    count: int = 0
    flops: Flops = 0.0
    seconds: Seconds = 0.0


NOTHING_AGAIN: Final = Recomputed()


@dataclass(frozen=True, slots=True)
class KernelTime:
    """What the kernels of one kind that are named after one operation take in a step, and how many runs these are."""

    kind: str
    source: str
    times: int
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class CompiledTime:
    """A step of a compiled program, by its kernels: seconds, those that it waits for copies, how many kernels it runs,
    and what takes longest."""

    seconds: Seconds
    wait: Seconds
    kernels: int
    longest: tuple[KernelTime, ...] = ()


@dataclass(frozen=True, slots=True)
class Keep:
    """Residual ``value`` stays in device memory until its last use."""

    value: ValueId
    nbytes: Bytes


@dataclass(frozen=True, slots=True)
class Remat:
    """Residual ``value`` is dropped after its last early use and recomputed by ``recipe``."""

    value: ValueId
    nbytes: Bytes
    recipe: OpId


@dataclass(frozen=True, slots=True)
class Offload:
    """Residual ``value`` waits in host memory; ``hidden``: both copies end while other ops run."""

    value: ValueId
    nbytes: Bytes
    hidden: bool


Action = Keep | Remat | Offload


@dataclass(frozen=True, slots=True)
class Leaf:
    """A donated leaf in host memory between calls: flat argument ``argument``, replaced by flat output ``slot``."""

    argument: int
    slot: int
    nbytes: Bytes
    name: str


TO_HOST, TO_DEVICE = "to_host", "to_device"
"""Primitives of the copies that a plan inserts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Predicted cost of every op of a graph, when it runs as part of the fused program.

    ``seconds``: roofline time; ``charge``: what solvers minimise, matrix time first.
    """

    seconds: tuple[Seconds, ...]
    charge: tuple[Seconds, ...]

    @property
    def per_second(self) -> float:
        """Charge of a second of the step: what a second of waiting is worth beside work that runs again."""
        return sum(self.charge) / (sum(self.seconds) or 1.0)


@dataclass(frozen=True, slots=True)
class Link:
    """The way between device and host: bytes per second in each direction, and seconds per copy."""

    bandwidth: float
    latency: Seconds


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule over versions of the original's values.

    ``origin[i]``: the original op that op ``i`` repeats, -1 for an inserted barrier or copy;
    ``version_of[v]``: the original value that value ``v`` equals.
    """

    graph: Graph
    origin: tuple[int, ...]
    version_of: tuple[int, ...]

    @classmethod
    def unchanged(cls, graph: Graph) -> Program:
        """The original schedule."""
        return cls(graph, tuple(range(len(graph.ops))), tuple(range(len(graph.values))))

    def stages(self) -> int:
        """Barriers that open a stage; those that tie copies to steps are not among them."""
        graph = self.graph
        return sum(
            self.origin[op.id] < 0
            and op.primitive == "optimization_barrier"
            and all(graph.values[v].space != "host" for v in op.operands)
            for op in graph.ops
        )

    def clones(self) -> list[Op]:
        """Ops that run a second (third, …) time."""
        seen: set[int] = set()
        out: list[Op] = []
        for op in self.graph.ops:
            o = self.origin[op.id]
            if o >= 0:
                if o in seen:
                    out.append(op)
                seen.add(o)
        return out

    def again(self, figure: Sequence[float]) -> float:
        """What ``figure``, one per op of the original, adds up to over the clones."""
        return sum(figure[self.origin[op.id]] for op in self.clones())


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Make ``graph`` fit into ``budget`` device bytes at the least cost in seconds.

    ``link``: None where nothing may wait in host memory; ``host_budget``: bytes that may. ``state``: bytes of
    arguments that the graph itself takes from the host and gives back to it; ``stacks``: of what its loops stack there.
    """

    graph: Graph
    costs: Costs
    budget: Bytes
    link: Link | None = None
    host_budget: Bytes = 0
    state: Bytes = 0
    stacks: Bytes = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A solver's answer. ``predicted.device`` may exceed the budget: then it is the least found."""

    program: Program
    actions: tuple[Action, ...]
    predicted: MemoryUse
    overhead: Seconds
    """Predicted extra seconds of one run."""
    recompute_flops: Flops
    solver: str
    offload_bytes: Bytes = 0
    """Bytes that leave for the host in one run."""
    wait: Seconds = 0.0
    """What of ``overhead`` is waiting for copies."""
    gap: float | None = None
    """How far the charge may be above the least, as a share of it: 0.0 is proven, None is not known."""
    bound: Seconds | None = None
    """Charge that no plan of the solver's space is below, where it has one."""

    @property
    def changes_nothing(self) -> bool:
        """Whether the program is the original one."""
        return not any(o < 0 for o in self.program.origin) and not self.program.clones()


Solver = Callable[[Problem], Plan]


class Solve(Protocol):
    """A plan of one problem for a budget.

    Where it misses, the smallest there is; if that is not asked for (``least``), it need not be the smallest.
    """

    def __call__(self, budget: Bytes, /, *, least: bool = True) -> Plan: ...


Prepare = Callable[[Problem], Solve]
"""A solver for several budgets: what does not depend on the budget is done once, then one plan per budget."""
