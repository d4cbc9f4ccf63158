"""Which donated arguments may wait on the host between steps; ``rewrites.state`` chooses among them.

Only the update needs them: optimizer moments, master weights, averages. The output that replaces one is made from it,
by ops of the update, and from as few other donated arguments as possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtensile.ir.ir import Graph, ValueId, consumers, producers
from jaxtensile.passes.offload.offload import SMALLEST
from jaxtensile.units import Bytes, Seconds

UPDATE = 0.5
"""An argument is needed late if its dependents take at most this share of the step's charge. A guess: an update is
little of a step."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Argument ``value`` and ``output``, its replacement in the next step; both on the host."""

    value: ValueId
    output: ValueId
    nbytes: Bytes


def movable(graph: Graph, charge: Sequence[Seconds]) -> tuple[tuple[Moved, ...], tuple[ValueId, ...]]:
    """The donated arguments that may wait on the host, in argument order, and those that JAX's pairing keeps on the
    device.

    JAX pairs donated arguments and outputs of one shape and type in order, in any memory space. An argument stays if
    its buffer would go to another output than its replacement.
    """
    pairs = _donations(graph)
    read_by = consumers(graph)
    limit = UPDATE * sum(charge)
    final = set(graph.outputs)
    update: dict[int, set[int]] = {}
    for s in pairs:
        value = graph.values[s]
        if value.nbytes < SMALLEST or value.space == "host" or "key" in value.dtype or s in final:
            continue
        ops = descendants(graph, read_by, s)
        if ops and not any(graph.ops[o].pinned for o in ops) and sum(charge[o] for o in ops) <= limit:
            update[s] = ops
    heirs = _heirs(graph, update, pairs)
    slots = Counter(graph.output_slots)
    ordered = [s for s in graph.inputs if s in heirs and slots[ValueId(heirs[s])] == 1]
    stay = tuple(s for s in ordered if pairs[s] != heirs[s])
    return tuple(Moved(s, ValueId(heirs[s]), graph.values[s].nbytes) for s in ordered if s not in stay), stay


def _donations(graph: Graph) -> dict[int, int]:
    """Donated argument → the output that takes over its buffer, as ``jax.jit`` pairs them."""
    pool: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for v in graph.inputs:
        if v in graph.donated:
            pool.setdefault((graph.values[v].shape, graph.values[v].dtype), []).append(v)
    pairs: dict[int, int] = {}
    for o in graph.output_slots:
        if o is not None:
            waiting = pool.get((graph.values[o].shape, graph.values[o].dtype))
            if waiting:
                pairs[waiting.pop(0)] = o
    return pairs


def descendants(graph: Graph, read_by: Sequence[Sequence[int]], v: int) -> set[int]:
    """All ops that depend on ``v``."""
    seen: set[int] = set()
    todo = list(read_by[v])
    while todo:
        o = todo.pop()
        if o not in seen:
            seen.add(o)
            todo.extend(r for w in graph.ops[o].results for r in read_by[w])
    return seen


def _heirs(graph: Graph, update: dict[int, set[int]], pairs: dict[int, int]) -> dict[int, int]:
    """Argument → its replacement: of its shape and type, made from it and few other donated arguments.

    A new moment is made from the old one; a new parameter from the old parameter and the moments.
    """
    late: set[int] = set()
    for ops in update.values():
        late |= ops
    made = producers(graph)
    choices: list[tuple[int, bool, int, int]] = []
    for o in dict.fromkeys(graph.outputs):
        if made[o] not in late:
            continue
        like = (graph.values[o].shape, graph.values[o].dtype)
        read = _read_by_cone(graph, made, late, o)
        same = [s for s in read & pairs.keys() if (graph.values[s].shape, graph.values[s].dtype) == like]
        choices.extend((len(same), pairs[s] != o, s, o) for s in same if s in update)
    heirs: dict[int, int] = {}
    for _, _, s, o in sorted(choices):
        if s not in heirs and o not in heirs.values():
            heirs[s] = o
    return heirs


def _read_by_cone(graph: Graph, made: Sequence[int], inside: set[int], o: int) -> set[int]:
    """What the ops of ``inside`` that make ``o`` read from outside it."""
    seen: set[int] = set()
    found: set[int] = set()
    todo = [o]
    while todo:
        v = todo.pop()
        if made[v] not in inside:
            found.add(v)
        elif made[v] not in seen:
            seen.add(made[v])
            todo.extend(graph.ops[made[v]].operands)
    return found


__all__ = ["Moved", "descendants", "movable"]
