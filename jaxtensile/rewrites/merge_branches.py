"""Merge a branch into its backward branch, which recomputes the residuals of the ``cond``.

Differentiation makes two conds on one predicate; the forward one passes residuals of every branch to the backward one.
After merging, each backward branch first runs the forward branch, on the operands of the forward cond. Its body then
has a forward and a backward part, and can be planned.

Invariant: the same branch runs on the same values; residuals with other readers are still passed on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from jaxtensile import _compat
from jaxtensile.ir.ir import Graph, consumers, producers
from jaxtensile.program.trace import Traced, bind, exchanged
from jaxtensile.rewrites.rewrite import Rewrite, Start, changed, large
from jaxtensile.units import Bytes


@dataclass(frozen=True)
class CondPair:
    """Op ids of a forward and a backward cond.

    ``links``: (forward result, backward operand behind the predicate) of each value that nothing else reads.
    """

    forward: int
    backward: int
    links: tuple[tuple[int, int], ...]


def find_cond_pairs(graph: Graph, smallest: Bytes) -> tuple[CondPair, ...]:
    """Pairs of conds on one predicate that pass on at least ``smallest`` bytes."""
    read_by, made, final = consumers(graph), producers(graph), set(graph.outputs)
    found: list[CondPair] = []
    for back in graph.ops:
        if back.primitive != "cond" or back.pinned or not back.slots or back.slots[0] < 0:
            continue
        links: dict[int, list[tuple[int, int]]] = {}
        for i, v in enumerate(back.slots[1:]):
            o = made[v] if v >= 0 else -1
            if o < 0 or v in final or read_by[v] != [back.id] or back.slots.count(v) != 1:
                continue
            front = graph.ops[o]
            same = front.primitive == "cond" and front.slots[:1] == back.slots[:1]
            if same and not front.pinned and len(front.bodies) == len(back.bodies):
                links.setdefault(o, []).append((front.results.index(v), i))
        for o, own in links.items():
            passed = sum(graph.values[graph.ops[o].results[r]].nbytes for r, _ in own)
            here = all(
                graph.values[v].space != "host" for op in (back, graph.ops[o]) for v in (*op.operands, *op.results)
            )
            if passed >= smallest and here:
                found.append(CondPair(o, back.id, tuple(own)))
    return tuple(found)


def merge_branches(traced: Traced, closed: Any, pairs: tuple[CondPair, ...]) -> Any:
    """The closed jaxpr of ``traced`` (of ``closed``) with the forward branches of ``pairs`` in the backward ones."""
    backs = {p.backward: [q for q in pairs if q.backward == p.backward] for p in pairs}
    new = {o: partial(_joined, traced, o, own) for o, own in backs.items()}
    return exchanged(traced, closed, new)


def _joined(traced: Traced, o: int, pairs: list[CondPair], read: Callable[[Any], Any]) -> list[Any]:
    equation = traced.equations[o]
    params = equation.eqn.params
    fronts = [traced.equations[p.forward] for p in pairs]
    linked = {i for p in pairs for _, i in p.links}
    own = [a for i, a in enumerate(equation.operands[1:]) if i not in linked]
    given = [[read(a) for a in front.operands[1:]] for front in fronts]
    operands = [read(equation.operands[0]), *(read(a) for a in own), *(x for xs in given for x in xs)]

    def branch(k: int, *args: Any) -> list[Any]:
        rest, left = list(args[: len(own)]), list(args[len(own) :])
        full: dict[int, Any] = {}
        for pair, front, xs in zip(pairs, fronts, given, strict=True):
            mine, left = left[: len(xs)], left[len(xs) :]
            results = _compat.jaxpr_as_fun(front.eqn.params["branches"][k])(*mine)
            full.update((i, results[r]) for r, i in pair.links)
        others = iter(rest)
        count = len(equation.operands) - 1
        return _compat.jaxpr_as_fun(params["branches"][k])(
            *(full[i] if i in full else next(others) for i in range(count))
        )

    avals = [jax.typeof(x) for x in operands[1:]]
    with _compat.equation_context(equation.eqn, equation.stack):
        branches = tuple(_closed(partial(branch, k), avals) for k in range(len(params["branches"])))
    return bind(replace(equation, eqn=equation.eqn.replace(params={**params, "branches": branches})), operands)


def _closed(fun: Callable[..., Any], avals: list[Any]) -> Any:
    return jax.make_jaxpr(fun)(*map(_compat.OfType, avals))


def _find(start: Start) -> list[tuple[CondPair, ...]]:
    pairs = find_cond_pairs(start.base.graph, large(start.base))
    return [pairs] if pairs else []


MERGE_BRANCHES = Rewrite(
    key="merge_branches",
    title="the merging of branches with their gradients",
    form=tuple[CondPair, ...],
    find=_find,
    apply=lambda start, pairs: changed(start, lambda: merge_branches(start.base, start.request.jaxpr, pairs)),
    describe=lambda pairs: f"{len(pairs)} branches compute again in their gradients what they would hand on to them",
    last=True,
    in_bodies=True,
)
