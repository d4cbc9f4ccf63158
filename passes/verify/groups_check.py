"""Check that groups of a program, run one after another, compute what the program computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from jaxtensile.errors import VerifyError
from jaxtensile.ir.groups import Group
from jaxtensile.ir.ir import Graph, Op

_BARRIER = "optimization_barrier"


def check_groups(graph: Graph, groups: Sequence[Group], most: int | None = None) -> None:
    """Raise ``VerifyError`` unless the groups compute the results of ``graph``.

    Each group is run by name: every op reads what the program's op reads, a value is gone once it was donated, and the
    results are there at the end. Pinned ops run once and in order. ``most``: the number of groups allowed.
    """
    if most is not None and len(groups) > most:
        _fail(f"there are {len(groups)} groups", f"{most} are allowed")
    there = {int(v) for v in graph.inputs}
    pinned: list[int] = []
    runs = [0] * len(graph.ops)
    for k, group in enumerate(groups):
        local = _given(graph, group, there, k)
        before = -1
        for o in group.ops:
            if not before < o < len(graph.ops):
                _fail(f"group {k} runs op {o} after op {before}", "ops run in schedule order")
            before, op = o, graph.ops[o]
            if missing := [v for v in op.operands if v not in local]:
                _fail(f"op {o} ({op.primitive}) of group {k} reads value {missing[0]}", "a group reads what it has")
            local.update(map(int, op.results))
            runs[o] += 1
            if op.pinned:
                pinned.append(o)
        if len(set(group.outputs)) < len(group.outputs) or not local.issuperset(group.outputs):
            _fail(f"group {k} hands on {group.outputs}", "each value once, and only what it has")
        there.update(map(int, group.outputs))
        _check_donations(graph, groups, k)
        there.difference_update({*group.inputs[: group.donated]} - {*group.outputs})
    if missing := [v for v in graph.outputs if v not in there]:
        _fail(f"result {missing[0]} is not there", "all results are there at the end")
    if pinned != [op.id for op in graph.ops if op.pinned]:
        _fail(f"ops with effects run as {pinned}", "they run once, in the program's order")
    for o, count in enumerate(runs):
        if count > 1 and _once(graph.ops[o]):
            _fail(f"op {o} ({graph.ops[o].primitive}) runs {count} times", "products, loops and effects run once")


def _once(op: Op) -> bool:
    return bool(op.pinned or op.bodies or op.flops)


def _given(graph: Graph, group: Group, there: set[int], k: int) -> set[int]:
    """What a group has at its beginning."""
    if len(set(group.inputs)) < len(group.inputs) or not there.issuperset(group.inputs):
        _fail(f"group {k} takes {group.inputs}", f"each value once, and only what is there: {sorted(there)}")
    local = {int(v) for v in group.inputs}
    names = {int(r): int(v) for r, v in group.same}
    for r in names:
        v, steps = r, 0
        while v in names:
            ops = [op for op in graph.ops if v in op.results]
            if len(ops) != 1 or ops[0].primitive != _BARRIER:
                _fail(f"group {k} has value {v} by another name", "only results of barriers equal other values")
            read = ops[0].slots or ops[0].operands
            if read[[*map(int, ops[0].results)].index(v)] != names[v] or steps > len(names):
                _fail(f"group {k} takes value {names[v]} for {v}", "a barrier's result is the operand of its place")
            v, steps = names[v], steps + 1
        local.add(r)
    for r, v in names.items():
        while v in names:
            v = names[v]
        made = v in group.inputs or any(v in graph.ops[o].results for o in group.ops)
        if not made:
            _fail(f"group {k} takes value {v} for {r}", "what a name stands for is there")
    return local


def _check_donations(graph: Graph, groups: Sequence[Group], k: int) -> None:
    group, results = groups[k], set(graph.outputs)
    if not 0 <= group.donated <= min(len(group.inputs), len(group.outputs)):
        _fail(f"group {k} writes over {group.donated} inputs", "at most its inputs, and its outputs")
    for v, r in zip(group.inputs[: group.donated], group.outputs, strict=False):
        was, now = graph.values[v], graph.values[r]
        if (was.shape, was.dtype, was.space) != (now.shape, now.dtype, now.space):
            _fail(f"group {k} writes value {r} over {v}", f"both have one type, not {was} and {now}")
        if v in graph.inputs and v not in graph.donated:
            _fail(f"group {k} writes over input {v}", "its caller keeps it")
        if v in results and v != r:
            _fail(f"group {k} writes over value {v}", "it is a result")
        if any(v in later.inputs for later in groups[k + 1 :]):
            _fail(f"group {k} writes over value {v}", "a later group reads it")


def _fail(what: str, bound: str) -> NoReturn:
    raise VerifyError(
        f"the groups of the program are wrong: {what}; {bound}. "
        "This is a bug in jaxtensile, please report it; without groups= the step runs whole"
    )


__all__ = ["check_groups"]
