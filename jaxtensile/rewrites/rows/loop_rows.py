"""How loops and branches pass rows on.

A scan does if its body does: each row of a carry or stack comes from the same row of the carries and slices read.
Totals over rows may be stacked. They may also be added to a carry that starts at zero, like weight gradients. A cond
does if all its branches do, alike.

Invariant: a loop on some rows makes exactly those rows of the full result; totals differ only in the order of addition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

from jaxtensile import _compat
from jaxtensile.ir.ir import producers
from jaxtensile.program.trace import Equation, Traced, trace_jaxpr
from jaxtensile.rewrites.rows.made_rows import Outer, on_the_device, row_at
from jaxtensile.rewrites.rows.rows import SAME, Passing, Row, Section, adding_scatter, passing

_ADDING = frozenset(("add", "add_any"))
_LINEAR = frozenset(
    """reshape squeeze transpose broadcast_in_dim slice split unstack reduce_sum convert_element_type neg copy
    copy_p""".split()
)
"""Ops allowed on a total of some rows before it is added to the others."""

SMALL = 4
"""How many times a total's bytes its terms must have to be added part by part: each part reads the total again. A
guess."""

At = Row | str | None
"""Where the rows of a value are. None: it is whole. ``"add"``: a total of rows. ``"same"``: made beside rows, equal for
all of them."""


@dataclass(kw_only=True)
class Loop(Section):
    """The body of a scan that passes rows on, and where the rows of its arguments and results are."""

    body: Traced
    takes: tuple[At, ...] = ()
    gives: tuple[At, ...] = ()
    again: bool = False
    """Whether it multiplies values without rows, and so once per part."""


@dataclass(kw_only=True)
class Branches(Section):
    """Branches that pass rows on alike."""

    each: tuple[Loop, ...]


class Loops:
    """How the equations of a program, or of a ``body``, pass rows on."""

    def __init__(self, traced: Traced, *, body: bool = False) -> None:
        self.traced, self.body = traced, body
        graph = traced.graph
        self.made = producers(graph)
        self.read = {v for op in graph.ops for v in op.operands} | set(graph.outputs)

    def passing(self, o: int, given: Sequence[Row | None], rows: int) -> Passing | None:
        """How op ``o`` passes on the ``given`` rows of operands; None if it does not."""
        equation = self.traced.equations[o]
        if equation.eqn is not None and equation.eqn.primitive.name == "scan":
            how = self._of_scan(equation, given, rows)
        elif equation.eqn is not None and equation.eqn.primitive.name == "cond":
            how = self._of_cond(equation, given, rows)
        elif (needs := adding_scatter(equation.eqn, given)) is not None and self._is_small(equation):
            how = Passing(needs, ("add",))
        else:
            how = passing(equation.eqn, given, rows)
        if how is None or any(g not in (None, n) for g, n in zip(given, how.needs, strict=True)):
            return None
        return how

    def _of_scan(self, equation: Equation, given: Sequence[Row | None], rows: int) -> Passing | None:
        eqn = equation.eqn
        consts, carries = _compat.scan_split(eqn.params)
        stacks = consts + carries
        if eqn.effects or any(g is not None and g.dim == 0 for g in given[stacks:]):
            return None
        # Rows of what is stacked are given where somebody reads them.
        wanted = [k >= carries and v in self.read for k, v in enumerate(equation.results)]
        made = _settled(_body(eqn.params["jaxpr"]), [*given[:stacks], *map(_inner, given[stacks:])], rows, wanted, eqn)
        if made is None or any(
            t == "add" and not self._is_zero(a) for t, a in zip(made.takes, equation.operands, strict=True)
        ):
            return None
        needs = [*map(_row, made.takes[:stacks]), *(_outer(_row(t)) for t in made.takes[stacks:])]
        gives = [*made.gives[:carries], *map(_outer, made.gives[carries:])]
        return Passing(tuple(needs), tuple(g or SAME for g in gives), inside=made)

    def _of_cond(self, equation: Equation, given: Sequence[Row | None], rows: int) -> Passing | None:
        eqn = equation.eqn
        if eqn.effects or given[0] is not None:
            return None
        takes, wanted = given[1:], [v in self.read for v in equation.results]
        found = [_through(_body(branch), takes, rows, wanted) for branch in eqn.params["branches"]]
        each = tuple(own for own in found if own is not None and own.takes == tuple(takes) and not own.again)
        gives = {own.gives for own in each}
        if len(each) < len(found) or len(gives) != 1:
            return None
        return Passing(tuple(given), tuple(g or SAME for g in gives.pop()), inside=Branches(each=each))

    def _is_small(self, equation: Equation) -> bool:
        """Whether a scatter's target starts at zero, and is small beside the updates or in a body."""
        target, _, updates = equation.operands
        size = self.traced.graph.values
        known = isinstance(updates, int) and size[updates].nbytes >= SMALL * size[equation.results[0]].nbytes
        return (known or self.body) and self._is_zero(target)

    def _is_zero(self, atom: Any) -> bool:
        """Whether a value is made of a literal zero alone."""
        while isinstance(atom, int):
            equation = self.traced.equations[self.made[atom]] if self.made[atom] >= 0 else None
            if equation is None or equation.eqn is None or equation.eqn.primitive.name not in _LINEAR:
                return False
            atom = equation.operands[0]
        return _is_literal_zero(atom)


_TRACED: Final[WeakKeyDictionary[Any, Traced]] = WeakKeyDictionary()


def _body(closed: Any) -> Traced:
    """The traced body, cached until the body is freed, because its constants may be device arrays."""
    known = _TRACED.get(closed)
    return _TRACED.setdefault(closed, trace_jaxpr(closed)) if known is None else known


def _settled(body: Traced, takes: list[At], rows: int, wanted: Sequence[bool], eqn: Any) -> Loop | None:
    """How a body passes rows on once the carry's rows are the same before and after an iteration; None if they never
    are.

    A carry may gain rows, or become a total, from one iteration to the next: at most once each.
    """
    consts, carries = _compat.scan_split(eqn.params)
    carry = slice(consts, consts + carries)
    while True:
        made = _through(body, takes, rows, wanted)
        if made is None:
            return None
        after = [*made.takes]
        if [*after[: carry.start], *after[carry.stop :]] != [*takes[: carry.start], *takes[carry.stop :]]:
            return None
        for k in range(carries):
            before, gives = after[consts + k], made.gives[k]
            if before is None:
                after[consts + k] = gives
            elif gives != before:
                return None
        if after == takes:
            return None if made.again else made
        takes = after


def _through(body: Traced, takes: Sequence[At], rows: int, wanted: Sequence[bool]) -> Loop | None:
    """How a body passes rows on in one iteration; None if it does not. ``wanted``: results whose rows are read."""
    graph, of_loops = body.graph, Loops(body, body=True)
    arguments = frozenset(body.arguments)
    at: dict[int, Row | str] = {v: t for v, t in zip(body.arguments, takes, strict=True) if t is not None}
    own = Loop(body=body)
    for op, equation in zip(graph.ops, body.equations, strict=True):
        if not any(v in at for v in op.operands):
            own.again |= bool(op.flops or op.bodies)
            continue
        if op.pinned or not on_the_device(graph, equation):
            return None
        given = [row_at(at, a) for a in equation.operands]
        # What a total, or a row after the other, is added to is one, too.
        begun = {a: "add" for a in op.operands if a in arguments and a not in at}
        needs = adding_scatter(equation.eqn, given)
        target = equation.operands[0] if needs is not None else None
        if needs is not None and isinstance(target, int) and (at | begun).get(target) == "add":
            how = Passing(needs, ("add",))
            at[target] = "add"
        elif any(at.get(v) == "add" for v in op.operands):
            how = _of_totals(equation, at | begun) or _of_totals(equation, at)
            if how is not None and equation.eqn.primitive.name in _ADDING:
                at |= begun
        else:
            how = of_loops.passing(op.id, given, rows)
        if how is None or any(gives in ("max", "min") for gives in how.gives):
            return None
        own.members[op.id] = how
        for i, (v, gives) in enumerate(zip(equation.results, how.gives, strict=True)):
            a = equation.operands[i] if op.primitive == "optimization_barrier" else None
            before = own.root(a) if isinstance(a, int) else -1
            if gives is not None or at.get(before) == SAME:
                at[v] = gives or SAME
            elif before >= 0:
                own.same[v] = before
    outer = Outer(body, rows, set(at), of_loops.made)
    for o, how in own.members.items():
        for a, need in zip(body.equations[o].operands, how.needs, strict=True):
            if isinstance(a, int) and need is not None and a not in at:
                own.reads(outer.rows_of(a, need))
    results: list[At] = []
    for a, want in zip(body.outputs, wanted, strict=True):
        found = at.get(a) if isinstance(a, int) else None
        if found is None and want and isinstance(a, int):
            found = _row_of(outer, own, a, graph.values[a].shape, rows)
        results.append(found)
    own.takes, own.gives = tuple(at.get(v) for v in body.arguments), tuple(results)
    return own


def _row_of(outer: Outer, own: Section, v: int, shape: Sequence[int], rows: int) -> Row | None:
    """Where ``v`` has rows that can be made though no operand passes any on, as in a dropout mask."""
    for dim in (d for d, size in enumerate(shape) if size == rows):
        found = outer.rows_of(v, Row(dim))
        if found.pulled:
            own.reads(found)
            return Row(dim)
    return None


def _of_totals(equation: Equation, at: Mapping[int, Row | str]) -> Passing | None:
    """How an equation acts on totals of some rows; None if its result is no total."""
    name = equation.eqn.primitive.name if equation.eqn is not None else ""
    kinds = [at.get(a) if isinstance(a, int) else None for a in equation.operands]
    first, *others = [k == "add" for k in kinds]
    linear = (
        (name in _ADDING and first and all(others))
        or (name in _LINEAR and first)
        or (name == "mul" and first + sum(others) == 1)
        or (name == "div" and first and not any(others))
        or (name == "pad" and first and _is_literal_zero(equation.operands[1]))
    )
    if not linear or any(isinstance(k, Row) for k in kinds):
        return None
    return Passing((None,) * len(kinds), ("add",) * len(equation.results))


def _is_literal_zero(atom: Any) -> bool:
    return not isinstance(atom, int) and not getattr(atom.val, "ndim", 0) and not atom.val


def _row(how: At) -> Row | None:
    return how if isinstance(how, Row) else None


def _inner(row: Row | None) -> Row | None:
    """Rows of a slice, from those of the stack."""
    return None if row is None else Row(row.dim - 1, row.block)


def _outer(how: Any) -> Any:
    """Rows of a stack, from those of its slices."""
    return Row(how.dim + 1, how.block) if isinstance(how, Row) else how
