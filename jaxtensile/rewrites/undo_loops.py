"""Drop from backward loops what they recompute of their forward loops.

A checkpoint around a scan body leaves two scans: the forward one stacks its carry, and the backward body begins with
the forward body. Here the forward scan stacks the values that are read, and the backward one reads them. A plan then
decides about the stacks, as for any pair.

Invariant: an equation is dropped only for one of the same or another body that computes the same bits from the same
values in the same iteration. Effects, foreign code and equations behind a user's barrier run as often as before. So do
values constant over iterations and views of arguments, which are not stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jax import lax

from jaxtensile import _compat
from jaxtensile.ir.ir import is_fixed
from jaxtensile.passes.lifetimes.fusion import VIEWS
from jaxtensile.program.cse import key_of, literal_key, values
from jaxtensile.program.trace import Equation, Traced, bind, exchanged, trace_jaxpr

_VIEWS = VIEWS | {"transpose", "convert_element_type"}
"""Cheaper to make again from an argument than to stack."""

Slot = tuple[int, int]
"""A scan, and a value of its body."""


@dataclass
class _Loop:
    """One scan: the equations it drops, and the values passed on instead.

    ``again``: body equations that a checkpoint recomputes. ``gone``: dropped equations. ``given``: body value → where
    it is stacked. ``known``: body value → its equal. ``stacked``: body values that others read.
    """

    body: Traced
    again: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    given: dict[int, Slot] = field(default_factory=dict)
    known: dict[int, int] = field(default_factory=dict)
    stacked: dict[int, None] = field(default_factory=dict)

    def now(self, v: int) -> int:
        while v in self.known:
            v = self.known[v]
        return v


def without_recomputation(
    traced: Traced, closed: Any, is_again: Callable[[Equation], bool]
) -> tuple[Any, dict[int, int]] | None:
    """The closed jaxpr of ``traced`` (of ``closed``) without recomputation in scans; None if nothing changes.

    Also, by scan, the number of stacks added behind its own. ``is_again``: whether a body equation is a checkpoint's
    recomputation.
    """
    scans = [i for i, op in enumerate(traced.graph.ops) if op.primitive == "scan" and not is_fixed(op)]
    loops = {i: _Loop(trace_jaxpr(traced.equations[i].eqn.params["jaxpr"])) for i in scans}
    if not any(is_again(e) for loop in loops.values() for e in loop.body.equations):
        return None
    search = _Search(traced, loops)
    for i in scans:
        search.look_through(i, is_again)
    changed = {i for i, loop in loops.items() if loop.gone or loop.stacked}
    if not changed:
        return None
    stacks: dict[Slot, Any] = {}
    last = max(changed)

    def scan(i: int, read: Callable[[Any], Any]) -> Sequence[Any]:
        made = _scan(traced.equations[i], loops[i], i, stacks, read)
        if i == last:
            stacks.clear()  # tracers that outlived their trace would be a leak
        return made

    new = exchanged(traced, closed, {i: partial(scan, i) for i in changed})
    return new, {i: len(loop.stacked) for i, loop in loops.items() if loop.stacked}


class _Search:
    """Find equal equations of bodies, one scan after the other."""

    def __init__(self, traced: Traced, loops: dict[int, _Loop]) -> None:
        self.traced, self.loops = traced, loops
        self.first: dict[Hashable, tuple[int, int]] = {}
        """Key of an equation → the first scan, and its body's equation."""
        self.made: dict[int, tuple[int, int]] = {
            v: (i, y - traced.graph.ops[i].carried[1])
            for i in loops
            for y, v in enumerate(traced.equations[i].results)
            if y >= traced.graph.ops[i].carried[1]
        }
        """Stack → its scan, and its number among the scan's stacks."""
        self.number: dict[Slot, Hashable] = {}
        """Body value → what stands for it and its equals: the first of them, or for a constant a value outside."""
        self.outside: dict[Hashable, tuple[int, ...]] = {}
        """Key of an equation outside loops → its results: forward loops get some constants from there."""
        for i, equation in enumerate(traced.equations):
            key = None if equation.eqn is None else key_of(traced, i, {})
            if key is not None:
                self.outside.setdefault(key, equation.results)

    def look_through(self, i: int, is_again: Callable[[Equation], bool]) -> None:
        """Find what scan ``i`` need not compute."""
        loop, trips = self.loops[i], self.traced.graph.ops[i].trip_count
        body = loop.body
        number, fixed = self._arguments(i)
        near = fixed | {*body.arguments}
        """Arguments, and views of them."""
        behind: dict[int, int] = {}
        """Results of checkpoint barriers → their operands."""
        for j, equation in enumerate(body.equations):
            if equation.eqn is None:
                for r, v in zip(equation.results, equation.operands, strict=True):
                    behind[r], number[r] = v, number[v]
                    fixed.update({r} if v in fixed else ())
                    near.update({r} if v in near else ())
                continue
            key = key_of(body, j, number)
            front, first = (i, j) if key is None else self._first((trips, key), (i, j))
            there = self.loops[front].body.equations[first].results
            reads = values(equation)
            if fixed.issuperset(reads):
                fixed.update(equation.results)
            if fixed.issuperset(reads) or (near.issuperset(reads) and body.graph.ops[j].primitive in _VIEWS):
                near.update(equation.results)
            if is_again(equation):
                loop.again.add(j)
                if front == i and first != j:
                    loop.gone.add(j)
                    loop.known.update(zip(equation.results, there, strict=True))
                elif front != i and near.isdisjoint(equation.results):
                    loop.gone.add(j)
            out = self.outside.get(key, ()) if fixed.issuperset(reads) else ()
            number.update(zip(equation.results, out or ((front, v) for v in there), strict=True))
        self.number.update(((i, v), n) for v, n in number.items())
        if loop.again:
            loop.known.update(behind)
            self._hand_on(i, number)
        if not loop.gone:
            loop.known.clear()

    def _first(self, key: Hashable, here: tuple[int, int]) -> tuple[int, int]:
        """The first remaining equation of a key; ``here`` if there is none."""
        front, first = self.first.setdefault(key, here)
        if front != here[0] and first in self.loops[front].gone:
            self.first[key] = here
        return self.first[key]

    def _arguments(self, i: int) -> tuple[dict[int, Hashable], set[int]]:
        """What stands for each argument of a body, and the arguments that are the same in every iteration."""
        body, operands, ops = self.loops[i].body, self.traced.equations[i].operands, self.traced.graph.ops
        consts, carries = ops[i].carried
        number: dict[int, Hashable] = {}
        for k, (v, outer) in enumerate(zip(body.arguments, operands, strict=True)):
            number[v] = i, v
            if consts <= k < consts + carries:
                continue
            if not isinstance(outer, int):
                number[v] = literal_key(outer) if k < consts else number[v]
                continue
            number[v] = outer if k < consts else ("slice", outer)
            if k >= consts and outer in self.made:
                front, y = self.made[outer]
                made = self.loops[front].body.outputs[ops[front].carried[1] + y]
                if isinstance(made, int) and ops[front].trip_count == ops[i].trip_count:
                    number[v] = self.number[front, made]
        number.update((v, ("value", id(x))) for v, x in body.consts.items())
        return number, {*body.arguments[:consts], *body.consts}

    def _hand_on(self, i: int, number: dict[int, Hashable]) -> None:
        """Record the sources of values that scan ``i`` reads and no longer makes."""
        loop = self.loops[i]
        read = {loop.now(a) for a in loop.body.outputs if isinstance(a, int)}
        for j in reversed(range(len(loop.body.equations))):
            equation = loop.body.equations[j]
            if equation.eqn is None or j in loop.gone:
                continue
            if j in loop.again and not loop.body.graph.ops[j].pinned and read.isdisjoint(equation.results):
                loop.gone.add(j)  # what it was computed again for is not
            else:
                read.update(map(loop.now, values(equation)))
        for v in sorted(read & {r for j in loop.gone for r in loop.body.equations[j].results}):
            at = number[v]
            assert isinstance(at, tuple)
            loop.given[v] = front, there = at
            self.loops[front].stacked[there] = None


def _scan(
    equation: Equation, loop: _Loop, i: int, stacks: dict[Slot, Any], read: Callable[[Any], Any]
) -> Sequence[Any]:
    """Run the scan without what it need not compute; ``stacks`` gets what it stacks for others."""
    params, body = equation.eqn.params, loop.body
    consts, carries = _compat.scan_split(params)
    operands = [read(a) for a in equation.operands]

    def step(carry: Any, x: Any) -> Any:
        slices, given = x
        env = dict(zip(body.arguments, [*operands[:consts], *carry, *slices], strict=True)) | body.consts | given

        def value(atom: Any) -> Any:
            return env[loop.now(atom)] if isinstance(atom, int) else atom.val

        for j, e in enumerate(body.equations):
            if j not in loop.gone and not loop.known.keys() & e.results:
                env.update(zip(e.results, bind(e, [value(a) for a in e.operands]), strict=True))
        outs = [value(a) for a in body.outputs]
        return outs[:carries], (outs[carries:], [env[v] for v in loop.stacked])

    with _compat.equation_context(equation.eqn, equation.stack):
        carry, (ys, new) = lax.scan(
            step,
            operands[consts : consts + carries],
            (operands[consts + carries :], {v: stacks[at] for v, at in loop.given.items()}),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
    stacks.update(((i, v), s) for v, s in zip(loop.stacked, new, strict=True))
    return [*carry, *ys]


__all__ = ["without_recomputation"]
