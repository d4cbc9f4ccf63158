"""Loop-invariant code motion: what no iteration changes is made once, in front of its loop, as XLA:CPU does.

Residuals that every iteration reads and none changes, such as those of a network in Hessian-vector products, then live
as long as their loop; ``rewrites.sink_invariants`` is the way back. Rules: ``while_loop_invariant_code_motion.cc``.

Invariant: every iteration sees the same values; effects, foreign code and random state stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax.numpy as jnp
from jax import lax

from jaxtensile import _compat
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.program.trace import Equation, Traced, exchanged, run, trace_jaxpr
from jaxtensile.units import Bytes

_NOT_ALONE: Final = frozenset("broadcast_in_dim expand_dims iota reshape rev slice squeeze transpose".split())
"""Primitives that move with what reads them alone: they cost nothing where they are read."""

_LEAST: Final = 1 / 64
"""Share of the temporaries from which invariants are worth another program: a tenth of what estimates are off by."""


@dataclass(frozen=True)
class _Loop:
    """A loop's body, and the equations of it that move in front: ``ahead`` run there, ``gone`` no longer inside."""

    body: Traced
    ahead: tuple[int, ...]
    gone: frozenset[int]
    inner: Mapping[int, _Loop]
    """Of loops in the body."""
    nbytes: Bytes
    """Of what the loop is given then."""


def hoist_invariants(traced: Traced, closed: Any) -> Any:
    """The closed jaxpr of ``traced`` (of ``closed``) with the invariants of its loops in front of them.

    ``closed`` itself where they are few bytes beside the temporaries, or where types of a mesh do not allow it.
    """
    loops = _loops(traced)
    if not loops or sum(map(_nbytes, loops.values())) < max(_LEAST * live_ranges(traced.graph).temp, 1):
        return closed
    try:
        return exchanged(traced, closed, {o: partial(_moved, traced.equations[o], loop) for o, loop in loops.items()})
    except _compat.ShardingTypeError:
        return closed


def _nbytes(loop: _Loop) -> Bytes:
    return loop.nbytes + sum(map(_nbytes, loop.inner.values()))


def _loops(traced: Traced) -> dict[int, _Loop]:
    """The loops of a program out of which something moves."""
    found: dict[int, _Loop] = {}
    for o, equation in enumerate(traced.equations):
        if equation.eqn is not None and equation.eqn.primitive.name in ("scan", "while"):
            loop = _loop(equation)
            if loop.gone or loop.inner:
                found[o] = loop
    return found


def _loop(equation: Equation) -> _Loop:
    params = equation.eqn.params
    body = trace_jaxpr(params["jaxpr"] if equation.eqn.primitive.name == "scan" else params["body_jaxpr"])
    inner = _loops(body)
    still = {*body.arguments[: _split(equation)[0]], *body.consts}
    made: dict[int, int] = {}
    ahead, gone = set[int](), set[int]()
    for i, each in enumerate(body.equations):
        operands = [a for a in each.operands if isinstance(a, int)]
        if i in inner or body.graph.ops[i].pinned or not still.issuperset(operands):
            continue
        still.update(each.results)
        made.update(dict.fromkeys(each.results, i))
        if each.eqn is not None and each.eqn.primitive.name in _NOT_ALONE:
            continue
        gone.add(i)
        left = [i]
        while left:
            if (j := left.pop()) not in ahead:
                ahead.add(j)
                left += [made[a] for a in body.equations[j].operands if isinstance(a, int) and a in made]
    read = {a for i, e in enumerate(body.equations) if i not in gone for a in e.operands if isinstance(a, int)}
    read.update(a for a in body.outputs if isinstance(a, int))
    given = (v for i in gone for v in body.equations[i].results if v in read)
    values = body.graph.values
    return _Loop(body, tuple(sorted(ahead)), frozenset(gone), inner, sum(values[v].nbytes for v in given))


def _split(equation: Equation) -> tuple[int, int]:
    """Constants and carried values of a loop's body."""
    params = equation.eqn.params
    if equation.eqn.primitive.name == "scan":
        return _compat.scan_split(params)
    consts = params["body_nconsts"]
    return consts, len(equation.operands) - params["cond_nconsts"] - consts


def _moved(equation: Equation, loop: _Loop, read: Callable[[Any], Any]) -> list[Any]:
    """The results of a loop, out of which moves what can."""
    params, (consts, carries) = equation.eqn.params, _split(equation)
    is_scan = equation.eqn.primitive.name == "scan"
    outer = 0 if is_scan else params["cond_nconsts"]
    operands = [read(a) for a in equation.operands]
    given, start, xs = operands[outer : outer + consts], operands[outer + consts :][:carries], []
    if is_scan:
        xs = operands[consts + carries :]
    body = loop.body
    before: dict[int, Any] = {**dict(zip(body.arguments, given, strict=False)), **body.consts}
    run(body, loop.ahead, before)
    there = {v: before[v] for i in loop.gone for v in body.equations[i].results}

    def step(carry: Iterable[Any], x: Iterable[Any] = ()) -> list[Any]:
        env = {**dict(zip(body.arguments, [*given, *carry, *x], strict=True)), **body.consts, **there}
        _run(body, (i for i in range(len(body.equations)) if i not in loop.gone), env, loop.inner)
        return [env[a] if isinstance(a, int) else a.val for a in body.outputs]

    with _compat.equation_context(equation.eqn, equation.stack):
        if is_scan:
            how = {name: params[name] for name in ("length", "reverse", "unroll")}

            def both(carry: Any, x: Any) -> Any:
                out = step(carry, x)
                return out[:carries], out[carries:]

            carry, ys = lax.scan(both, start, xs, **how)
            return [*carry, *ys]
        asked = trace_jaxpr(params["cond_jaxpr"])

        def asks(carry: Any) -> Any:
            env = {**dict(zip(asked.arguments, [*operands[:outer], *carry], strict=True)), **asked.consts}
            run(asked, range(len(asked.equations)), env)
            (out,) = asked.outputs
            return env[out] if isinstance(out, int) else out.val

        if not params["cond_jaxpr"].out_avals[0].shape:
            return [*lax.while_loop(asks, step, start)]

        # Batched loops: each goes on until its own condition fails, all until the last fails.
        def kept(carry: Any) -> list[Any]:
            more = asks(carry)
            pairs = zip(step(carry), carry, strict=True)
            return [jnp.where(jnp.expand_dims(more, range(more.ndim, jnp.ndim(a))), a, b) for a, b in pairs]

        return [*lax.while_loop(lambda carry: jnp.any(asks(carry)), kept, start)]


def _run(body: Traced, equations: Iterable[int], env: dict[int, Any], inner: Mapping[int, _Loop]) -> None:
    for i in equations:
        if i not in inner:
            run(body, (i,), env)
            continue
        each = body.equations[i]
        out = _moved(each, inner[i], lambda a: env[a] if isinstance(a, int) else a.val)
        env.update(zip(each.results, out, strict=True))
