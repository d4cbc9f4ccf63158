"""Random numbers as XLA:CPU makes them of threefry keys: a loop over two words of each number.

JAX lowers ``threefry2x32`` to a loop of five rounds on a CPU (``jax/_src/random/prng.py``). It takes two u32 of each
number and makes two others; in between there are four, whatever the width of the number. What is asked for is then made
of both words where it is read, and so both live until the last kernel that reads the mask of a dropout.

Measured on jax 0.10.2 and 0.12.0.1: 16 bytes a number of 8 to 32 bits, in use while it is drawn.

Invariant: inputs and outputs are the same values; every original op appears once, in order.
"""

from __future__ import annotations

import math
from dataclasses import replace

from jaxtensile.ir.ir import Graph, Op, OpId, ValueId
from jaxtensile.passes.lifetimes.fusion import STORED
from jaxtensile.passes.lowering.lowered import INDEX, Lowered, Rewriting
from jaxtensile.switches import on

_THREEFRY = "key<fry>"
_JOINED = "xor"
"""The elementwise op that makes a number of its words."""


def expanded_draws(graph: Graph) -> Lowered:
    """The graph with the words of its random numbers; the same graph if it draws none."""
    if not _any(graph) or not on("expanded_draws"):
        return Lowered(graph, tuple(range(len(graph.ops))))
    new = Rewriting(graph)
    for op in graph.ops:
        if op.bodies:
            op = replace(op, bodies=tuple(expanded_draws(body).graph for body in op.bodies))
        if not _is_draw(graph, op):
            new.add(op, op.operands)
            continue
        shape = graph.values[op.results[0]].shape
        size = INDEX * math.prod(shape)
        words = tuple(ValueId(new.value(size, shape, "uint32")) for _ in range(2))
        loop = Op(id=OpId(0), primitive=STORED, operands=op.operands, results=words, workspace=2 * size)
        new.put(loop, op)
        new.add(replace(op, primitive=_JOINED), words)
    return new.done()


def _is_draw(graph: Graph, op: Op) -> bool:
    return op.primitive == "random_bits" and bool(op.operands) and graph.values[op.operands[0]].dtype == _THREEFRY


def _any(graph: Graph) -> bool:
    return any(_is_draw(graph, op) or any(map(_any, op.bodies)) for op in graph.ops)
