"""Move ops between a stack and the loop that reads it into that loop, slice by slice.

A custom gradient may keep a loop's stack in another type or shape, and convert it back for the backward loop. Such
loops are still a pair. Conversions, transpositions behind the first axis, and reshapes back to one slice per iteration
work as well on the slice.

Invariant: every iteration of every loop sees the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax import lax

from jaxtensile import _compat
from jaxtensile.ir.ir import Graph, Op, consumers, is_fixed, producers
from jaxtensile.program.trace import Traced, bind, exchanged, trace_jaxpr
from jaxtensile.rewrites.rewrite import Rewrite, changed

ELEMENTWISE = frozenset({"convert_element_type", "copy", "copy_p", "neg", "reduce_precision"})
"""They act the same on a slice of any shape."""
ROW_MAJOR = frozenset({"reshape", "squeeze", "broadcast_in_dim", "expand_dims"})
"""They keep the order of the elements if they keep their number."""


@dataclass(frozen=True)
class Chain:
    """``ops`` from ``stack`` to a loop's operand; ``shapes``: of a slice after each, None if slices are not apart."""

    stack: int
    ops: tuple[int, ...]
    shapes: tuple[tuple[int, ...] | None, ...]


def find_chains(graph: Graph) -> dict[int, dict[int, Chain]]:
    """Loop → xs position → the chain from a stack of another loop with as many iterations."""
    read_by, made, final = consumers(graph), producers(graph), set(graph.outputs)
    found: dict[int, dict[int, Chain]] = {}
    for back in graph.ops:
        if back.primitive != "scan" or is_fixed(back):
            continue
        first = sum(back.carried)
        for x, v in enumerate(back.slots[first:]):
            ops: list[int] = []
            while v >= 0 and made[v] >= 0 and _passes(graph.ops[made[v]]) and len(read_by[v]) == 1 and v not in final:
                ops.append(made[v])
                v = graph.ops[made[v]].operands[0]
            front = graph.ops[made[v]] if v >= 0 and made[v] >= 0 else None
            if not ops or front is None or front.primitive != "scan" or front.trip_count != back.trip_count:
                continue
            stacked = front.results.index(v) >= front.carried[1]
            shapes = _slices(graph, ops[::-1]) if stacked else None
            if shapes is not None:
                found.setdefault(back.id, {})[x] = Chain(v, tuple(ops[::-1]), shapes)
    return found


def _passes(op: Op) -> bool:
    return op.primitive in ELEMENTWISE | ROW_MAJOR | {"transpose"} and len(op.operands) == 1 and not op.pinned


def _slices(graph: Graph, ops: Sequence[int]) -> tuple[tuple[int, ...] | None, ...] | None:
    """The shape of a slice after each op; None if one mixes iterations."""
    length = graph.values[graph.ops[ops[0]].operands[0]].shape[0]
    shape: tuple[int, ...] | None = graph.values[graph.ops[ops[0]].operands[0]].shape[1:]
    found: list[tuple[int, ...] | None] = []
    for o in ops:
        op = graph.ops[o]
        before, after = (graph.values[v] for v in (op.operands[0], op.results[0]))
        if op.primitive == "transpose":
            # That the first axis stays first is for ``_plain`` to say.
            if shape is None:
                return None
            shape = after.shape[1:]
        elif op.primitive in ROW_MAJOR:
            if _count(before.shape) != _count(after.shape):
                return None
            shape = after.shape[1:] if after.shape[:1] == (length,) else None
        found.append(shape)
    return tuple(found) if shape is not None else None


def _count(shape: Sequence[int]) -> int:
    total = 1
    for d in shape:
        total *= d
    return total


def sink(traced: Traced, closed: Any) -> Any | None:
    """The closed jaxpr of ``traced`` (of ``closed``) with chains in the loops that read them; None without chains."""
    chains = find_chains(traced.graph)
    chains = {o: own for o, own in chains.items() if all(_plain(traced, c) for c in own.values())}
    if not chains:
        return None
    new = {o: partial(_loop, traced, o, own) for o, own in chains.items()}
    return exchanged(traced, closed, new)


def _plain(traced: Traced, chain: Chain) -> bool:
    """Whether its ops have no sharding, and its transpositions keep the first axis."""
    for o in chain.ops:
        params = traced.equations[o].eqn.params
        if params.get("sharding") is not None or params.get("permutation", (0,))[0] != 0:
            return False
    return True


def _loop(traced: Traced, o: int, chains: dict[int, Chain], read: Callable[[Any], Any]) -> list[Any]:
    equation = traced.equations[o]
    params = equation.eqn.params
    consts, carries = _compat.scan_split(params)
    first = consts + carries
    body = trace_jaxpr(params["jaxpr"])
    given = [read(a) for a in equation.operands[:first]]
    xs = [read(chains[k].stack if k in chains else a) for k, a in enumerate(equation.operands[first:])]

    def step(carry: Any, x: Sequence[Any]) -> Any:
        slices = [_sliced(traced, chains[k], v) if k in chains else v for k, v in enumerate(x)]
        env: dict[int, Any] = dict(zip(body.arguments, [*given[:consts], *carry, *slices], strict=True))
        env.update(body.consts)

        def value(atom: Any) -> Any:
            return env[atom] if isinstance(atom, int) else atom.val

        for inner in body.equations:
            env.update(zip(inner.results, bind(inner, [value(a) for a in inner.operands]), strict=True))
        out = [value(a) for a in body.outputs]
        return out[:carries], out[carries:]

    with _compat.equation_context(equation.eqn, equation.stack):
        carry, ys = lax.scan(
            step, given[consts:], xs, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
        )
    return [*carry, *ys]


def _sliced(traced: Traced, chain: Chain, x: Any) -> Any:
    """The chain applied to one slice."""
    for o, shape in zip(chain.ops, chain.shapes, strict=True):
        equation = traced.equations[o]
        name = equation.eqn.primitive.name
        if name == "transpose":
            order = equation.eqn.params["permutation"]
            x = lax.transpose(x, [p - 1 for p in order[1:]])
        elif name in ROW_MAJOR:
            x = lax.reshape(x, shape) if shape is not None else x
        else:
            (x,) = bind(equation, [x])
    return x


SINK = Rewrite(
    key="sink",
    title="the sinking of operations into loops",
    form=tuple[()],
    find=lambda _: [()],
    apply=lambda start, _: changed(start, lambda: sink(start.base, start.request.jaxpr)),
)
