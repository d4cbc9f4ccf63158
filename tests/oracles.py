"""Slow, obvious answers that fast code is compared with."""

from itertools import chain, combinations, permutations

from jaxtensile.ir.plan import Program
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.recompute.clones import recomputed_ops, with_clones
from jaxtensile.passes.recompute.stages import boundary_at, cut_points, find_boundary


class Meanings:
    """What values are: terms ``(op of the original, operands, position)``, numbered so that equal
    terms have equal numbers. Barriers pass their operands on."""

    def __init__(self):
        self.table = {}

    def number(self, term):
        return self.table.setdefault(term, len(self.table))

    def of(self, graph, origin=None):
        """For each value its number; None if it never gets one."""
        known = [None] * len(graph.values)
        for v in graph.inputs:
            known[v] = self.number(("input", v))
        for op in graph.ops:
            o = op.id if origin is None else origin[op.id]
            operands = tuple(known[v] for v in op.operands)
            assert None not in operands, f"op {op.id} reads a value that is not there"
            for k, r in enumerate(op.results):
                passes_on = op.primitive == "optimization_barrier"
                known[r] = operands[k] if passes_on else self.number((o, operands, k))
        return known


def same_outputs(graph, program):
    """Whether both compute the same terms for all outputs."""
    meanings = Meanings()
    before, after = meanings.of(graph), meanings.of(program.graph, program.origin)
    return [before[v] for v in graph.outputs] == [after[v] for v in program.graph.outputs]


def subsets(items):
    items = list(items)
    return chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))


def best_kept_set(graph, boundary, seconds, price, stuck=frozenset()):
    """The least ``price * bytes kept + seconds recomputed`` over all kept sets that are possible:
    nothing pinned runs again, and what is ``stuck`` is kept or not needed."""
    made = {r: o for o in boundary.cone for r in graph.ops[o].results}
    candidates = [v for v in made if v not in boundary.always]
    costs = []
    for kept in map(frozenset, subsets(candidates)):
        again = recomputed_by_hand(graph, boundary, made, kept)
        wanted = {u for o in again for u in graph.ops[o].operands if u in made and u not in boundary.always}
        wanted |= set(boundary.needed)
        if any(graph.ops[o].pinned for o in again) or (wanted & stuck) - kept:
            continue
        costs.append(cost_of(graph, seconds, price, kept, again))
    return min(costs)


def cost_of(graph, seconds, price, kept, again):
    return price * sum(graph.values[v].nbytes for v in kept) + sum(seconds[o] for o in again)


def recomputed_by_hand(graph, boundary, made, kept):
    """Least set of ops that makes everything needed from what is kept: grown until it stops growing."""
    again = set()
    while True:
        wanted = {u for o in again for u in graph.ops[o].operands} | set(boundary.needed)
        grown = {made[u] for u in wanted if u in made and u not in kept and u not in boundary.always}
        if grown <= again:
            return again
        again |= grown


def completed(graph, boundary, kept):
    """``kept`` and the results of effects that the rest would need to run again."""
    while effects := {o for o in recomputed_ops(graph, boundary, kept) if graph.ops[o].pinned}:
        kept = kept | {r for o in effects for r in graph.ops[o].results}
    return kept


def one_boundary(graph, budget):
    """The boundary that solvers of one boundary work on for ``budget``, None where there is none."""
    live = live_ranges(graph)
    step = find_boundary(graph, live, max(budget - (live.device - live.temp), 0))
    return None if step is None else boundary_at(graph, step)


def every_schedule(graph, boundary, charge, always=frozenset(), candidates=None):
    """Charge and device bytes of the schedule of every kept set there is, or of ``always`` and any ``candidates``."""
    program, kernels = Program.unchanged(graph), live_ranges(graph).kernels
    cuts, _ = cut_points(graph, boundary)
    if candidates is None:
        candidates = [r for o in boundary.cone for r in graph.ops[o].results if r not in boundary.always]
    found = []
    for kept in (always.union(some) for some in subsets(candidates)):
        again = recomputed_ops(graph, boundary, kept)
        if not any(graph.ops[o].pinned for o in again):
            device = live_ranges(with_clones(program, kernels, boundary, kept, cuts).graph).device
            found.append((sum(charge[o] for o in again), device))
    return found


def least_charge(schedules, budget):
    """The least charge among ``every_schedule`` that fits; None when none does."""
    return min((charge for charge, device in schedules if device <= budget), default=None)


def overlaps(buffers, offsets):
    """Pairs of buffers that are live at once and share bytes, by looking at every pair."""
    placed = list(enumerate(zip(buffers, offsets, strict=True)))
    return [
        (i, j)
        for (i, (a, p)), (j, (b, q)) in combinations(placed, 2)
        if max(a.lower, b.lower) < min(a.upper, b.upper) and max(p, q) < min(p + a.size, q + b.size)
    ]


def lowest_height(buffers):
    """The least height of any packing: in one of the orders, each on what lies below it and lives at once with it."""
    best = None
    for order in permutations(range(len(buffers))):
        offsets = {}
        for k in order:
            b = buffers[k]
            below = (
                offsets[j] + buffers[j].size
                for j in offsets
                if buffers[j].lower < b.upper and b.lower < buffers[j].upper
            )
            offsets[k] = -(-max(below, default=0) // b.alignment) * b.alignment
        height = max((offsets[k] + buffers[k].size for k in order), default=0)
        best = height if best is None else min(best, height)
    return best


def fits(buffers, height):
    """Whether there is a packing of so many bytes: every offset of every buffer, the largest ones first."""
    buffers = sorted(buffers, key=lambda b: -b.size * (b.upper - b.lower))

    def rest(offsets):
        if len(offsets) == len(buffers):
            return True
        b = buffers[len(offsets)]
        beside = [
            (o, o + a.size) for a, o in zip(buffers, offsets, strict=False) if a.lower < b.upper and b.lower < a.upper
        ]
        return any(
            all(end <= at or at + b.size <= o for o, end in beside) and rest((*offsets, at))
            for at in range(0, height - b.size + 1, b.alignment)
        )

    return rest(())
