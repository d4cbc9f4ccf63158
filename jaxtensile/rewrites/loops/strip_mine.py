"""Nest loops in loops: N iterations become n times k.

A pair of scans stacks at least its carry per iteration. If both scans are nested alike, the outer pair stacks its carry
only n times, and its backward body runs the k iterations again. That is n + k slices instead of N, for one more forward
pass. A pair inside a body may be nested again. (Griewank, Optimization Methods and Software 1992; Chen et al., arXiv
1604.06174.)

Invariant: the same iterations in the same order on the same values; every stack has the same elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jax import lax

from jaxtensile import _compat
from jaxtensile.program.trace import Equation, Traced, bind, retrace
from jaxtensile.rewrites.loops.loops import loop_ladder
from jaxtensile.rewrites.rewrite import Rewrite, Start, changed, large


def strip_mine(traced: Traced, closed: Any, inner: Mapping[int, int]) -> Any:
    """The closed jaxpr of ``traced`` (of ``closed``) with scans strip-mined; ``inner``: op → iterations of its inner
    loop.

    The last iterations by position that do not fill an inner loop form a loop behind or in front of the nested one.
    """

    def evaluate(*flat: Any) -> list[Any]:
        env: dict[int, Any] = dict(zip(traced.arguments, flat, strict=True))
        env.update(traced.consts)
        parted: dict[int, _Parts] = {}
        """Stacks of nested loops, which the next nested loop takes as they are."""

        def read(atom: Any) -> Any:
            if not isinstance(atom, int):
                return atom.val
            if atom not in env:
                env[atom] = parted[atom].whole()
            return env[atom]

        def part(atom: Any, sizes: tuple[int, int, int]) -> _Parts:
            known = parted.get(atom) if isinstance(atom, int) else None
            return known if known is not None and known.sizes == sizes else _Parts.of(read(atom), sizes)

        for i, equation in enumerate(traced.equations):
            if i not in inner:
                results = bind(equation, [read(a) for a in equation.operands])
                env.update(zip(equation.results, results, strict=True))
                continue
            params = equation.eqn.params
            consts, carries = _compat.scan_split(params)
            first = consts + carries
            sizes = (*divmod(params["length"], inner[i]), inner[i])
            with _compat.equation_context(equation.eqn, equation.stack):
                given = [read(a) for a in equation.operands[:first]]
                xs = [part(a, sizes) for a in equation.operands[first:]]
                carry, ys = _nested(equation, given[:consts], given[consts:], xs, sizes)
            env.update(zip(equation.results[:carries], carry, strict=True))
            parted.update(zip(equation.results[carries:], ys, strict=True))
        return [read(a) for a in traced.outputs]

    return retrace(evaluate, closed)


@dataclass(frozen=True)
class _Parts:
    """A stack as [n, k, ...], and [rest, ...] if n times k is not all; ``sizes``: n, rest, k."""

    sizes: tuple[int, int, int]
    nested: Any
    rest: Any = None

    @classmethod
    def of(cls, whole: Any, sizes: tuple[int, int, int]) -> _Parts:
        n, rest, k = sizes
        main = lax.slice_in_dim(whole, 0, n * k) if rest else whole
        left = lax.slice_in_dim(whole, n * k, n * k + rest) if rest else None
        return cls(sizes, lax.reshape(main, (n, k, *whole.shape[1:])), left)

    def whole(self) -> Any:
        n, rest, k = self.sizes
        main = lax.reshape(self.nested, (n * k, *self.nested.shape[2:]))
        return lax.concatenate([main, self.rest], 0) if rest else main


def _nested(
    equation: Equation, consts: Sequence[Any], start: Sequence[Any], xs: Sequence[_Parts], sizes: tuple[int, int, int]
) -> tuple[Sequence[Any], list[_Parts]]:
    """The carry and the stacks of a nested scan."""
    params = equation.eqn.params
    n, rest, k = sizes
    carries = len(start)

    def few(length: int, carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        part = replace(equation, eqn=equation.eqn.replace(params={**params, "length": length}))
        out = bind(part, [*consts, *carry, *x])
        return out[:carries], out[carries:]

    carry, left = list(start), []
    if rest and params["reverse"]:
        carry, left = few(rest, carry, [x.rest for x in xs])
    carry, ys = lax.scan(partial(few, k), carry, [x.nested for x in xs], length=n, reverse=params["reverse"])
    if rest and not params["reverse"]:
        carry, left = few(rest, carry, [x.rest for x in xs])
    return carry, [_Parts(sizes, *parts) for parts in (zip(ys, left, strict=True) if rest else zip(ys, strict=True))]


def _find(start: Start) -> list[tuple[tuple[int, int], ...]]:
    ways = loop_ladder(start.base.graph, start.request.device, None).nests(large(start.base))
    return [tuple(sorted(inner.items())) for inner in ways]


def _describe(inner: tuple[tuple[int, int], ...]) -> str:
    sizes = ", ".join(map(str, sorted({k for _, k in inner})))
    return f"{len(inner)} loops are loops of loops, of {sizes} iterations each"


STRIP_MINE = Rewrite(
    key="strip_mine",
    title="the strip-mining of loops",
    form=tuple[tuple[int, int], ...],
    find=_find,
    apply=lambda start, inner: changed(start, lambda: strip_mine(start.base, start.request.jaxpr, dict(inner))),
    describe=_describe,
    last=True,
    in_bodies=True,
)
