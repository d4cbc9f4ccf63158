"""Evaluate a program's schedule on the caller's tracers: the one place where schedules become jaxprs.

Invariant: every equation keeps its parameters, configuration and source line. A rewritten program differs only in
repeated equations and barriers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxtensile import _compat
from jaxtensile.ir.ir import Graph, Op, producers
from jaxtensile.ir.plan import TO_DEVICE, TO_HOST, Program
from jaxtensile.passes.lifetimes.fusion import IN_PLACE
from jaxtensile.program.host_stacks import HostStacks
from jaxtensile.program.trace import Equation, Traced, bind

_SPACE = {TO_HOST: jax.memory.Space.Host, TO_DEVICE: jax.memory.Space.Device}


_LARGE = 1 << 20
"""Bytes of stacks for which a loop gets its own zeros, and of constants that are made late. A guess, as
``offload.SMALLEST``."""


def emit(
    traced: Traced, program: Program, *, apart: bool = False, stacked: bool = False
) -> Callable[[Sequence[Any]], list[Any]]:
    """Flat arguments → flat outputs, by the schedule of ``program``.

    ``apart``: each loop makes its own stacks, and a constant that is written into is made late. ``stacked``: copies to
    the host are ``HostStacks``.
    """
    graph, origin = program.graph, program.origin
    made = _made_from_arguments(graph)
    blank = _blank(graph, origin) if apart else {}
    last_use: dict[int, int] = {v: op.id for op in graph.ops for v in op.operands}
    last_use.update(dict.fromkeys(graph.outputs, len(graph.ops)))

    def evaluate(flat: Sequence[Any]) -> list[Any]:
        env: dict[int, Any] = dict(zip(traced.arguments, flat, strict=True))
        env.update(traced.consts)
        stacks = HostStacks(graph) if stacked else None
        for op in graph.ops:
            results: Sequence[Any]
            if stacks is not None and stacks.holds(op):
                results = stacks.bind(op, [env[v] for v in op.operands])
            elif op.primitive in _SPACE:
                results = [jax.device_put(env[op.operands[0]], _SPACE[op.primitive])]
            elif origin[op.id] < 0:
                results = _compat.barrier(env[v] for v in op.operands)
            else:
                equation = traced.equations[origin[op.id]]
                given = iter(op.operands)
                operands = [env[next(given)] if isinstance(a, int) else a.val for a in equation.operands]
                if op.id in blank:
                    operands = _with_late_zeros(equation, operands, op, made, traced.equations[blank[op.id]])
                results = (_with_its_own_stacks(equation, operands, op, made) if apart else None) or (
                    _with_its_own_zeros(equation, operands) or bind(equation, operands)
                )
            env.update(zip(op.results, results, strict=True))
            for v in dict.fromkeys(op.operands):
                if last_use[v] == op.id:
                    del env[v]
        final = iter(graph.outputs)
        return [env[next(final)] if isinstance(a, int) else a.val for a in traced.outputs]

    return evaluate


def _made_from_arguments(graph: Graph) -> list[int]:
    """The op that makes each value; -1 for arguments and for values that depend on none."""
    made = producers(graph)
    known = set[int](graph.inputs)
    for op in graph.ops:
        if known.intersection(op.operands):
            known.update(op.results)
    return [op if v in known else -1 for v, op in enumerate(made)]


def _with_its_own_stacks(equation: Equation, operands: list[Any], op: Op, made: Sequence[int]) -> list[Any] | None:
    """A loop whose stacks' zeros are made when it begins: behind a barrier with its latest operand that depends on
    arguments. None for anything else, and for a loop that may begin with the program.

    XLA makes all loops' zeros in one kernel, so the last loop's stacks would live from the start. Only scalars go
    behind the barrier: a broadcast constant there, like a mask's fill, would become a buffer.
    """
    if equation.eqn is None or equation.eqn.primitive.name != "scan" or _compat.has_effects(equation.eqn):
        return None
    params = equation.eqn.params
    consts, carries = _compat.scan_split(params)
    avals = [v.aval for v in equation.eqn.outvars]
    stacks = avals[carries:]
    if not all(map(_is_plain, avals)) or sum(a.size * a.dtype.itemsize for a in stacks) < _LARGE:
        return None
    latest = _latest(equation, op, made)
    if latest is None:
        return None
    body = _compat.jaxpr_as_fun(params["jaxpr"])
    length, reverse = params["length"], params["reverse"]
    with _compat.equation_context(equation.eqn, equation.stack):
        kinds = list(dict.fromkeys(a.dtype for a in stacks))
        tied, *zeros = lax.optimization_barrier((operands[latest], *(np.zeros((), kind) for kind in kinds)))
        operands = [*operands[:latest], tied, *operands[latest + 1 :]]
        fixed, init, xs = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]
        into = [lax.broadcast(zeros[kinds.index(a.dtype)], a.shape) for a in stacks]

        def step(state: Any, slices: Any) -> tuple[Any, None]:
            i, carry, stacked = state
            out = body(*fixed, *carry, *slices)
            stacked = [lax.dynamic_update_index_in_dim(s, y, i, 0) for s, y in zip(stacked, out[carries:], strict=True)]
            return (i - 1 if reverse else i + 1, out[:carries], stacked), None

        first = np.int32(length - 1 if reverse else 0)
        (_, last, stacked), _ = lax.scan(
            step, (first, init, into), xs, length=length, reverse=reverse, unroll=params.get("unroll", 1)
        )
    return [*last, *stacked]


def _latest(equation: Equation, op: Op, made: Sequence[int]) -> int | None:
    """The latest operand that depends on arguments; None if none does."""
    given = iter(op.operands)
    ages = [made[next(given)] if isinstance(a, int) else -1 for a in equation.operands]
    latest = max(range(len(ages)), key=ages.__getitem__)
    return latest if ages[latest] >= 0 else None


def _is_plain(aval: Any) -> bool:
    """Whether an array of numbers on the device, of a type it keeps."""
    there = "host" in str(getattr(aval, "memory_space", "")).lower()
    return isinstance(aval.dtype, np.dtype) and aval.dtype != jax.dtypes.float0 and not aval.weak_type and not there


def _blank(graph: Graph, origin: Sequence[int]) -> dict[int, int]:
    """Op that writes into its own large constant → the equation that broadcasts a literal to it.

    Other ops without operands may have effects or several results.
    """
    made = producers(graph)
    readers = Counter(v for op in graph.ops for v in op.operands) + Counter(graph.outputs)
    found: dict[int, int] = {}
    for op in graph.ops:
        if op.primitive not in IN_PLACE or made[into := op.operands[0]] < 0:
            continue
        source = graph.ops[made[into]]
        constant = source.primitive == "broadcast_in_dim" and not source.operands
        if constant and readers[into] == 1 and graph.values[into].nbytes >= _LARGE:
            found[op.id] = origin[source.id]
    return found


def _with_late_zeros(
    equation: Equation, operands: list[Any], op: Op, made: Sequence[int], constant: Equation
) -> list[Any]:
    """The operands of an equation that writes into a constant (the gradient of a lookup). The constant is made behind a
    barrier with the latest operand that depends on arguments.

    XLA makes constants at any time: beside copies to the host, an embedding gradient's zeros, 94 MB, were alive during
    the last attention's gradient (BERT of three layers, H200, jax 0.10.2).
    """
    latest = _latest(equation, op, made)  # a constant is older than anything that is made of arguments
    if latest is None or not _is_plain(jax.typeof(operands[latest])):
        return operands
    with _compat.equation_context(constant.eqn, constant.stack):
        (literal,) = constant.operands
        tied, late = lax.optimization_barrier((operands[latest], np.asarray(literal.val, literal.aval.dtype)))
        (into,) = bind(constant, [late])
    return [into, *operands[1:latest], tied, *operands[latest + 1 :]]


def _with_its_own_zeros(equation: Equation, operands: list[Any]) -> list[Any] | None:
    """The gradient of a max pool, added to zeros made late; None for anything else.

    XLA merges equal constants: these zeros are a buffer, and every ``relu`` of their shape would read its zeros there,
    from the forward pass on.
    """
    if equation.eqn is None or equation.eqn.primitive.name != "select_and_scatter_add":
        return None
    source, operand = operands
    with _compat.equation_context(equation.eqn, equation.stack):
        source, zero = lax.optimization_barrier((source, np.zeros((), source.dtype)))
        return [_compat.select_and_scatter_add(source, operand, zero, equation.eqn.params)]
