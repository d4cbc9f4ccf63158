"""Merge equal equations, as XLA does.

Equal equations have the same primitive, parameters, configuration and operands. A function that calls its network for a
value and again for a gradient has many. If any two that cost something are merged, all are, except ops on constants
alone (masks): they are made where they are read.

Invariant: an equation merges only with one that computes the same bits. Effects, foreign code and mutable state stay as
they are, and nothing merges across a barrier.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxtensile import _compat
from jaxtensile.ir.ir import Graph, Op, OpId, ValueId
from jaxtensile.program.trace import Equation, Traced

_RANDOM, _SCATTER = ("random_", "rng_", "threefry"), ("scatter",)
_APART = frozenset({"optimization_barrier"})
"""Primitives written to keep equal values apart."""


def cse(traced: Traced, *, cheap: bool = False) -> Traced:
    """The program with equal equations merged. It is returned unchanged unless one that costs something merges, or any
    with ``cheap``."""
    equal = Equal(traced)
    spared = False
    stays: list[int] = []
    for i, first in equal.each():
        if first == i:
            stays.append(i)
        else:
            spared = spared or cheap or not is_cheap(traced.graph.ops[i])
    return rebuilt(traced, equal.same, stays)[0] if spared else traced


class Equal:
    """Equal equations, one after the other.

    ``same``: value → the value it is merged into, or that it is behind a barrier.
    """

    def __init__(self, traced: Traced, *, barriers: bool = True) -> None:
        self.traced, self.barriers = traced, barriers
        self.same: dict[int, int] = {}
        self.number: dict[int, int] = {}
        """Value → the first equal value, merged or not."""

    def each(self) -> Iterator[tuple[int, int]]:
        """Each equation and the first one it merges with, or itself. -1 for inserted barriers that are seen through."""
        equations, ops = self.traced.equations, self.traced.graph.ops
        constant: set[int] = set()
        known: dict[Hashable, int] = {}
        for i, equation in enumerate(equations):
            if equation.eqn is None:
                if self.barriers:
                    yield i, i
                    continue
                for r, v in zip(equation.results, equation.operands, strict=True):
                    self.same[r], self.number[r] = self.now(v), self.numbered(v)
                yield i, -1
                continue
            key = key_of(self.traced, i, self.number)
            first = i if key is None else known.setdefault(key, i)
            self.number.update(zip(equation.results, equations[first].results, strict=True))
            if key is not None and is_cheap(ops[i]) and constant.issuperset(map(self.now, values(equation))):
                # Masks and zeros are made where they are read: one for all would only live longer.
                constant.update(equation.results)
                first = i
            if first != i:
                self.same.update(zip(equation.results, equations[first].results, strict=True))
            yield i, first

    def now(self, v: int) -> int:
        """The value that ``v`` is merged into."""
        return self.same.get(v, v)

    def numbered(self, v: int) -> int:
        """The first value equal to ``v``."""
        return self.number.get(v, v)


def values(equation: Equation) -> list[int]:
    """The operands that are not literals."""
    return [a for a in equation.operands if isinstance(a, int)]


def is_cheap(op: Op) -> bool:
    """Whether an op on constants costs next to nothing: no matrix work, loops, random numbers or scatters (always
    stored)."""
    return not (op.flops or op.bodies or op.primitive.startswith(_RANDOM + _SCATTER))


def key_of(traced: Traced, i: int, number: Mapping[int, Hashable]) -> Hashable | None:
    """A key shared by equations that compute the same bits as equation ``i``; None if none can.

    ``number``: a representative for equal values.
    """
    equation, op = traced.equations[i], traced.graph.ops[i]
    if op.pinned or op.primitive in _APART:
        return None
    eqn = equation.eqn
    avals = tuple(v.aval for v in eqn.outvars)
    if not all(type(a) is _compat.ShapedArray for a in (*avals, *(v.aval for v in eqn.invars))):
        return None  # references and tokens stand for state
    operands = tuple(number.get(a, a) if isinstance(a, int) else literal_key(a) for a in equation.operands)
    key = (eqn.primitive, eqn.ctx, operands, _exact(eqn.params), avals)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def literal_key(literal: Any) -> Hashable:
    """The key of a literal."""
    return (_compat.Literal, literal.aval, _exact(literal.val))


def _exact(x: Any) -> Hashable:
    """A key of ``x``, equal only for the same type and bits: 1 is not True, 0.0 is not -0.0."""
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


def rebuilt(traced: Traced, same: dict[int, int], stays: Sequence[int]) -> tuple[Traced, dict[int, ValueId]]:
    """The equations that stay and their Graph, renumbered, and the new id of each remaining value."""
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
        fuser=old.fuser,
    )
    made = Traced(
        graph=graph,
        equations=tuple(replace(e, operands=atoms(e.operands), results=atoms(e.results)) for e in equations),
        consts={now(v): x for v, x in traced.consts.items()},
        outputs=atoms(traced.outputs),
        arguments=tuple(map(now, traced.arguments)),
    )
    return made, number


__all__ = ["Equal", "cse", "is_cheap", "key_of", "literal_key", "rebuilt", "values"]
