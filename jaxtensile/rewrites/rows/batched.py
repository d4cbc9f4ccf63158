"""Rows that an equation passes on by JAX's batching rule, for primitives without a rule of ours.

A batching rule computes each element of a batch alone. If its result is the very same equation, with equal parameters,
then each row of the results depends on that row of the operands only. This holds for a part of the rows too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax

from jaxtensile import _compat
from jaxtensile.program.trace import closed_bodies, trace_jaxpr, trace_on

Shapes = Sequence[tuple[int, ...]]
Dims = Sequence[int | None]
"""Dimension of the rows of each operand; None: all of it is read."""


@lru_cache(maxsize=1000)
def batched(eqn: Any, dims: Dims) -> int | None:
    """The dimension of the rows of all results, for rows in ``dims`` of the operands; None if no batching rule says
    so."""
    avals = [v.aval for v in eqn.invars]
    # Rules of loops and branches make new bodies, which takes long and is never the same equation.
    if eqn.effects or closed_bodies(eqn)[0] or not all(type(a) is _compat.ShapedArray for a in avals):
        return None
    return _found(eqn, [a.shape for a in avals], dims)


def _found(eqn: Any, shapes: Shapes, dims: Dims) -> int | None:
    alone = [s if d is None else (*s[:d], 1, *s[d + 1 :]) for s, d in zip(shapes, dims, strict=True)]
    for out in dict.fromkeys((0, *(d for d in dims if d is not None))):
        if _is_itself(eqn, shapes, dims, out) and _is_itself(eqn, alone, dims, out):
            return out
    # Of a batch of batches the outer one is taken off: what is left has to be the same equation again.
    inner = [d - 1 for d in dims if d is not None and d > 0]
    if len(inner) < len(dims) or not _is_itself(eqn, shapes, [0] * len(dims), 0):
        return None
    found = _found(eqn, [s[1:] for s in shapes], inner)
    return None if found is None else found + 1


def _is_itself(eqn: Any, shapes: Shapes, dims: Dims, out: int) -> bool:
    """Whether the rule makes the equation itself for operands of these shapes."""

    def element(*operands: Any) -> Any:
        return eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))

    try:
        kinds = [v.aval.update(shape=tuple(s)) for v, s in zip(eqn.invars, shapes, strict=True)]
        # Rules need not look whether there is such an element.
        one = [
            k if d is None else k.update(shape=(*k.shape[:d], *k.shape[d + 1 :]))
            for k, d in zip(kinds, dims, strict=True)
        ]
        trace_on(element, one)
        made = trace_jaxpr(trace_on(jax.vmap(element, tuple(dims), out), kinds))
        (own,) = made.equations
        params = own.eqn.params
        same = own.eqn.primitive is eqn.primitive and params.keys() == eqn.params.keys()
        same = same and all(bool(params[k] == eqn.params[k]) for k in params)
    except Exception:  # what a rule says of shapes that it does not know, or that it does not exist
        return False
    return same and (own.operands, own.results) == (made.arguments, made.outputs)
