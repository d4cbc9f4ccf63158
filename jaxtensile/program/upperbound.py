"""Upper bound on a program's bytes, in any order.

Every program without a given budget is asked for it; one with ample room runs as under ``jax.jit``. Rough on purpose:
no schedule, fusion or reuse.
"""

from __future__ import annotations

import math
from typing import Any

from jaxtensile import _compat
from jaxtensile.program.flops import BY_GROUPS, spread
from jaxtensile.units import MIB, Bytes

AMPLE = 4
"""Times the bytes of all values granted to XLA for layouts, padding and workspaces.

At 1, programs that XLA pads (convolutions of few channels) could miss the device; at 16, large ones that fit easily
would be planned.
"""
WORTHWHILE = MIB
"""Bytes of all values below which a program without a given budget keeps its checkpoints. Their recomputation takes
microseconds, a plan about a second."""
_UNDONE = frozenset({"remat2", "checkpoint", "remat", "optimization_barrier", "call_hi_primitive"})
"""Primitives of programs that may recompute what there is room for."""


def all_values(closed: Any) -> Bytes | None:
    """Bytes of all values of a program, calls and loops included; None if a size is unknown.

    A body counts once: each iteration replaces the last one's values. Symbolic dimensions have unknown sizes.
    """
    try:
        return sum(_of(jaxpr) for jaxpr in _bodies(closed))
    except _compat.UnknownSizeError:
        return None


def recomputes(closed: Any) -> bool:
    """Whether a program contains a ``jax.checkpoint`` or its lowered form."""
    return any(eqn.primitive.name in _UNDONE for jaxpr in _bodies(closed) for eqn in jaxpr.eqns)


def _bodies(closed: Any) -> list[Any]:
    """A program and everything it calls, each once."""
    found = {id(top := _compat.open_jaxpr(closed)[0]): top}
    waiting = [top]
    while waiting:
        for eqn in waiting.pop().eqns:
            for body in _compat.bodies(eqn):
                if id(body) not in found:
                    found[id(body)] = body
                    waiting.append(body)
    return list(found.values())


def _of(jaxpr: Any) -> Bytes:
    made = (v for eqn in jaxpr.eqns for v in (*eqn.outvars, *_copies(eqn)))
    return sum(_bytes(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars, *made))


def _copies(eqn: Any) -> list[Any]:
    """Operands that a compiler copies: the rows of products by groups."""
    if eqn.primitive.name not in BY_GROUPS:
        return []
    times = spread(eqn.params, [v.aval.shape for v in eqn.invars])
    return [v for v, n in zip(eqn.invars, times, strict=False) for _ in range(n)]


def _bytes(aval: Any) -> Bytes:
    return sum(math.prod(shape) * itemsize for shape, itemsize in _compat.arrays_of(aval))


__all__ = ["AMPLE", "WORTHWHILE", "all_values", "recomputes"]
