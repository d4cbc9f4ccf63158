"""Lower bound on the bytes of any plan: what single ops need at once, whatever is recomputed.

While a matrix product runs, its operands and its result exist; recomputation can only move that moment. All possible
fusion is assumed:

* An operand counts for the least bytes from which it can be computed on the fly: the smaller of itself and its sources,
  back to results of kernels that cannot fuse.
* A result counts for the least bytes that an epilogue could store instead.
* Arguments are added; donated ones, whose memory XLA reuses, only if an op that must run later still reads them.

Invariant: never above ``argument + output + temp - alias`` of a compiled program that computes the graph. For XLA:GPU
only: the others fuse products with the reductions and products that read them (TPU, CPU) or keep values on the chip
(TPU). There only arguments and outputs are sure.

XLA:GPU (H200, jax 0.10.2 and 0.12.0.1) also does this: Epilogues store the type they convert to (product in f32, bf16
or bool stored). ``p - a @ b`` is written over a donated ``p``, output or not. Temporaries live in the memory of later
outputs. Slices move in front of products. A product with a vector is a reduction. Closed-over constants are in no
figure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from jaxtensile.ir.ir import Graph, Op, OpId, ValueId, consumers
from jaxtensile.passes.lifetimes.fusion import ELEMENTWISE, MOVES, PRODUCTS, REDUCTIONS, SCATTERS, VIEWS
from jaxtensile.units import Bytes

BARRIER = "optimization_barrier"
LIBRARY = frozenset("sort fft cholesky triangular_solve lu geqrf householder_product eigh svd".split())
"""Kernels that write all of their results, perhaps over their operands."""
FUSIBLE = ELEMENTWISE | MOVES | VIEWS | {"dynamic_update_slice"}

_SMALL = 256
"""Elements: XLA may fuse products whose operands together have fewer, batch aside. Its limit is 100; more here, so that
the bound never exceeds XLA's need."""
_MAX_LEAVES = 32
"""Kernels that a value is traced back to; with more it counts as sharing memory with everything. More only raise the
bound. A guess."""
_WORST = 3
"""Ops named in ``Bound.ops``, for errors."""
_TRIES = 64
"""Ops examined, heaviest first; more only raise the bound. A guess."""


@dataclass(frozen=True, slots=True)
class Bound:
    """``nbytes``: no plan needs less. ``ops``: the worst ops, at most 3, with their bytes beside the arguments, largest
    first."""

    nbytes: Bytes
    ops: tuple[tuple[OpId, Bytes], ...]


def lower_bound(graph: Graph, constants: Collection[int] = (), *, bounded: bool = True) -> Bound:
    """Least device bytes of any program that computes ``graph``, with any recomputation.

    ``constants``: inputs that are no arguments; XLA counts them nowhere. ``bounded``: whether an op's needs exist at
    once; if not, ``nbytes`` is arguments and outputs, and ops are still named.
    """
    needs = _Needs(graph, graph.outputs, graph.outputs)
    inputs = [v for v in graph.inputs if v in needs.used and v not in constants]
    donated = [v for v in inputs if v in graph.donated]
    argument = sum(needs.size[v] for v in inputs)
    output = sum(needs.size[v] for v in graph.outputs)
    fixed = argument - sum(needs.size[v] for v in donated)
    donations = _Donations(needs, donated)
    worst: list[tuple[Bytes, Bytes, OpId]] = []
    for footprint, op in needs.heaviest()[:_TRIES]:
        if len(worst) == _WORST and argument + footprint <= worst[-1][0]:
            break
        beside_donations = donations.held(op) + needs.operands(op) + donations.stored(op)
        worst = sorted([*worst, (fixed + max(footprint, beside_donations), footprint, op.id)], reverse=True)[:_WORST]
    least = argument + output - _most_alias(needs, donated)
    by_footprint = sorted(((f, o) for _, f, o in worst), key=lambda w: (-w[0], w[1]))
    sure = [need for need, _, _ in worst] if bounded else []
    return Bound(max([least, *sure]), tuple((o, f) for f, o in by_footprint))


def _most_alias(needs: _Needs, donated: Sequence[int]) -> Bytes:
    """Most bytes of outputs that can reuse donated inputs: jit and XLA pair them by size."""
    outputs = [needs.size[v] for v in needs.graph.outputs]
    total = 0
    for v in donated:
        if needs.size[v] in outputs:
            outputs.remove(needs.size[v])
            total += needs.size[v]
    return total


@dataclass(frozen=True, slots=True)
class _Cut:
    """``nbytes``: least bytes from which a value can be had at once. ``leaves``: the kernels' results that they stem
    from; None if too many to tell from any others."""

    nbytes: Bytes
    leaves: frozenset[int] | None


_FREE = _Cut(0, frozenset())
"""Inputs, constants, and values made from them alone: counted elsewhere or nowhere."""


def _together(cuts: Iterable[_Cut]) -> _Cut:
    """Least bytes for several values at once: those from different kernels add up."""
    total, counted = 0, frozenset[int]()
    leaves: frozenset[int] | None = frozenset()
    for cut in sorted(cuts, key=lambda c: -c.nbytes):
        if total == 0 or (cut.leaves is not None and counted is not None and counted.isdisjoint(cut.leaves)):
            total += cut.nbytes
            counted = None if counted is None or cut.leaves is None else counted | cut.leaves
        leaves = None if leaves is None or cut.leaves is None else leaves | cut.leaves
    return _Cut(total, leaves if leaves is None or len(leaves) <= _MAX_LEAVES else None)


class _Needs:
    """Bytes that each op of one graph needs while it runs, arguments aside.

    ``used``: values that ``wanted`` depends on; ``ends``: wanted values surely stored. ``cut[v]``: least bytes that
    must exist for ``v`` to be read. ``most[v]``, ``least[v]``: least bytes stored for the most and the least demanding
    reader of ``v``. An op that runs several times may serve one reader each time.
    """

    def __init__(self, graph: Graph, wanted: Collection[ValueId], ends: Collection[ValueId]) -> None:
        self.graph = graph
        self.size = [v.nbytes if v.space != "host" else 0 for v in graph.values]
        self.used = _used(graph, wanted)
        self.ops = [op for op in graph.ops if op.pinned or not self.used.isdisjoint(op.results)]
        self.product = {op.id for op in self.ops if op.primitive in PRODUCTS and not _may_fuse(graph, op)}
        self.scatter = {op.id for op in self.ops if op.primitive in SCATTERS and _updates(graph, op) > 1}
        self.cut = self._cuts()
        self.least, self.most = self._stored(ends)

    def makes_buffers(self, op: Op) -> bool:
        """Whether the results cannot be computed inside their readers."""
        return op.id in self.product or op.id in self.scatter or op.primitive in LIBRARY

    def reads_buffers(self, op: Op) -> bool:
        """Whether operands are read from memory or recomputed on the fly, never kept in registers."""
        reduces = op.primitive in REDUCTIONS or (op.primitive in PRODUCTS and _depth(self.graph, op) > 1)
        return reduces or self.makes_buffers(op)

    def flows(self, op: Op) -> list[tuple[ValueId, tuple[ValueId, ...]]]:
        """Each result with the operands it depends on. A barrier passes each operand on by itself."""
        if op.primitive == BARRIER and len(op.operands) == len(op.results):
            return [(r, (v,)) for v, r in zip(op.operands, op.results, strict=True)]
        return [(r, op.operands) for r in op.results]

    def _cuts(self) -> list[_Cut]:
        cut = [_FREE] * len(self.graph.values)
        number = _numbers(self.graph, self.ops)
        for op in self.ops:
            for r, operands in self.flows(op):
                if self.makes_buffers(op):
                    cut[r] = _Cut(self.size[r], frozenset({number[r]}))
                elif (
                    op.primitive in FUSIBLE
                    or op.primitive in REDUCTIONS
                    or op.primitive in (*PRODUCTS, *SCATTERS, BARRIER)
                ):
                    before = _together(cut[v] for v in dict.fromkeys(operands))
                    cut[r] = _Cut(min(before.nbytes, self.size[r]), before.leaves)
        return cut

    def _stored(self, ends: Collection[ValueId]) -> tuple[list[Bytes], list[Bytes]]:
        count = len(self.size)
        least: list[Bytes | None] = [None] * count
        most: list[Bytes] = [0] * count

        def serve(v: ValueId, low: Bytes, high: Bytes) -> None:
            before = least[v]
            least[v] = min(self.size[v], low if before is None else min(before, low))
            most[v] = max(most[v], min(self.size[v], high))

        for v in ends:
            serve(v, self.size[v], self.size[v])
        for op in reversed(self.ops):
            fuses = op.primitive in FUSIBLE or op.primitive == BARRIER
            for r, operands in self.flows(op):
                if op.id in self.scatter and r in self.used:  # never inside a fusion
                    least[r] = most[r] = self.size[r]
                for v in dict.fromkeys(operands):
                    if self.reads_buffers(op):
                        serve(v, self.size[v], self.size[v])
                    elif r in self.used:
                        serve(v, (least[r] or 0) if fuses else 0, most[r] if fuses else 0)
        return [low or 0 for low in least], most

    def operands(self, op: Op) -> Bytes:
        """Bytes that exist while ``op`` runs because it reads them."""
        if op.id not in self.product and op.id not in self.scatter:
            return 0
        read = op.operands[1:] if op.id in self.scatter else op.operands
        return _together(self.cut[v] for v in dict.fromkeys(read)).nbytes

    def footprint(self, op: Op) -> Bytes:
        """Bytes that exist at once in one of the runs of ``op``."""
        if op.bodies:
            return min(self._inside(op, body) for body in op.bodies)
        if not self.makes_buffers(op):
            return 0
        return self.operands(op) + max((self.most[r] for r in op.results), default=0)

    def _inside(self, op: Op, body: Graph) -> Bytes:
        if op.primitive == "scan" and op.trip_count == 0:
            return 0
        places = body.output_slots or body.outputs
        needed = [r in self.used for r in op.results]
        if len(places) != len(needed):
            return 0
        wanted = [v for v, n in zip(places, needed, strict=True) if n and v is not None]
        # A stack may be recomputed by the loop that reads it; a carry is always stored.
        carries = set(places[: op.carried[1]] if op.primitive == "scan" else places)
        heaviest = _Needs(body, wanted, [v for v in wanted if v in carries]).heaviest()
        return heaviest[0][0] if heaviest else 0

    def heaviest(self) -> list[tuple[Bytes, Op]]:
        """Ops with the bytes they need, largest first."""
        needs = [(self.footprint(op), op) for op in self.ops if op.bodies or self.makes_buffers(op)]
        return sorted((n for n in needs if n[0] > 0), key=lambda n: (-n[0], n[1].id))


class _Donations:
    """Donated arguments that must still exist while an op runs, or values made from them alone (``owner``)."""

    def __init__(self, needs: _Needs, donated: Sequence[int]) -> None:
        self.needs, self.donated = needs, donated
        self.owner: dict[int, int] = {v: v for v in donated}
        size = needs.size
        for op in needs.ops:
            if op.primitive in FUSIBLE or op.primitive in REDUCTIONS or op.primitive == BARRIER:
                for r, operands in needs.flows(op):
                    owners = [self.owner[v] for v in operands if v in self.owner]
                    if owners and needs.cut[r] == _FREE:
                        self.owner[r] = max(owners, key=lambda d: size[d])
        self.read_by = consumers(needs.graph)

    def _later(self, op: Op) -> set[int]:
        """Values that exist only after ``op`` ran."""
        later = set[int](op.results)
        for other in self.needs.ops:
            if other.id > op.id:
                later.update(r for r, operands in self.needs.flows(other) if not later.isdisjoint(operands))
        return later

    def held(self, op: Op) -> Bytes:
        """Least bytes of donated arguments while ``op`` first runs."""
        needs, size, later = self.needs, self.needs.size, self._later(op)
        held = dict.fromkeys(self.owner, 0)
        for v in needs.graph.outputs:
            if v in self.owner:
                held[v] = size[v]
        for other in reversed(needs.ops):
            for r, operands in needs.flows(other):
                for v in operands:
                    if v not in self.owner:
                        continue
                    if (r in later and self._at_once(other)) if other is not op else op.id in needs.product:
                        held[v] = size[v]
                    elif self.owner.get(r) == self.owner[v]:
                        held[v] = max(held[v], min(held[r], size[v]))
        return sum(held[v] for v in self.donated)

    def _at_once(self, op: Op) -> bool:
        """Whether an op reads all its operands at one time."""
        needs = self.needs
        fusible = op.primitive in FUSIBLE and op.primitive not in ("concatenate", BARRIER)
        return fusible or op.id in needs.product or op.id in needs.scatter

    def stored(self, op: Op) -> Bytes:
        """Least bytes that any run of ``op`` stores, without donated memory: an epilogue may write over an argument it
        reads."""
        needs = self.needs
        if op.id in needs.scatter:
            return sum(needs.least[r] for r in op.results)
        if op.id not in needs.product:
            return 0
        return sum(needs.least[r] for r in op.results if not self._meets_owned(r, needs.least[r]))

    def _meets_owned(self, result: int, nbytes: Bytes) -> bool:
        """Whether ops that may fuse behind ``result`` read a donated argument with room for ``nbytes``."""
        needs, seen, todo = self.needs, set[int](), [result]
        while todo:
            for o in self.read_by[todo.pop()]:
                op = needs.graph.ops[o]
                if o in seen or op.primitive not in FUSIBLE:
                    continue
                seen.add(o)
                owned = [v for v in op.operands if v in self.owner]
                if any(max(needs.size[v], needs.size[self.owner[v]]) >= nbytes for v in owned):
                    return True
                todo.extend(op.results)
        return False


def _used(graph: Graph, wanted: Collection[ValueId]) -> set[int]:
    """Values that ``wanted`` or an effect depends on."""
    used = set[int](wanted)
    for op in reversed(graph.ops):
        if op.primitive == BARRIER and not op.pinned and len(op.operands) == len(op.results):
            used.update(v for v, r in zip(op.operands, op.results, strict=True) if r in used)
        elif op.pinned or not used.isdisjoint(op.results):
            used.update(op.operands)
    return used


def _numbers(graph: Graph, ops: Iterable[Op]) -> list[int]:
    """Equal numbers for values that XLA may find equal (common subexpressions); others may share one."""
    number = list(range(len(graph.values)))
    known: dict[tuple[object, ...], tuple[ValueId, ...]] = {}
    for op in ops:
        if op.primitive == BARRIER and len(op.operands) == len(op.results):
            for v, r in zip(op.operands, op.results, strict=True):
                number[r] = number[v]
            continue
        looks = tuple((graph.values[r].shape, graph.values[r].dtype) for r in op.results)
        same = known.setdefault((op.primitive, looks, *(number[v] for v in op.operands)), op.results)
        for r, s in zip(op.results, same, strict=True):
            number[r] = number[s]
    return number


def _depth(graph: Graph, op: Op) -> int:
    """Multiply-adds per element of a product's result."""
    count = _count(graph, op.results[0])
    return round(op.flops / (2 * count)) if count else 0


def _may_fuse(graph: Graph, op: Op) -> bool:
    """Whether a product is so small, or so flat (a vector on one side), that XLA may treat it as elementwise."""
    depth = _depth(graph, op)
    if depth < 2 or len(op.operands) != 2:
        return True
    result, left, right = (_count(graph, v) for v in (op.results[0], *op.operands))
    if op.primitive != "dot_general":
        return left < _SMALL or right < _SMALL
    rows, columns = result * depth / right, result * depth / left
    return rows < 2 or columns < 2 or depth * (rows + columns) < _SMALL


def _updates(graph: Graph, op: Op) -> int:
    """Places that a scatter writes to. With one it is an update of a slice, which fuses."""
    if len(op.operands) < 2:
        return 0
    count = 1
    for d in graph.values[op.operands[1]].shape[:-1]:
        count *= d
    return count


def _count(graph: Graph, v: ValueId) -> int:
    count = 1
    for d in graph.values[v].shape:
        count *= d
    return count
