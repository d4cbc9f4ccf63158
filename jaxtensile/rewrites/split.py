"""Compute products that are only read in slices some slices at a time, never as a whole.

The gradient of a stack of vectors is often one large product read in slices. Recomputation does not help: the product,
its operands and its sums exist at once. A slice of a product is the product of a slice: of one factor along a free
dimension, of both along a batch dimension. A slice of a sum is a sum of slices. Each smaller kernel reads the other
factor again, so fewer pieces take less time and more bytes.

Invariant: the same operations on the same operands make every element. Only the elements that one op makes change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Final

from jax import lax

from jaxtensile import _compat
from jaxtensile.ir.ir import Graph, consumers
from jaxtensile.program.trace import Traced, bind, retrace
from jaxtensile.rewrites.rewrite import Rewrite, Start, changed, large
from jaxtensile.units import Bytes

_POINTWISE = frozenset("add add_any sub mul neg convert_element_type".split())
_CUTS = frozenset(("slice", "split", "unstack"))
EACH: Final = 0
"""Pieces: one per slice."""
FEW: Final = (2, 4, 8)
"""Other numbers of pieces tried. A guess: each is planned in full."""


def sliced_products(traced: Traced, smallest: Bytes) -> frozenset[int]:
    """Values of at least ``smallest`` bytes that are products, or pointwise made from such, and only read in slices."""
    graph = traced.graph
    read_by = consumers(graph)
    final = set(graph.outputs)
    able = [False] * len(graph.values)
    for op in reversed(graph.ops):
        if len(op.results) != 1 or op.pinned:
            continue
        r = op.results[0]
        if graph.values[r].nbytes < smallest or r in final or not read_by[r]:
            continue
        if op.primitive == "dot_general" or (op.primitive in _POINTWISE and _same_shapes(graph, op.operands, r)):
            able[r] = all(_cuts(traced, o) or _passes_on(graph, o, able) for o in read_by[r])
    chosen: set[int] = set()
    for op in graph.ops:
        for r in op.results:
            if able[r] and (op.primitive == "dot_general" or not chosen.isdisjoint(op.operands)):
                chosen.add(r)
    return frozenset(chosen)


def split_products(traced: Traced, closed: Any, chosen: frozenset[int], pieces: int = EACH) -> Any:
    """The closed jaxpr of ``traced`` (of ``closed``) with each ``chosen`` value in ``pieces`` of neighbouring slices.

    A piece is made where one of its slices is first read, behind a barrier with the previous piece. Without barriers
    XLA merges products that share a factor, and the whole is back.
    """
    within = _pieces(traced, chosen, pieces)

    def evaluate(*flat: Any) -> list[Any]:
        env: dict[int, Any] = dict(zip(traced.arguments, flat, strict=True))
        env.update(traced.consts)
        last: dict[int, _Slice] = {}  # whole → the slice whose piece was made last
        made: dict[tuple[int, int, int, int], Any] = {}

        def read(atom: Any) -> Any:
            if not isinstance(atom, int):
                return atom.val
            value = env[atom]
            if isinstance(value, _Slice):
                env[atom] = value = make(value)
            return value

        def make(wanted: _Slice) -> Any:
            with _compat.equation_context(wanted.equation.eqn, wanted.equation.stack):
                if wanted.piece not in made:
                    before, whole = last.get(id(wanted.whole)), wanted.whole
                    if before is not None:
                        leaves = whole.leaves()
                        *leaves, made[before.piece] = _compat.barrier((*leaves, made[before.piece]))
                        whole = whole.of(iter(leaves))
                    made[wanted.piece] = whole.piece(wanted.dim, *wanted.within)
                    last[id(wanted.whole)] = wanted
                low = wanted.within[0]
                part = lax.slice_in_dim(made[wanted.piece], wanted.low - low, wanted.high - low, axis=wanted.dim)
                return lax.squeeze(part, (wanted.dim,)) if wanted.squeezed else part

        for equation in traced.equations:
            first = equation.operands[0] if equation.operands else None
            if equation.results and equation.results[0] in chosen:
                operands = tuple(read(a) for a in equation.operands)
                env[equation.results[0]] = _Later(equation, operands)
            elif isinstance(first, int) and isinstance(env[first], _Later):
                slices = _slices(equation, env[first])
                slices = [replace(s, within=within.get((first, s.low, s.high), s.within)) for s in slices]
                env.update(zip(equation.results, slices, strict=True))
            else:
                results = bind(equation, [read(a) for a in equation.operands])
                env.update(zip(equation.results, results, strict=True))
        return [read(o) for o in traced.outputs]

    return retrace(evaluate, closed)


@dataclass(frozen=True, slots=True)
class _Later:
    """A value that is made where a slice of it is read."""

    equation: Any
    operands: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.equation.eqn.outvars[0].aval.shape)

    def leaves(self) -> list[Any]:
        """The arrays that it is made from."""
        out: list[Any] = []
        for x in self.operands:
            out.extend(x.leaves() if isinstance(x, _Later) else [x] if getattr(x, "shape", ()) else [])
        return out

    def of(self, leaves: Iterator[Any]) -> _Later:
        """The same value from other arrays, in the order of ``leaves()``."""
        operands = [
            x.of(leaves) if isinstance(x, _Later) else next(leaves) if getattr(x, "shape", ()) else x
            for x in self.operands
        ]
        return _Later(self.equation, tuple(operands))

    def piece(self, dim: int, low: int, high: int) -> Any:
        """Elements ``low`` to ``high`` along ``dim``."""
        if self.equation.eqn.primitive.name != "dot_general":
            return bind(self.equation, [_piece(x, dim, low, high) for x in self.operands])[0]
        (left_sum, right_sum), (left_batch, right_batch) = self.equation.eqn.params["dimension_numbers"]
        left, right = self.operands
        free = [d for d in range(_rank(left)) if d not in (*left_sum, *left_batch)]
        other = [d for d in range(_rank(right)) if d not in (*right_sum, *right_batch)]
        if dim < len(left_batch):
            left = _piece(left, left_batch[dim], low, high)
            right = _piece(right, right_batch[dim], low, high)
        elif dim < len(left_batch) + len(free):
            left = _piece(left, free[dim - len(left_batch)], low, high)
        else:
            right = _piece(right, other[dim - len(left_batch) - len(free)], low, high)
        return bind(self.equation, [left, right])[0]


@dataclass(frozen=True, slots=True)
class _Slice:
    """Elements ``low`` to ``high`` along ``dim`` of ``whole``, made together with those of ``within``."""

    equation: Any
    whole: _Later
    dim: int
    low: int
    high: int
    within: tuple[int, int]
    squeezed: bool = False

    @property
    def piece(self) -> tuple[int, int, int, int]:
        """A key, equal for slices made together."""
        return id(self.whole), self.dim, *self.within


def _rank(x: Any) -> int:
    return len(x.shape)


def _piece(x: Any, dim: int, low: int, high: int) -> Any:
    if isinstance(x, _Later):
        return x.piece(dim, low, high)
    if not getattr(x, "shape", ()):
        return x
    return lax.slice_in_dim(x, low, high, axis=dim)


def _slices(equation: Any, whole: _Later) -> list[_Slice]:
    """The results of a cutting equation on ``whole``."""
    squeezed = equation.eqn.primitive.name == "unstack"
    dim, spans = _cut(equation, whole.shape)
    return [_Slice(equation, whole, dim, *span, span, squeezed) for span in spans]


def _cut(equation: Any, shape: tuple[int, ...]) -> tuple[int, list[tuple[int, int]]]:
    """The dimension that a cutting equation cuts, and the spans."""
    name, params = equation.eqn.primitive.name, equation.eqn.params
    if name == "slice":
        (dim,) = _cut_dims(params, shape)
        return dim, [(params["start_indices"][dim], params["limit_indices"][dim])]
    if name == "split":
        ends = list(accumulate(params["sizes"]))
        return params["axis"], [(e - n, e) for e, n in zip(ends, params["sizes"], strict=True)]
    return params["axis"], [(k, k + 1) for k in range(shape[params["axis"]])]


def _pieces(traced: Traced, chosen: frozenset[int], pieces: int) -> dict[tuple[int, int, int], tuple[int, int]]:
    """(value, span) of each slice → the span made with it, if larger."""
    if pieces == EACH:
        return {}
    found: dict[tuple[int, int, int], tuple[int, int]] = {}
    for v in chosen:
        cuts = [_cut(traced.equations[o], traced.graph.values[v].shape) for o in _cuts_of(traced, v)]
        spans = sorted({span for _, spans in cuts for span in spans})
        if len({dim for dim, _ in cuts}) != 1 or any(a[1] != b[0] for a, b in pairwise(spans)):
            continue  # slices of several dimensions, or that overlap, have no neighbours
        size = -(-len(spans) // pieces)
        if size == 1:
            continue
        for i in range(0, len(spans), size):
            group = spans[i : i + size]
            found.update({(v, *span): (group[0][0], group[-1][1]) for span in group})
    return found


def _cuts_of(traced: Traced, v: int) -> list[int]:
    """The cutting ops that read a value."""
    return [op.id for op in traced.graph.ops if op.operands and op.operands[0] == v and _cuts(traced, op.id)]


def _cut_dims(params: Any, shape: tuple[int, ...]) -> list[int]:
    spans = zip(params["start_indices"], params["limit_indices"], shape, strict=True)
    return [d for d, (low, high, size) in enumerate(spans) if (low, high) != (0, size)]


def _cuts(traced: Traced, o: int) -> bool:
    """Whether op ``o`` reads its operand in slices along one dimension."""
    equation = traced.equations[o]
    if equation.eqn is None or equation.eqn.primitive.name not in _CUTS:
        return False
    params = equation.eqn.params
    if equation.eqn.primitive.name != "slice":
        return True
    strides = params.get("strides")
    return (strides is None or set(strides) == {1}) and len(_cut_dims(params, equation.eqn.invars[0].aval.shape)) == 1


def _passes_on(graph: Graph, o: int, able: list[bool]) -> bool:
    op = graph.ops[o]
    return op.primitive in _POINTWISE and able[op.results[0]]


def _same_shapes(graph: Graph, operands: tuple[int, ...], result: int) -> bool:
    shape = graph.values[result].shape
    return all(graph.values[v].shape in (shape, ()) for v in operands)


Sites = tuple[tuple[int, ...], int]
"""The values made in pieces, and the number of pieces."""


def _find(start: Start) -> list[Sites]:
    chosen = sliced_products(start.base, large(start.base))
    numbers = dict.fromkeys(k for k in (*FEW, EACH) if k == EACH or _pieces(start.base, chosen, k)) if chosen else ()
    return [(tuple(sorted(chosen)), k) for k in numbers]


def _describe(sites: Sites) -> str:
    values, pieces = sites
    how = "slice by slice" if pieces == EACH else f"in {pieces} pieces"
    return f"{len(values)} large values, read in slices only, are made {how}"


SLICES = Rewrite(
    key="slices",
    title="products made slice by slice",
    form=tuple[tuple[int, ...], int],
    find=_find,
    apply=lambda start, sites: changed(
        start, lambda: split_products(start.base, start.request.jaxpr, frozenset(sites[0]), sites[1])
    ),
    describe=_describe,
    last=True,
)
