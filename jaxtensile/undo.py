"""What would a program be without its ``jax.checkpoint``s: their recomputation merged away.

The same equations without the barriers in front of recomputation, and with equal ones computed
once: the same primitive, parameters and configuration, on the same values. What a checkpoint
would compute again is then an ordinary residual, which a plan may keep or recompute. Only what is
made of nothing but constants, as masks are, is still made wherever it is read.

Invariant: an equation is merged only with one that computes the same bits; what has effects, is
foreign code or touches mutable state runs as often as before. Checkpoints inside loops, and
programs that send anything to the host, are left alone.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxtensile import _compat
from jaxtensile.ir import Graph, Op, OpId, ValueId
from jaxtensile.trace import Equation, Traced

_PURE = frozenset({"random_seed", "random_wrap"})
"""Never repeated by a plan, and yet no more than functions of their operands."""
_RANDOM = ("random_", "rng_", "threefry")
_APART = frozenset({"optimization_barrier"})
"""Written to keep equal values apart."""


@dataclass(frozen=True)
class Undone:
    """A program without its checkpoints.

    ``kept``: values of ``traced`` that the program as written computes again instead of waiting;
    ``barriers``: how many stood in the way of merging. Without any, XLA merges by itself.
    """

    traced: Traced
    kept: tuple[ValueId, ...]
    barriers: int


def undo(traced: Traced) -> Undone | None:
    """The program without its checkpoints; None where they recompute nothing, or send it to the host."""
    again = [_recomputes(e) for e in traced.equations]
    if not any(again) or _uses_host(traced.graph):
        return None
    same: dict[int, int] = {}
    """Value → the value it is merged into, or that it is behind a barrier."""
    number: dict[int, int] = {}
    """Value → the first value that is equal to it: also for those that are not merged."""
    constant: set[int] = set()

    def now(v: int) -> int:
        return same.get(v, v)

    def numbered(v: int) -> int:
        return number.get(v, v)

    known: dict[Hashable, int] = {}
    stays: list[int] = []
    merged: set[int] = set()
    barriers = 0
    for i, equation in enumerate(traced.equations):
        if equation.eqn is None:
            barriers += 1
            for r, v in zip(equation.results, equation.operands, strict=True):
                same[r], number[r] = now(v), numbered(v)
            continue
        key = None if _must_stay(traced, i) else _key(equation, number)
        first = i if key is None else known.setdefault(key, i)
        number.update(zip(equation.results, traced.equations[first].results, strict=True))
        if key is not None and _is_cheap(traced.graph.ops[i]) and constant.issuperset(map(now, _values(equation))):
            # Masks and zeros are made where they are read: one for all would only live longer.
            constant.update(equation.results)
            stays.append(i)
            continue
        if first == i:
            stays.append(i)
            continue
        same.update(zip(equation.results, traced.equations[first].results, strict=True))
        if again[i]:
            merged.update(traced.equations[first].results)
    if not merged:
        return None
    read = {now(v) for i in stays if again[i] for v in _values(traced.equations[i])}
    read |= {now(v) for v in traced.outputs if isinstance(v, int) and v in same}
    return _rebuilt(traced, same, stays, sorted(merged & read), barriers)


def _recomputes(equation: Equation) -> bool:
    """Whether the equation is of a differentiated checkpoint: its recomputation, or backward of it."""
    return any(call.params.get("differentiated", False) for call in equation.callers)


def _uses_host(graph: Graph) -> bool:
    return any(v.space == "host" for v in graph.values) or any(_uses_host(b) for op in graph.ops for b in op.bodies)


def _values(equation: Equation) -> list[int]:
    return [a for a in equation.operands if isinstance(a, int)]


def _is_cheap(op: Op) -> bool:
    """Whether an op on constants costs next to nothing: no matrix work, no loop, no random numbers."""
    return not (op.flops or op.bodies or op.primitive.startswith(_RANDOM))


def _must_stay(traced: Traced, i: int) -> bool:
    eqn, op = traced.equations[i].eqn, traced.graph.ops[i]
    return bool(eqn.effects) or op.primitive in _APART or (op.pinned and op.primitive not in _PURE)


def _key(equation: Equation, number: dict[int, int]) -> Hashable | None:
    """What two equations share when they compute the same bits; None for one that cannot be compared."""
    eqn = equation.eqn
    avals = tuple(v.aval for v in eqn.outvars)
    if not all(type(a) is _compat.ShapedArray for a in (*avals, *(v.aval for v in eqn.invars))):
        return None  # references and tokens stand for state
    operands = tuple(
        number.get(a, a) if isinstance(a, int) else (_compat.Literal, a.aval, _exact(a.val)) for a in equation.operands
    )
    key = (eqn.primitive, eqn.ctx, operands, _exact(eqn.params), avals)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _exact(x: Any) -> Hashable:
    """``x`` as a key that is equal for the same type and bits only: not 1 for True, nor 0.0 for -0.0."""
    if isinstance(x, dict):
        return (dict, *((k, _exact(v)) for k, v in sorted(x.items(), key=lambda item: str(item[0]))))
    if isinstance(x, tuple | list):
        return (type(x), *map(_exact, x))
    if isinstance(x, float | complex | np.generic):
        return (type(x), np.asarray(x).tobytes())
    if isinstance(x, np.ndarray) and not x.ndim and not x.dtype.hasobject:
        return (type(x), x.dtype, x.tobytes())
    if isinstance(x, np.ndarray | jax.Array):
        return ("array", id(x))  # whatever it holds; the equation keeps it alive
    return (type(x), x)


def _rebuilt(traced: Traced, same: dict[int, int], stays: list[int], kept: list[int], barriers: int) -> Undone:
    """The equations that stay and their Graph, on consecutive ids."""
    old = traced.graph
    left = dict.fromkeys((*traced.arguments, *traced.consts, *(r for i in stays for r in traced.equations[i].results)))
    number = {v: ValueId(n) for n, v in enumerate(sorted(left))}

    def now(v: int) -> ValueId:
        return number[same.get(v, v)]

    def atoms(of: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(now(a) if isinstance(a, int) else a for a in of)

    equations = [traced.equations[i] for i in stays]
    ops = tuple(
        replace(
            old.ops[i],
            id=OpId(n),
            operands=tuple(map(now, old.ops[i].operands)),
            results=tuple(map(now, old.ops[i].results)),
            slots=tuple(now(s) if s >= 0 else -1 for s in old.ops[i].slots),
        )
        for n, i in enumerate(stays)
    )
    graph = Graph(
        values=tuple(replace(old.values[v], id=n) for v, n in number.items()),
        ops=ops,
        inputs=tuple(map(now, old.inputs)),
        outputs=tuple(map(now, old.outputs)),
        donated=frozenset(map(now, old.donated)),
        output_slots=tuple(None if s is None else now(s) for s in old.output_slots),
    )
    undone = Traced(
        graph=graph,
        equations=tuple(replace(e, operands=atoms(e.operands), results=atoms(e.results)) for e in equations),
        consts={now(v): x for v, x in traced.consts.items()},
        outputs=atoms(traced.outputs),
        arguments=tuple(map(now, traced.arguments)),
    )
    return Undone(undone, tuple(map(now, kept)), barriers)


__all__ = ["Undone", "undo"]
