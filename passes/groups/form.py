"""The groups between given cut points: which ops each runs, what it takes and hands on, and what it may write over.

What XLA does not store is not stored between groups either: what a kernel computes inside itself is computed in each
group that reads it, from the same buffers. A barrier's result in a later group is the barrier's operand.

Invariant: each value is computed from the same values as in the program, so it is the same up to how XLA rounds inside
of kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxtensile.ir.groups import Group
from jaxtensile.ir.ir import Graph, OpId, ValueId, of_nothing, producers
from jaxtensile.passes.lifetimes.fusion import Kernels

_BARRIER = "optimization_barrier"


def made_again(graph: Graph, kernels: Kernels) -> list[bool]:
    """For each op whether every group that reads its results computes them for itself."""
    outputs, free = frozenset(graph.outputs), of_nothing(graph)
    return [
        not (op.pinned or op.bodies or op.flops or op.primitive == _BARRIER or not op.results)
        and outputs.isdisjoint(op.results)
        and (op.id in free or all(kernels.home[v] != v for v in op.results))
        for op in graph.ops
    ]


def form(graph: Graph, again: Sequence[bool], cuts: Sequence[int]) -> tuple[Group, ...]:
    """The groups of ``graph`` cut before each op in ``cuts`` (ascending). ``again``: as from ``made_again``."""
    return _Former(graph, again, cuts).groups()


@dataclass(slots=True)
class _Draft:
    """A group in the making, as ``Group``."""

    ops: list[int] = field(default_factory=list[int])
    inputs: dict[int, None] = field(default_factory=dict[int, None])
    outputs: set[int] = field(default_factory=set[int])
    same: dict[int, int] = field(default_factory=dict[int, int])


class _Former:
    def __init__(self, graph: Graph, again: Sequence[bool], cuts: Sequence[int]) -> None:
        self.graph, self.again, self.ends = graph, again, (0, *cuts, len(graph.ops))
        self.made = producers(graph)
        self.behind: dict[int, int] = {
            r: v
            for op in graph.ops
            if op.primitive == _BARRIER
            for v, r in zip(op.slots or op.operands, op.results, strict=True)
            if v >= 0
        }
        """By result of a barrier, the operand that it equals."""

    def groups(self) -> tuple[Group, ...]:
        """The last is made first: a group makes what later ones read."""
        results = set[int](self.graph.outputs)
        handed = {v for v in results if self.made[v] < 0}
        """Inputs that are results: the last group hands them on."""
        wanted, drafts = results - handed, list[_Draft]()
        for k in reversed(range(len(self.ends) - 1)):
            draft = self._draft(k, wanted)
            if not drafts:
                draft.inputs.update(dict.fromkeys(v for v in self.graph.inputs if v in handed))
                draft.outputs |= handed
            wanted = (wanted - draft.outputs) | {v for v in draft.inputs if self.made[v] >= 0}
            drafts.append(draft)
        drafts.reverse()
        last = {v: k for k, draft in enumerate(drafts) for v in draft.inputs}
        free = self.graph.donated.union(v for v, o in enumerate(self.made) if o >= 0) - (results - handed)
        return tuple(
            self._group(draft, {v for v in draft.inputs if last[v] == k and v in free})
            for k, draft in enumerate(drafts)
        )

    def _draft(self, k: int, wanted: set[int]) -> _Draft:
        """The group that makes those of ``wanted`` that its ops make."""
        draft, (start, stop) = _Draft(), self.ends[k : k + 2]
        draft.outputs = {v for v in wanted if start <= self.made[v] < stop}
        needed = set(draft.outputs)
        left: list[int] = []
        for o in reversed(range(start, stop)):
            op = self.graph.ops[o]
            if op.pinned or not needed.isdisjoint(op.results):
                draft.ops.append(o)
                needed.update(op.operands)
                left += (v for v in op.operands if self.made[v] < start)
        draft.ops += self._from_outside(draft, left)
        draft.ops.sort()
        return draft

    def _from_outside(self, draft: _Draft, left: list[int]) -> list[int]:
        """Ops of earlier groups to run again for the values ``left``; the others become inputs, or names of such."""
        ops, seen = dict[int, None](), set[int]()
        while left:
            v = left.pop()
            if v in seen:
                continue
            seen.add(v)
            if v in self.behind:
                draft.same[v] = self.behind[v]
                left.append(self.behind[v])
            elif (o := self.made[v]) >= 0 and self.again[o]:
                ops[o] = None
                left += self.graph.ops[o].operands
            else:
                draft.inputs[v] = None
        return list(ops)

    def _group(self, draft: _Draft, free: set[int]) -> Group:
        """The group with its donations. ``free``: inputs that nobody reads later.

        An output may take over an input of its type that was read before, or by the op that makes the output: else XLA
        would copy it.
        """
        values = self.graph.values
        read, born = dict[int, int](), dict.fromkeys(draft.inputs, -1)
        for o in draft.ops:
            born.update(dict.fromkeys(self.graph.ops[o].results, o))
        # An input behind a view, or inside of a kernel, is read when that kernel runs.
        for o in reversed(draft.ops):
            op = self.graph.ops[o]
            until = max((read.get(r, o) for r in op.results), default=o) if self.again[o] else o
            for v in op.operands:
                while v in draft.same:
                    v = draft.same[v]
                read[v] = max(read.get(v, -1), until)
        pool = defaultdict[tuple[tuple[int, ...], str], list[int]](list)
        for v in sorted(free, key=lambda v: (-read.get(v, -1), v)):
            pool[values[v].shape, values[v].dtype].append(v)
        pairs: list[tuple[int, int]] = []
        for v in sorted(draft.outputs, key=lambda v: (born[v], v)):
            kind = pool[values[v].shape, values[v].dtype]
            if v in kind:  # it is handed on as it is
                kind.remove(v)
                pairs.append((v, v))
            elif kind and born[v] >= 0 and read.get(kind[-1], -1) <= born[v]:
                pairs.append((kind.pop(), v))
        given, taken = [v for v, _ in pairs], [v for _, v in pairs]
        return Group(
            ops=tuple(map(OpId, draft.ops)),
            inputs=tuple(map(ValueId, (*given, *(v for v in draft.inputs if v not in set(given))))),
            outputs=tuple(map(ValueId, (*taken, *sorted(draft.outputs.difference(taken))))),
            donated=len(pairs),
            same=tuple((ValueId(r), ValueId(v)) for r, v in sorted(draft.same.items())),
        )


__all__ = ["form", "made_again"]
