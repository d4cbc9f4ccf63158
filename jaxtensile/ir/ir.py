"""A program as data: values with bytes, ops in schedule order, nested bodies.

Invariant: ``graph.ops[i].id == i`` and ``graph.values[j].id == j``; an op reads only inputs and results of earlier ops.
Nothing here knows JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, NewType, TypeVar, cast

from jaxtensile.ir.fuser import H200, Fuser
from jaxtensile.units import Bytes, Flops

ValueId = NewType("ValueId", int)
OpId = NewType("OpId", int)
T = TypeVar("T")


OUTER = "outer_product"
"""The primitive of a ``dot_general`` that sums nothing: XLA multiplies its broadcast operands (``HandleDot`` in
``xla/hlo/transforms/simplifiers/algebraic_simplifier.cc``)."""

COLLECTIVES = frozenset(
    """psum psum2 psum_invariant pmax pmin ppermute all_gather all_gather_invariant all_to_all reduce_scatter
    ragged_all_to_all""".split()
)
"""Primitives that exchange values between devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One array and its bytes on the device."""

    id: ValueId
    nbytes: Bytes
    shape: tuple[int, ...]
    dtype: str
    space: str = "device"


WHILE_TRIPS: Final = 10
"""Iterations assumed for a ``while``. A guess: solvers end within tens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One equation.

    ``flops``: matrix and convolution FLOPs, including bodies times trips. ``pinned``: never cloned, dropped or moved
    (effects, references, foreign calls). ``bodies``: of loops and branches. ``trip_count``: how often they run, 1 if
    unknown. ``slots``: for ops with bodies and barriers before literals, the value at each operand position, -1 for a
    literal. ``carried``: for scans, numbers of constants and of carries. ``reverse``: whether a scan runs from the last
    slice to the first.

    ``padded``: bytes after padding that XLA writes out for lack of a kernel, 0 if none. For convolutions and gradients
    of max pools: of operand 0 or the result; if ``turned``, of the transposed operand 0. For a ``pad`` with equal zeros
    on both sides: of the result. ``turned``: whether a convolution is the gradient of a dilated one's filter; then XLA
    swaps batch and features of both operands. ``windows_first``: for scatters, whether the axes of a window are not the
    updates' last.

    ``across``: for products and convolutions, the axis order that a row-major library needs for each operand, empty if
    the operand has it. ``groups``: for products by groups, copies of each operand if a compiler multiplies all as one.
    ``workspace``: known bytes needed beside operands and results. ``rereads``: for windowed reductions and their
    gradients, reads per element of the operand.
    """

    id: OpId
    primitive: str
    operands: tuple[ValueId, ...]
    results: tuple[ValueId, ...]
    flops: Flops = 0.0
    pinned: bool = False
    bodies: tuple[Graph, ...] = ()
    trip_count: int = 1
    slots: tuple[int, ...] = ()
    carried: tuple[int, int] = (0, 0)
    reverse: bool = False
    padded: Bytes = 0
    turned: bool = False
    windows_first: bool = False
    across: tuple[tuple[int, ...], ...] = ()
    groups: tuple[int, ...] = ()
    workspace: Bytes = 0
    rereads: float = 1.0

    @property
    def runs(self) -> int:
        """How often bodies are taken to run."""
        return WHILE_TRIPS if self.primitive == "while" else self.trip_count

    def on(self, id: int, operands: Sequence[int], results: Sequence[int]) -> Op:
        """The same computation as op ``id`` of another schedule, on other values."""
        return Op(
            id=cast("OpId", id),  # schedules are written op by op: not even what does nothing is called here
            primitive=self.primitive,
            operands=cast("tuple[ValueId, ...]", tuple(operands)),
            results=cast("tuple[ValueId, ...]", tuple(results)),
            flops=self.flops,
            pinned=self.pinned,
            bodies=self.bodies,
            trip_count=self.trip_count,
            slots=self._slots(operands) if self.slots else (),
            carried=self.carried,
            reverse=self.reverse,
            padded=self.padded,
            turned=self.turned,
            windows_first=self.windows_first,
            across=self.across,
            groups=self.groups,
            workspace=self.workspace,
            rereads=self.rereads,
        )

    def _slots(self, operands: Sequence[int]) -> tuple[int, ...]:
        given = iter(operands)
        return tuple(next(given) if s >= 0 else -1 for s in self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Ops in schedule order.

    ``donated``: inputs with buffers that outputs may reuse. ``output_slots``: the value at each output position, None
    for a literal (``outputs`` omits those). ``fuser``: by whose rules its lifetimes are told.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    donated: frozenset[ValueId] = frozenset()
    output_slots: tuple[ValueId | None, ...] = ()
    fuser: Fuser = H200

    @property
    def flops(self) -> Flops:
        """Matrix and convolution FLOPs of one run."""
        return sum(op.flops for op in self.ops)


class Same(Generic[T]):
    """A key that compares by identity."""

    __slots__ = ("it",)

    def __init__(self, it: T) -> None:
        self.it = it

    def __hash__(self) -> int:
        return id(self.it)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.it is cast("Same[object]", other).it


def fused_by(graph: Graph, fuser: Fuser) -> Graph:
    """``graph`` and its bodies by the rules of ``fuser``."""
    ops = (replace(op, bodies=tuple(fused_by(b, fuser) for b in op.bodies)) if op.bodies else op for op in graph.ops)
    return replace(graph, ops=tuple(ops), fuser=fuser)


def producers(graph: Graph) -> list[int]:
    """For each value the op that makes it, -1 for inputs."""
    made_by = [-1] * len(graph.values)
    for op in graph.ops:
        for v in op.results:
            made_by[v] = op.id
    return made_by


def consumers(graph: Graph) -> list[list[int]]:
    """For each value its readers, in schedule order, each once."""
    read_by: list[list[int]] = [[] for _ in graph.values]
    for op in graph.ops:
        operands = op.operands
        for v in operands if len(operands) < 2 else dict.fromkeys(operands):
            read_by[v].append(op.id)
    return read_by


def is_fixed(op: Op) -> bool:
    """Whether an op has to stay as it is. A scan around collectives stays where it is, but what else its iterations do
    may change."""
    pinned = [inner for body in op.bodies for inner in body.ops if inner.pinned]
    hosts = any(v is not None and body.values[v].space == "host" for body in op.bodies for v in body.output_slots)
    loop = op.primitive == "scan" and bool(pinned) and not hosts
    return op.pinned and not (loop and all(o.primitive in COLLECTIVES or not is_fixed(o) for o in pinned))


def of_nothing(graph: Graph) -> set[int]:
    """Ops that depend on no input, and are neither pinned, loops or branches, nor products."""
    made, found = set[int](), set[int]()
    for op in graph.ops:
        if not (op.pinned or op.bodies or op.flops) and made.issuperset(op.operands):
            made.update(op.results)
            found.add(op.id)
    return found
