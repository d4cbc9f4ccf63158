"""What are some rows of a value made from, where none of those that are passed on gives them?

A mask for dropout is made from random bits for the rows that need it; rows of what another argument of the batch says
come from the same rows of that argument, products as well where nobody else reads them. What is not made from less
comes as a slice.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxtensile.ir.ir import Graph, consumers
from jaxtensile.program.trace import Equation, Traced
from jaxtensile.rewrites.rows.rows import Passing, Row, Section, made_of_whole, passing

LESS = 2
"""How many times fewer bytes have to be read than the whole has, for rows of it to be made and not sliced. A guess."""
DEEP = 64
"""Ops that are followed back at most from what rows need to what it is made from: against long programs. A guess."""


class Outer:
    """Rows of values that no member makes: of a mask for dropout, or of what the rows of another argument give.

    ``members``: who reads rows.
    """

    def __init__(
        self, traced: Traced, rows: int, inner: set[int], made: Sequence[int], members: Container[int] = ()
    ) -> None:
        self.traced, self.rows, self.inner, self.made, self.members = traced, rows, inner, made, members
        self._readers = consumers(traced.graph)
        self._kept = set(traced.graph.outputs)
        self._found: dict[tuple[int, Row], Section] = {}

    def rows_of(self, v: int, row: Row, depth: int = 0, by: int = -1) -> Section:
        """What some rows of ``v`` had best be made from: from less than they are, or by a slice of ``v``; ``by``: who
        reads them, where that is no member."""
        if (v, row) not in self._found:
            made = self._from_less(v, row, depth, by) if depth < DEEP else None
            self._found[v, row] = made or Section(sliced={(v, row): None})
        return self._found[v, row]

    def _from_less(self, v: int, row: Row, depth: int, by: int) -> Section | None:
        """The rows made anew, by an op that multiplies nothing unless it does so for them alone; None where a slice is
        as good."""
        graph, o = self.traced.graph, self.made[v]
        if o < 0:
            return None
        equation = self.traced.equations[o]
        if equation.eqn is None or graph.ops[o].pinned or graph.ops[o].bodies or len(graph.ops[o].results) > 1:
            return None
        (reader, *others) = self._readers[v] or (-1,)
        alone = v not in self._kept and not others and reader in (self.members if by < 0 else (by,))
        how = self._how(o, row, alone)
        if how is None or self.inner.intersection(graph.ops[o].operands):
            return None
        found = Section(pulled={(v, row): (o, how)})
        for a, need in zip(equation.operands, how.needs, strict=True):
            if not isinstance(a, int):
                continue
            if need is None:
                found.whole[a] = None
            else:
                found.reads(self.rows_of(a, need, depth + 1, o))
        size = graph.values
        kept = (a for a in found.whole if self.made[a] >= 0)
        sliced = (a for a, _ in found.sliced if not (alone and self.made[a] < 0))  # what is given is there anyway
        read = sum(size[a].nbytes for a in (*sliced, *kept))
        return found if read <= size[v].nbytes // LESS else None

    def _how(self, o: int, row: Row, alone: bool) -> Passing | None:
        """How op ``o`` makes some rows of its result."""
        op, equation = self.traced.graph.ops[o], self.traced.equations[o]
        found = made_of_whole(equation.eqn, row, self.rows)
        if found is not None or (op.flops and not alone):
            return found
        shapes = [self.traced.graph.values[a].shape if isinstance(a, int) else () for a in equation.operands]
        for k, shape in enumerate(shapes):
            for dim, places in enumerate(shape):
                if places != self.rows * row.block:
                    continue
                given = [Row(dim, row.block) if i == k else None for i in range(len(shapes))]
                how = passing(equation.eqn, given, self.rows)
                if how is not None and how.gives == (row,) and how.needs[k] is not None:
                    return how
        return None


def on_the_device(graph: Graph, equation: Equation) -> bool:
    """Whether all that it makes are arrays of numbers that are on the device."""
    avals = () if equation.eqn is None else [v.aval for v in equation.eqn.outvars]
    if any(not isinstance(getattr(a, "dtype", None), np.dtype) or a.dtype == jax.dtypes.float0 for a in avals):
        return False
    return all(graph.values[v].space == "device" for v in (*equation.results, *_ids(equation.operands)))


def _ids(atoms: Sequence[Any]) -> list[int]:
    return [a for a in atoms if isinstance(a, int)]


def row_at(at: Mapping[int, Row | str], atom: Any) -> Row | None:
    found = at.get(atom) if isinstance(atom, int) else None
    return found if isinstance(found, Row) else None
