"""Control dependencies that keep XLA from postponing work that frees memory.

XLA's list schedule runs first whatever frees the most bytes at once. A product that needs a transpose first seems to
free nothing, so it waits behind a kernel that makes a large buffer. A barrier before each op with a large result
prevents that. It covers the operands, and results computed from large buffers that die there.

* A sum over a gradient that only an update reads can be postponed to the end, and all gradients with it. With bytes on
  the host so can the gradient's last reader. Every barrier waits for both.
* XLA would transpose all weights of convolutions at the start, or where the first barrier lets it read them. So a
  convolution reads its weights behind a barrier with its other operand.

A Llama's step planned at 19,604 MB (H200, jax 0.10.2) compiles to 20,158 MB without them, to 19,605 with them.

Invariant: nothing runs twice, except what fuses into its readers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jaxtensile.ir.ir import Graph, producers
from jaxtensile.ir.plan import TO_DEVICE, TO_HOST, Program
from jaxtensile.passes.lifetimes.fusion import fuse
from jaxtensile.passes.lifetimes.liveness import Liveness, live_ranges
from jaxtensile.passes.order.in_order import with_barriers
from jaxtensile.passes.order.schedule import BARRIER, Schedule
from jaxtensile.switches import on
from jaxtensile.units import Bytes

CONVOLUTION = "conv_general_dilated"

LARGE = 1 / 64
"""Buffers of this share of the temporaries count. A guess."""
_WEIGHT = 1 / 1000
"""Weights of this share of the temporaries are held back; copies of smaller ones are little beside the first
activation. The share is a guess."""


def controlled(program: Program) -> Program:
    """The program with a barrier before each large result that other ops could wait behind, if any."""
    live = live_ranges(program.graph)
    found = with_barriers(program, live.kernels, dependencies(program.graph, live))
    return with_weights_late(found, int(_WEIGHT * live.temp))


def with_weights_late(program: Program, least: Bytes) -> Program:
    """The program with a barrier over weights and the other operand of each convolution; unchanged if there is none.

    The weights are arguments of at least ``least`` bytes.
    """
    graph = program.graph
    home, inputs = fuse(graph).home, set(graph.inputs)
    schedule = Schedule(graph.values, program.version_of)
    for op in graph.ops:
        operands = list(op.operands)
        if op.primitive == CONVOLUTION:
            weights = [v for v in operands if home[v] in inputs and graph.values[v].nbytes >= least]
            beside = [v for v in operands if home[v] >= 0 and home[v] not in inputs and graph.values[v].space != "host"]
            if weights and beside and on("ties_of_weights"):
                held = [*weights[:1], *beside[:1]]
                behind: dict[int, int] = dict(zip(held, schedule.put_barrier(held), strict=True))
                operands = [behind.get(v, v) for v in operands]
        schedule.put(op, operands, op.results, program.origin[op.id])
    if len(schedule.ops) == len(graph.ops):
        return program
    new = replace(graph, values=tuple(schedule.values), ops=tuple(schedule.ops))
    return Program(new, tuple(schedule.origin), tuple(schedule.version_of))


def dependencies(graph: Graph, live: Liveness) -> dict[int, frozenset[int]]:
    """Op → the buffers that a barrier before it covers.

    * An op with a large result: its operands, and results of ops that read another large buffer last, since the
      previous large result. Ops that it needs anyway do not count.
    * An existing barrier: its operands, and results of such ops since the previous barrier. In programs with copies
      also of all ops that read a large buffer and make none.

    Linear in edges.
    """
    kernels, made = live.kernels, producers(graph)
    large = max(int(LARGE * live.temp), 1)
    last = {r.stop - 1 for r in live.ranges if r.nbytes >= large}
    copies = any(op.primitive in (TO_HOST, TO_DEVICE) for op in graph.ops)
    found: dict[int, frozenset[int]] = {}
    begun, waiting, since = 0, list[int](), list[int]()

    def hold(at: int, loose: list[int], beside: Iterable[int]) -> None:
        results = {kernels.home[r] for o in loose for r in graph.ops[o].results if kernels.home[r] >= 0}
        read = {b for b in beside if b >= 0 and made[b] >= 0}
        if results and read and on("ties_of_sums" if graph.ops[at].primitive == BARRIER else "ties_before_large"):
            found[at] = frozenset(results | read)

    for op in graph.ops:
        if op.primitive == BARRIER:
            hold(op.id, since, (kernels.home[v] for v in op.operands))
            begun, waiting, since = op.id, [], []
            continue
        if not kernels.is_root[op.id] or op.primitive in (TO_HOST, TO_DEVICE):
            continue  # what waits for a copy stands still
        makes = any(kernels.home[r] == r and graph.values[r].nbytes >= large for r in op.results)
        if makes and waiting:
            needed = _needed(graph, made, op.id, begun)
            hold(op.id, [o for o in waiting if o not in needed], kernels.reads[op.id])
        if makes:
            begun, waiting = op.id, []
        if op.id in last:
            waiting.append(op.id)
        reads = any(made[b] >= 0 and graph.values[b].nbytes >= large for b in kernels.reads[op.id])
        if op.id in last or (copies and reads and not makes):
            since.append(op.id)
    return found


def _needed(graph: Graph, made: list[int], o: int, begun: int) -> set[int]:
    """The ops from ``begun`` on that op ``o`` waits for."""
    needed, left = {o}, [o]
    while left:
        for v in graph.ops[left.pop()].operands:
            if (p := made[v]) >= begun and p not in needed:
                needed.add(p)
                left.append(p)
    return needed
