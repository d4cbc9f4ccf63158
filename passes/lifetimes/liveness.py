"""Bytes live at each step, after fusion, with aliases and donation.

Invariant: a buffer is live in ``[start, stop)`` steps. The profile at step ``i`` is what op ``i`` needs while it runs:
everything live before it, plus its results.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from jaxtensile.ir.ir import Graph, Op, Same
from jaxtensile.ir.plan import TO_HOST, MemoryUse
from jaxtensile.passes.lifetimes.donated import copied_back
from jaxtensile.passes.lifetimes.fusion import RECENT, Fuser, Kernels, fuse
from jaxtensile.passes.lifetimes.in_place import in_outputs, share
from jaxtensile.passes.lifetimes.loop_bodies import Loop, freed, loop_of, results_kept, slices_kept
from jaxtensile.switches import on, switched_off
from jaxtensile.units import Bytes


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
    memory analysis. ``onto[b]``: the result that XLA may write over ``b``, which dies in that kernel; ``b`` and the
    result are counted both. ``copied``: results that are copied over the argument whose memory they get
    (``donated``)."""

    ranges: tuple[LiveRange, ...]
    profile: list[Bytes]
    kernels: Kernels
    owner: list[int]
    argument: Bytes
    output: Bytes
    alias: Bytes
    onto: dict[int, int]
    copied: frozenset[int] = frozenset()

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


def _live_ranges(graph: Graph, kernels: Kernels, together: bool, loop: Loop | None = None) -> Liveness:
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
        late = product in kernels.added and any(home[v] < 0 for v in ops[start[r]].operands)
        # A scatter into what is not stored waits for it.
        start[r], start[product] = start[r] if late else start[product], -2
    for product in kernels.joined.values():
        start[product] = -2
    free = freed(graph, kernels, loop, stop) if loop is not None else dict[int, int]()
    kept = _results_apart(graph, kernels, loop, start, stop)
    for v, end in kept.items():
        stop[v] = end
    for v, i in slices_kept(graph, kernels, loop).items() if loop is not None else ():
        start[v] = i
    final = in_outputs(graph, kernels, start, stop, kept)
    merged, onto = share(graph, kernels, start, stop, final)
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
        if start[v] >= free.get(onto.get(v, -1), n):
            del free[onto[v]]  # one lies where the next carry will
            continue
        ranges.append(LiveRange(v, start[v], stop[v], nbytes))
        delta[start[v]] += nbytes
        delta[stop[v]] -= nbytes
    for op in ops:
        if (op.bodies or op.workspace) and kernels.is_root[op.id]:
            inner = inner_temp(op, kernels.by)
            delta[op.id] += inner
            delta[op.id + 1] -= inner
    profile = list(accumulate(delta))[:n]
    argument = sum(values[v].nbytes for v in graph.inputs if values[v].space != "host")
    output = sum(values[v].nbytes for v in graph.outputs if values[v].space != "host")
    copied = frozenset(kept) if loop is None else frozenset[int]()
    return Liveness(tuple(ranges), profile, kernels, merged, argument, output, alias, onto, copied)


def _results_apart(
    graph: Graph, kernels: Kernels, loop: Loop | None, start: list[int], stop: list[int]
) -> dict[int, int]:
    """Results of a program or a loop's body with memory of their own, each with the op after which it is free."""
    if loop is not None:
        return results_kept(graph, kernels, loop, start, stop)
    late = graph.donated and on("donated_late")
    return copied_back(graph, kernels, taken_over(graph), start, stop) if late else {}


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


def inner_temp(op: Op, by: Fuser) -> Bytes:
    """Bytes that ``op`` needs beyond its operands and results: in the largest of its bodies, or as its workspace."""
    of = (_body_temp(Same(b), loop_of(op, b), by, switched_off()) for b in op.bodies)
    return max(of, default=op.workspace)


@lru_cache(maxsize=256)
def _body_temp(body: Same[Graph], loop: Loop | None, by: Fuser, off: frozenset[str]) -> Bytes:
    """Bytes that a loop body or branch needs beyond its arguments and results. Cached: schedules share bodies."""
    return _live_ranges(body.it, fuse(body.it, by=by), False, loop).temp


def taken_over(graph: Graph) -> list[int]:
    """For each output the donated device input of the same shape and type whose memory it gets, as jit pairs them; -1
    if none."""
    pool: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for v in reversed(graph.inputs):  # jit drops the unused ones
        if v in graph.donated and graph.values[v].space != "host":
            pool.setdefault((graph.values[v].shape, graph.values[v].dtype), []).append(v)
    out: list[int] = []
    for v in graph.outputs:
        left = pool.get((graph.values[v].shape, graph.values[v].dtype))
        out.append(left.pop() if left and graph.values[v].space != "host" else -1)
    return out


def _donate(graph: Graph) -> Bytes:
    """Device bytes of outputs that reuse a donated input."""
    return sum(graph.values[v].nbytes for v, old in zip(graph.outputs, taken_over(graph), strict=True) if old >= 0)
