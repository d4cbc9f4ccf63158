"""Optimal cuts of a chain, by a dynamic programme over the bytes kept so far.

A chain is a forward part of *links*, cut by single values, the ends: only the end is read across an end. A link keeps
everything, only its end, or nothing. Links dropped in a row are recomputed together when the descent reaches the last
one, and stay until read, so that

    bytes kept before the row + bytes of the row up to the link that is read  <=  room there.

Only the bytes kept before a row matter. So undominated labels (bytes kept, charge) at the ends are exact, without
resolution or price. As in Beaumont et al. 2019 (arXiv 1911.13214), with one recomputation per op and one boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtensile.errors import SolverError
from jaxtensile.ir.plan import Plan, Problem, Program
from jaxtensile.passes.lifetimes.liveness import Liveness, live_ranges
from jaxtensile.passes.recompute.clones import with_clones
from jaxtensile.passes.recompute.nodes import Nodes, others
from jaxtensile.passes.recompute.stages import boundary_at, cut_points, find_boundary
from jaxtensile.passes.solvers.answer import answer
from jaxtensile.units import Bytes, Seconds

_REPAIRS = 24
"""Most schedules laid out, each with less room by the last overshoot. A guess."""
_FEW, _LINK = 8, 0.75
"""A forward part of so many values or more is no chain if one link has over this share of them. A guess."""


@dataclass(frozen=True, slots=True)
class Link:
    """Part of a chain. ``inner``: bytes that the descent reads beside the ``end``. ``charge``: of recomputing the link.
    ``saved``: part of it saved by keeping the end. ``room``: bytes available when the descent reads it. ``forward``:
    bytes available to links before the previous one while it is first computed."""

    inner: Bytes
    end: Bytes
    charge: Seconds
    saved: Seconds
    room: Bytes
    forward: Bytes


WHOLE, END, NOTHING = "whole", "end", "nothing"


@dataclass(frozen=True, slots=True)
class _Label:
    nbytes: Bytes
    charge: Seconds
    choice: tuple[str, ...]
    latest: Bytes = 0
    """Part of ``nbytes`` that the last link keeps."""


def cheapest(links: Sequence[Link], room: Bytes, top: Bytes) -> tuple[str, ...] | None:
    """What each link keeps at the least charge; None if nothing fits.

    ``room``: bytes at the boundary. ``top``: bytes between the last link and the boundary, for all but the last.
    """
    n = len(links)
    at: list[list[_Label]] = [[] for _ in range(n + 1)]
    at[0] = [_Label(0, 0.0, ())]
    done: list[_Label] = []
    for j in range(n + 1):
        at[j] = _undominated(at[j])
        for label in at[j]:
            again, cost, dropped = label.nbytes, label.charge, 0
            for k in range(j, n):
                link = links[k]
                if label.nbytes - (label.latest if k == j else 0) > link.forward:
                    break
                # Link k ends the row, kept whole or with its inner part computed again with the row …
                for choice, kept, here, more in (
                    (WHOLE, link.inner + link.end, label.nbytes, 0.0),
                    (END, link.end, again, link.charge - link.saved),
                ):
                    held = label.nbytes + kept
                    if here + link.inner + link.end <= link.room and held <= room:
                        row = (NOTHING,) * dropped
                        at[k + 1].append(_Label(held, cost + more, (*label.choice, *row, choice), kept))
                # … or is dropped too.
                again, cost, dropped = again + link.inner + link.end, cost + link.charge, dropped + 1
                if again > link.room:
                    break
            else:
                if label.nbytes - (0 if dropped else label.latest) > top:
                    continue
                done.append(_Label(label.nbytes, cost, (*label.choice, *(NOTHING,) * dropped)))
    best = min(done, key=lambda a: (a.charge, a.nbytes), default=None)
    return None if best is None else best.choice


def _undominated(labels: list[_Label]) -> list[_Label]:
    """Labels that no label with equal ``latest`` beats in bytes and charge."""
    out: dict[Bytes, list[_Label]] = {}
    for label in sorted(labels, key=lambda a: (a.nbytes, a.charge)):
        known = out.setdefault(label.latest, [])
        if not known or label.charge < known[-1].charge:
            known.append(label)
    return [label for known in out.values() for label in known]


def solve(problem: Problem) -> Plan:
    """The cheapest cuts; the program as it is if no residual waits."""
    return prepare(problem)(problem.budget)


def prepare(problem: Problem) -> Callable[[Bytes], Plan]:
    """``solve`` for several budgets of one problem. ``SolverError`` if the program is no chain."""
    program = Program.unchanged(problem.graph)
    live = live_ranges(problem.graph)

    def at(budget: Bytes) -> Plan:
        best = _best(problem, program, live, budget) if live.device > budget else (program, live)
        return answer(problem, *best, "chain")

    return at


def _best(problem: Problem, program: Program, live: Liveness, budget: Bytes) -> tuple[Program, Liveness]:
    """The first schedule that fits, each next with less room; else the lowest."""
    graph = problem.graph
    room = budget - (live.device - live.temp)
    step = find_boundary(graph, live, max(room, 0))
    boundary = None if step is None else boundary_at(graph, step)
    if boundary is None or not boundary.needed:
        return program, live
    nodes = Nodes(graph, live, boundary, fused=False)
    groups = _groups(nodes)
    values, longest = len(nodes.maker), max(map(len, groups), default=0)
    if values >= _FEW and longest > _LINK * values:
        raise SolverError(
            f"no single value cuts {longest} of the {values} values that wait for the backward pass, so this "
            "program is no chain: use solver='auto', or 'exact' for a small one"
        )
    beside = others(nodes, live)
    cuts, _ = cut_points(graph, boundary)
    lowest = program, live
    for _ in range(_REPAIRS):
        links = _links(problem, nodes, groups, beside, room)
        first = max(min(nodes.first.values(), default=0), boundary.step + 1)
        made_by = max(nodes.maker.values(), default=0)
        between = max(beside[made_by + 1 : boundary.step], default=0)
        choice = cheapest(links, room - max(beside[boundary.step : first]), room - between)
        # With room for nothing, the least that can be kept: every end, or nothing at all.
        choices = [choice] if choice is not None else [(END,) * len(links), (NOTHING,) * len(links)]
        for made in choices:
            kept = _kept(nodes, groups, made)
            planned = with_clones(program, live.kernels, boundary, kept, cuts)
            after = live_ranges(planned.graph)
            if after.device < lowest[1].device:
                lowest = planned, after
            if after.device <= budget:
                return planned, after
            room -= max(after.device - budget, 1)
        if choice is None:
            break
    return lowest


def _groups(nodes: Nodes) -> list[list[int]]:
    """Nodes by link, the end last."""
    order = sorted(nodes.maker, key=lambda v: (nodes.maker[v], v))
    place = {v: i for i, v in enumerate(order)}
    reach = [max((place[u] for o in nodes.readers[v] for u in nodes.makes[o]), default=-1) for v in order]
    groups: list[list[int]] = []
    here: list[int] = []
    furthest = -1
    for i, v in enumerate(order):
        here.append(v)
        if furthest <= i:  # nothing before v is read behind it
            groups.append(here)
            here = []
        furthest = max(furthest, reach[i])
    return [*groups, here] if here else groups


def _links(problem: Problem, nodes: Nodes, groups: list[list[int]], beside: list[int], room: Bytes) -> list[Link]:
    size, charge = problem.graph.values, problem.costs.charge
    links: list[Link] = []
    passed = 0
    for group in groups:
        ops = dict.fromkeys(nodes.maker[v] for v in group)
        read = [v for v in group if v in nodes.first]
        low = min((nodes.first[v] for v in read), default=nodes.step)
        end, start = group[-1], passed
        passed = max(ops) + 1
        links.append(
            Link(
                inner=sum(size[v].nbytes for v in read if v != end),
                end=size[end].nbytes,
                charge=sum(charge[o] for o in ops),
                saved=charge[nodes.maker[end]] if nodes.single(nodes.maker[end]) else 0.0,
                room=room - beside[low],  # later steps are left to the repair
                forward=room - max(beside[start:passed], default=0),
            )
        )
    return links


def _kept(nodes: Nodes, groups: list[list[int]], choice: Sequence[str]) -> frozenset[int]:
    kept = {*nodes.small, *nodes.pinned}
    for group, what in zip(groups, choice, strict=True):
        if what != NOTHING:
            kept.add(group[-1])
        if what == WHOLE:
            kept.update(v for v in group if v in nodes.first)
    return frozenset(kept)
