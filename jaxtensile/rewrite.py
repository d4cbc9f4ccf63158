"""The one place where jaxprs change: evaluate a program's schedule on the caller's tracers.

Invariant: every equation is bound with its own parameters, configuration and source line, so a
rewritten program differs from the original in what is repeated and where barriers stand, and in
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxtensile import _compat
from jaxtensile.plan import TO_DEVICE, TO_HOST, Program
from jaxtensile.trace import Equation, Traced, bind

_SPACE = {TO_HOST: jax.memory.Space.Host, TO_DEVICE: jax.memory.Space.Device}


def rewrite(traced: Traced, program: Program) -> Callable[[Sequence[Any]], list[Any]]:
    """Flat arguments → flat outputs, by the schedule of ``program``."""
    graph, origin = program.graph, program.origin
    last_use: dict[int, int] = {v: op.id for op in graph.ops for v in op.operands}
    last_use.update(dict.fromkeys(graph.outputs, len(graph.ops)))

    def evaluate(flat: Sequence[Any]) -> list[Any]:
        env: dict[int, Any] = dict(zip(traced.arguments, flat, strict=True))
        env.update(traced.consts)
        for op in graph.ops:
            results: Sequence[Any]
            if op.primitive in _SPACE:
                results = [jax.device_put(env[op.operands[0]], _SPACE[op.primitive])]
            elif origin[op.id] < 0:
                results = lax.optimization_barrier(tuple(env[v] for v in op.operands))
            else:
                equation = traced.equations[origin[op.id]]
                given = iter(op.operands)
                operands = [env[next(given)] if isinstance(a, int) else a.val for a in equation.operands]
                results = _with_its_own_zeros(equation, operands) or bind(equation, operands)
            env.update(zip(op.results, results, strict=True))
            for v in dict.fromkeys(op.operands):
                if last_use[v] == op.id:
                    del env[v]
        final = iter(graph.outputs)
        return [env[next(final)] if isinstance(a, int) else a.val for a in traced.outputs]

    return evaluate


def _with_its_own_zeros(equation: Equation, operands: list[Any]) -> list[Any] | None:
    """The gradient of a max pool that adds to zeros made late; None for anything else.

    XLA merges equal constants: what such a gradient adds to has to exist, and then every ``relu`` of its
    shape reads its zeros from there, from the forward pass on.
    """
    if equation.eqn is None or equation.eqn.primitive.name != "select_and_scatter_add":
        return None
    source, operand = operands
    with _compat.equation_context(equation.eqn, equation.stack):
        source, zero = lax.optimization_barrier((source, np.zeros((), source.dtype)))
        return [_compat.select_and_scatter_add(source, operand, zero, equation.eqn.params)]
