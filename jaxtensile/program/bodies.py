"""Bodies of loops and branches as programs of their own, and a program with other bodies in their places.

Invariant: a body that is exchanged takes and gives values of the same types; everything around it
is bound as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxtensile import _compat
from jaxtensile.program.trace import Traced, bind, exchanged, retrace, trace_jaxpr

_PARAMETER = {"scan": "jaxpr", "while": "body_jaxpr", "cond": "branches"}

Key = tuple[int, int]
"""Op, and which of its bodies."""


@dataclass(frozen=True)
class Body:
    """A body: its closed jaxpr, which of its arguments its results replace (a loop's carry), and how often it runs."""

    closed: Any
    donated: tuple[bool, ...]
    trips: int

    def traced(self) -> Traced:
        return trace_jaxpr(self.closed, self.donated)


def bodies_of(traced: Traced, o: int) -> list[Body]:
    """The bodies of op ``o`` that can be exchanged: of scans, whiles and branches on plain arrays."""
    eqn, op = traced.equations[o].eqn, traced.graph.ops[o]
    if eqn is None or op.primitive not in _PARAMETER or eqn.effects:
        return []
    found = eqn.params[_PARAMETER[op.primitive]]
    out: list[Body] = []
    for closed in found if isinstance(found, tuple) else (found,):
        jaxpr, _ = _compat.open_jaxpr(closed)
        if not all(type(v.aval) is _compat.ShapedArray for v in (*jaxpr.invars, *jaxpr.outvars)):
            return []
        out.append(Body(closed, _carried(op.primitive, op.carried, eqn.params, len(jaxpr.invars)), op.trip_count))
    return out


def _carried(primitive: str, carried: tuple[int, int], params: Mapping[str, Any], count: int) -> tuple[bool, ...]:
    """Which arguments of a body are a loop's carry."""
    if primitive == "while":
        carried = params["body_nconsts"], count - params["body_nconsts"]
    consts, carries = carried
    return tuple(consts <= i < consts + carries for i in range(count))


def maker(traced: Traced, o: int, value: int) -> tuple[str, str]:
    """What made ``value``, a result of op ``o``, and where: of what a scan stacks the op in its body,
    ``("scan of tanh", "model.py:41 (layer)")``."""
    op = traced.graph.ops[o]
    place = op.results.index(value)
    if op.primitive == "scan" and place >= op.carried[1] and (found := bodies_of(traced, o)):
        inside = found[0].traced()
        slot = inside.graph.output_slots[place]
        by = next((inner.id for inner in inside.graph.ops if slot in inner.results), None)
        if by is not None and slot is not None:
            primitive, source = maker(inside, by, slot)
            return f"scan of {primitive}", source
    return op.primitive, traced.source(o)


def with_bodies(traced: Traced, closed: Any, new: Mapping[Key, Callable[[Sequence[Any]], list[Any]]]) -> Any:
    """The closed jaxpr of ``traced`` (of ``closed``) with other bodies: flat arguments → flat results."""

    def changed(o: int) -> Callable[[Callable[[Any], Any]], list[Any]]:
        equation = traced.equations[o]
        name = _PARAMETER[equation.eqn.primitive.name]
        old = equation.eqn.params[name]
        several = isinstance(old, tuple)

        def results(read: Callable[[Any], Any]) -> list[Any]:
            made = tuple(
                retrace(lambda *args, f=new[o, k]: f(args), body) if (o, k) in new else body
                for k, body in enumerate(old if several else (old,))
            )
            eqn = equation.eqn.replace(params={**equation.eqn.params, name: made if several else made[0]})
            return bind(replace(equation, eqn=eqn), [read(a) for a in equation.operands])

        return results

    return exchanged(traced, closed, {o: changed(o) for o, _ in new})
