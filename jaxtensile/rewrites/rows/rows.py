"""How an equation acts on some rows of its operands.

A row is one place of one dimension of an array, or ``block`` adjacent places. An equation passes rows on if every row
of its results depends only on the same row of operands with rows, and on the others as a whole. A sum over rows is a
sum of sums. All else is for whole arrays.

Invariant: an equation on some rows makes exactly those rows of the full result; totals differ only in the order of
addition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxtensile.passes.lifetimes import fusion
from jaxtensile.rewrites.rows import numbered
from jaxtensile.rewrites.rows.batched import batched

ELEMENTWISE = (fusion.ELEMENTWISE - {"random_bits", "threefry2x32"}) | frozenset(
    """bitcast_convert_type copy copy_p igamma igamma_grad_a igammac polygamma regularized_incomplete_beta
    stop_gradient zeta""".split()
)
"""Includes ops that XLA does not fuse or gives no kernel; excludes random bits, which depend on their place."""
SAME = "same"
"""Marks a whole result made beside rows by an equation that cannot be parted."""
TOTALS = {"reduce_sum": "add", "reduce_max": "max", "reduce_min": "min"}
_REDUCTIONS = frozenset({*TOTALS, "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"})
_CUMULATIVE = frozenset("cumsum cumprod cummax cummin cumlogsumexp".split())
_WINDOWS = frozenset("reduce_window_max reduce_window_min reduce_window_sum select_and_scatter_add".split())
_PLACES = ("sharding", "out_sharding")


class Row(NamedTuple):
    """Where the rows of an array are: the dimension, and the places per row."""

    dim: int
    block: int = 1


@dataclass(frozen=True)
class Passing:
    """How an equation passes rows on.

    ``needs``: the rows of each operand; None: all of it is read. ``gives``: the rows of each result; None: it is the
    operand of the same number; a string: how totals of rows are joined (``"add"``, ``"max"``, ``"min"``; ``SAME``: no
    total). ``params``: those parameters that depend on the number of rows, from that number. ``numbered``: makes rows
    that depend on their position, from the operands, the first place and the number of places. ``inside``: how the body
    of a loop passes rows on.
    """

    needs: tuple[Row | None, ...]
    gives: tuple[Row | str | None, ...]
    params: Callable[[int], Mapping[str, Any]] = lambda _: {}
    numbered: Callable[[Sequence[Any], Any, int], Any] | None = None
    inside: Section | None = None


@dataclass(kw_only=True)
class Section:
    """Ops of a program or body that pass rows on, and what they read.

    ``members``: op → how. ``pulled``: (value, rows) made anew from less → op and how. ``sliced``: (value, rows) sliced
    from the value. ``whole``: values read whole. ``same``: results of barriers → operands, for readers of all of it.
    """

    members: dict[int, Passing] = field(default_factory=dict)
    pulled: dict[tuple[int, Row], tuple[int, Passing]] = field(default_factory=dict)
    sliced: dict[tuple[int, Row], None] = field(default_factory=dict)
    whole: dict[int, None] = field(default_factory=dict)
    same: dict[int, int] = field(default_factory=dict)

    def reads(self, other: Section) -> None:
        """Add what ``other`` is made from to what this section reads."""
        self.pulled.update(other.pulled)
        self.sliced.update(other.sliced)
        self.whole.update(other.whole)

    def root(self, v: int) -> int:
        """The value behind all barriers of ``v``."""
        while v in self.same:
            v = self.same[v]
        return v


def passing(eqn: Any, given: Sequence[Row | None], rows: int) -> Passing | None:
    """How ``eqn`` passes on ``rows`` rows ``given`` of some operands; None if it does not."""
    if eqn is None or (eqn.primitive.name == "optimization_barrier" and not eqn.effects):
        return Passing(tuple(given), tuple(given))
    if _placed(eqn) or eqn.effects:
        return None
    name = eqn.primitive.name
    rule = _RULES.get(name) or (_elementwise if name in ELEMENTWISE else _batched)
    return rule(eqn, tuple(given), rows)


def made_of_whole(eqn: Any, wanted: Row, rows: int) -> Passing | None:
    """How some rows of the result are made from whole operands, and from no other rows; None if they are not."""
    name, shape = eqn.primitive.name, _shape(eqn.outvars[0])
    if _placed(eqn) or eqn.effects:
        return None
    if name == "iota" and eqn.params["dimension"] != wanted.dim:
        return Passing((), (wanted,), lambda n: {"shape": _resized(shape, wanted, n)})
    if name == "iota":
        dtype = eqn.outvars[0].aval.dtype
        return Passing((), (wanted,), numbered=lambda _, at, n: numbered.iota(dtype, shape, wanted.dim, at, n))
    if name == "random_bits" and numbered.are_counted(eqn):
        width = eqn.params["bit_width"]
        return Passing(
            (None,), (wanted,), numbered=lambda given, at, n: numbered.bits(given[0], width, shape, wanted.dim, at, n)
        )
    if name == "broadcast_in_dim" and len(eqn.invars) == 1:
        dims = [int(d) for d in eqn.params["broadcast_dimensions"]]
        if wanted.dim not in dims or _shape(eqn.invars[0])[dims.index(wanted.dim)] == 1:
            return Passing((None,), (wanted,), lambda n: {"shape": _resized(shape, wanted, n)})
    return None


def _placed(eqn: Any) -> bool:
    """Whether it places its result on some of several devices."""
    places = (eqn.params.get(name) for name in _PLACES)
    return any(place is not None and not getattr(getattr(place, "mesh", None), "empty", False) for place in places)


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(int(d) for d in getattr(atom.aval, "shape", ()))


def _resized(shape: Sequence[int], row: Row, n: int) -> tuple[int, ...]:
    """The shape with ``n`` rows."""
    return (*shape[: row.dim], n * row.block, *shape[row.dim + 1 :])


def _only(given: Sequence[Row | None]) -> Row | None:
    """The rows of operands of one shape; None if they differ."""
    found = {row for row in given if row is not None}
    return found.pop() if len(found) == 1 else None


def _elementwise(eqn: Any, given: tuple[Row | None, ...], rows: int) -> Passing | None:
    row, shape = _only(given), _shape(eqn.outvars[0])
    if row is None or row.dim >= len(shape) or shape[row.dim] != rows * row.block:
        return None
    shapes = [_shape(v) for v in eqn.invars]
    if any(s and (len(s) != len(shape) or s[row.dim] not in (1, shape[row.dim])) for s in shapes):
        return None
    return Passing(tuple(row if s and s[row.dim] > 1 else None for s in shapes), (row,))


def _broadcast(eqn: Any, given: tuple[Row | None, ...], rows: int) -> Passing | None:
    row, shape = given[0], _shape(eqn.outvars[0])
    if row is None or len(given) > 1:
        return None
    made = Row(int(eqn.params["broadcast_dimensions"][row.dim]), row.block)
    if shape[made.dim] != rows * row.block:
        return None
    return Passing(given, (made,), lambda n: {"shape": _resized(shape, made, n)})


def _reshape(eqn: Any, given: tuple[Row | None, ...], rows: int) -> Passing | None:
    row, old, new = given[0], _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    if row is None or len(given) > 1:
        return None
    order = [*(eqn.params.get("dimensions") or range(len(old)))]
    before = math.prod(old[d] for d in order[: order.index(row.dim)])
    found = (Row(d, n // rows) for d, n in enumerate(new) if n > 1 and n % rows == 0 and math.prod(new[:d]) == before)
    made = next(found, None)
    if made is None:
        return None
    return Passing(given, (made,), lambda n: {"new_sizes": _resized(new, made, n)})


def _squeeze(eqn: Any, given: tuple[Row | None, ...], _: int) -> Passing | None:
    (row,) = given
    gone = [int(d) % len(_shape(eqn.invars[0])) for d in eqn.params["dimensions"]]
    if row is None or row.dim in gone:
        return None
    return Passing(given, (Row(row.dim - sum(d < row.dim for d in gone), row.block),))


def _transpose(eqn: Any, given: tuple[Row | None, ...], _: int) -> Passing | None:
    (row,) = given
    return None if row is None else Passing(given, (Row(list(eqn.params["permutation"]).index(row.dim), row.block),))


def _reduction(eqn: Any, given: tuple[Row | None, ...], _: int) -> Passing | None:
    (row,) = given
    axes = eqn.params["axes"]
    if row is None:
        return None
    if row.dim in axes:
        how = TOTALS.get(eqn.primitive.name)
        return None if how is None else Passing(given, (how,))
    return Passing(given, (Row(row.dim - sum(a < row.dim for a in axes), row.block),))


def _dot(eqn: Any, given: tuple[Row | None, ...], _: int) -> Passing | None:
    (sums, batches) = eqn.params["dimension_numbers"]
    side = 0 if given[0] is not None else 1
    row = given[side]
    if row is None:
        return None
    for dims, total in ((sums, True), (batches, False)):
        if row.dim in dims[side]:
            at = list(dims[side]).index(row.dim)
            other = Row(dims[1 - side][at], row.block)
            needs = (row, other) if side == 0 else (other, row)
            if given[1 - side] not in (None, other):
                return None
            return Passing(needs, ("add" if total else Row(at, row.block),))
    if given[1 - side] is not None:
        return None
    free = [d for d in range(len(_shape(eqn.invars[side]))) if d not in (*sums[side], *batches[side])]
    made = len(batches[0]) + free.index(row.dim)
    if side == 1:
        made += len(_shape(eqn.invars[0])) - len(sums[0]) - len(batches[0])
    return Passing(given, (Row(made, row.block),))


def _convolution(eqn: Any, given: tuple[Row | None, ...], rows: int) -> Passing | None:
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    left, right = given
    batch, feature, *_rest = numbers.lhs_spec
    for name, dim in (("feature_group_count", feature), ("batch_group_count", batch)):
        if params[name] != 1 and params[name] % rows == 0:
            grouped = _by_groups(eqn, given, rows, name, dim)
            if grouped is not None:
                return grouped
    if params["batch_group_count"] != 1:
        return None
    if left is not None and left.dim == batch and right is None:
        return Passing(given, (Row(numbers.out_spec[0], left.block),))
    inner = numbers.rhs_spec[1]
    if params["feature_group_count"] != 1:
        return None
    if left is not None and left.dim == feature and right in (None, Row(inner, left.block)):
        return Passing((left, Row(inner, left.block)), ("add",))
    if right is not None and right.dim == inner and left is None:
        return Passing((Row(feature, right.block), right), ("add",))
    if right is not None and right.dim == numbers.rhs_spec[0] and left is None:
        return Passing(given, (Row(numbers.out_spec[1], right.block),))
    return None


def _by_groups(eqn: Any, given: tuple[Row | None, ...], rows: int, name: str, dim: int) -> Passing | None:
    """Each row in some groups of a convolution, as under ``vmap`` with a filter or a gradient of each row; ``dim``: of
    the left operand, where the groups are."""
    numbers, groups = eqn.params["dimension_numbers"], eqn.params[name]
    outs = numbers.rhs_spec[0]
    needs = Row(dim, _shape(eqn.invars[0])[dim] // rows), Row(outs, _shape(eqn.invars[1])[outs] // rows)
    if any(g not in (None, need) for g, need in zip(given, needs, strict=True)):
        return None
    return Passing(needs, (Row(numbers.out_spec[1], needs[1].block),), lambda n: {name: groups // rows * n})


def _alike(eqn: Any, given: tuple[Row | None, ...], axis: int | None) -> Passing | None:
    """Operands and results have their rows in one place, other than ``axis``."""
    row = _only(given)
    if row is None or row.dim == axis:
        return None
    return Passing((row,) * len(given), (row,) * len(eqn.outvars))


def _along(name: str) -> Callable[[Any, tuple[Row | None, ...], int], Passing | None]:
    return lambda eqn, given, _: _alike(eqn, given, int(eqn.params[name]) % max(len(_shape(eqn.invars[0])), 1))


def _top_k(eqn: Any, given: tuple[Row | None, ...], _: int) -> Passing | None:
    rank = len(_shape(eqn.invars[0]))
    return _alike(eqn, given, int(eqn.params.get("axis", -1)) % rank)


def _rev(eqn: Any, given: tuple[Row | None, ...], _: int) -> Passing | None:
    (row,) = given
    return None if row is None or row.dim in eqn.params["dimensions"] else Passing(given, given)


def _pad(eqn: Any, given: tuple[Row | None, ...], _: int) -> Passing | None:
    row = given[0]
    if row is None or given[1] is not None or tuple(eqn.params["padding_config"][row.dim]) != (0, 0, 0):
        return None
    return Passing(given, (row,))


def _slice(eqn: Any, given: tuple[Row | None, ...], rows: int) -> Passing | None:
    (row,) = given
    params = eqn.params
    if row is None or params["start_indices"][row.dim] != 0 or params["limit_indices"][row.dim] != rows * row.block:
        return None
    if params.get("strides") is not None and params["strides"][row.dim] != 1:
        return None
    return Passing(given, given, lambda n: {"limit_indices": _resized(params["limit_indices"], row, n)})


def _unstack(eqn: Any, given: tuple[Row | None, ...], _: int) -> Passing | None:
    (row,) = given
    axis = eqn.params["axis"] % len(_shape(eqn.invars[0]))
    if row is None or row.dim == axis:
        return None
    return Passing(given, (Row(row.dim - (row.dim > axis), row.block),) * len(eqn.outvars))


def _stack(eqn: Any, given: tuple[Row | None, ...], _: int) -> Passing | None:
    row = _only(given)
    if row is None:
        return None
    axis = eqn.params["axis"] % len(_shape(eqn.outvars[0]))
    return Passing((row,) * len(given), (Row(row.dim + (row.dim >= axis), row.block),))


def _windows(eqn: Any, given: tuple[Row | None, ...], _: int) -> Passing | None:
    row, params = _only(given), eqn.params
    if row is None:
        return None
    ones = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    if any(params.get(name) is not None and params[name][row.dim] != 1 for name in ones):
        return None
    return _alike(eqn, given, None) if tuple(params["padding"][row.dim]) == (0, 0) else None


def _gather(eqn: Any, given: tuple[Row | None, ...], rows: int) -> Passing | None:
    numbers, sizes = eqn.params["dimension_numbers"], tuple(eqn.params["slice_sizes"])
    operand, indices = given
    source, rank = _shape(eqn.invars[0]), len(_shape(eqn.outvars[0]))
    outer = [d for d in range(rank) if d not in numbers.offset_dims]
    pairs = [*zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)]
    for of_operand, of_indices in pairs:
        block = next((r.block for r, d in ((operand, of_operand), (indices, of_indices)) if r and r.dim == d), None)
        if block is not None:
            needs = Row(of_operand, block), Row(of_indices, block)
            if any(g not in (None, need) for g, need in zip(given, needs, strict=True)):
                return None
            return Passing(needs, (Row(outer[of_indices], block),))
    if operand is None and indices is not None and indices.dim < len(outer):
        return Passing(given, (Row(outer[indices.dim], indices.block),))
    if operand is None or indices is not None or operand.dim in numbers.start_index_map:
        return None
    kept = [d for d in range(len(source)) if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    if operand.dim not in kept or sizes[operand.dim] != rows * operand.block:
        return None
    made = Row(numbers.offset_dims[kept.index(operand.dim)], operand.block)
    return Passing(given, (made,), lambda n: {"slice_sizes": _resized(sizes, operand, n)})


def _scatter(eqn: Any, given: tuple[Row | None, ...], rows: int) -> Passing | None:
    numbers = eqn.params["dimension_numbers"]
    target, updates = _shape(eqn.invars[0]), _shape(eqn.invars[2])
    outer = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    ways: list[tuple[Row | None, Row | None, Row | None]] = []
    pairs = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    blocks = {r.block for r in given if r is not None}
    for block in blocks:
        ways += [(Row(o, block), Row(i, block), Row(outer[i], block)) for o, i in pairs]
        gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        kept = [d for d in range(len(target)) if d not in gone]
        for d, u in zip(kept, numbers.update_window_dims, strict=True):
            if d not in numbers.scatter_dims_to_operand_dims and updates[u] == target[d] == rows * block:
                ways.append((Row(d, block), None, Row(u, block)))
    for needs in ways if len(blocks) == 1 else ():
        if all(g in (None, need) for g, need in zip(given, needs, strict=True)):
            return Passing(needs, (needs[0],))
    return None


def _batched(eqn: Any, given: tuple[Row | None, ...], rows: int) -> Passing | None:
    """By JAX's batching rule: with the given rows alone, or with the same rows of the other operands too."""
    found = {row.block for row in given if row is not None}
    if len(found) != 1:
        return None
    (block,) = found
    row, shapes = _only(given), [_shape(v) for v in eqn.invars]
    also = [row if row is not None and s[row.dim : row.dim + 1] == (rows * block,) else None for s in shapes]
    for needs in dict.fromkeys((given, tuple(g or a for g, a in zip(given, also, strict=True)))):
        dim = batched(eqn, tuple(None if need is None else need.dim for need in needs))
        if dim is not None:
            return Passing(needs, (Row(dim, block),) * len(eqn.outvars))
    return None


def adding_scatter(eqn: Any, given: Sequence[Row | None]) -> tuple[None, Row, Row] | None:
    """The rows that a scatter needs to add each row of its updates by the same row of its indices; None for other
    ops."""
    if eqn is None or eqn.primitive.name not in ("scatter-add", "scatter_add") or _placed(eqn):
        return None
    numbers = eqn.params["dimension_numbers"]
    outer = [d for d in range(len(_shape(eqn.invars[2]))) if d not in numbers.update_window_dims]
    target, indices, updates = given
    if target is not None or numbers.operand_batching_dims:
        return None
    for k, d in enumerate(outer):
        block = next((r.block for r in (indices, updates) if r is not None), 1)
        needs = Row(k, block), Row(d, block)
        if any(given[1:]) and all(g in (None, need) for g, need in zip(given[1:], needs, strict=True)):
            return None, *needs
    return None


_RULES: dict[str, Callable[[Any, tuple[Row | None, ...], int], Passing | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "concatenate": _along("dimension"),
    "split": _along("axis"),
    "sort": _along("dimension"),
    "top_k": _top_k,
    "rev": _rev,
    "pad": _pad,
    "slice": _slice,
    "unstack": _unstack,
    "stack": _stack,
    "gather": _gather,
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(_CUMULATIVE, _along("axis")),
    **dict.fromkeys(fusion.SCATTERS, _scatter),
    **dict.fromkeys(_WINDOWS, _windows),
}
