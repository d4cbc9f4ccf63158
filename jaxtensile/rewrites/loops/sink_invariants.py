"""Make the constants that only one loop reads inside its iterations, instead of once before it.

A constant lives until its loop ends, such as the residuals of a linearised network in conjugate gradients. Made inside,
from values that live anyway, it is part of a body with a forward and a backward part, which can be planned.

Invariant: every iteration sees the same values; pinned ops and other loops do not run more often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax import lax

from jaxtensile import _compat
from jaxtensile.ir.ir import Graph, consumers, producers
from jaxtensile.passes.lifetimes.fusion import VIEWS
from jaxtensile.program.trace import Traced, exchanged, run, trace_jaxpr
from jaxtensile.rewrites.loops.levels import without_loops_between
from jaxtensile.rewrites.loops.loops import fewest_stacks
from jaxtensile.rewrites.rewrite import LARGE, Rewrite, Start, changed
from jaxtensile.units import Bytes


@dataclass(frozen=True)
class Moved:
    """``ops`` that a loop runs itself, in order, and their outside operands ``given``."""

    ops: tuple[int, ...]
    given: tuple[int, ...]


def find_invariants(graph: Graph, least: Bytes) -> dict[int, Moved]:
    """Loop → the makers of its constants of at least ``least`` bytes that nothing reads after it."""
    read_by, made, final = consumers(graph), producers(graph), set(graph.outputs)
    found: dict[int, Moved] = {}
    for loop in graph.ops:
        # How often others run is not known.
        if loop.primitive != "scan" or loop.pinned or loop.trip_count < 2:
            continue

        slices = set(loop.slots[sum(loop.carried) :])

        def there(v: int, loop: int = loop.id, slices: set[int] = slices) -> bool:
            """Whether the value, or its source behind views, lives during the loop anyway."""
            while not (made[v] < 0 or v in final or v in slices or read_by[v][-1] > loop):
                op = graph.ops[made[v]]
                if op.primitive not in VIEWS or not op.operands:
                    return False
                v = op.operands[0]
            return True

        def stays(v: int, there: Callable[[int], bool] = there) -> bool:
            """Whether the value lives anyway, cannot be made again, or is too small."""
            value, op = graph.values[v], graph.ops[made[v]]
            # A loop that carries nothing makes each slice by itself, as the loop that reads it then may.
            loops = bool(op.bodies) and (op.primitive != "scan" or op.carried[1] > 0)
            fixed = op.pinned or loops or op.primitive == "optimization_barrier" or value.space == "host"
            return there(v) or fixed or value.nbytes < least

        constants = {v for v in loop.slots[: loop.carried[0]] if v >= 0}
        ops, given = set[int](), {v: None for v in constants if stays(v)}
        for v in sorted(constants.difference(given)):
            more, needed = _made_from(graph, made, v, ops, stays)
            held = sum(graph.values[u].nbytes for u in needed if u not in given and not there(u))
            if held < graph.values[v].nbytes:
                ops |= more
                given.update(dict.fromkeys(needed))
        given = {v: None for o in sorted(ops) for v in graph.ops[o].operands if made[v] not in ops}
        if ops:
            found[loop.id] = Moved(tuple(sorted(ops)), tuple(given))
    return found


def _made_from(
    graph: Graph, made: list[int], v: int, known: set[int], stays: Callable[[int], bool]
) -> tuple[set[int], list[int]]:
    """The ops, beside ``known`` ones, that make a value, and those of their operands that stay."""
    ops, given, left = set[int](), list[int](), [v]
    while left:
        op = graph.ops[made[left.pop()]]
        if op.id not in ops and op.id not in known:
            ops.add(op.id)
            given += [u for u in op.operands if stays(u)]
            left += [u for u in op.operands if not stays(u)]
    return ops, given


def sink_invariants(traced: Traced, closed: Any, moved: dict[int, Moved]) -> Any:
    """The closed jaxpr of ``traced`` (of ``closed``) with loops that make ``moved`` themselves."""
    new = {o: partial(_loop, traced, o, own) for o, own in moved.items()}
    return exchanged(traced, closed, new)


def _loop(traced: Traced, o: int, moved: Moved, read: Callable[[Any], Any]) -> list[Any]:
    equation = traced.equations[o]
    params = equation.eqn.params
    consts, carries = _compat.scan_split(params)
    body = trace_jaxpr(params["jaxpr"])
    inside = {v for i in moved.ops for v in traced.equations[i].results}
    given = [read(v) for v in moved.given]
    # The loop may begin with what it is no longer given as a constant.
    fixed = [None if isinstance(a, int) and a in inside else read(a) for a in equation.operands[:consts]]
    varying = [read(a) for a in equation.operands[consts:]]

    # Each right in front of what first reads it: what is read early need not be there with what is read late.
    wanted = {
        name: a
        for name, a in zip(body.arguments[:consts], equation.operands[:consts], strict=True)
        if isinstance(a, int) and a in inside
    }
    order = _late(traced, moved, [*(_among(wanted, e.operands) for e in body.equations), _among(wanted, body.outputs)])

    def step(carry: Any, x: Any) -> Any:
        # Behind a barrier with something that changes, or XLA would do it once, in front of the loop.
        changing = [*carry, *x]
        k = min(range(len(changing)), key=lambda i: changing[i].size, default=0)
        behind = _compat.barrier([*given, *changing[k : k + 1]])
        here, changing[k : k + 1] = behind[: len(given)], behind[len(given) :]
        outside: dict[int, Any] = dict(zip(moved.given, here, strict=True))
        env: dict[int, Any] = dict(zip(body.arguments, [*fixed, *changing], strict=True))
        env.update(body.consts)
        for i, first in enumerate(order):
            run(traced, first, outside)
            env.update((name, outside[v]) for name, v in wanted.items() if v in outside)
            run(body, range(i, min(i + 1, len(body.equations))), env)
        out = [env[a] if isinstance(a, int) else a.val for a in body.outputs]
        return out[:carries], out[carries:]

    with _compat.equation_context(equation.eqn, equation.stack):
        carry, ys = lax.scan(
            step,
            varying[:carries],
            varying[carries:],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
    return [*carry, *ys]


def _among(wanted: dict[int, int], atoms: Iterable[Any]) -> list[int]:
    return [wanted[a] for a in atoms if isinstance(a, int) and a in wanted]


def _late(traced: Traced, moved: Moved, wanted: list[list[int]]) -> list[list[int]]:
    """For each equation of a body the ops of ``moved`` right before it; ``wanted``: values it reads."""
    made = {v: i for i in moved.ops for v in traced.equations[i].results}
    done = set[int]()
    out: list[list[int]] = []
    for values in wanted:
        first = set[int]()
        left = [*values]
        while left:
            i = made.get(left.pop(), -1)
            if i >= 0 and i not in done:
                done.add(i)
                first.add(i)
                left += [a for a in traced.equations[i].operands if isinstance(a, int)]
        out.append(sorted(first))
    return out


_SMALLER = 64
"""How many times smaller than ``large`` an invariant worth moving may be. A guess."""


def _find(start: Start) -> list[tuple[tuple[int, Moved], ...]]:
    # What counts is large beside what is left once the loops stack as little as they can.
    moved = find_invariants(start.base.graph, max(int(LARGE * fewest_stacks(start).temp) // _SMALLER, 1))
    return [tuple(moved.items())] if moved else []


def _apply(start: Start, moved: tuple[tuple[int, Moved], ...]) -> Traced | None:
    def change() -> Any:
        jaxpr = sink_invariants(start.base, start.request.jaxpr, dict(moved))
        return without_loops_between(trace_jaxpr(jaxpr), jaxpr)

    return changed(start, change)


SINK_INVARIANTS = Rewrite(
    key="sink_invariants",
    title="the making of loop constants inside loops",
    form=tuple[tuple[int, Moved], ...],
    find=_find,
    apply=_apply,
    describe=lambda moved: f"{len(moved)} loops make in every iteration what was made for them once",
    last=True,
    in_bodies=True,
)
