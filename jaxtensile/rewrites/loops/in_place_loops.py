"""Loops that write what they stack over slices that they have read.

A scan that reads a stack in slices and makes another one of the same type holds both: the cache of a decoder whose
layers are scanned, the inputs of a recurrent layer and their gradients. If nobody reads the first stack afterwards, the
loop can carry it, and replace each slice once it is read. XLA does so in place. It holds a donated stack twice
otherwise, once as an argument and once as a result.

Invariant: every iteration sees the same slices and makes the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import lax

from jaxtensile import _compat
from jaxtensile.ir.ir import Graph, consumers, is_fixed
from jaxtensile.passes.lifetimes.liveness import taken_over
from jaxtensile.program.trace import Traced, exchanged
from jaxtensile.rewrites.rewrite import Rewrite, Start, changed, large
from jaxtensile.units import Bytes

Site: TypeAlias = tuple[int, tuple[tuple[int, int], ...]]
"""A scan, and (position among the stacks it reads, among those it makes) of each pair."""


def find_pairs(graph: Graph, smallest: Bytes) -> Iterator[Site]:
    """Scans with stacks of ``smallest`` bytes that could be written over others."""
    read_by, final, given = consumers(graph), set(graph.outputs), set(graph.inputs)
    takes = {r: old for r, old in zip(graph.outputs, taken_over(graph), strict=True) if old >= 0}
    for op in graph.ops:
        if op.primitive != "scan" or op.trip_count < 2 or is_fixed(op) or not op.slots:
            continue
        pairs: list[tuple[int, int]] = []
        for y, r in enumerate(op.results[op.carried[1] :]):
            made = graph.values[r]
            if made.nbytes < smallest or made.space == "host" or not (read_by[r] or r in final):
                continue
            for x, v in enumerate(op.slots[sum(op.carried) :]):
                if v < 0 or op.slots.count(v) > 1 or x in {x for x, _ in pairs}:
                    continue
                alike = (graph.values[v].shape, graph.values[v].dtype) == (made.shape, made.dtype)
                last = read_by[v][-1:] == [op.id] and v not in final and graph.values[v].space != "host"
                # An argument is only written over if it is given away for this result.
                if alike and last and (takes.get(r) == v if v in given else r not in takes):
                    pairs.append((x, y))
                    break
        if pairs:
            yield op.id, tuple(pairs)


def _of_one_type(traced: Traced, site: Site) -> Site:
    """The pairs of a scan whose types agree in all: a weak one, say, becomes no other one."""
    o, pairs = site
    eqn = traced.equations[o].eqn
    consts, carries = _compat.scan_split(eqn.params)
    reads, makes = eqn.invars[consts + carries :], eqn.outvars[carries:]
    alike = (reads[x].aval == makes[y].aval and not makes[y].aval.weak_type for x, y in pairs)
    return o, tuple(pair for pair, same in zip(pairs, alike, strict=True) if same)


def in_place(traced: Traced, closed: Any, sites: tuple[Site, ...]) -> Any:
    """The closed jaxpr of ``traced`` (of ``closed``) with the pairs of ``sites`` carried by their loops."""
    return exchanged(traced, closed, {o: partial(_loop, traced, o, dict(pairs)) for o, pairs in sites})


def _loop(traced: Traced, o: int, pairs: Mapping[int, int], read: Callable[[Any], Any]) -> list[Any]:
    equation = traced.equations[o]
    params = equation.eqn.params
    consts, carries = _compat.scan_split(params)
    given = [read(a) for a in equation.operands]
    xs = given[consts + carries :]
    body = _compat.jaxpr_as_fun(params["jaxpr"])

    def step(carry: Any, x: Any) -> Any:
        carry, stacks = carry
        others, i = x
        slices = {
            k: lax.dynamic_index_in_dim(stack, i, 0, keepdims=False, allow_negative_indices=False)
            for k, stack in stacks.items()
        }
        left = iter(others)
        out = body(*given[:consts], *carry, *(slices[k] if k in slices else next(left) for k in range(len(xs))))
        made = out[carries:]
        stacks = {
            k: lax.dynamic_update_index_in_dim(stack, made[pairs[k]], i, 0, allow_negative_indices=False)
            for k, stack in stacks.items()
        }
        return (out[:carries], stacks), [y for k, y in enumerate(made) if k not in pairs.values()]

    with _compat.equation_context(equation.eqn, equation.stack):
        start = given[consts : consts + carries], {k: xs[k] for k in pairs}
        along = [x for k, x in enumerate(xs) if k not in pairs], jnp.arange(params["length"], dtype=jnp.int32)
        (carry, stacks), ys = lax.scan(
            step, start, along, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
        )
    stacked, left = {y: stacks[x] for x, y in pairs.items()}, iter(ys)
    return [*carry, *(stacked[y] if y in stacked else next(left) for y in range(len(ys) + len(stacked)))]


def _find(start: Start) -> list[tuple[Site, ...]]:
    if not any(op.primitive == "scan" for op in start.base.graph.ops):
        return []
    found = (_of_one_type(start.base, site) for site in find_pairs(start.base.graph, large(start.base)))
    sites = tuple(site for site in found if site[1])
    return [sites] if sites else []


def _describe(sites: tuple[Site, ...]) -> str:
    count = sum(len(pairs) for _, pairs in sites)
    return f"{count} stacks are written over what their loops read"


IN_PLACE_LOOPS = Rewrite(
    key="in_place_loops",
    title="loops that write over what they read",
    form=tuple[Site, ...],
    find=_find,
    apply=lambda start, sites: changed(start, lambda: in_place(start.base, start.request.jaxpr, sites)),
    describe=_describe,
    in_bodies=True,
    same_work=True,
)
