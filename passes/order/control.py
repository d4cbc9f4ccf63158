"""Which control dependencies keep XLA from putting off what frees memory?

Of what could run next, XLA's list schedule prefers what frees the most at once, whatever comes of it. The product that
reads a softmax last may have to transpose it first, which frees nothing, so it waits behind the kernel that makes the
gradient of the scores, which frees a little and makes the largest buffer of all. A barrier before what makes something
large, over what it reads and what was computed from large buffers that go, has them go first.

Measured on an H200 (jax 0.10.2): two plans of a Llama's step of 57 GB for 19,604 MB, its scores in float32, compile to
20,158 and 20,117 MB, with them to 19,605 and 19,593.

A sum over a gradient that only an update reads may be put off to the end, and all gradients with it; where bytes wait
on the host, whoever reads the gradient last. So every barrier that there is waits for those sums as well (Mixer with
12.9 GB on the host, planned at 870 MB: 6,849 MB without any, 5,839 with those above, 974 with these; ResNet-50 without
the host 3,733 and 3,448 of 3,182, U-Net 9,478 and 9,210 of 8,983).

What XLA makes of an argument alone waits for nothing: convolutions want their weights transposed, and copies of all of
them are there from the beginning, or from where the first barrier lets them be read. So a convolution reads its weights
from behind a barrier with what else it reads (ResNet-50, batch 16, f32: a plan predicted at 600 MB compiles to 709 MB
without, to 676 with these alone and to 666 with all).

Invariant: nothing runs again but what fuses into its readers.
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
"""Weights of this share of the temporaries are held back: copies of smaller ones are together little beside the first
activation (ResNet-50 at batch 16: 709 MB without, 666 with). The share is a guess."""


def controlled(program: Program) -> Program:
    """The program with a barrier before what makes something large while others could still wait; the program as it is
    where there is none."""
    live = live_ranges(program.graph)
    found = with_barriers(program, live.kernels, dependencies(program.graph, live))
    return with_weights_late(found, int(_WEIGHT * live.temp))


def with_weights_late(program: Program, least: Bytes) -> Program:
    """The program with arguments of ``least`` bytes and more, where convolutions read them, behind a barrier with the
    buffer that the convolution reads beside; the program as it is where there are none."""
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
    """By op that makes something large: the buffers it reads, and what the ops made that read another large one last,
    since the large one before, without which it could run. By barrier: what it holds, and what they made since the
    barrier before; in programs with copies, what all made there that read something large and make nothing large.
    Linear in edges."""
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
