"""Which buffers a kernel writes its results over.

Invariant: a buffer that is written over is read by nobody else from then on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

from jaxtensile.ir.ir import Graph, Op, ValueId, producers
from jaxtensile.passes.lifetimes.fusion import (
    DECOMPOSITIONS,
    ELEMENTWISE,
    IN_PLACE,
    PRODUCT,
    PRODUCTS,
    REDUCTIONS,
    ROW,
    VIEWS,
    Kernels,
    is_fusible,
)
from jaxtensile.switches import on

COMPLEX = frozenset({"complex64", "complex128"})
WRITING_OVER = IN_PLACE | DECOMPOSITIONS | {"scan"}


def written_over(home: list[int], op: Op) -> list[int]:
    """Buffers that one of ``WRITING_OVER`` writes its results over, once nobody else reads them."""
    if op.primitive != "scan":
        return [home[v] for v in op.operands[:1] if home[v] >= 0]  # none where all it reads are literals
    consts, carries = op.carried
    # What is stacked is written while all that the loop reads is there.
    return [home[v] for v in op.slots[consts : consts + carries] if v >= 0 and home[v] >= 0]


def in_outputs(
    graph: Graph, kernels: Kernels, start: list[int], stop: list[int], apart: Collection[int] = ()
) -> set[int]:
    """Buffers of outputs but those ``apart``, and those that updates and loops write outputs over: allocated from the
    start."""
    home, values = kernels.home, graph.values
    found = {home[v] for v in graph.outputs if home[v] >= 0 and home[v] not in apart}
    for op in reversed(graph.ops):
        if op.primitive in WRITING_OVER and kernels.is_root[op.id] and not found.isdisjoint(op.results):
            pool = written_over(home, op)
            free = [b for b in pool if start[b] >= 0 and stop[b] == op.id + 1 and b not in found]
            for r in op.results[: op.carried[1]] if op.primitive == "scan" else op.results:
                b = next((b for b in free if values[b].nbytes == values[r].nbytes), None)
                if b is not None and on("outputs_written_over"):
                    free.remove(b)
                    if r in found:
                        found.add(b)
    return found


def share(
    graph: Graph, kernels: Kernels, start: list[int], stop: list[int], final: set[int]
) -> tuple[list[int], dict[int, int]]:
    """Let buffers take over the memory of an operand that dies in the same kernel; return each value's owner, and
    ``Liveness.onto``.

    For in-place updates, loop carries, and elementwise kernels whose result is as large as a dying operand. Extends the
    first owner's lifetime. Exceptions:

    * XLA:GPU writes no elementwise kernel over parts of tuples (``_in_tuples``), nor over complex numbers, whose
      parts it reads by themselves.
    * Kernels that add a product begin earlier.
    * Nothing takes over the memory of outputs (``final``), and they that of nothing: theirs is there from the start.
      What dies as an output is written may lie in it (``onto``).
    * An operand read at other places than the result is written stays (``read_elsewhere``).
    """
    values, home = graph.values, kernels.home
    owner = list(range(len(values)))
    last = list(stop)
    onto: dict[int, int] = {}
    in_tuples = _in_tuples(graph, kernels)
    made: list[int] = []
    rows, gpu = _rows_apart(graph, kernels, final), kernels.by.twice
    later = final.difference(home[v] for v in graph.outputs)
    for op in graph.ops:
        i = op.id
        if not kernels.is_root[i]:
            continue
        if op.primitive in WRITING_OVER:
            pool = written_over(home, op) if on("updates_in_place") else []
        elif op.bodies:
            pool = list(kernels.reads[i])
        elif is_fusible(op.primitive) and on("elementwise_in_place"):
            what = kernels.added.get(op.results[0])
            if what is None:
                pool = [b for b in kernels.reads[i] if b not in in_tuples]
                if i in rows and on("rows_apart"):
                    pool = [b for b in pool if b not in rows[i]]
                if (product := kernels.joined.get(op.results[0], -1)) >= 0:
                    made = made or producers(graph)
                    pool = [b for b in pool if b not in kernels.reads[made[product]]]
                if gpu and values[op.results[0]].dtype in COMPLEX and on("complex_apart"):
                    pool = []
            else:  # over what a product is added to it is written before; a scatter is into the rest of the sum
                pool = [home[v] for v in op.operands if home[v] >= 0] if what in kernels.added else []
        else:
            continue
        free = [b for b in pool if start[b] >= 0 and stop[b] == i + 1 and b not in final]
        alike = is_fusible(op.primitive) and any(values[b].nbytes == values[op.results[0]].nbytes for b in free)
        if alike and on("moved_apart"):
            made = made or producers(graph)
            elsewhere = read_elsewhere(graph, kernels, made, op)
            free = [b for b in free if b not in elsewhere]
        for r in op.results[: op.carried[1]] if op.primitive == "scan" else op.results:
            if home[r] != r or r in later:
                continue
            for b in free:
                if values[b].nbytes != values[r].nbytes:
                    continue
                if r in final:
                    onto.setdefault(owner[b], r)
                else:
                    owner[r] = owner[b]
                    free.remove(b)
                    root = owner[r]
                    last[root] = max(last[root], stop[r])
                    break
    for v in range(len(values)):
        if owner[v] == v:
            stop[v] = last[v]
    return owner, onto


def is_in_a_tuple(op: Op, kernels: Kernels) -> bool:
    """Whether ``op``'s result is part of a tuple, with the workspace of a call of cuDNN or cuBLAS.

    A kernel writes only over what another instruction made as a whole (``IsUserOf`` in
    ``xla/service/heap_simulator/heap_simulator.cc``). What loops, branches and sorts of several arrays make is written
    over (H200).
    """
    by = kernels.by
    return by.calls and op.primitive in PRODUCTS and not (op.primitive == PRODUCT and by.products)


def _in_tuples(graph: Graph, kernels: Kernels) -> set[int]:
    """Buffers that are parts of tuples: what barriers hold, and what libraries make."""
    barriers, calls = on("barriers_apart"), on("tuples_apart")
    found = set[int]()
    for op in graph.ops:
        if barriers and op.primitive == "optimization_barrier":
            found.update(kernels.home[v] for v in op.operands)
        elif calls and is_in_a_tuple(op, kernels):
            found.update(op.results)
    return found


def _rows_apart(graph: Graph, kernels: Kernels, final: set[int]) -> dict[int, set[int]]:
    """By op, the buffers that it reads along with sums or maxima of their rows that nobody else reads. XLA:GPU computes
    these totals and the op in one kernel, which does not write over those buffers (softmax, normalization; H200, rows
    of 1,024 to 32,768)."""
    values, home, reads = graph.values, kernels.home, kernels.reads
    totals = dict[int, tuple[int, ...]]()
    made, read_by, found = dict[int, int](), dict[int, set[int]](), dict[int, set[int]]()
    for op in graph.ops if kernels.by.twice and kernels.by.products else ():
        if not kernels.is_root[op.id]:
            continue
        of = [b for b in reads[op.id] if b in totals] if totals else []
        if not of and op.primitive not in REDUCTIONS:
            continue
        r = op.results[0] if op.results else -1
        for b in of:
            read_by[b].add(op.id)
        source = values[op.operands[0]].shape if op.primitive in REDUCTIONS and op.operands else ()
        of_rows = len(source) > 1 and values[r].shape == source[:-1] and source[-1] <= ROW
        small = [b for b in of if values[b].nbytes >= values[r].nbytes]
        if home[r] == r and (of_rows or (small and (source or is_fusible(op.primitive)))):
            known = chain.from_iterable(totals[b] for b in small)
            totals[r], made[r], read_by[r] = tuple({*known, *(reads[op.id] if of_rows else ())}), op.id, set()
        elif of and is_fusible(op.primitive):
            found[op.id] = set(of)
    for i, of in found.items():
        inside = {i, *(made[b] for b in of)}
        alone = [b for b in of if b not in final and read_by[b] <= inside]
        found[i] = set(chain.from_iterable(totals[b] for b in alone))
    return found


def read_elsewhere(graph: Graph, kernels: Kernels, made: list[int], op: Op) -> set[int]:
    """Buffers of which ``op``'s kernel reads other places than it writes: through transposes, slices, sums. XLA:CPU
    takes a reshape inside a kernel for such a read; it reshapes products of an array of rows with a matrix."""
    ops, leaves, values = graph.ops, kernels.leaves, graph.values
    found, seen, left = set[int](), set[int](), list[tuple[Op, int]]()

    def follow(reader: Op) -> None:
        if reader.primitive == "transpose" and reader.operands:
            v = reader.operands[0]
            before = ops[made[v]] if made[v] >= 0 else reader
            back = before.primitive == "transpose" and before is not reader and not kernels.is_root[before.id]
            if back and values[before.operands[0]].shape == values[reader.results[0]].shape:
                left.append((before, before.operands[0]))  # both together are nothing to XLA
                return
        folded = reader.primitive == "transpose" and kernels.home[reader.results[0]] >= 0 and reader is not op
        if reader.primitive in ELEMENTWISE or reader.primitive in VIEWS or folded:
            left.extend((reader, v) for v in reader.operands)
        else:
            found.update(chain.from_iterable(leaves[v] for v in reader.operands))

    follow(op)
    while left:
        reader, v = left.pop()
        reshaped = reader.primitive in VIEWS and values[v].shape != values[reader.results[0]].shape
        if reshaped and not kernels.by.twice:
            found.update(leaves[v])
            continue
        if v in seen:
            continue
        seen.add(v)
        maker = ops[made[v]] if made[v] >= 0 else None
        if maker is not None and not kernels.is_root[maker.id]:
            follow(maker)
        elif maker is not None and maker.primitive == PRODUCT and not kernels.by.twice:
            ranks = {len(values[o].shape) for o in maker.operands}
            if len(ranks) > 1:
                found.add(v)
    return found


def read_late(
    graph: Graph, kernels: Kernels, maker: list[int], old: int, op: Op, result: int, start: int, stop: int
) -> bool:
    """Whether ``op`` cannot write ``result`` over ``old``, a carry or a donated argument that is read until ``stop``:
    it or what needs its result reads ``old``. Readers that do not need the result come first. ``start``: when the
    result is begun."""
    reads = kernels.reads
    if stop <= start:
        return False
    if result in kernels.added:  # written over what the product is added to
        factors = reads[maker[kernels.added[result]]]
        if old in factors or (old in reads[op.id] and old not in {kernels.home[v] for v in op.operands}):
            return True
    elif (
        old in reads[op.id]
        and not _is_updated(kernels, op, result, old)
        and (not is_fusible(op.primitive) or old in read_elsewhere(graph, kernels, maker, op))
    ):
        return True
    behind = set[int](op.results)
    for later in graph.ops[op.id + 1 : stop]:
        if kernels.is_root[later.id] and not behind.isdisjoint(reads[later.id]):
            if old in reads[later.id]:
                return True
            behind.update(later.results)
    return False


def _is_updated(kernels: Kernels, op: Op, result: int, old: int) -> bool:
    """Whether ``op`` writes ``result`` over ``old`` as it goes: an update in place, a loop into the carry that it
    began with, or, for all that is known, a branch."""
    home = kernels.home
    if op.primitive in IN_PLACE:
        return home[op.operands[0]] == old
    if op.primitive not in ("scan", "while"):
        return bool(op.bodies)
    given = [home[v] if v >= 0 else -1 for v in op.slots]
    consts, carries = op.carried if op.primitive == "scan" else (len(given) - len(op.results), len(op.results))
    k = op.results.index(ValueId(result))
    return k < carries and given[consts + k] == old and given.count(old) == 1


def read_beside(graph: Graph, kernels: Kernels, maker: list[int], old: int, op: Op) -> bool:
    """Whether a kernel reads ``old`` that ``op`` does not need. Elementwise ones are the same kernel."""
    needed = needed_by(kernels, maker, op.id)
    others = (o for o in graph.ops if kernels.is_root[o.id] and o.id not in needed and not is_fusible(o.primitive))
    return any(old in kernels.reads[o.id] for o in others)


def needed_by(kernels: Kernels, maker: Sequence[int], op: int) -> set[int]:
    """The kernels, by their ops, that ``op`` needs, and ``op``."""
    needed, left = set[int](), [op]
    while left:
        i = left.pop()
        if i not in needed:
            needed.add(i)
            left += [maker[b] for b in kernels.reads[i] if maker[b] >= 0]
    return needed
