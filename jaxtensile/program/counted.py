"""Gathers and scatters whose indices count places, as ``x[jnp.arange(n), y]``: the counted dimension becomes a batch
dimension, as ``take_along_axis`` and ``vmap`` write it.

Then each place of the result comes from the same place of the array, and work can be done for some of them.

Invariant: the same elements are read and written. XLA makes the counted indices again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax import lax

from jaxtensile import _compat
from jaxtensile.ir.ir import producers
from jaxtensile.passes.lifetimes.fusion import SCATTERS
from jaxtensile.program.trace import Equation, Traced, exchanged

_OF_GATHER: Final = ("collapsed_slice_dims", "start_index_map", "operand_batching_dims", "start_indices_batching_dims")
_OF_SCATTER: Final = (
    "inserted_window_dims",
    "scatter_dims_to_operand_dims",
    "operand_batching_dims",
    "scatter_indices_batching_dims",
)
_NUMBERS: Final = {"gather": _OF_GATHER, **dict.fromkeys(SCATTERS, _OF_SCATTER)}
"""Dimension numbers by primitive: of the array's dimensions, those that a window has not and those that are indexed;
the batch dimensions of the array and of the indices."""


class _Count(NamedTuple):
    """Component ``part`` of the indices counts their dimension ``dim``, for dimension ``of`` of the array."""

    part: int
    dim: int
    of: int


def counted(traced: Traced, closed: Any) -> Any:
    """The closed jaxpr of ``traced`` (of ``closed``) with batch dimensions for counted indices; ``closed`` itself where
    none count, or where types of a mesh do not allow it."""
    counts = _Counts(traced)
    found = {o: count for o, e in enumerate(traced.equations) if (count := counts.of(e)) is not None}
    if not found:
        return closed
    try:
        return exchanged(traced, closed, {o: partial(_batched, traced.equations[o], c) for o, c in found.items()})
    except _compat.ShardingTypeError:
        return closed


class _Counts:
    """What counts in a program."""

    def __init__(self, traced: Traced) -> None:
        self.traced, self.made = traced, producers(traced.graph)

    def of(self, equation: Equation) -> _Count | None:
        """What an equation's indices count; None: nothing, or they are all that it reads by."""
        if equation.eqn is None or equation.eqn.primitive.name not in _NUMBERS:
            return None
        gone, to, *_ = _numbers(equation.eqn)
        source, indices = (_shape(v) for v in equation.eqn.invars[:2])
        parts = self._parts(equation.operands[1], len(indices) - 1)
        if len(to) < 2 or len(parts) != len(to):
            return None
        for part, (v, of) in enumerate(zip(parts, to, strict=True)):
            dim = self.dim(v)
            if dim is not None and dim < len(indices) - 1 and of in gone and source[of] == indices[dim]:
                return _Count(part, dim, of)
        return None

    def _parts(self, v: Any, last: int) -> list[int]:
        """What is joined along the last dimension, one number each; empty if it is something else."""
        equation = self._maker(v, "concatenate")
        if equation is None or equation.eqn.params["dimension"] != last:
            return []
        whole = all(isinstance(a, int) for a in equation.operands)
        single = all(_shape(x)[last] == 1 for x in equation.eqn.invars)
        return [*equation.operands] if whole and single else []

    def dim(self, v: Any) -> int | None:
        """The dimension along which a value is 0, 1, 2, ..., and the same along all others; None if there is none."""
        equation = self._maker(v)
        if equation is None:
            return _dim_of(self._constant(v))
        if not _counts_all(equation.eqn.outvars[0].aval):
            return None
        name, params = equation.eqn.primitive.name, equation.eqn.params
        if name == "iota":
            return int(params["dimension"])
        if name == "select_n" and len(equation.operands) == 3 and self._never(equation.operands[0]):
            return self.dim(equation.operands[1])
        if name not in ("broadcast_in_dim", "reshape", "convert_element_type", "copy", "squeeze", "expand_dims"):
            return None
        before = self.dim(equation.operands[0])
        if before is None or name in ("convert_element_type", "copy"):
            return before
        given, made = _shape(equation.eqn.invars[0]), _shape(equation.eqn.outvars[0])
        if name == "broadcast_in_dim":
            after = int(params["broadcast_dimensions"][before])
            return after if made[after] == given[before] else None
        kept = [d for d, n in enumerate(given) if n > 1], [d for d, n in enumerate(made) if n > 1]
        same = [given[d] for d in kept[0]] == [made[d] for d in kept[1]]
        return kept[1][kept[0].index(before)] if same and before in kept[0] else None

    def _never(self, v: Any) -> bool:
        """Whether this is false, or asks if something that counts is below zero, which it never is."""
        constant = self._constant(v)
        if constant is not None:
            return not constant.any()
        equation = self._maker(v, "lt")
        if equation is None or isinstance(equation.operands[1], int) or equation.operands[1].val != 0:
            return False
        return self.dim(equation.operands[0]) is not None

    def _constant(self, v: Any) -> np.ndarray[Any, Any] | None:
        """A constant of numpy's; None for others, and for those of JAX, which may be far away."""
        found = self.traced.consts.get(v) if isinstance(v, int) else v.val
        return None if found is None or isinstance(found, jax.Array) else np.asarray(found)

    def _maker(self, v: Any, name: str = "") -> Equation | None:
        """The equation of that name that makes a value."""
        equation = self.traced.equations[self.made[v]] if isinstance(v, int) and self.made[v] >= 0 else None
        if equation is None or equation.eqn is None:
            return None
        return equation if name in ("", equation.eqn.primitive.name) else None


def _batched(equation: Equation, count: _Count, read: Callable[[Any], Any]) -> Sequence[Any]:
    """The equation with a batch dimension for what its indices count."""
    eqn = equation.eqn
    operands = [read(a) for a in equation.operands]
    indices = operands[1]
    last = indices.ndim - 1
    parts = [lax.slice_in_dim(indices, k, k + 1, axis=last) for k in range(indices.shape[last]) if k != count.part]
    operands[1] = lax.concatenate(parts, last) if len(parts) > 1 else parts[0]
    numbers = eqn.params["dimension_numbers"]
    gone, to, of_operand, of_indices = _numbers(eqn)
    pairs = sorted([*zip(of_operand, of_indices, strict=True), (count.of, count.dim)])
    changed = (
        tuple(d for d in gone if d != count.of),
        tuple(d for d in to if d != count.of),
        tuple(d for d, _ in pairs),
        tuple(d for _, d in pairs),
    )
    numbers = numbers._replace(**dict(zip(_NUMBERS[eqn.primitive.name], changed, strict=True)))
    # All indices together may be in order where those of a batch are not.
    params = {**eqn.params, "dimension_numbers": numbers, "indices_are_sorted": False}
    with _compat.equation_context(eqn, equation.stack):
        out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return [out]


def _numbers(eqn: Any) -> tuple[tuple[int, ...], ...]:
    """The dimension numbers that ``_NUMBERS`` names."""
    numbers = eqn.params["dimension_numbers"]
    return tuple(getattr(numbers, name) for name in _NUMBERS[eqn.primitive.name])


def _dim_of(constant: np.ndarray[Any, Any] | None) -> int | None:
    """The dimension that an array of numbers counts; None if there is none."""
    if constant is None or not _counts_all(constant):
        return None
    places = ((d, _along(np.arange(n), d, constant.ndim)) for d, n in enumerate(constant.shape) if n > 1)
    return next((d for d, numbers in places if (constant == numbers).all()), None)


def _along(numbers: np.ndarray[Any, Any], dim: int, rank: int) -> np.ndarray[Any, Any]:
    return numbers.reshape([-1 if d == dim else 1 for d in range(rank)])


def _counts_all(aval: Any) -> bool:
    """Whether its integers can count all places along any dimension."""
    wide = np.issubdtype(aval.dtype, np.integer)
    return wide and max(aval.shape, default=1) <= int(np.iinfo(aval.dtype).max) + 1


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


__all__ = ["counted"]
