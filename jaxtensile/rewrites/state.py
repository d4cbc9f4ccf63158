"""Choose arguments that wait on the host between steps, and make the program that streams them.

Invariant: a program with its state on the host is checked against its original.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxtensile.ir.ir import ValueId
from jaxtensile.ir.plan import TO_DEVICE, TO_HOST, Leaf, Link
from jaxtensile.passes.offload.state import Moved, movable
from jaxtensile.passes.offload.streaming import stream
from jaxtensile.passes.verify.check import check
from jaxtensile.program.trace import Equation, Traced
from jaxtensile.units import Bytes, Seconds


def choose(
    traced: Traced, charge: Sequence[Seconds], names: Sequence[str], most: Bytes | None
) -> tuple[tuple[Leaf, ...], tuple[str, ...]]:
    """The leaves that wait on the host, in argument order, and the names of those that must stay.

    The largest go first, up to ``most`` bytes. A leaf stays if outputs come in another order than arguments.
    """
    found, stay = movable(traced.graph, charge)
    position = {v: i for i, v in enumerate(traced.arguments)}
    slots = {v: k for k, v in enumerate(traced.outputs) if isinstance(v, int)}
    leaves: list[Leaf] = []
    room = most
    for m in sorted(found, key=lambda m: -m.nbytes):
        if room is None or m.nbytes <= room:
            argument = position[m.value]
            leaves.append(Leaf(argument, slots[m.output], m.nbytes, names[argument]))
            room = None if room is None else room - m.nbytes
    return tuple(sorted(leaves, key=lambda x: x.argument)), tuple(names[position[v]] for v in stay)


def on_host(traced: Traced, leaves: Sequence[Leaf], seconds: Sequence[Seconds], link: Link) -> Traced:
    """``traced`` with ``leaves`` in host memory, each on the device only during its update.

    ``seconds``: of every op of ``traced``.
    """
    moved = [Moved(ValueId(traced.arguments[x.argument]), ValueId(traced.outputs[x.slot]), x.nbytes) for x in leaves]
    program = stream(traced.graph, moved, seconds, link)
    check(traced.graph, program, frozenset(v for m in moved for v in (m.value, m.output)))
    equations: list[Equation] = []
    ops = list(program.graph.ops)
    for i, (op, origin) in enumerate(zip(program.graph.ops, program.origin, strict=True)):
        if origin < 0:
            copy = op.primitive if op.primitive in (TO_HOST, TO_DEVICE) else ""
            equations.append(Equation(None, None, tuple(op.operands), tuple(op.results), copy=copy))
            ops[i] = replace(op, pinned=True)  # no plan repeats or drops it
            continue
        old = traced.equations[origin]
        given = iter(op.operands)
        operands = tuple(next(given) if isinstance(a, int) else a for a in old.operands)
        equations.append(replace(old, operands=operands, results=tuple(op.results)))
    final = iter(program.graph.outputs)
    return Traced(
        graph=replace(program.graph, ops=tuple(ops)),
        equations=tuple(equations),
        consts=traced.consts,
        outputs=tuple(next(final) if isinstance(a, int) else a for a in traced.outputs),
        arguments=traced.arguments,
    )


__all__ = ["choose", "on_host"]
