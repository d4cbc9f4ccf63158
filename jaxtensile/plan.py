"""What was decided: the vocabulary between solvers, checker, rewriter and report.

Invariant: a ``Program`` computes the same outputs as the graph it was made from: each of its
ops is an op of the original on versions of the same values, or a barrier that changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtensile.ir import Graph, Op, OpId, ValueId
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


Action = Keep | Remat


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Predicted cost of every op of a graph, when it runs as part of the fused program.

    ``seconds``: roofline time; ``charge``: what solvers minimise, matrix time first.
    """

    seconds: tuple[Seconds, ...]
    charge: tuple[Seconds, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule over versions of the original's values.

    ``origin[i]``: the original op that op ``i`` repeats, -1 for an inserted barrier;
    ``version_of[v]``: the original value that value ``v`` equals.
    """

    graph: Graph
    origin: tuple[int, ...]
    version_of: tuple[int, ...]

    @classmethod
    def unchanged(cls, graph: Graph) -> Program:
        """The original schedule."""
        return cls(graph, tuple(range(len(graph.ops))), tuple(range(len(graph.values))))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Make ``graph`` fit into ``budget`` device bytes at the least cost in seconds."""

    graph: Graph
    costs: Costs
    budget: Bytes


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

    @property
    def changes_nothing(self) -> bool:
        """Whether the program is the original one."""
        return not any(o < 0 for o in self.program.origin) and not self.program.clones()


Solver = Callable[[Problem], Plan]
