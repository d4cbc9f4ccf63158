"""Products that are only read in slices: compute the slices, and never the whole.

The gradient of a stack of vectors is often one large product of which every consumer reads a slice.
No recomputation helps there: the product, what it is made from and whatever is added to it exist at
once. But a slice of a product is the product of a slice (of one factor along a free dimension, of
both along a batch dimension), and a slice of a sum is the sum of slices: the same multiplications in
more and smaller kernels.

Invariant: every element is computed by the same operations from the same operands as before; what
changes is which elements one op makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from jax import lax

from jaxtensile import _compat
from jaxtensile.ir.ir import Graph, consumers
from jaxtensile.program.trace import Traced, bind, retrace
from jaxtensile.rewrites.rewrite import Rewrite, Start, changed, large
from jaxtensile.units import Bytes

_POINTWISE = frozenset("add add_any sub mul neg convert_element_type".split())
_CUTS = frozenset(("slice", "split", "unstack"))


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


def split_products(traced: Traced, closed: Any, chosen: frozenset[int]) -> Any:
    """The closed jaxpr of ``traced`` (of ``closed``) that makes the ``chosen`` values slice by slice.

    A slice is made where it is first read, and one after the other: each stands behind a barrier with
    the one before it. Without that XLA merges products that share a factor, and the whole is back.
    """

    def evaluate(*flat: Any) -> list[Any]:
        env: dict[int, Any] = dict(zip(traced.arguments, flat, strict=True))
        env.update(traced.consts)
        last: dict[int, tuple[int, Any]] = {}  # whole → the slice made last: its value id and itself

        def read(atom: Any) -> Any:
            if not isinstance(atom, int):
                return atom.val
            value = env[atom]
            if isinstance(value, _Slice):
                env[atom] = value = make(atom, value)
            return value

        def make(v: int, wanted: _Slice) -> Any:
            with _compat.equation_context(wanted.equation.eqn, wanted.equation.stack):
                before = last.get(id(wanted.whole))
                whole = wanted.whole
                if before is not None:
                    u, slice_before = before
                    leaves = whole.leaves()
                    *leaves, slice_before = lax.optimization_barrier((*leaves, slice_before))
                    env[u] = slice_before
                    whole = whole.of(iter(leaves))
                made = whole.piece(wanted.dim, wanted.low, wanted.high)
                made = lax.squeeze(made, (wanted.dim,)) if wanted.squeezed else made
            last[id(wanted.whole)] = v, made
            return made

        for equation in traced.equations:
            first = equation.operands[0] if equation.operands else None
            if equation.results and equation.results[0] in chosen:
                operands = tuple(read(a) for a in equation.operands)
                env[equation.results[0]] = _Later(equation, operands)
            elif isinstance(first, int) and isinstance(env[first], _Later):
                env.update(zip(equation.results, _slices(equation, env[first]), strict=True))
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
        """The same from other arrays, in the order of ``leaves()``."""
        operands = [
            x.of(leaves) if isinstance(x, _Later) else next(leaves) if getattr(x, "shape", ()) else x
            for x in self.operands
        ]
        return _Later(self.equation, tuple(operands))

    def piece(self, dim: int, low: int, high: int) -> Any:
        """Elements ``low`` to ``high`` along ``dim``, all of the other dimensions."""
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
    """What one result of a cutting equation is: elements ``low`` to ``high`` along ``dim`` of ``whole``."""

    equation: Any
    whole: _Later
    dim: int
    low: int
    high: int
    squeezed: bool = False


def _rank(x: Any) -> int:
    return len(x.shape)


def _piece(x: Any, dim: int, low: int, high: int) -> Any:
    if isinstance(x, _Later):
        return x.piece(dim, low, high)
    if not getattr(x, "shape", ()):
        return x
    return lax.slice_in_dim(x, low, high, axis=dim)


def _slices(equation: Any, whole: _Later) -> list[_Slice]:
    """What a cutting equation makes of ``whole``."""
    name, params = equation.eqn.primitive.name, equation.eqn.params
    if name == "slice":
        (dim,) = _cut_dims(params, whole.shape)
        return [_Slice(equation, whole, dim, params["start_indices"][dim], params["limit_indices"][dim])]
    if name == "split":
        ends = list(accumulate(params["sizes"]))
        return [_Slice(equation, whole, params["axis"], e - n, e) for e, n in zip(ends, params["sizes"], strict=True)]
    axis = params["axis"]
    return [_Slice(equation, whole, axis, k, k + 1, True) for k in range(whole.shape[axis])]


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


def _find(start: Start) -> list[tuple[int, ...]]:
    chosen = sliced_products(start.base, large(start.base))
    return [tuple(sorted(chosen))] if chosen else []


SLICES = Rewrite(
    key="slices",
    title="products made slice by slice",
    form=tuple[int, ...],
    find=_find,
    apply=lambda start, values: changed(
        start, lambda: split_products(start.base, start.request.jaxpr, frozenset(values))
    ),
    describe=lambda values: f"{len(values)} large values, read in slices only, are made slice by slice",
    sharded=True,
    last=True,
)
