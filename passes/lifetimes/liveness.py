"""Bytes live at each step, after fusion, with aliases and donation.

Invariant: a buffer is live in ``[start, stop)`` steps. The profile at step ``i`` is what op ``i`` needs while it runs:
everything live before it, plus its results.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain

from jaxtensile.ir.ir import Graph, Op, Same
from jaxtensile.ir.plan import TO_HOST, MemoryUse
from jaxtensile.passes.lifetimes.fusion import (
    DECOMPOSITIONS,
    IN_PLACE,
    RECENT,
    REDUCTIONS,
    ROW,
    Fuser,
    Kernels,
    fuse,
    is_fusible,
)
from jaxtensile.switches import on, switched_off
from jaxtensile.units import Bytes

COMPLEX = frozenset({"complex64", "complex128"})


@dataclass(frozen=True, slots=True)
class LiveRange:
    """Buffer ``value`` is allocated during ``[start, stop)``."""

    value: int
    start: int
    stop: int
    nbytes: Bytes


@dataclass(frozen=True, slots=True)
class Liveness:
    """Buffers of one run. ``profile[i]``: temporary bytes while op ``i`` runs, without arguments and outputs.
    ``owner[b]``: the buffer whose memory ``b`` takes over, or ``b``. ``argument``, ``output``, ``alias``: as in XLA's
    memory analysis."""

    ranges: tuple[LiveRange, ...]
    profile: list[Bytes]
    kernels: Kernels
    owner: list[int]
    argument: Bytes
    output: Bytes
    alias: Bytes

    @property
    def temp(self) -> Bytes:
        """Peak of the profile."""
        return max(self.profile, default=0)

    @property
    def device(self) -> Bytes:
        """Bytes the program occupies: argument + output + temp - alias."""
        return self.argument + self.output + self.temp - self.alias

    def at_peak(self) -> tuple[int, list[LiveRange], Bytes]:
        """The op at the peak, the buffers live there, and bytes inside the op's bodies; ``(-1, [], 0)`` without
        temporaries."""
        if not self.temp:
            return -1, [], 0
        peak = max(range(len(self.profile)), key=self.profile.__getitem__)
        held = [r for r in self.ranges if r.start <= peak < r.stop]
        return peak, held, self.profile[peak] - sum(r.nbytes for r in held)

    def use(self, host: Bytes = 0) -> MemoryUse:
        """The prediction of XLA's memory analysis. ``host``: bytes that wait there."""
        return MemoryUse(argument=self.argument, output=self.output, temp=self.temp, alias=self.alias, host=host)


def live_ranges(graph: Graph, kernels: Kernels | None = None, *, together: bool = False) -> Liveness:
    """Buffers and their lifetimes when the ops run in schedule order. ``together``: the program is compiled as written,
    so loops do not each make what they stack into (``rewrite``)."""
    if kernels is None and not together:
        return _known(Same(graph), switched_off())
    return _live_ranges(graph, kernels or fuse(graph), together)


@lru_cache(maxsize=RECENT)
def _known(same: Same[Graph], off: frozenset[str]) -> Liveness:
    return _live_ranges(same.it, fuse(same.it), False)


def _live_ranges(graph: Graph, kernels: Kernels, together: bool) -> Liveness:
    values, ops = graph.values, graph.ops
    home = kernels.home
    n = len(ops)
    start = [-2] * len(values)  # -2: no buffer; -1: input
    stop = [0] * len(values)
    for v in graph.inputs:
        start[v] = -1
    for op in ops:
        i = op.id
        if not kernels.is_root[i]:
            continue
        for r in op.results:
            if home[r] == r:
                start[r], stop[r] = i, i + 1
        for b in kernels.reads[i]:
            stop[b] = max(stop[b], i + 1)
    _copies_take_time(graph, kernels, stop)
    for r, product in kernels.added.items():  # what it is added up to is written when the product is
        start[r], start[product] = start[product], -2
    final = _in_outputs(graph, kernels, start, stop)
    merged = _share(graph, kernels, start, stop, final)
    if together:
        _stacks_begin_together(graph, start)
    alias = _donate(graph)
    fixed = final.difference(graph.inputs)
    ranges: list[LiveRange] = []
    delta = [0] * (n + 1)
    for v in range(len(values)):
        if start[v] < 0 or home[v] != v or v in fixed or merged[v] != v:
            continue
        nbytes = values[v].nbytes
        if nbytes == 0 or values[v].space == "host":
            continue
        ranges.append(LiveRange(v, start[v], stop[v], nbytes))
        delta[start[v]] += nbytes
        delta[stop[v]] -= nbytes
    for op in ops:
        if (op.bodies or op.workspace) and kernels.is_root[op.id]:
            inner = max((_body_temp(Same(b), kernels.by, switched_off()) for b in op.bodies), default=op.workspace)
            delta[op.id] += inner
            delta[op.id + 1] -= inner
    profile = list(accumulate(delta))[:n]
    argument = sum(values[v].nbytes for v in graph.inputs if values[v].space != "host")
    output = sum(values[v].nbytes for v in graph.outputs if values[v].space != "host")
    return Liveness(tuple(ranges), profile, kernels, merged, argument, output, alias)


_WRITING_OVER = IN_PLACE | DECOMPOSITIONS | {"scan"}


def _written_over(home: list[int], op: Op) -> list[int]:
    """Buffers that one of ``_WRITING_OVER`` writes its results over, once nobody else reads them."""
    if op.primitive != "scan":
        return [home[v] for v in op.operands[:1] if home[v] >= 0]  # none where all it reads are literals
    consts, carries = op.carried
    # What is stacked is written while all that the loop reads is there.
    return [home[v] for v in op.slots[consts : consts + carries] if v >= 0 and home[v] >= 0]


def _in_outputs(graph: Graph, kernels: Kernels, start: list[int], stop: list[int]) -> set[int]:
    """Buffers of outputs, and those that updates and loops write outputs over: allocated from the start."""
    home, values = kernels.home, graph.values
    found = {home[v] for v in graph.outputs if home[v] >= 0}
    for op in reversed(graph.ops):
        if op.primitive in _WRITING_OVER and kernels.is_root[op.id] and not found.isdisjoint(op.results):
            pool = _written_over(home, op)
            free = [b for b in pool if start[b] >= 0 and stop[b] == op.id + 1 and b not in found]
            for r in op.results[: op.carried[1]] if op.primitive == "scan" else op.results:
                b = next((b for b in free if values[b].nbytes == values[r].nbytes), None)
                if b is not None and on("outputs_written_over"):
                    free.remove(b)
                    if r in found:
                        found.add(b)
    return found


def _copies_take_time(graph: Graph, kernels: Kernels, stop: list[int]) -> None:
    """Keep a buffer copied to the host until the first op that asks for the copy."""
    copied = {op.results[0]: kernels.reads[op.id] for op in graph.ops if op.primitive == TO_HOST}
    if not copied or not on("copies_take_time"):
        return
    for op in graph.ops:
        for v in op.operands:
            for b in copied.pop(v, ()):
                stop[b] = max(stop[b], op.id + 1)


def _stacks_begin_together(graph: Graph, start: list[int]) -> None:
    """Start all stacks of a type at the first loop.

    XLA:GPU makes the zeros into which loops stack once per type, and all stacks of the type in one kernel. If another
    op wants zeros of the type, each loop copies them instead.
    """
    values, first = graph.values, dict[tuple[tuple[int, ...], str], int]()
    loops = [op for op in graph.ops if op.primitive == "scan"]
    if len(loops) < 2 or not on("stacks_together"):
        return
    zeros: set[int] = set()
    for op in graph.ops:
        # Of literals alone; and a product with what was a bool becomes a choice between the other factor and zero.
        made = op.primitive in ("broadcast_in_dim", "convert_element_type")
        if made and all(v in zeros or values[v].dtype == "bool" for v in op.operands):
            zeros.update(op.results)
    chosen = {
        (tuple(sorted(values[r].shape)), values[r].dtype)  # in any order: XLA computes what is transposed as it is read
        for op in graph.ops
        if op.primitive in ("select_n", "mul") and not zeros.isdisjoint(op.operands)
        for r in op.results
    }
    for op in loops:
        for v in op.results[op.carried[1] :]:
            kind = values[v].shape, values[v].dtype
            if (tuple(sorted(kind[0])), kind[1]) not in chosen and start[v] >= 0:
                start[v] = first.setdefault(kind, start[v])


@lru_cache(maxsize=256)
def _body_temp(body: Same[Graph], by: Fuser, off: frozenset[str]) -> Bytes:
    """Bytes that a loop body or branch needs beyond its arguments and results. Cached: schedules share bodies."""
    return live_ranges(body.it, fuse(body.it, by=by)).temp


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


def _share(graph: Graph, kernels: Kernels, start: list[int], stop: list[int], final: set[int]) -> list[int]:
    """Let buffers take over the memory of an operand that dies in the same kernel; return each value's owner.

    For in-place updates, loop carries, and elementwise kernels whose result is as large as a dying operand. Extends the
    first owner's lifetime. Exceptions:

    * XLA:GPU writes no elementwise kernel over operands from behind a barrier, nor over complex numbers, whose parts it
      reads by themselves.
    * Kernels that add a product begin earlier.
    * Nothing takes over the memory of outputs (``final``). Buffers that outputs are written over later have their own.
    """
    values, home = graph.values, kernels.home
    owner = list(range(len(values)))
    last = list(stop)
    behind: set[int] = set()
    rows, gpu = _rows_apart(graph, kernels, final), kernels.by.twice
    later = final.difference(home[v] for v in graph.outputs)
    for op in graph.ops:
        i = op.id
        if op.primitive == "optimization_barrier":
            behind.update(home[v] for v in op.operands if on("barriers_apart"))
            continue
        if not kernels.is_root[i]:
            continue
        if op.primitive in _WRITING_OVER:
            pool = _written_over(home, op) if on("updates_in_place") else []
        elif op.bodies:
            pool = list(kernels.reads[i])
        elif is_fusible(op.primitive) and on("elementwise_in_place"):
            what = kernels.added.get(op.results[0])
            if what is None:
                pool = [b for b in kernels.reads[i] if b not in behind]
                if i in rows and on("rows_apart"):
                    pool = [b for b in pool if b not in rows[i]]
                if gpu and values[op.results[0]].dtype in COMPLEX and on("complex_apart"):
                    pool = []
            else:  # over what a product is added to it is written before; a scatter is into the rest of the sum
                pool = [home[v] for v in op.operands] if what in kernels.added else []
        else:
            continue
        free = [b for b in pool if start[b] >= 0 and stop[b] == i + 1 and b not in final]
        for r in op.results[: op.carried[1]] if op.primitive == "scan" else op.results:
            if home[r] != r or r in later:
                continue
            for b in free:
                if values[b].nbytes == values[r].nbytes:
                    owner[r] = owner[b]
                    free.remove(b)
                    root = owner[r]
                    last[root] = max(last[root], stop[r])
                    break
    for v in range(len(values)):
        if owner[v] == v:
            stop[v] = last[v]
    return owner


def taken_over(graph: Graph) -> list[bool]:
    """For each output whether it reuses a donated device input of the same shape and type, as jit pairs them."""
    pool: dict[tuple[tuple[int, ...], str], int] = {}
    for v in graph.donated.intersection(graph.inputs):  # jit drops the unused ones
        if graph.values[v].space != "host":
            key = (graph.values[v].shape, graph.values[v].dtype)
            pool[key] = pool.get(key, 0) + 1
    out: list[bool] = []
    for v in graph.outputs:
        key = (graph.values[v].shape, graph.values[v].dtype)
        out.append(graph.values[v].space != "host" and pool.get(key, 0) > 0)
        if out[-1]:
            pool[key] -= 1
    return out


def _donate(graph: Graph) -> Bytes:
    """Device bytes of outputs that reuse a donated input."""
    return sum(graph.values[v].nbytes for v, taken in zip(graph.outputs, taken_over(graph), strict=True) if taken)
