"""Rewrite pairs of scans inside pairs of scans: the outer pair passes on what an inner forward scan stacks.

One iteration of the outer forward scan, followed by that of the backward scan, is a program with ordinary inner pairs.
It is rewritten as any other, at any depth, and then cut in two again. The outer pair stacks what the second half reads
of the first.

Invariant: both scans run the same iterations in order on the same values. What the second half reads of the first is a
stacked result, a constant, or a slice available to both scans.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jaxtensile import _compat
from jaxtensile.ir.ir import Graph, of_nothing
from jaxtensile.passes.offload.loops import InnerPlan, LoopLadder, LoopPlan, ScanPair, find_pairs
from jaxtensile.program.bodies import Key, bodies_of, with_bodies
from jaxtensile.program.trace import Traced, retrace, trace_in_turn, trace_jaxpr, trace_on
from jaxtensile.rewrites.loops.loops import RECOMPUTATION, Evaluation, Rewriting, loop_ladder
from jaxtensile.rewrites.rewrite import Rewrite, Start, changed, large
from jaxtensile.units import Bytes

RUNGS = 3
"""Most ways tried per iteration of a pair: the first, the last and one between. A guess."""


@dataclass(frozen=True)
class Halves:
    """The bodies of a forward and a backward scan, as closed jaxprs.

    ``given``: argument of the second body → number of the first body's result, or ``~k`` for the first body's argument
    k. ``fixed``: constants of the forward scan. ``carried``: forward arguments that change per iteration and are not
    slices; the second half gets them as results.
    """

    first: Any
    second: Any
    given: Mapping[int, int]
    fixed: range
    carried: range

    @classmethod
    def of(cls, traced: Traced, pair: ScanPair) -> Halves:
        front, back = (traced.equations[o].eqn.params for o in (pair.forward, pair.backward))
        consts, carries = _compat.scan_split(front)
        xs = sum(_compat.scan_split(back))
        given = {xs + x: carries + y for y, x in pair.links}
        return cls(front["jaxpr"], back["jaxpr"], given, range(consts), range(consts, consts + carries))

    def traced(self) -> tuple[Traced, int]:
        """Both halves as one program, and the number of equations in the first."""
        return trace_in_turn(self.first, self.second, self.given)

    def rewritten(self, plan: InnerPlan) -> Halves:
        halves = self
        if plan.inner:
            halves = halves._parted(lambda traced: _Inner(traced, plan.inner))
        if not plan.loops:
            return halves

        def rewriting(traced: Traced) -> Evaluation:
            _check(traced, [loop.pair for loop in plan.loops])
            return Rewriting(traced, plan.loops)

        return halves._parted(rewriting)

    def _parted(self, evaluation: Callable[[Traced], Evaluation]) -> Halves:
        """The halves of the program that ``evaluation`` makes of both."""
        traced, count = self.traced()
        avals = [[v.aval for v in _compat.open_jaxpr(half)[0].invars] for half in (self.first, self.second)]
        mine = traced.arguments[: len(avals[0])]
        others = traced.arguments[len(avals[0]) :]
        own = len(_compat.open_jaxpr(self.first)[0].outvars) - len({k for k in self.given.values() if k >= 0})
        anew = sorted(o for o in of_nothing(traced.graph) if o < count)
        last = range(count, len(traced.equations))
        read: dict[Any, Any] = {}
        """What the second half reads of the first → its type."""

        def whole(*flat: Any) -> list[Any]:
            work = evaluation(traced)
            work.env.update(zip(traced.arguments, flat, strict=True))
            work.run(range(count))
            again = {v for i in anew for v in traced.equations[i].results}
            known = work.env.keys() - traced.consts.keys() - again - set(others)
            work.env = seen = _Seen(work.env)
            work.run(last)
            out = [work.read(a) for a in traced.outputs[own:]]
            read.update((k, jax.typeof(seen.value(k))) for k in seen.keys_read if k in known)
            return out

        kept = [a for k, a in enumerate(avals[1]) if k not in self.given]
        trace_on(whole, [*avals[0], *kept])
        shared = {v: ~k for k, v in enumerate(mine) if k not in self.carried}
        handed = [k for k in read if k not in shared]

        def first(*flat: Any) -> list[Any]:
            work = evaluation(traced)
            work.env.update(zip(mine, flat, strict=True))
            work.run(range(count))
            return [*map(work.read, traced.outputs[:own]), *(work.env[k] for k in handed)]

        def second(*flat: Any) -> list[Any]:
            work = evaluation(traced)
            work.env.update(zip((*others, *read), flat, strict=True))
            work.run(anew)
            work.run(last)
            return [work.read(a) for a in traced.outputs[own:]]

        number = {k: own + i for i, k in enumerate(handed)} | shared
        given = {len(others) + i: number[k] for i, k in enumerate(read)}
        made = trace_on(first, avals[0]), trace_on(second, [*kept, *read.values()])
        return Halves(*made, given, self.fixed, self.carried)


def _check(traced: Traced, pairs: Sequence[ScanPair]) -> None:
    """Raise ``ValueError`` unless the program has these ``pairs``: a plan may come from a file."""
    if not set(find_pairs(traced.graph)).issuperset(pairs):
        raise ValueError("its loops are linked in another way")


class _Seen(dict[Any, Any]):
    """A dict that remembers the keys read."""

    def __init__(self, known: Mapping[Any, Any]) -> None:
        super().__init__(known)
        self.keys_read: dict[Any, None] = {}

    def __getitem__(self, key: Any) -> Any:
        self.keys_read[key] = None
        return super().__getitem__(key)

    def value(self, key: Any) -> Any:
        return super().__getitem__(key)


class _Inner(Evaluation):
    """Evaluation with the iterations of some pairs rewritten."""

    def __init__(self, traced: Traced, plans: Sequence[InnerPlan]) -> None:
        super().__init__(traced)
        _check(traced, [plan.pair for plan in plans])
        made = [(plan.pair, Halves.of(traced, plan.pair).rewritten(plan)) for plan in plans]
        self.fronts = {pair.forward: (pair, halves) for pair, halves in made}
        self.backs = {pair.backward: (pair, halves) for pair, halves in made}

    def results(self, i: int) -> Sequence[Any]:
        if i in self.fronts:
            return self._front(i, *self.fronts[i])
        return self._back(i, *self.backs[i]) if i in self.backs else super().results(i)

    def _front(self, i: int, pair: ScanPair, halves: Halves) -> list[Any]:
        found = self._scan(i, halves.first, self.operands(i), halves.fixed)
        linked = {len(halves.carried) + y for y, _ in pair.links}
        count = len(self.traced.equations[i].results)
        left = iter(found)
        out = [None if k in linked else next(left) for k in range(count)]
        self.env.update(((i, ~k), stack) for k, stack in enumerate(left, count - len(linked)))
        return out

    def _back(self, i: int, pair: ScanPair, halves: Halves) -> list[Any]:
        consts, carries = _compat.scan_split(self.traced.equations[i].eqn.params)
        linked = {consts + carries + x for _, x in pair.links}
        args = [a for k, a in enumerate(self.operands(i)) if k not in linked]
        fixed, front = set(range(consts)), self.traced.equations[pair.forward].operands
        for k, v in sorted(halves.given.items()):
            if v < 0 and ~v in halves.fixed:
                fixed.add(k)
            args.append(self.env[pair.forward, ~v] if v >= 0 else self.read(front[~v]))
        return self._scan(i, halves.second, args, fixed)

    def _scan(self, i: int, closed: Any, args: Sequence[Any], fixed: Container[int]) -> list[Any]:
        """Run scan ``i`` with another body; arguments neither ``fixed`` nor carried are sliced."""
        equation = self.traced.equations[i]
        params, body = equation.eqn.params, trace_jaxpr(closed)
        consts, carries = _compat.scan_split(params)
        carried = range(consts, consts + carries)
        sliced = [k for k in range(len(args)) if k not in fixed and k not in carried]

        def step(carry: Any, x: Any) -> Any:
            here = dict(enumerate(args)) | dict(zip(carried, carry, strict=True)) | dict(zip(sliced, x, strict=True))
            outs = Evaluation(body).of([here[k] for k in range(len(args))])
            return outs[:carries], outs[carries:]

        with _compat.equation_context(equation.eqn, equation.stack):
            start, xs = [args[k] for k in carried], [args[k] for k in sliced]
            length, reverse, unroll = (params[name] for name in ("length", "reverse", "unroll"))
            carry, ys = lax.scan(step, start, xs, length=length, reverse=reverse, unroll=unroll)
        return [*carry, *ys]


def rewrite_inner(traced: Traced, closed: Any, plans: Sequence[InnerPlan]) -> Any:
    """The closed jaxpr of ``traced`` (of ``closed``) with ``plans`` applied in the iterations of its loops."""
    return retrace(lambda *flat: _Inner(traced, plans).of(flat), closed)


def inner_ways(traced: Traced, ladder: Callable[[Graph], LoopLadder], least: Bytes) -> list[tuple[InnerPlan, ...]]:
    """Ways to rewrite loops inside the pairs that stack at least ``least`` bytes, from most to least stacked."""
    found = [[*_plans(traced, pair, ladder)] for pair in _apart(traced.graph, least)]
    found = [own for own in found if own]
    most = max(map(len, found), default=0)
    return [tuple(own[min(i, len(own) - 1)] for own in found) for i in range(most)]


def _apart(graph: Graph, least: Bytes) -> Iterator[ScanPair]:
    """Pairs that share no loop, the largest stacks first."""

    def stacks(pair: ScanPair) -> Bytes:
        op = graph.ops[pair.forward]
        return sum(graph.values[op.results[op.carried[1] + y]].nbytes for y, _ in pair.links)

    used = set[int]()
    for pair in sorted(find_pairs(graph), key=lambda p: (-stacks(p), p.forward)):
        if stacks(pair) >= least and used.isdisjoint((pair.forward, pair.backward)):
            used |= {pair.forward, pair.backward}
            yield pair


def _plans(traced: Traced, pair: ScanPair, ladder: Callable[[Graph], LoopLadder]) -> Iterator[InnerPlan]:
    """Plans for one pair, from most to least stacked."""
    halves = Halves.of(traced, pair)
    both, _ = halves.traced()
    if not find_pairs(both.graph):
        return
    for deeper in ((), *inner_ways(both, ladder, 0)):
        now = both
        if deeper:
            plan = InnerPlan(pair, deeper, ())
            yield plan
            now, _ = halves.rewritten(plan).traced()
        ways = ladder(now.graph).rungs[1:]
        chosen = dict.fromkeys(ways[round(i * (len(ways) - 1) / max(RUNGS - 1, 1))] for i in range(RUNGS) if ways)
        yield from (InnerPlan(pair, deeper, way) for way in chosen)


def without_loops_between(traced: Traced, closed: Any) -> Any:
    """The closed jaxpr of ``traced`` (of ``closed``) with certain inner loops merged into their reader.

    They carry nothing and make slices for one loop of the same body; each slice is made where it is read.
    """
    new: dict[Key, Callable[[Sequence[Any]], list[Any]]] = {}
    for op in traced.graph.ops:
        for k, body in enumerate(bodies_of(traced, op.id) if op.primitive == "scan" and not op.pinned else ()):
            inner = body.traced()
            plans = [*_between(inner.graph)]
            if plans:
                new[op.id, k] = lambda args, inner=inner, plans=plans: Rewriting(inner, plans).of(args)
    return with_bodies(traced, closed, new)


def _between(graph: Graph) -> Iterator[LoopPlan]:
    for pair in find_pairs(graph):
        front = graph.ops[pair.forward]
        if not front.carried[1] and len(pair.links) == len(front.results):
            again = tuple(op.id for op in front.bodies[0].ops)
            yield LoopPlan(pair, tuple(y for y, _ in pair.links), (), again)


def _find(start: Start) -> list[tuple[InnerPlan, ...]]:
    return inner_ways(start.base, lambda graph: loop_ladder(graph, start.request.device, None), large(start.base))


def _describe(plans: tuple[InnerPlan, ...]) -> str:
    count = sum(map(_pairs, plans))
    what = "a pair of loops" if count == 1 else f"{count} pairs of loops"
    return f"{what} in iterations of loops compute again what they would stack"


def _pairs(plan: InnerPlan) -> int:
    """How many pairs of loops change in the iterations of one."""
    return len(plan.loops) + sum(map(_pairs, plan.inner))


INNER = Rewrite(
    key="inner",
    title=RECOMPUTATION,
    form=tuple[InnerPlan, ...],
    find=_find,
    apply=lambda start, plans: changed(start, lambda: rewrite_inner(start.base, start.request.jaxpr, plans)),
    describe=_describe,
)
