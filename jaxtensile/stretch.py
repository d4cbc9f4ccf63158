"""Which stretch of a program can be done for some rows after the other?

What lies between a batch and the gradients of the weights makes every row from the same row of what went before, and
adds up over rows in the end (``rows``). Where that is all of a training step up to the update, doing it in parts is
gradient accumulation; where it is the loss of a language model, logits of all tokens need never exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtensile.ir import Graph, producers
from jaxtensile.rows import Passing, Row, made_of_whole, passing
from jaxtensile.trace import Equation, Traced
from jaxtensile.units import Bytes

SEEDS = 12
"""Places of rows that are tried at most, of arguments and of what large products read."""
CHEAP = 1 / 64
"""Share of what rows go through that is little enough to make for all rows first."""
DEEP = 64
"""Ops that are followed back at most from what rows need to what it is made from."""


class Seed(NamedTuple):
    """Where rows come from: a value, its dimension of that many rows; ``stage``: after how many totals of them."""

    value: int
    dim: int
    rows: int
    stage: int


@dataclass
class Stretch:
    """Ops that pass rows on, with no way from one to another outside.

    ``members``: op → how; ``pulled``: (value, rows) that are made anew for some rows, from less than they are → how;
    ``sliced``: (value, rows) that come from outside; ``whole``: values that are read as they are; ``leaving``: what
    others read of it, as rows or as totals; ``same``: results of barriers → what they are, for whoever reads all of it.
    """

    seed: Seed
    members: dict[int, Passing]
    pulled: dict[tuple[int, Row], tuple[int, Passing]] = field(default_factory=dict)
    sliced: dict[tuple[int, Row], None] = field(default_factory=dict)
    whole: dict[int, None] = field(default_factory=dict)
    leaving: dict[int, Row | str] = field(default_factory=dict)
    same: dict[int, int] = field(default_factory=dict)
    inside: Bytes = 0
    """Bytes of the values that nothing outside reads, less those of rows that leave it."""


def find_stretch(traced: Traced, smallest: Bytes) -> Stretch | None:
    """The stretch that keeps most bytes to itself, less those of rows that leave it; None where these are fewer than
    ``smallest``."""
    found = [s for seed in _seeds(traced, smallest) for s in stretches(traced, *seed)]
    best = max(found, key=lambda s: (s.inside, -s.seed.value, -s.seed.dim), default=None)
    return best if best is not None and best.inside >= smallest else None


def stretch_of(traced: Traced, seed: Seed) -> Stretch | None:
    """The stretch that comes from a seed; None where there is none."""
    found = stretches(traced, seed.value, Row(seed.dim), seed.rows)
    return next((s for s in found if s.seed == seed), None)


def _seeds(traced: Traced, smallest: Bytes) -> list[tuple[int, Row, int]]:
    """(value, rows, how many) of arguments that come back as no result, and of what large products read."""
    graph = traced.graph
    kinds = {(graph.values[v].shape, graph.values[v].dtype) for v in graph.outputs}
    values = [v for v in graph.inputs if (graph.values[v].shape, graph.values[v].dtype) not in kinds]
    large = [op for op in graph.ops if op.primitive == "dot_general" and graph.values[op.results[0]].nbytes >= smallest]
    large.sort(key=lambda op: -graph.values[op.results[0]].nbytes)
    values = sorted(values, key=lambda v: -graph.values[v].nbytes)[:SEEDS] + [
        v for op in large[:4] for v in op.operands
    ]
    found: dict[tuple[int, Row, int], None] = {}
    for v in dict.fromkeys(values):
        for dim, size in enumerate(graph.values[v].shape[:2]):
            if size > 1:
                found[int(v), Row(dim), size] = None
    return list(found)


def stretches(traced: Traced, value: int, row: Row, rows: int) -> list[Stretch]:
    """The stretches of ops that rows of a value go through, one for each time that totals of them are needed.

    Totals that are cheap to have before, like the number of tokens that count, are not waited for.
    """
    graph = traced.graph
    aside: set[int] = set()
    while True:
        at, found, same = _passed_on(traced, value, row, rows, aside)
        more = _cheap_totals(graph, at, found)
        if not more:
            break
        aside |= more
    made = producers(graph)
    for own in found.values():
        _complete(traced, own, at, same, made)
    return list(found.values())


def _passed_on(
    traced: Traced, value: int, row: Row, rows: int, aside: set[int]
) -> tuple[dict[int, Row | str], dict[int, Stretch], dict[int, int]]:
    """Where rows of all values are that have them, the stretches by their stage, and what barriers only hand on;
    ``aside``: ops that are for whole values."""
    graph = traced.graph
    at: dict[int, Row | str] = {value: row}
    stage = [0] * len(graph.values)
    found: dict[int, Stretch] = {}
    same: dict[int, int] = {}
    made = set[int]()
    for op, equation in zip(graph.ops, traced.equations, strict=True):
        given = [_row(at, a) for a in equation.operands]
        able = any(given) and not op.pinned and op.id not in aside and _on_the_device(graph, equation)
        how = passing(equation.eqn, given, rows) if able else None
        if how is not None and any(g not in (None, n) for g, n in zip(given, how.needs, strict=True)):
            how = None
        # What does not pass rows on reads around barriers: behind them is what was before.
        reads = [root(same, v) if how is None else v for v in op.operands]
        level = max((stage[v] + (v in made and (how is None or isinstance(at[v], str))) for v in reads), default=0)
        for v in op.results:
            stage[v] = level
        if how is None:
            continue
        own = found.setdefault(level, Stretch(Seed(value, row.dim, rows, level), {}))
        own.members[op.id] = how
        for i, (v, gives) in enumerate(zip(equation.results, how.gives, strict=True)):
            a = equation.operands[i] if i < len(equation.operands) else None
            if gives is not None:
                at[v] = gives
            if op.primitive == "optimization_barrier" and isinstance(a, int) and root(same, a) not in made:
                same[v] = root(same, a)
            elif gives is not None:
                made.add(v)
    return at, found, same


def _cheap_totals(graph: Graph, at: Mapping[int, Row | str], found: Mapping[int, Stretch]) -> set[int]:
    """Members that make totals which later ones wait for, where they multiply nothing and make little."""
    if len(found) < 2:
        return set()
    members = {o for own in found.values() for o in own.members}
    made = producers(graph)
    enough = CHEAP * sum(graph.values[v].nbytes for o in members for v in graph.ops[o].results)
    awaited = [False] * len(graph.values)
    for op in reversed(graph.ops):
        if op.id in members or any(awaited[r] for r in op.results):
            for v in op.operands:
                awaited[v] = True
    cheap: set[int] = set()
    for v, how in at.items():
        if isinstance(how, str) and awaited[v]:
            own = _ancestors(graph, made, v, members)
            if sum(graph.values[r].nbytes for o in own for r in graph.ops[o].results) <= enough and not any(
                graph.ops[o].flops for o in own
            ):
                cheap |= own
    return cheap


def _ancestors(graph: Graph, made: Sequence[int], v: int, members: set[int]) -> set[int]:
    """The members that ``v`` is made by, as far back as there are any."""
    found, todo = set[int](), [v]
    while todo:
        o = made[todo.pop()]
        if o in members and o not in found and graph.ops[o].primitive != "optimization_barrier":
            found.add(o)
            todo += graph.ops[o].operands
    return found


def _on_the_device(graph: Graph, equation: Equation) -> bool:
    """Whether all that it makes are arrays of numbers that are on the device."""
    avals = () if equation.eqn is None else [v.aval for v in equation.eqn.outvars]
    if any(not isinstance(getattr(a, "dtype", None), np.dtype) or a.dtype == jax.dtypes.float0 for a in avals):
        return False
    return all(graph.values[v].space == "device" for v in (*equation.results, *_ids(equation.operands)))


def _ids(atoms: Sequence[Any]) -> list[int]:
    return [a for a in atoms if isinstance(a, int)]


def _row(at: Mapping[int, Row | str], atom: Any) -> Row | None:
    found = at.get(atom) if isinstance(atom, int) else None
    return found if isinstance(found, Row) else None


def _complete(
    traced: Traced, own: Stretch, at: Mapping[int, Row | str], same: Mapping[int, int], made: Sequence[int]
) -> None:
    """What a stretch reads from outside, and what is read of it there."""
    graph = traced.graph
    own.same = {v: a for v, a in same.items() if made[v] in own.members}
    inner: set[int] = {v for o in own.members for v in graph.ops[o].results if v in at}
    outer = _Outer(traced, own.seed.rows, inner, made)
    for o, how in own.members.items():
        for a, need in zip(traced.equations[o].operands, how.needs, strict=True):
            if not isinstance(a, int) or (need is not None and a in inner):
                continue
            if need is None:
                own.whole[a] = None
            else:
                outer.rows_of(a, need).join(own)
    outside = {v for op in graph.ops if op.id not in own.members for v in op.operands} | set(graph.outputs)
    own.leaving = {v: at[v] for v in sorted(inner & outside - own.same.keys())}
    totals = {v for v in inner if isinstance(at[v], str)}
    leaving = sum(graph.values[v].nbytes for v, how in own.leaving.items() if isinstance(how, Row))
    own.inside = sum(graph.values[v].nbytes for v in inner - outside - totals) - leaving


@dataclass
class _Made:
    """What some rows of a value are made from: see the fields of ``Stretch``."""

    pulled: dict[tuple[int, Row], tuple[int, Passing]] = field(default_factory=dict)
    sliced: dict[tuple[int, Row], None] = field(default_factory=dict)
    whole: dict[int, None] = field(default_factory=dict)

    def join(self, other: _Made | Stretch) -> None:
        """Add this to what another one is made from."""
        other.pulled.update(self.pulled)
        other.sliced.update(self.sliced)
        other.whole.update(self.whole)


class _Outer:
    """Rows of values that no member makes: of a mask for dropout, or of what the rows of another argument give."""

    def __init__(self, traced: Traced, rows: int, inner: set[int], made: Sequence[int]) -> None:
        self.traced, self.rows, self.inner, self.made = traced, rows, inner, made
        self._found: dict[tuple[int, Row], _Made] = {}

    def rows_of(self, v: int, row: Row, depth: int = 0) -> _Made:
        """What some rows of ``v`` had best be made from: from less than they are, or by a slice of ``v``."""
        if (v, row) not in self._found:
            made = self._from_less(v, row, depth) if depth < DEEP else None
            self._found[v, row] = made or _Made(sliced={(v, row): None})
        return self._found[v, row]

    def _from_less(self, v: int, row: Row, depth: int) -> _Made | None:
        """The rows made anew, by an op that multiplies nothing; None where a slice is as good."""
        graph, o = self.traced.graph, self.made[v]
        equation = self.traced.equations[o]
        if o < 0 or equation.eqn is None or graph.ops[o].pinned or graph.ops[o].bodies or len(graph.ops[o].results) > 1:
            return None
        how = self._how(o, row)
        if how is None or self.inner.intersection(graph.ops[o].operands):
            return None
        found = _Made({(v, row): (o, how)})
        for a, need in zip(equation.operands, how.needs, strict=True):
            if not isinstance(a, int):
                continue
            if need is None:
                found.whole[a] = None
            else:
                self.rows_of(a, need, depth + 1).join(found)
        size = graph.values
        kept = (a for a in found.whole if self.made[a] >= 0)
        read = sum(size[a].nbytes for a in (*(a for a, _ in found.sliced), *kept))
        return found if read <= size[v].nbytes // 2 else None

    def _how(self, o: int, row: Row) -> Passing | None:
        """How op ``o`` makes some rows of its result."""
        op, equation = self.traced.graph.ops[o], self.traced.equations[o]
        found = made_of_whole(equation.eqn, row, self.rows)
        if found is not None or op.flops:
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


def root(same: Mapping[int, int], v: int) -> int:
    """What ``v`` is, behind all barriers."""
    while v in same:
        v = same[v]
    return v
