"""Find the region of a program that can run some rows at a time.

Between a batch and the weight gradients each row comes from the same row before, and sums over rows come last
(``rows``). If the region is the step up to the update, parts of it are gradient accumulation. If it is the loss of a
language model, the logits of all tokens need never exist at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from jaxtensile.ir.ir import Graph, consumers, producers
from jaxtensile.passes.lifetimes.fusion import ELEMENTWISE, EXPENSIVE, MOVES, REDUCTIONS, VIEWS
from jaxtensile.passes.lifetimes.liveness import Liveness, live_ranges
from jaxtensile.passes.lifetimes.prologue import PRODUCT
from jaxtensile.program.trace import Traced
from jaxtensile.rewrites.rows.loop_rows import Loops
from jaxtensile.rewrites.rows.made_rows import Outer, on_the_device, row_at
from jaxtensile.rewrites.rows.rows import SAME, TOTALS, Row, Section
from jaxtensile.units import Bytes

SEEDS = 12
"""Most places of rows tried, in arguments and in operands of large products. A guess; each is a walk through the
program."""
LARGEST = 4
"""Values whose rows are followed back to their origin. A guess."""
PRODUCTS = 4
"""Largest products, whose operands' rows are tried too. A guess."""
CHEAP = 1 / 64
"""Share of a region small enough to compute for all rows outside it. A guess."""
NEARLY = 1 / 4
"""Share of the peak by which regions leave about as many bytes. A guess."""


FREE = frozenset(name for name in (ELEMENTWISE | MOVES | VIEWS) - EXPENSIVE if not name.startswith("random"))
"""Ops that cost nothing in a kernel that reads their result."""


class Seed(NamedTuple):
    """The origin of rows: dimension ``dim`` of a value, ``rows`` long; ``stage``: after how many totals of them."""

    value: int
    dim: int
    rows: int
    stage: int


@dataclass(kw_only=True)
class Region(Section):
    """Ops that pass rows on, with no path between two of them outside.

    ``leaving``: values that others read, as rows or totals. ``within``: values that only the region reads.
    """

    seed: Seed
    leaving: dict[int, Row | str] = field(default_factory=dict)
    within: frozenset[int] = frozenset()
    inside: Bytes = 0
    """Bytes of values ``within``, less those of rows that leave it."""


def find_region(traced: Traced, smallest: Bytes) -> Region | None:
    """The region without whose values the fewest bytes are left at the peak, and of those that leave about as few the
    one with the most ``inside``; None if fewer than ``smallest``."""
    made, readers = producers(traced.graph), consumers(traced.graph)
    known: dict[Hashable, Region] = {}
    for seed in _seeds(traced, smallest):
        at, stages, same = _stages(traced, *seed)
        for own in stages.values():
            key = frozenset((o, how.needs, how.gives) for o, how in own.members.items())
            if key in known:  # another origin of the same rows
                known[key].seed = min(known[key].seed, own.seed)
            else:
                known[key] = own
                _complete(traced, own, at, same, made, readers)
    found = [s for s in known.values() if s.inside >= smallest]
    live = live_ranges(traced.graph)
    left = [_left(live, s) for s in found]
    about = min(left, default=0) + NEARLY * live.temp
    best = [s for s, n in zip(found, left, strict=True) if n <= about]
    return max(best, key=lambda s: (s.inside, -s.seed.value, -s.seed.dim), default=None)


def _left(live: Liveness, own: Region) -> Bytes:
    """Bytes at the peak if a region's values need none."""
    less = [0] * (len(live.profile) + 1)
    for r in live.ranges:
        if r.value in own.within:
            less[r.start] += r.nbytes
            less[min(r.stop, len(live.profile))] -= r.nbytes
    return max((n - gone for n, gone in zip(live.profile, accumulate(less), strict=False)), default=0)


def ends(traced: Traced, smallest: Bytes) -> list[int]:
    """Ops that get rows and pass none on, most bytes first: why there is no region."""
    found = {o for seed in _seeds(traced, smallest) for o in _passed_on(traced, *seed, set())[-1]}
    graph = traced.graph
    size = {o: sum(graph.values[v].nbytes for v in (*graph.ops[o].operands, *graph.ops[o].results)) for o in found}
    return sorted(found, key=lambda o: (-size[o], o))


def region_of(traced: Traced, seed: Seed) -> Region | None:
    """The region of a seed; None if there is none."""
    found = regions(traced, seed.value, Row(seed.dim), seed.rows)
    return next((s for s in found if s.seed == seed), None)


def _seeds(traced: Traced, smallest: Bytes) -> list[tuple[int, Row, int]]:
    """(value, rows, count) to try: arguments that return as no result, operands of large products, and origins of the
    rows of the largest values."""
    graph = traced.graph
    kinds = {(graph.values[v].shape, graph.values[v].dtype) for v in graph.outputs}
    values = [v for v in graph.inputs if (graph.values[v].shape, graph.values[v].dtype) not in kinds]
    large = [op for op in graph.ops if op.primitive == "dot_general" and graph.values[op.results[0]].nbytes >= smallest]
    large.sort(key=lambda op: -graph.values[op.results[0]].nbytes)
    values = sorted(values, key=lambda v: -graph.values[v].nbytes)[:SEEDS] + [
        v for op in large[:PRODUCTS] for v in op.operands
    ]
    found: dict[tuple[int, Row, int], None] = {}
    for v in dict.fromkeys(values):
        for dim, size in enumerate(graph.values[v].shape[:2]):
            if size > 1:
                found[int(v), Row(dim), size] = None
    made = producers(graph)
    results = [v for op in graph.ops for v in op.results if graph.values[v].nbytes >= smallest]
    begun: dict[tuple[int, Row, int], None] = {}
    for v in sorted(results, key=lambda v: -graph.values[v].nbytes)[:LARGEST]:
        for size in {size for size in graph.values[v].shape[:2] if size > 1}:
            begun.update(dict.fromkeys(_beginning(graph, made, v, size)))
    found.update(dict.fromkeys(sorted(begun, key=lambda seed: (made[seed[0]], seed))[:SEEDS]))
    return list(found)


def _beginning(graph: Graph, made: Sequence[int], v: int, size: int) -> Iterator[tuple[int, Row, int]]:
    """Values of ``size`` places along a dimension that lead to ``v`` and read none of that size."""
    seen, todo = {v}, [v]
    while todo:
        v = todo.pop()
        before = graph.ops[made[v]].operands if made[v] >= 0 else ()
        more = [u for u in before if size in graph.values[u].shape]
        todo += [u for u in more if u not in seen]
        seen.update(more)
        if not more and made[v] >= 0:
            yield from ((v, Row(dim), size) for dim, n in enumerate(graph.values[v].shape) if n == size)


def regions(traced: Traced, value: int, row: Row, rows: int) -> list[Region]:
    """The regions that rows of a value go through, one per stage of needed totals."""
    at, found, same = _stages(traced, value, row, rows)
    made, readers = producers(traced.graph), consumers(traced.graph)
    for own in found.values():
        _complete(traced, own, at, same, made, readers)
    return list(found.values())


def _stages(
    traced: Traced, value: int, row: Row, rows: int
) -> tuple[dict[int, Row | str], dict[int, Region], dict[int, int]]:
    """(rows of values, regions by stage, results of barriers → operands).

    Cheap totals, like the number of tokens, are computed before and start no new stage.
    """
    graph = traced.graph
    aside: set[int] = set()
    while True:
        at, found, same, _ = _passed_on(traced, value, row, rows, aside)
        more = _cheap_totals(graph, at, found)
        if not more:
            break
        aside |= more
    return at, found, same


def _passed_on(
    traced: Traced, value: int, row: Row, rows: int, aside: set[int]
) -> tuple[dict[int, Row | str], dict[int, Region], dict[int, int], list[int]]:
    """(rows of values, regions by stage, results of barriers → operands, ops that end rows); ``aside``: ops kept on
    whole values."""
    graph = traced.graph
    at: dict[int, Row | str] = {value: row}
    stage = [0] * len(graph.values)
    found: dict[int, Region] = {}
    same = Section()
    made = set[int]()
    ended: list[int] = []
    of_loops = Loops(traced)
    for op, equation in zip(graph.ops, traced.equations, strict=True):
        given = [row_at(at, a) for a in equation.operands]
        able = any(given) and not op.pinned and op.id not in aside and on_the_device(graph, equation)
        how = of_loops.passing(op.id, given, rows) if able else None
        # What does not pass rows on reads around barriers: behind them is what was before.
        reads = [same.root(v) if how is None else v for v in op.operands]
        level = max((stage[v] + (v in made and (how is None or at[v] in TOTALS.values())) for v in reads), default=0)
        for v in op.results:
            stage[v] = level
        if how is None:
            if any(given) and op.id not in aside:
                ended.append(op.id)
            continue
        own = found.setdefault(level, Region(seed=Seed(value, row.dim, rows, level)))
        own.members[op.id] = how
        for i, (v, gives) in enumerate(zip(equation.results, how.gives, strict=True)):
            a = equation.operands[i] if op.primitive == "optimization_barrier" else None
            before = same.root(a) if isinstance(a, int) else -1
            within = before in made and stage[before] == level
            if gives is not None or (within and at[before] == SAME):
                at[v] = gives or SAME
            if before >= 0 and not within:
                same.same[v] = before
            elif v in at:
                made.add(v)
    return at, found, same.same, ended


def _cheap_totals(graph: Graph, at: Mapping[int, Row | str], found: Mapping[int, Region]) -> set[int]:
    """Members that make awaited totals, multiply nothing and make little."""
    if len(found) < 2:
        return set()
    members = {o for own in found.values() for o in own.members}
    made = producers(graph)
    enough = CHEAP * sum(graph.values[v].nbytes for o in members for v in graph.ops[o].results)
    awaited = [False] * len(graph.values)
    for op in reversed(graph.ops):
        if op.id in members or any(awaited[r] for r in op.results):
            for v in op.operands:
                awaited[v] = True
    cheap: set[int] = set()
    for v, how in at.items():
        if isinstance(how, str) and awaited[v]:
            own = _ancestors(graph, made, v, members)
            if sum(graph.values[r].nbytes for o in own for r in graph.ops[o].results) <= enough and not any(
                graph.ops[o].flops or graph.ops[o].bodies for o in own
            ):
                cheap |= own
    return cheap


def _ancestors(graph: Graph, made: Sequence[int], v: int, members: set[int]) -> set[int]:
    """The members that ``v`` depends on."""
    found, todo = set[int](), [v]
    while todo:
        o = made[todo.pop()]
        if o in members and o not in found and graph.ops[o].primitive != "optimization_barrier":
            found.add(o)
            todo += graph.ops[o].operands
    return found


def _complete(
    traced: Traced,
    own: Region,
    at: Mapping[int, Row | str],
    same: Mapping[int, int],
    made: Sequence[int],
    readers: Sequence[Sequence[int]],
) -> None:
    """Fill in what a region reads from outside, and what outside reads of it."""
    graph = traced.graph
    _leave_moves(graph, own, at)
    own.same = {v: a for v, a in same.items() if made[v] in own.members}
    inner: set[int] = {v for o in own.members for v in graph.ops[o].results if v in at}
    outer = Outer(traced, own.seed.rows, inner, made, own.members, readers)
    for o, how in own.members.items():
        for a, need in zip(traced.equations[o].operands, how.needs, strict=True):
            if not isinstance(a, int) or (need is not None and a in inner):
                continue
            if need is None and a not in inner:
                own.whole[a] = None
            elif need is not None:
                own.reads(outer.rows_of(a, need))
    _from_less(graph, own, made)
    outside = {v for op in graph.ops if op.id not in own.members for v in op.operands} | set(graph.outputs)
    own.leaving = {v: at[v] for v in sorted(inner & outside - own.same.keys())}
    totals = {v for v in inner if isinstance(at[v], str)}
    leaving = sum(graph.values[v].nbytes for v, how in own.leaving.items() if isinstance(how, Row))
    own.within = frozenset(inner - outside - totals)
    own.inside = sum(graph.values[v].nbytes for v in own.within) - leaving


def _leave_moves(graph: Graph, own: Region, at: Mapping[int, Row | str]) -> None:
    """Remove final ops that only move leading rows: outside they cost one kernel, and leading rows are stacked as they
    are."""
    read = [0] * len(graph.values)
    for o in own.members:
        for v in graph.ops[o].operands:
            read[v] += 1
    for o in sorted(own.members, reverse=True):
        op = graph.ops[o]
        moves = op.primitive in MOVES | VIEWS and len(op.operands) == len(own.members[o].needs) == 1
        first = moves and isinstance(rows := at.get(op.operands[0]), Row) and rows.dim == 0
        last = first and not any(read[v] for v in op.results)
        if last and graph.values[op.operands[0]].nbytes <= sum(graph.values[v].nbytes for v in op.results):
            del own.members[o]
            read[op.operands[0]] -= 1


def _from_less(graph: Graph, own: Region, made: Sequence[int]) -> None:
    """Have each part make whole values anew if their sources have fewer bytes, beside values read anyway; masks have
    none.

    A transposed value that only products read is transposed by each part: outside it would be a copy.
    """
    for v in [v for v in own.whole if _is_turned(graph, own, made, v)]:
        del own.whole[v]
        own.whole[graph.ops[made[v]].operands[0]] = None
    fused = FREE | REDUCTIONS
    stored = {v for o in own.members for v in graph.ops[o].operands if graph.ops[o].primitive not in fused}
    for v in sorted(own.whole, key=lambda v: -made[v]):
        ops, left, needed = set[int](), [v], set[int]()
        while left:
            u = left.pop()
            op = graph.ops[made[u]] if made[u] >= 0 else None
            if op is None or op.primitive not in FREE or op.pinned:
                needed.add(u)
            elif op.id not in ops:
                ops.add(op.id)
                left += op.operands
        more = sum(graph.values[u].nbytes for u in needed - own.whole.keys())
        if ops and more < graph.values[v].nbytes and not (needed and v in stored):
            del own.whole[v]
            own.whole.update(dict.fromkeys(sorted(needed)))


def _is_turned(graph: Graph, own: Region, made: Sequence[int], v: int) -> bool:
    """Whether a value is a transposition that only products of the region read."""
    if made[v] < 0 or graph.ops[made[v]].primitive != "transpose" or not graph.ops[made[v]].operands:
        return False
    return all(graph.ops[o].primitive == PRODUCT for o in own.members if v in graph.ops[o].operands)
