"""The vocabulary of plans, shared by solvers, checker, rewriter and report.

Invariant: a ``Program`` computes its original's outputs. Each op is one of the original's on versions of the same
values, or a barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from jaxtensile.ir.ir import Graph, Op, OpId, ValueId
from jaxtensile.units import Bytes, Flops, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of one executable, by XLA's categories. ``exact``: XLA's own."""

    argument: Bytes
    output: Bytes
    temp: Bytes
    alias: Bytes
    host: Bytes = 0
    exact: bool = False

    @property
    def device(self) -> Bytes:
        """Bytes needed on the device: argument + output + temp - alias."""
        return self.argument + self.output + self.temp - self.alias


@dataclass(frozen=True, slots=True)
class Recomputed:
    """XLA's own recomputation in a step: instructions (those of a loop once), FLOPs of products, predicted seconds."""

    count: int = 0
    flops: Flops = 0.0
    seconds: Seconds = 0.0


NOTHING_AGAIN: Final = Recomputed()


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Number and seconds of one kind of kernel, named after one operation, in a step."""

    kind: str
    source: str
    times: int
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class CompiledTime:
    """A compiled step by its kernels: seconds, seconds of waiting for copies, number of kernels, and the longest."""

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
    """Residual ``value`` is offloaded. ``hidden``: both copies end while other ops run."""

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
    """Predicted cost of every op of a graph, within the fused program.

    ``seconds``: roofline time. ``charge``: the solvers' objective, matrix time first.
    """

    seconds: tuple[Seconds, ...]
    charge: tuple[Seconds, ...]

    @property
    def per_second(self) -> float:
        """Charge per second of the step: converts waiting to the price of recomputation."""
        return sum(self.charge) / (sum(self.seconds) or 1.0)


@dataclass(frozen=True, slots=True)
class Link:
    """The link between device and host: bytes per second in each direction, and seconds per copy."""

    bandwidth: float
    latency: Seconds


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule over versions of the original's values.

    ``origin[i]``: the original op that op ``i`` repeats, -1 for an inserted barrier or copy. ``version_of[v]``: the
    original value that value ``v`` equals.
    """

    graph: Graph
    origin: tuple[int, ...]
    version_of: tuple[int, ...]

    @classmethod
    def unchanged(cls, graph: Graph) -> Program:
        """The original schedule."""
        return cls(graph, tuple(range(len(graph.ops))), tuple(range(len(graph.values))))

    def stages(self) -> int:
        """Number of barriers that open a stage, without those that tie copies to steps."""
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
        """The sum over the clones of ``figure``, which has an entry per original op."""
        return sum(figure[self.origin[op.id]] for op in self.clones())


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Make ``graph`` fit into ``budget`` device bytes at the least cost in seconds.

    ``link``: None without offloading. ``host_budget``: bytes that may be offloaded. ``state``: bytes of arguments that
    the graph itself takes from the host and returns. ``stacks``: bytes that its loops stack there.
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
    """A solver's answer. If ``predicted.device`` exceeds the budget, it is the least found."""

    program: Program
    actions: tuple[Action, ...]
    predicted: MemoryUse
    overhead: Seconds
    """Predicted extra seconds of one run."""
    recompute_flops: Flops
    solver: str
    offload_bytes: Bytes = 0
    """Bytes copied to the host in one run."""
    wait: Seconds = 0.0
    """Part of ``overhead`` spent waiting for copies."""
    gap: float | None = None
    """How far the charge may be above the least, as a share of it: 0.0 proven, None not known."""
    bound: Seconds | None = None
    """Lower bound of the charge in the solver's space, if any."""

    @property
    def changes_nothing(self) -> bool:
        """Whether the program is the original one."""
        return not any(o < 0 for o in self.program.origin) and not self.program.clones()


Solver = Callable[[Problem], Plan]


class Solve(Protocol):
    """A plan of one problem for a budget.

    If it misses the budget it is the smallest plan; with ``least=False`` it need not be.
    """

    def __call__(self, budget: Bytes, /, *, least: bool = True) -> Plan: ...


Prepare = Callable[[Problem], Solve]
"""A solver for several budgets: budget-independent work is done once."""
