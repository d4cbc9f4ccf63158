"""Exchanges between devices that XLA adds to a divided program, as equations of their own.

XLA gathers an operand that an op reads less divided than it is kept: once, before the first such reader, and the copy
lives until the last. Here an equation stands for that. It hands its operand on and means nothing to XLA, which gathers
where the reader stands: so a plan may hold the copy, or drop it and have it gathered again.

Invariant: results are those of the program without these equations, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.interpreters import mlir

from jaxtensile import _compat
from jaxtensile.ir.ir import Op, OpId, ValueId
from jaxtensile.program.trace import Equation, Traced

Parts = tuple[int, ...]
"""Into how many parts each dimension of an array is divided."""
GATHER, SUM = "all_gather", "psum"
"""What the equations are in a graph with the sizes of one device."""

_resharded = _compat.Primitive("resharded")
_resharded.def_impl(lambda x, **_: x)
_resharded.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_resharded, lambda _, x, **__: [x])


@dataclass(frozen=True, slots=True)
class Read:
    """Equation ``reader`` reads ``value`` divided into ``parts``, of which one device has ``shape`` and ``nbytes``."""

    reader: int
    value: int
    parts: Parts
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Added:
    """``result`` of equation ``maker`` is added up over devices: divided into ``partial`` parts before, of which one
    device has ``shape`` and ``nbytes``, and into ``parts`` behind. ``total``: bytes of the sum before it is divided."""

    maker: int
    result: int
    partial: Parts
    parts: Parts
    shape: tuple[int, ...]
    nbytes: int
    total: int


def parts_of_exchange(eqn: Any) -> tuple[Parts | None, Parts] | None:
    """How the operand of a sum (None: of a gather) and its result are divided; None for any other equation."""
    if eqn is None or eqn.primitive is not _resharded:
        return None
    return eqn.params["partial"], eqn.params["parts"]


def added(traced: Traced) -> frozenset[int]:
    """The values that are added up over devices already."""
    sums = (e for e in traced.equations if (parts := parts_of_exchange(e.eqn)) is not None and parts[0] is not None)
    return frozenset(v for e in sums for v in (*e.operands, *e.results) if isinstance(v, int))


def with_exchanges(traced: Traced, exchanges: Sequence[Read | Added]) -> Traced:
    """``traced`` with an equation before the first of the reads of a value in the same parts, and one behind each
    result that is added up."""
    reads: dict[int, list[Read]] = {}
    sums: dict[int, Added] = {}
    for exchange in exchanges:
        if isinstance(exchange, Read):
            reads.setdefault(exchange.reader, []).append(exchange)
        else:
            sums[exchange.maker] = exchange
    making = _Making(traced)
    for op, equation in zip(traced.graph.ops, traced.equations, strict=True):
        making.add(op, equation, reads.get(op.id, ()), sums.get(op.id))
    graph = replace(traced.graph, values=tuple(making.values), ops=tuple(making.ops))
    return replace(traced, graph=graph, equations=tuple(making.equations))


class _Making:
    """Scratch of one program."""

    def __init__(self, traced: Traced) -> None:
        self.values = [*traced.graph.values]
        self.ops: list[Op] = []
        self.equations: list[Equation] = []
        self.made: dict[tuple[int, Parts], ValueId] = {}

    def add(self, op: Op, equation: Equation, reads: Sequence[Read], adds: Added | None) -> None:
        instead: dict[int, ValueId] = {}
        for read in reads:
            key = read.value, read.parts
            if key not in self.made:
                new = self.made[key] = self._new(read.value, read.shape, read.nbytes)
                self._exchange(GATHER, equation, read.value, new, None, read.parts)
            instead[read.value] = self.made[key]
        results = op.results
        if adds is not None:
            results = (self._new(adds.result, adds.shape, adds.nbytes),)
        self.ops.append(
            replace(
                op,
                id=OpId(len(self.ops)),
                operands=tuple(instead.get(v, v) for v in op.operands),
                slots=tuple(instead.get(s, s) for s in op.slots),
                results=results,
            )
        )
        operands = tuple(instead.get(a, a) if isinstance(a, int) else a for a in equation.operands)
        self.equations.append(replace(equation, operands=operands, results=results))
        if adds is not None:
            self._exchange(SUM, equation, results[0], adds.result, adds.partial, adds.parts, adds.total)

    def _new(self, like: int, shape: tuple[int, ...], nbytes: int) -> ValueId:
        new = ValueId(len(self.values))
        self.values.append(replace(self.values[like], id=new, shape=shape, nbytes=nbytes))
        return new

    def _exchange(
        self, kind: str, at: Equation, v: int, r: int, partial: Parts | None, parts: Parts, workspace: int = 0
    ) -> None:
        """An exchange at the place of ``at`` in the user's code."""
        atoms = (*zip(at.operands, at.eqn.invars, strict=True), *zip(at.results, at.eqn.outvars, strict=True))
        whole = next(var.aval for a, var in atoms if a in (v, r))
        kind_of = jax.ShapeDtypeStruct(whole.shape, whole.dtype)
        closed = jax.make_jaxpr(lambda x: _resharded.bind(x, partial=partial, parts=parts))(kind_of)
        eqn = _compat.open_jaxpr(closed)[0].eqns[0].replace(source_info=at.eqn.source_info)
        operands, results = (ValueId(v),), (ValueId(r),)
        op = Op(id=OpId(len(self.ops)), primitive=kind, operands=operands, results=results, workspace=workspace)
        self.ops.append(op)
        self.equations.append(Equation(eqn, at.stack, operands, results, at.callers))


__all__ = ["GATHER", "SUM", "Added", "Read", "added", "parts_of_exchange", "with_exchanges"]
