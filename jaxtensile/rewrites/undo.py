"""Merge away the recomputation of a program's ``jax.checkpoint``s.

Barriers before recomputation are removed, and equal equations run once: same primitive, parameters, configuration and
values. A plan may then keep or recompute these residuals. Values made of constants only, such as masks, are still made
wherever they are read.

Invariant: an equation is merged only with one that computes the same bits. Effects, foreign code and mutable state run
as often as before. Programs that send anything to the host, and loops recomputed as a whole, are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtensile import _compat
from jaxtensile.ir.ir import Graph, ValueId
from jaxtensile.program.cse import Equal, rebuilt, values
from jaxtensile.program.trace import Equation, Traced, jaxprs_in, trace_jaxpr
from jaxtensile.rewrites.undo_loops import without_recomputation


@dataclass(frozen=True)
class Undone:
    """A program without its checkpoints.

    ``kept``: values of ``traced`` that the program as written recomputes instead of keeping. ``barriers``: barriers and
    loops that prevented merging; without any, XLA merges by itself.
    """

    traced: Traced
    kept: tuple[ValueId, ...]
    barriers: int


def undo(traced: Traced, closed: Any | None = None, *, keep_unused: bool = True) -> Undone | None:
    """The program without its checkpoints; None if they recompute nothing, or send it to the host.

    ``closed``: the source of ``traced``; without it, checkpoints in loops stay.
    """
    if _uses_host(traced.graph):
        return None
    undone = _straight(traced)
    looped = None if closed is None else _looped(undone or Undone(traced, (), 0), closed, keep_unused)
    return looped or undone


def checkpoints_in_loops(jaxpr: Any) -> int:
    """The number of the user's differentiated checkpoints inside loops."""
    return _checkpoints(jaxpr, False)


def _checkpoints(jaxpr: Any, inside: bool) -> int:
    count = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        count += inside and name in ("remat2", "checkpoint") and bool(eqn.params.get("differentiated"))
        count += sum(_checkpoints(body, inside or name in ("scan", "while")) for body in jaxprs_in(eqn.params.values()))
    return count


def _straight(traced: Traced) -> Undone | None:
    """The program with recomputation outside loops merged."""
    again = [_recomputes(e) for e in traced.equations]
    if not any(again):
        return None
    equal = Equal(traced, barriers=False)
    stays: list[int] = []
    cse: set[int] = set()
    barriers = 0
    for i, first in equal.each():
        if first < 0:
            barriers += 1
        elif first == i:
            stays.append(i)
        elif again[i]:
            cse.update(traced.equations[i].results)
    if not cse:
        return None
    read = {v for i in stays for v in values(traced.equations[i])} | {v for v in traced.outputs if isinstance(v, int)}
    made, number = rebuilt(traced, equal.same, stays)
    return Undone(made, tuple(sorted({number[equal.now(v)] for v in cse & read})), barriers)


def _looped(before: Undone, closed: Any, keep_unused: bool) -> Undone | None:
    """The program with what its loops recompute stacked; None if they recompute nothing."""
    old = before.traced
    found = without_recomputation(old, closed, _recomputes)
    if found is None:
        return None
    jaxpr, more = found
    donated = tuple(a in old.graph.donated for a in old.arguments)
    new = trace_jaxpr(jaxpr, donated, keep_unused=keep_unused)
    kept: set[ValueId] = set()
    if [op.primitive for op in old.graph.ops] == [op.primitive for op in new.graph.ops]:
        ops = zip(old.graph.ops, new.graph.ops, strict=True)
        number = {v: w for a, b in ops for v, w in zip(a.results, b.results, strict=False)}  # loops have more
        kept = {number[v] for v in before.kept if v in number}
    loops = ([op for op in g.ops if op.primitive == "scan"] for g in (old.graph, new.graph))
    for a, b in zip(*loops, strict=True):
        kept.update(b.results[len(b.results) - more.get(a.id, 0) :])
    return Undone(new, tuple(sorted(kept)), before.barriers + len(more))


def _recomputes(equation: Equation) -> bool:
    """Whether the equation belongs to a differentiated checkpoint: its recomputation, and with ``remat2`` the rest
    too."""
    if any(map(_compat.is_recomputation, equation.callers)):
        return True
    return equation.eqn is not None and _compat.is_recomputation(equation.eqn, equation.stack)


def _uses_host(graph: Graph) -> bool:
    return any(v.space == "host" for v in graph.values) or any(_uses_host(b) for op in graph.ops for b in op.bodies)


__all__ = ["Undone", "undo"]
