"""Rewrites that XLA makes before fusion and that take memory of their own.

* cuDNN convolutions pad alike on both sides. Other operands are padded first. So are dilated ones, except in the
  gradient of a strided convolution, whose filter is reversed. Convolutions of one gradient share the copy.
* Zeros padded alike on both sides for convolutions alone are padded by the convolutions.
* The gradient of a dilated convolution's filter is a convolution with features as its batch. Transposed copies of both
  operands are written for it.
* The gradient of a max pool becomes a pool that also gives the places of the maxima, an s32 per axis, and a scatter
  into zeros. XLA merges equal constants, so a ``relu`` of the same shape compares with these zeros. They live from its
  first kernel on, and are copied if another gradient still wants them.
* cuDNN takes operands in an order of its own, and adds and compares as it convolves (``convolutions``).
* An array added to a scatter into zeros replaces the zeros: for a table read by rows and as a matrix.

Measured on compiled networks for an H200 (``docs/xla.md``); planned programs avoid the second by a barrier.

Invariant: inputs and outputs are the same values; every other original op appears once, in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jaxtensile.ir.ir import Graph, Op, OpId, Value, ValueId, consumers, producers
from jaxtensile.passes.lifetimes.fusion import STORED
from jaxtensile.passes.lowering.convolutions import CONVOLUTION, LAST_FROM_9, Convolutions
from jaxtensile.switches import on
from jaxtensile.units import Bytes

_DILATED = 1.5
"""Factor from which a padded copy is taken to be dilated: dilated arrays are about twice as large or more. Between 1
and 2, a guess."""
INDEX = 4
"""Bytes of an s32, the type of places of maxima (docs/xla.md: the gradient of a max pool)."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """``origin[i]``: the original op that op ``i`` is, or is made for."""

    graph: Graph
    origin: tuple[int, ...]


def lowered(graph: Graph, channels_last: frozenset[str] | None = LAST_FROM_9) -> Lowered:
    """The graph with XLA's additions; the same graph if there are none. ``channels_last``: see ``Convolutions``."""
    onto = _added_to_sums(graph)
    if not onto and not any(op.padded or op.primitive == CONVOLUTION for op in graph.ops):
        return Lowered(graph, tuple(range(len(graph.ops))))
    return _Lowering(graph, onto, channels_last).run()


def _added_to_sums(graph: Graph) -> dict[int, int]:
    """By op, for sums of a product and a scatter into zeros without other readers: the scatter."""
    made, read_by = producers(graph), consumers(graph)
    found: dict[int, int] = {}
    for op in graph.ops:
        if op.primitive not in ("add", "add_any") or len(set(op.operands)) < 2:
            continue
        for v in reversed(op.operands):
            scatter = graph.ops[made[v]] if made[v] >= 0 else op
            if scatter.primitive not in ("scatter-add", "scatter_add") or not scatter.operands:
                continue
            zeros = graph.ops[made[scatter.operands[0]]] if made[scatter.operands[0]] >= 0 else op
            (other,) = (o for o in op.operands if o != v)
            alone = all(len(read_by[o]) == 1 and o not in graph.outputs for o in op.operands)
            numbers = zeros.primitive == "broadcast_in_dim" and not zeros.operands
            if alone and numbers and _is_product(graph, made, other) and op.results and on("sums_into_scatters"):
                found[op.id] = scatter.id
                break
    return found


def _is_product(graph: Graph, made: list[int], v: int) -> bool:
    """Whether ``v`` is a matrix product, transposed or not."""
    while made[v] >= 0 and graph.ops[made[v]].primitive in ("transpose", "reshape"):
        v = graph.ops[made[v]].operands[0]
    return made[v] >= 0 and graph.ops[made[v]].primitive == "dot_general"


class Rewriting:
    """A graph that is written anew, with what XLA adds to ``old``."""

    def __init__(self, graph: Graph) -> None:
        self.old = graph
        self.values = list(graph.values)
        self.ops: list[Op] = []
        self.origin: list[int] = []

    def value(self, nbytes: Bytes, shape: tuple[int, ...], dtype: str) -> int:
        self.values.append(Value(id=ValueId(len(self.values)), nbytes=nbytes, shape=shape, dtype=dtype))
        return len(self.values) - 1

    def insert(
        self, for_: Op, primitive: str, operands: tuple[int, ...], results: tuple[int, ...], rereads: float = 1.0
    ) -> None:
        made = Op(
            id=OpId(len(self.ops)),
            primitive=primitive,
            operands=tuple(ValueId(v) for v in operands),
            results=tuple(ValueId(v) for v in results),
            rereads=rereads,
        )
        self.put(made, for_)

    def put(self, made: Op, for_: Op) -> None:
        self.ops.append(replace(made, id=OpId(len(self.ops))))
        self.origin.append(for_.id)

    def add(self, op: Op, operands: tuple[int, ...]) -> None:
        self.ops.append(op.on(len(self.ops), operands, op.results))
        self.origin.append(op.id)

    def done(self) -> Lowered:
        """The new graph, or the old one if nothing is new."""
        if tuple(self.ops) == self.old.ops:
            return Lowered(self.old, tuple(self.origin))
        return Lowered(replace(self.old, values=tuple(self.values), ops=tuple(self.ops)), tuple(self.origin))


class _Lowering(Rewriting):
    """Scratch of one ``lowered``."""

    def __init__(self, graph: Graph, onto: dict[int, int], channels_last: frozenset[str] | None) -> None:
        super().__init__(graph)
        self.onto = onto
        """Of sums, what scatters its share into the rest."""
        self.made = producers(graph)
        self.read_by = consumers(graph)
        self.convolutions = Convolutions(graph, self.made, self.read_by, channels_last)
        self.copies: dict[int, int] = {}
        """Of inputs that convolutions read in another order."""
        self.pads: dict[tuple[int, Bytes], int] = {}
        self.zeros: dict[tuple[tuple[int, ...], str], int] = {}
        """By type: the zeros that pool gradients of that type add to."""
        self.pools = [op.id for op in graph.ops if op.primitive == "select_and_scatter_add" and on("pool_gradients")]
        adding = [
            self.kind(graph.ops[o].results[0])
            for o in self.pools
            if graph.ops[o].padded == graph.values[graph.ops[o].results[0]].nbytes
        ]
        self.wanted = frozenset(adding)
        selected = {self.kind(op.results[0]) for op in graph.ops if op.primitive == "select_n" and op.results}
        self.kept = {kind for kind in adding if adding.count(kind) > 1 or kind in selected}
        """Types whose zeros are read after a gradient was added to them, so the gradient gets a copy."""

    def run(self) -> Lowered:
        scatters = set(self.onto.values())
        ends = self.convolutions.ends
        for op in self.old.ops:
            if op.id in scatters:
                continue
            if op.id in ends:
                self.add(replace(op, primitive="reshape"), (ends[op.id],))
                continue
            if op.primitive == CONVOLUTION and not op.turned:
                op = replace(op, operands=self.in_order(op))
            if op.id in self.onto:
                scatter = self.old.ops[self.onto[op.id]]
                (rest,) = (v for v in op.operands if v not in scatter.results)
                self.add(replace(op, primitive=scatter.primitive), (rest, *scatter.operands[1:]))
            elif op.id in self.pools:
                self.pool_gradient(op)
            elif op.turned and op.primitive == CONVOLUTION and on("turned_filters"):
                sizes = [op.padded, *(self.old.values[v].nbytes for v in op.operands[1:])]
                self.add(op, tuple(self.transposed(op, v, n) for v, n in zip(op.operands, sizes, strict=True)))
            elif self.is_padded(op):
                self.add(op, (self.pad(op), *op.operands[1:]))
            elif self.is_folded(op):
                self.add(replace(op, primitive="reshape"), op.operands[:1])
            elif self.compares_with_zeros(op):
                self.add(op, (*op.operands, self.zeros_of(op, self.kind(op.results[0]))))
            else:
                self.add(op, op.operands)
        return self.done()

    def kind(self, v: int) -> tuple[tuple[int, ...], str]:
        return self.old.values[v].shape, self.old.values[v].dtype

    def is_padded(self, op: Op) -> bool:
        """Whether a padded copy is written for convolution ``op``."""
        gradient = op.turned or op.id in self.convolutions.gradients
        return op.primitive == CONVOLUTION and op.padded > 0 and not gradient and on("padded_convolutions")

    def is_folded(self, op: Op) -> bool:
        """Whether ``op`` is a ``pad`` that convolutions do themselves (``FoldConvInputPad`` in
        ``xla/hlo/transforms/simplifiers/algebraic_simplifier.cc``)."""
        if op.primitive != "pad" or not op.padded or op.results[0] in self.old.outputs:
            return False
        readers = [self.old.ops[o] for o in self.read_by[op.results[0]]]
        return all(
            r.primitive == CONVOLUTION and not r.padded and op.results[0] not in r.operands[1:] for r in readers
        ) and on("folded_pads")

    def in_order(self, op: Op) -> tuple[ValueId, ...]:
        """The operands of a convolution in cuDNN's order, with those that are not made in it copied."""
        for v in self.convolutions.out_of_order(op):
            if v not in self.copies:
                self.copies[v] = self.transposed(op, v, self.old.values[v].nbytes)
        return tuple(ValueId(self.copies.get(v, v)) for v in self.convolutions.operands(op))

    def compares_with_zeros(self, op: Op) -> bool:
        """Whether ``op`` is a ``relu`` of a type whose zeros must exist, or its gradient once they do."""
        if not op.results or self.kind(op.results[0]) not in self.wanted or not on("shared_zeros"):
            return False
        if op.primitive == "max":
            return len(op.operands) == 1
        if op.primitive == "select_n" and self.kind(op.results[0]) in self.zeros:
            makers = (self.made[v] for v in op.operands)
            return any(
                m >= 0 and self.old.ops[m].primitive == "broadcast_in_dim" and not self.old.ops[m].operands
                for m in makers
            )
        return False

    def zeros_of(self, op: Op, kind: tuple[tuple[int, ...], str]) -> int:
        if kind not in self.zeros:
            self.zeros[kind] = self.constant(op, self.old.values[op.results[0]].nbytes, *kind)
        return self.zeros[kind]

    def pool_gradient(self, op: Op) -> None:
        """Add the places of the maxima and a scatter into zeros, in place if nobody wants those afterwards."""
        source, operand = op.operands[0], op.operands[-1]
        result = self.old.values[op.results[0]]
        windows = self.old.values[source]
        count = math.prod(windows.shape)
        places = tuple(self.value(INDEX * count, windows.shape, "int32") for _ in result.shape)
        pooled = self.value(windows.nbytes, windows.shape, windows.dtype)  # comes with them, and nobody reads it
        self.insert(op, "reduce_window_max", (operand,), (*places, pooled), rereads=op.rereads)
        if op.padded == result.nbytes:
            kind = self.kind(op.results[0])
            into = self.zeros_of(op, kind)
            if kind in self.kept:
                copied = self.value(result.nbytes, *kind)
                self.insert(op, STORED, (into,), (copied,))
                into = copied
            self.insert(op, "scatter-add", (into, source, *places), op.results)
            return
        size = max(op.padded, result.nbytes)
        into = self.constant(op, size, (size,), "uint8")
        summed = self.value(size, (size,), "uint8")
        self.insert(op, "scatter-add", (into, source, *places), (summed,))
        self.insert(op, "slice", (summed,), op.results)

    def pad(self, op: Op) -> int:
        key = (op.operands[0], op.padded)
        known = self.values[op.operands[0]]
        # What is dilated is about twice as large or more, and is padded otherwise by each convolution.
        if key not in self.pads or op.padded >= _DILATED * known.nbytes:
            self.pads[key] = self.value(op.padded, (op.padded,), known.dtype)
            self.insert(op, "pad", op.operands[:1], (self.pads[key],))
        return self.pads[key]

    def transposed(self, op: Op, v: int, nbytes: Bytes) -> int:
        known = self.old.values[v]
        made = self.value(nbytes, known.shape, known.dtype)
        self.insert(op, "transpose", (v,), (made,))
        return made

    def constant(self, op: Op, nbytes: Bytes, shape: tuple[int, ...], dtype: str) -> int:
        made = self.value(nbytes, shape, dtype)
        self.insert(op, "broadcast_in_dim", (), (made,))
        return made
