"""Loop and branch bodies as programs of their own, and their exchange.

Invariant: a new body has the old argument and result types; all else is bound unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxtensile import _compat
from jaxtensile.ir.ir import Graph
from jaxtensile.program.trace import Traced, bind, exchanged, retrace, trace_jaxpr

_PARAMETER = {"scan": "jaxpr", "while": "body_jaxpr", "cond": "branches"}
_OF_CALLS = {"jit": "jaxpr", "pjit": "jaxpr"}

Key = tuple[int, int]
"""(op, index of its body)"""


@dataclass(frozen=True)
class Body:
    """A body: its closed jaxpr, the arguments its results replace (a loop's carry), its assumed number of runs, and its
    graph in the op."""

    closed: Any
    donated: tuple[bool, ...]
    trips: int
    graph: Graph

    def traced(self) -> Traced:
        """The body, with the sizes that it has in its op."""
        found = trace_jaxpr(self.closed, self.donated)
        return replace(found, graph=replace(self.graph, donated=found.graph.donated))


def bodies_of(traced: Traced, o: int) -> list[Body]:
    """The exchangeable bodies of op ``o``: of scans, whiles and branches on plain arrays, without effects."""
    eqn, op = traced.equations[o].eqn, traced.graph.ops[o]
    if eqn is None or op.primitive not in _PARAMETER or _compat.has_effects(eqn):
        return []
    found = eqn.params[_PARAMETER[op.primitive]]
    out: list[Body] = []
    for k, closed in enumerate(found if isinstance(found, tuple) else (found,)):
        jaxpr, _ = _compat.open_jaxpr(closed)
        if not all(type(v.aval) is _compat.ShapedArray for v in (*jaxpr.invars, *jaxpr.outvars)):
            return []
        carried = _carried(op.primitive, op.carried, eqn.params, len(jaxpr.invars))
        out.append(Body(closed, carried, op.runs, op.bodies[k]))
    return out


def _carried(primitive: str, carried: tuple[int, int], params: Mapping[str, Any], count: int) -> tuple[bool, ...]:
    """Which arguments of a body are a loop's carry."""
    if primitive == "while":
        carried = params["body_nconsts"], count - params["body_nconsts"]
    consts, carries = carried
    return tuple(consts <= i < consts + carries for i in range(count))


def with_closed(eqn: Any, new: Sequence[Any]) -> Any:
    """An equation of a loop, branch or call with other closed bodies, as many as ``trace.closed_bodies`` finds."""
    name = (_PARAMETER | _OF_CALLS)[eqn.primitive.name]
    several = isinstance(eqn.params[name], tuple)
    return eqn.replace(params={**eqn.params, name: tuple(new) if several else new[0]})


def maker(traced: Traced, o: int, value: int) -> tuple[str, str]:
    """The primitive and line that made ``value``, a result of op ``o``. For a scan's stack, the op in its body:
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
    """The closed jaxpr of ``traced`` (of ``closed``) with ``new`` bodies: flat arguments → flat results."""

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
