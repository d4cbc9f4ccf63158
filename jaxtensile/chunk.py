"""A stretch of a program done for some rows after the other: the batch in parts, as a loop inside the step.

What the stretch makes on the way is as much smaller, and the multiplications are the same.

Invariant: every element is made by the same operations from the same elements as before; totals over rows are totals of
the parts' totals, added in float32 where they are of fewer bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtensile import _compat
from jaxtensile.ir import Graph
from jaxtensile.rows import Passing, Row
from jaxtensile.stretch import Stretch, root
from jaxtensile.trace import Equation, Traced, bind, retrace

_JOIN: dict[str, Callable[[Any, Any], Any]] = {"add": lax.add, "max": lax.max, "min": lax.min}


def in_chunks(traced: Traced, closed: Any, own: Stretch, parts: int, *, mixed: bool = True) -> Any | None:
    """The closed jaxpr of ``traced`` (of ``closed``) with the stretch in a loop of so many parts of its rows.

    None where what has effects would have to wait for the loop. ``parts`` divides the number of rows; ``mixed``:
    whether the device multiplies numbers of 16 bits into float32 (XLA:CPU does not for all shapes).
    """
    order = _order(traced.graph, own)
    if order is None:
        return None

    def evaluate(*flat: Any) -> list[Any]:
        env: dict[int, Any] = dict(zip(traced.arguments, flat, strict=True))
        env.update(traced.consts)

        def read(atom: Any) -> Any:
            return env[root(own.same, atom)] if isinstance(atom, int) else atom.val

        for o in order:
            if o < 0:
                env.update(_loop(traced, own, read, parts, mixed))
            else:
                equation = traced.equations[o]
                env.update(zip(equation.results, bind(equation, [read(a) for a in equation.operands]), strict=True))
        return [read(a) for a in traced.outputs]

    return retrace(evaluate, closed)


def _order(graph: Graph, own: Stretch) -> list[int] | None:
    """The other ops and the loop (-1): it begins as soon as it can, and what waits for it comes right after."""
    reads = {root(own.same, v) for v in (*(a for a, _ in own.sliced), *own.whole)}
    missing = {v for op in graph.ops for v in op.results} & reads
    late: set[int] = {v for o in own.members for v in graph.ops[o].results if v not in own.same}
    first, order, waiting, done = min(own.members), list[int](), list[int](), False
    for op in graph.ops:
        if not done and op.id >= first and not missing:
            order += [-1, *waiting]
            late, done = set(), True
        if op.id in own.members:
            continue
        if not done and any(root(own.same, v) in late for v in op.operands):
            if op.pinned:
                return None
            waiting.append(op.id)
            late.update(op.results)
        else:
            order.append(op.id)
            missing.difference_update(op.results)
    if not done:
        order += [-1, *waiting]
    return order


def _loop(
    traced: Traced, own: Stretch, read: Callable[[Any], Any], parts: int, mixed: bool
) -> Iterator[tuple[int, Any]]:
    """What leaves the stretch, made part by part."""
    n = own.seed.rows // parts
    pulled = _by_op(own)

    def part(i: Any) -> dict[int, Any]:
        env: dict[tuple[int, Row | None], Any] = {}

        def get(atom: Any, need: Row | None) -> Any:
            if not isinstance(atom, int):
                return atom.val
            if need is None:
                return read(atom)
            if (atom, need) not in env:
                if (atom, None) in env:
                    return env[atom, None]
                size = n * need.block
                env[atom, need] = lax.dynamic_slice_in_dim(read(atom), i * size, size, need.dim)
            return env[atom, need]

        for o in sorted({*own.members, *pulled}):
            for row, how in pulled.get(o, ()):
                equation = traced.equations[o]
                operands = [*map(get, equation.operands, how.needs)]
                if how.numbered is not None:
                    size = n * row.block
                    with _compat.equation_context(equation.eqn, equation.stack):
                        env[equation.results[0], row] = how.numbered(operands, i * size, size)
                else:
                    (env[equation.results[0], row],) = _bound(equation, how, operands, n, mixed)
            if o in own.members:
                equation, how = traced.equations[o], own.members[o]
                if traced.graph.ops[o].primitive == "optimization_barrier":
                    there = [k for k, row in enumerate(how.needs) if row is not None]
                    made = lax.optimization_barrier(tuple(get(equation.operands[k], how.needs[k]) for k in there))
                    env.update(((equation.results[k], None), x) for k, x in zip(there, made, strict=True))
                    continue
                made = _bound(equation, how, [*map(get, equation.operands, how.needs)], n, mixed)
                env.update(((v, None), x) for v, x in zip(equation.results, made, strict=True))
        return {v: env[v, None] for v in own.leaving}

    shapes = jax.eval_shape(part, jax.ShapeDtypeStruct((), np.int32))
    values = traced.graph.values
    carried = [v for v, how in own.leaving.items() if isinstance(how, str) or how.dim > 0]
    stacked = [v for v in own.leaving if v not in carried]

    def start(v: int) -> Any:
        how, made = own.leaving[v], shapes[v]
        if isinstance(how, Row):
            return lax.full(values[v].shape, 0, made.dtype)
        return lax.full(made.shape, _identity(how, made.dtype), made.dtype)

    def step(state: Any, _: None) -> Any:
        i, totals = state
        made = part(i)
        new: list[Any] = []
        for v, before in zip(carried, totals, strict=True):
            how = own.leaving[v]
            if isinstance(how, Row):
                new.append(lax.dynamic_update_slice_in_dim(before, made[v], i * n * how.block, how.dim))
            else:
                new.append(_JOIN[how](before, made[v]))
        return (i + 1, new), [made[v] for v in stacked]

    (_, totals), parts_of = lax.scan(step, (np.int32(0), [start(v) for v in carried]), None, length=parts)
    for v, x in zip(carried, totals, strict=True):
        yield v, lax.convert_element_type(x, jnp.dtype(values[v].dtype))
    for v, x in zip(stacked, parts_of, strict=True):
        yield v, lax.reshape(x, values[v].shape)


def _by_op(own: Stretch) -> dict[int, list[tuple[Row, Passing]]]:
    found: dict[int, list[tuple[Row, Passing]]] = {}
    for (_, row), (o, how) in own.pulled.items():
        found.setdefault(o, []).append((row, how))
    return found


def _identity(how: str, dtype: Any) -> Any:
    if how == "add":
        return 0
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf if how == "max" else np.inf
    if dtype == np.bool_:
        return how == "min"
    return jnp.iinfo(dtype).min if how == "max" else jnp.iinfo(dtype).max


def _bound(equation: Equation, how: Passing, operands: list[Any], n: int, mixed: bool) -> list[Any]:
    """The equation on some rows; totals of fewer than 32 bits in float32."""
    eqn = equation.eqn
    params = {**eqn.params, **how.params(n)}
    dtype = eqn.outvars[0].aval.dtype
    if how.gives == ("add",) and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        if "preferred_element_type" in params:
            params["preferred_element_type"] = np.dtype(np.float32)
        if "preferred_element_type" not in params or not mixed:
            operands = [lax.convert_element_type(x, np.float32) for x in operands]
    with _compat.equation_context(eqn, equation.stack):
        return bind(replace(equation, eqn=eqn.replace(params=params)), operands)
