"""Outputs that cannot be written over the donated argument whose memory they get.

The argument is still read: by the kernel that writes the output (a product, a shift, a loop over its slices), by what
needs the output, or by another output that is written over what this one reads. Then the output has memory of its own
among the temporaries and is copied: such a donation saves nothing (H200 and CPU, jax 0.10.2 and 0.12).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from jaxtensile.ir.ir import Graph, producers
from jaxtensile.passes.lifetimes.fusion import Kernels
from jaxtensile.passes.lifetimes.in_place import needed_by, read_late


def copied_back(
    graph: Graph, kernels: Kernels, takes: Sequence[int], start: Sequence[int], stop: Sequence[int]
) -> dict[int, int]:
    """Outputs with memory of their own, each with the op after which it is free.

    XLA:GPU copies once the argument is dead, XLA:CPU at the end. ``takes``: for each output the argument whose memory
    it gets, or -1.
    """
    home, given, n, maker = kernels.home, set[int](graph.inputs), len(graph.ops), producers(graph)
    whole = {home[v] for v in graph.outputs} & given
    found: dict[int, int] = {}
    over: dict[int, int] = {}
    seen = set[int]()
    for v, old in zip(graph.outputs, takes, strict=True):
        b = home[v]
        if old < 0 or b < 0 or b in given or b in seen or not kernels.is_root[maker[b]]:
            continue
        over[old] = b
        seen.add(b)
        end = n if old in whole else stop[old]  # what is a result as well is read at the end
        if read_late(graph, kernels, maker, old, graph.ops[maker[b]], b, start[b], end):
            found[b] = end
    reads = {old: set(kernels.reads[maker[b]]) for old, b in over.items()}
    if kernels.by.twice:
        in_place = {old for old, b in over.items() if b not in found}
        for old in over:
            if old in in_place and _in_a_circle(reads, in_place, old):
                in_place.remove(old)
                found[over[old]] = stop[old]
        return {b: max(end, start[b] + 1) for b, end in found.items()}
    beside: dict[int, list[int]] = {}
    for old, own in reads.items():
        for other in own & over.keys() - {old}:
            beside.setdefault(other, []).append(maker[over[old]])
    # XLA:CPU copies before it knows the order.
    late = {over[a] for a, own in beside.items() if not needed_by(kernels, maker, maker[over[a]]).issuperset(own)}
    return dict.fromkeys((*found, *late), n)


def _in_a_circle(reads: Mapping[int, set[int]], over: Collection[int], old: int) -> bool:
    """Whether what is written over ``old`` has to come both before and behind another output that is written over an
    argument. Outputs of the same arrays are one kernel of XLA:GPU.

    ``reads``: by argument that is written over, what the output reads. ``over``: those whose output is not copied.
    """
    first = reads[old]
    left, seen = [a for a in first if a != old and a in over and reads[a] != first], {old}
    while left:
        a = left.pop()
        if a in seen:
            continue
        seen.add(a)
        if old in reads[a]:
            return True
        left += [b for b in reads[a] if b in over]
    return False
