"""How many bytes can a program need at most, in whatever order it runs?

Asked of every program that no budget was given for: one that has ample room runs as ``jax.jit`` runs it, and nothing
else is asked. Rough on purpose: no schedule, no fusion, no reuse.
"""

from __future__ import annotations

import math
from typing import Any

from jaxtensile import _compat
from jaxtensile.program.flops import BY_GROUPS, spread
from jaxtensile.units import MIB, Bytes

AMPLE = 4
"""Times the bytes of all values that XLA is granted for what it adds: layouts, padding, workspaces.

At 1, programs that XLA pads (convolutions of few channels) could miss the device; at 16, large ones that fit easily
would be planned.
"""
WORTHWHILE = MIB
"""Bytes of all values below which a program that no budget was given for keeps its checkpoints.

What they recompute there takes microseconds, and finding out what else there is room for about a second.
"""
_UNDONE = frozenset({"remat2", "checkpoint", "remat", "optimization_barrier", "call_hi_primitive"})
"""Primitives that say that a program may recompute what there is room for."""


def all_values(closed: Any) -> Bytes | None:
    """Bytes of all values of a program together, those inside its calls and loops too; None where a size is unknown.

    A body counts once: its values in one iteration replace those of the iteration before. Sizes are unknown in
    programs with symbolic dimensions.
    """
    try:
        return sum(_of(jaxpr) for jaxpr in _bodies(closed))
    except _compat.UnknownSizeError:
        return None


def recomputes(closed: Any) -> bool:
    """Whether a ``jax.checkpoint``, or what is made of one, is in a program."""
    return any(eqn.primitive.name in _UNDONE for jaxpr in _bodies(closed) for eqn in jaxpr.eqns)


def _bodies(closed: Any) -> list[Any]:
    """A program and everything that it calls, each once."""
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
    """What a compiler writes several times: the rows of products by groups."""
    if eqn.primitive.name not in BY_GROUPS:
        return []
    times = spread(eqn.params, [v.aval.shape for v in eqn.invars])
    return [v for v, n in zip(eqn.invars, times, strict=False) for _ in range(n)]


def _bytes(aval: Any) -> Bytes:
    return sum(math.prod(shape) * itemsize for shape, itemsize in _compat.arrays_of(aval))


__all__ = ["AMPLE", "WORTHWHILE", "all_values", "recomputes"]
