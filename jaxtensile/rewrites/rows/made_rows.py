"""Rows that no member of a region makes.

Random bits of a dropout mask are made for the needed rows alone. Rows of values from another batch argument come from
its same rows; products too, if nothing else reads them. Other rows are slices.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxtensile.ir.ir import OUTER, Graph, consumers
from jaxtensile.program.trace import Equation, Traced
from jaxtensile.rewrites.rows.rows import Passing, Row, Section, made_of_whole, passing

LESS = 2
"""How many times fewer bytes making rows must read than the whole value has; else they are sliced. A guess."""
DEEP = 64
"""Most ops followed back from needed rows to their sources, a limit for long programs. A guess."""


class Outer:
    """Rows of values that no member makes: of a dropout mask, or from rows of another argument.

    ``members``: readers of rows.
    """

    def __init__(
        self,
        traced: Traced,
        rows: int,
        inner: set[int],
        made: Sequence[int],
        members: Container[int] = (),
        readers: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.traced, self.rows, self.inner, self.made, self.members = traced, rows, inner, made, members
        self._readers = consumers(traced.graph) if readers is None else readers
        self._kept = set(traced.graph.outputs)
        self._found: dict[tuple[int, Row], Section] = {}

    def rows_of(self, v: int, row: Row, depth: int = 0, by: int = -1) -> Section:
        """The cheapest source of some rows of ``v``: fewer bytes than ``v``, or a slice of it; ``by``: a reader that is
        no member."""
        if (v, row) not in self._found:
            made = self._from_less(v, row, depth, by) if depth < DEEP else None
            self._found[v, row] = made or Section(sliced={(v, row): None})
        return self._found[v, row]

    def _from_less(self, v: int, row: Row, depth: int, by: int) -> Section | None:
        """The rows made anew; None if a slice is as good. An op that multiplies must do so for these rows alone."""
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
        spared = max((size[u].nbytes for u, _ in found.pulled if self._spared[u]), default=0) if self._spared[v] else 0
        given = {a for a, _ in found.sliced if self.made[a] < 0}  # what is given is there anyway
        kept = {a for a in found.whole if self.made[a] >= 0 and size[a].shape} | {a for a, _ in found.sliced} - given
        read = sum(size[a].nbytes for a in kept)
        if not alone:
            read += sum(size[a].nbytes for a in given) // (LESS if spared else 1)
        return found if read <= max(size[v].nbytes, spared) // LESS else None

    @cached_property
    def _spared(self) -> list[bool]:
        """Of each value, whether nobody needs it as a whole once the members make rows anew: labels scattered into
        zeros and summed up, as in the gradient of a cross entropy."""
        graph = self.traced.graph
        found = [False] * len(graph.values)
        values = [*graph.inputs, *(v for op in graph.ops for v in op.results)]
        for v in reversed(values):
            found[v] = v not in self._kept and all(
                r in self.members
                or (not graph.ops[r].pinned and graph.ops[r].results and all(found[u] for u in graph.ops[r].results))
                for r in self._readers[v]
            )
        return found

    def _how(self, o: int, row: Row, alone: bool) -> Passing | None:
        """How op ``o`` makes some rows of its result."""
        op, equation = self.traced.graph.ops[o], self.traced.equations[o]
        found = made_of_whole(equation.eqn, row, self.rows)
        if found is not None or (op.flops and op.primitive != OUTER and not alone):
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
    """Whether all operands and results are on the device, and all results are numeric arrays."""
    avals = () if equation.eqn is None else [v.aval for v in equation.eqn.outvars]
    if any(not isinstance(getattr(a, "dtype", None), np.dtype) or a.dtype == jax.dtypes.float0 for a in avals):
        return False
    return all(graph.values[v].space == "device" for v in (*equation.results, *_ids(equation.operands)))


def _ids(atoms: Sequence[Any]) -> list[int]:
    return [a for a in atoms if isinstance(a, int)]


def row_at(at: Mapping[int, Row | str], atom: Any) -> Row | None:
    found = at.get(atom) if isinstance(atom, int) else None
    return found if isinstance(found, Row) else None
