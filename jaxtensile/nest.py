"""Loops as loops of loops: N iterations become n times k, so that what all N stack may be stacked once in k.

A pair of scans stacks at least its carry in every iteration. Where both scans are nested alike, the outer
pair need stack its carry n times only, and its backward body runs the k iterations once more: n + k slices
instead of N, for one more forward pass. A pair inside a body may be nested again.
(Griewank, Optimization Methods and Software 1992; Chen et al., arXiv 1604.06174.)

Invariant: the same iterations in the same order on the same values; every stack has the same elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax import lax

from jaxtensile import _compat
from jaxtensile.trace import Equation, Traced, bind, retrace


def nest_loops(traced: Traced, closed: Any, inner: Mapping[int, int]) -> Any:
    """The closed jaxpr of ``traced`` (of ``closed``) with scans nested; ``inner``: op → iterations of its inner loop,
    a divisor of its length."""

    def evaluate(*flat: Any) -> list[Any]:
        env: dict[int, Any] = dict(zip(traced.arguments, flat, strict=True))
        env.update(traced.consts)
        parted: dict[int, Any] = {}
        """Stacks of nested loops, [n, k, ...]; the next one takes them as they are."""

        def read(atom: Any) -> Any:
            if not isinstance(atom, int):
                return atom.val
            if atom not in env:
                n, k, *rest = parted[atom].shape
                env[atom] = lax.reshape(parted[atom], (n * k, *rest))
            return env[atom]

        def part(atom: Any, n: int, k: int) -> Any:
            known = parted.get(atom) if isinstance(atom, int) else None
            if known is None or known.shape[:2] != (n, k):
                whole = read(atom)
                known = lax.reshape(whole, (n, k, *whole.shape[1:]))
            return known

        for i, equation in enumerate(traced.equations):
            if i not in inner:
                results = bind(equation, [read(a) for a in equation.operands])
                env.update(zip(equation.results, results, strict=True))
                continue
            params = equation.eqn.params
            consts, carries = _compat.scan_split(params)
            k, first = inner[i], consts + carries
            n = params["length"] // k
            with _compat.equation_context(equation.eqn, equation.stack):
                given = [read(a) for a in equation.operands[:first]]
                xs = [part(a, n, k) for a in equation.operands[first:]]
                carry, ys = _nested(equation, given[:consts], given[consts:], xs, n, k)
            env.update(zip(equation.results[:carries], carry, strict=True))
            parted.update(zip(equation.results[carries:], ys, strict=True))
        return [read(a) for a in traced.outputs]

    return retrace(evaluate, closed)


def _nested(
    equation: Equation, consts: Sequence[Any], start: Sequence[Any], xs: Sequence[Any], n: int, k: int
) -> tuple[list[Any], list[Any]]:
    """``n`` times ``k`` iterations of a scan: its carry, and its stacks as [n, k, ...]."""
    params = equation.eqn.params
    few = replace(equation, eqn=equation.eqn.replace(params={**params, "length": k}))

    def step(carry: Any, x: Any) -> Any:
        out = bind(few, [*consts, *carry, *x])
        return out[: len(start)], out[len(start) :]

    carry, ys = lax.scan(step, list(start), list(xs), length=n, reverse=params["reverse"])
    return carry, ys
