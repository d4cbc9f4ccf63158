"""What a region in parts hands on, and what is made of that afterwards.

Rows that others read are stacked part by part, which takes a kernel for each value and part, and a buffer that is
filled first. Rows that cost little beside the region are made again from what is there without it, so nobody waits for
the last part. Rows that are taken from one value are taken from its stack.

Invariant: what is made afterwards are the same operations on the same elements, on all rows at once.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from jaxtensile.ir.ir import Graph, producers
from jaxtensile.passes.lifetimes.fusion import MOVES, VIEWS
from jaxtensile.rewrites.rows.region import CHEAP, FREE, Region
from jaxtensile.rewrites.rows.rows import Row

MORE: Final = 1 / 16
"""Share of their bytes by which a value may have more than what is taken from it. A guess."""


class Handed(NamedTuple):
    """``kept``: values that the loop makes, and how. ``again``: ops that run behind it, in order."""

    kept: dict[int, Row | str]
    again: list[int]


def handed_on(graph: Graph, own: Region, there: set[int]) -> Handed:
    """What the loop of a region makes. ``there``: values that exist before it."""
    again = _made_again(graph, own, there)
    made = {v for o in again for v in graph.ops[o].results}
    kept = {v: how for v, how in own.leaving.items() if v not in made}
    found = _taken_from_one(graph, own, kept, there)
    if found is None:
        return Handed(kept, again)
    source, how, taken = found
    kept = {v: at for v, at in kept.items() if v not in taken} | {source: how}
    return Handed(kept, sorted({*again, *(o for ops in taken.values() for o in ops)}))


def _made_again(graph: Graph, own: Region, there: set[int]) -> list[int]:
    """The ops that make rows again that leave the region.

    They start from values in ``there``, cost little beside the region, and make nothing larger on the way, but for what
    only moves in the kernels that read it.
    """
    made, found = producers(graph), set[int]()
    little = CHEAP * sum(graph.ops[o].flops for o in own.members)

    def also(v: int) -> set[int] | None:
        ops, todo = set(found), [made[v]]
        while todo:
            op = graph.ops[todo.pop()]
            if op.id not in ops:
                larger = any(graph.values[r].nbytes > graph.values[v].nbytes for r in op.results)
                if op.pinned or op.bodies or (larger and op.primitive not in MOVES | VIEWS):
                    return None
                ops.add(op.id)
                others = {own.root(a) for a in op.operands} - there
                if any(made[a] not in own.members for a in others):
                    return None
                todo += [made[a] for a in others]
        return ops if sum(graph.ops[o].flops for o in ops) <= little else None

    rows = [v for v, how in own.leaving.items() if isinstance(how, Row) and made[v] in own.members]
    for v in sorted(rows, key=lambda v: (-graph.values[v].nbytes, v)):
        found = also(v) or found
    return sorted(found)


def _taken_from_one(
    graph: Graph, own: Region, kept: dict[int, Row | str], there: set[int]
) -> tuple[int, Row, dict[int, list[int]]] | None:
    """A value of the region, its rows, and those of ``kept`` that are taken from it, each with the ops that do."""
    made = producers(graph)
    taken: dict[int, dict[int, list[int]]] = {}
    for v, how in kept.items():
        ops, source = list[int](), v
        while isinstance(how, Row) and made[source] in own.members:
            op = graph.ops[made[source]]
            before = {own.root(a) for a in op.operands} - there
            if op.primitive not in FREE or op.pinned or len(before) != 1:
                break
            ops.append(op.id)
            (source,) = before
            taken.setdefault(source, {})[v] = [*ops]
    size = {source: sum(graph.values[v].nbytes for v in of) for source, of in taken.items()}

    def rows_of(source: int) -> Row | str | None:
        if made[source] not in own.members:
            return None
        return own.members[made[source]].gives[graph.ops[made[source]].results.index(source)]

    enough = [
        source
        for source, of in taken.items()
        if len(of) > 1
        and isinstance(rows_of(source), Row)
        and graph.values[source].nbytes <= (1 + MORE) * size[source] + (source in kept) * graph.values[source].nbytes
    ]
    best = max(enough, key=lambda source: (len(taken[source]), size[source], source), default=None)
    how = None if best is None else rows_of(best)
    return (best, how, taken[best]) if best is not None and isinstance(how, Row) else None
