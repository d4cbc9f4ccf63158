"""A program as data: values with bytes, ops in schedule order, nested bodies kept.

Invariant: ``graph.ops[i].id == i`` and ``graph.values[j].id == j``; an op reads only
values that are inputs or results of earlier ops. Nothing here knows JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NewType, TypeVar, cast

from jaxtensile.units import Bytes, Flops

ValueId = NewType("ValueId", int)
OpId = NewType("OpId", int)
T = TypeVar("T")


OUTER = "outer_product"
"""The primitive of a ``dot_general`` that adds nothing up: XLA multiplies its operands, spread out (``HandleDot`` in
``xla/hlo/transforms/simplifiers/algebraic_simplifier.cc``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One array: its bytes on the device that runs the program."""

    id: ValueId
    nbytes: Bytes
    shape: tuple[int, ...]
    dtype: str
    space: str = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One equation.

    ``flops``: matrix and convolution FLOPs, bodies and trip counts included;
    ``pinned``: never cloned, dropped or moved (effects, references, foreign calls);
    ``bodies``: bodies of loops and branches; ``trip_count``: how often they run (1 when unknown).
    ``slots``: for ops with bodies, and for barriers before literals, the value in every operand position, -1 for a
    literal;
    ``carried``: for scans, the number of constants and of carries among the positions;
    ``reverse``: for scans, whether they run from the last slice to the first;
    ``padded``: for convolutions and gradients of max pools, bytes of operand 0 or of the result once padding that XLA
    has no kernel for is written out, 0 where there is none; where it is ``turned``, of the transposed operand 0; for
    a ``pad`` with as many zeros on either side, bytes of the result;
    ``turned``: for convolutions, the gradient of a dilated one's filter: XLA swaps batch and features of both operands;
    ``across``: for products and convolutions, in which order of its axes a library that takes arrays by rows needs
    each operand, none where that is its own;
    ``groups``: for products by groups, how many copies of each operand a compiler writes that multiplies all as one;
    ``workspace``: bytes that the op needs beside its operands and results while it runs, as far as they are known;
    ``rereads``: for windowed reductions and their gradients, how often an element of the operand is read.
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
    across: tuple[tuple[int, ...], ...] = ()
    groups: tuple[int, ...] = ()
    workspace: Bytes = 0
    rereads: float = 1.0

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

    ``donated``: inputs whose buffers the outputs may reuse; ``output_slots``: the value in every
    output position, None for a literal (``outputs`` leaves those out).
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    donated: frozenset[ValueId] = frozenset()
    output_slots: tuple[ValueId | None, ...] = ()

    @property
    def flops(self) -> Flops:
        """Matrix and convolution FLOPs of one run."""
        return sum(op.flops for op in self.ops)


class Same(Generic[T]):
    """Something as a key: itself, whatever equals it."""

    __slots__ = ("it",)

    def __init__(self, it: T) -> None:
        self.it = it

    def __hash__(self) -> int:
        return id(self.it)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.it is cast("Same[object]", other).it


def producers(graph: Graph) -> list[int]:
    """For each value the op that makes it, -1 for inputs."""
    made_by = [-1] * len(graph.values)
    for op in graph.ops:
        for v in op.results:
            made_by[v] = op.id
    return made_by


def consumers(graph: Graph) -> list[list[int]]:
    """For each value the ops that read it, in schedule order, each once."""
    read_by: list[list[int]] = [[] for _ in graph.values]
    for op in graph.ops:
        operands = op.operands
        for v in operands if len(operands) < 2 else dict.fromkeys(operands):
            read_by[v].append(op.id)
    return read_by


def of_nothing(graph: Graph) -> set[int]:
    """The ops that depend on no input, and are neither pinned, loops or branches, nor products."""
    made, found = set[int](), set[int]()
    for op in graph.ops:
        if not (op.pinned or op.bodies or op.flops) and made.issuperset(op.operands):
            made.update(op.results)
            found.add(op.id)
    return found
