"""Rewrite pairs of scans so that they do not stack what the backward body can recompute.

Invariant: both loops run the same iterations in order on the same values. The forward loop stacks something else, or
elsewhere; the backward loop recomputes the rest before its own equations.

XLA:GPU before its change 46308 (2026-07-27) assumes a host slice copied in the background to be at a place linear in
the iteration count. If the loop runs backwards, it reads the stack forwards, and gradients are silently wrong. An index
loaded from memory avoids that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxtensile import _compat
from jaxtensile.devices.profiles import DeviceProfile
from jaxtensile.ir.ir import Graph
from jaxtensile.ir.plan import Costs, Link, MemoryUse
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.offload.loops import LoopLadder, LoopPlan, repeated
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.program.trace import Equation, Traced, bind, retrace, trace_jaxpr
from jaxtensile.rewrites.rewrite import Start, traced_for
from jaxtensile.units import Seconds

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
RECOMPUTATION = "recomputation inside loops"
"""The name for users when it is left out."""


def loop_ladder(graph: Graph, device: DeviceProfile, link: Link | None) -> LoopLadder:
    """Ways to rewrite the loops of a program, by the cost of their bodies on ``device``."""

    def costs(body: Graph) -> Costs:
        return op_costs(body, device, body=True)

    return LoopLadder(graph, lambda body: costs(body).charge, link, lambda body: costs(body).seconds)


def again_of(graph: Graph, device: DeviceProfile) -> Callable[[LoopPlan], tuple[Seconds, Seconds]]:
    """A function from a loop plan to the charge and the seconds of its recomputation, over all iterations."""
    costs = cache(lambda forward: op_costs(repeated(graph.ops[forward]), device, body=True))

    def again(plan: LoopPlan) -> tuple[Seconds, Seconds]:
        body, trips = costs(plan.pair.forward), graph.ops[plan.pair.forward].trip_count
        return trips * sum(body.charge[o] for o in plan.again), trips * sum(body.seconds[o] for o in plan.again)

    return again


def fewest_stacks(start: Start) -> MemoryUse:
    """Memory use of the program if its loops stack as little as possible."""
    graph, device = start.base.graph, start.request.device
    again = again_of(graph, device)
    way = sorted(loop_ladder(graph, device, None).rungs, key=lambda way: sum(again(plan)[0] for plan in way))[-1]
    traced = traced_for(start.request, rewrite_loops(start.base, start.request.jaxpr, way)) if way else start.base
    return live_ranges(traced.graph).use()


class Evaluation:
    """A program run through JAX's tracers, with some equations changed.

    ``env``: values so far, and what changed equations pass on to others.
    """

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.env: dict[Any, Any] = dict(traced.consts)

    def of(self, args: Sequence[Any]) -> list[Any]:
        """The results of the whole program."""
        self.env.update(zip(self.traced.arguments, args, strict=True))
        self.run(range(len(self.traced.equations)))
        return [self.read(o) for o in self.traced.outputs]

    def run(self, numbers: Iterable[int]) -> None:
        for i in numbers:
            equation = self.traced.equations[i]
            self.env.update((v, r) for v, r in zip(equation.results, self.results(i), strict=True) if r is not None)

    def read(self, atom: Any) -> Any:
        return self.env[atom] if isinstance(atom, int) else atom.val

    def operands(self, i: int) -> list[Any]:
        """Operands of equation ``i``; None for a value no longer made."""
        atoms = self.traced.equations[i].operands
        return [self.read(a) if not isinstance(a, int) or a in self.env else None for a in atoms]

    def results(self, i: int) -> Sequence[Any]:
        """Results of equation ``i``; None for a value no longer made."""
        return bind(self.traced.equations[i], self.operands(i))


class Rewriting(Evaluation):
    """Evaluation with the loops of ``plans`` rewritten.

    ``load_index``: read host stacks at an index loaded from memory.
    """

    def __init__(self, traced: Traced, plans: Sequence[LoopPlan], load_index: bool = False) -> None:
        super().__init__(traced)
        self.load_index = load_index
        self.fronts = {p.pair.forward: [q for q in plans if q.pair.forward == p.pair.forward] for p in plans}
        self.backs = {p.pair.backward: [q for q in plans if q.pair.backward == p.pair.backward] for p in plans}

    def results(self, i: int) -> Sequence[Any]:
        if i not in self.fronts and i not in self.backs:
            return super().results(i)
        sources = [_Source(self.traced, plan, self.env, self.read) for plan in self.backs.get(i, ())]
        equation, plans = self.traced.equations[i], self.fronts.get(i, ())
        return _loop(equation, self.operands(i), plans, sources, self.env, self.load_index)


def rewrite_loops(traced: Traced, closed: Any, plans: Sequence[LoopPlan], *, load_index: bool = False) -> Any:
    """The closed jaxpr of ``traced`` (of ``closed``) with the loops of ``plans`` rewritten."""
    return retrace(lambda *flat: Rewriting(traced, plans, load_index).of(flat), closed)


def _loop(
    equation: Equation,
    operands: Sequence[Any],
    plans: Sequence[LoopPlan],
    sources: Sequence[_Source],
    extra: dict[Any, Any],
    load_index: bool,
) -> list[Any]:
    """Run a scan that is the forward one of ``plans``, the backward one of ``sources``, or both.

    Dropped stacks are None in the result; new ones go to ``extra``. Residuals no longer stacked are recomputed.
    """
    params = equation.eqn.params
    consts, carries = _compat.scan_split(params)
    body = trace_jaxpr(params["jaxpr"])
    missing = {x for s in sources for x in s.position.values()}
    xs = [x for k, x in enumerate(operands[consts + carries :]) if k not in missing]

    dropped = {y for p in plans for y in p.dropped}
    at_hand = {v for k, v in enumerate(body.arguments[consts + carries :]) if k not in missing}
    at_hand |= {o for y, o in enumerate(body.outputs[carries:]) if isinstance(o, int) and y not in dropped}
    stacked = sorted({v for p in plans for v in _reads(body, p, consts, carries)} - at_hand)
    hosted = {v for p in plans for v in p.hosted}

    # Stacks on the host that are read at a loaded index are constants of the loop.
    there = [{v for v, s in source.stacks.items() if _compat.in_host_memory(s)} for source in sources]
    apart = [own if load_index else set[int]() for own in there]
    loaded = [{v: s for v, s in source.stacks.items() if v in own} for source, own in zip(sources, apart, strict=True)]
    given = [{v: s for v, s in src.stacks.items() if v not in own} for src, own in zip(sources, apart, strict=True)]

    def step(carry: Any, x: Any) -> Any:
        others, slices, index = x
        recomputed: dict[int, Any] = {}
        for source, values, own in zip(sources, slices, loaded, strict=True):
            found = {v: lax.dynamic_index_in_dim(s, index, keepdims=False) for v, s in own.items()}
            recomputed.update(source.recompute(values | found))
        left = iter(others)
        count = len(body.arguments) - consts - carries
        full = [recomputed[k] if k in missing else next(left) for k in range(count)]
        work = Evaluation(body)
        outs, env = work.of([*operands[:consts], *carry, *full]), work.env
        ys = [y for k, y in enumerate(outs[carries:]) if k not in dropped]
        # Copies last, so that nothing of the iteration waits for them.
        return outs[:carries], (ys, [jax.device_put(env[v], HOST) if v in hosted else env[v] for v in stacked])

    with _compat.equation_context(equation.eqn, equation.stack):
        order = lax.optimization_barrier(np.arange(params["length"], dtype=np.int32)) if any(loaded) else None
        start = operands[consts : consts + carries]
        # Unrolled, slices would be put together on the host, by its processor or on the device after all.
        unroll = 1 if hosted or any(there) else params["unroll"]
        carry, (ys, new) = lax.scan(
            step, start, (xs, given, order), length=params["length"], reverse=params["reverse"], unroll=unroll
        )
    for plan in plans:
        extra.update(((plan.pair.forward, v), stack) for v, stack in zip(stacked, new, strict=True))
    left = iter(ys)
    count = len(body.outputs) - carries
    return [*carry, *(None if k in dropped else next(left) for k in range(count))]


def _reads(body: Traced, plan: LoopPlan, consts: int, carries: int) -> set[int]:
    """Values of one iteration of ``body`` from which the backward scan of ``plan`` recomputes the rest."""
    made = {r for o in plan.again for r in body.equations[o].results}
    reads = [a for o in plan.again for a in body.equations[o].operands]
    reads += [body.outputs[carries + y] for y in plan.dropped]
    constants = {*body.arguments[:consts], *body.consts}
    return {a for a in reads if isinstance(a, int)} - made - constants


class _Source:
    """Where one backward scan gets the values of one forward body."""

    def __init__(self, traced: Traced, plan: LoopPlan, extra: dict[Any, Any], read: Any) -> None:
        equation = traced.equations[plan.pair.forward]
        params = equation.eqn.params
        consts, carries = _compat.scan_split(params)
        self.body = trace_jaxpr(params["jaxpr"])
        self.again = plan.again
        outs = self.body.outputs[carries:]
        wanted = {a for o in plan.again for a in self.body.equations[o].operands if isinstance(a, int)}
        wanted |= {outs[y] for y in plan.dropped if isinstance(outs[y], int)}
        given = zip(self.body.arguments[:consts], equation.operands, strict=False)
        self.constants = {v: read(a) for v, a in given if v in wanted} | self.body.consts
        links = dict(plan.pair.links)
        self.position = {y: links[y] for y in plan.dropped}
        self.outs = outs
        # New stacks, slices, and stacks that stay.
        number = plan.pair.forward
        slices = dict(zip(self.body.arguments[consts + carries :], equation.operands[consts + carries :], strict=True))
        staying = {o: k for k, o in enumerate(outs) if isinstance(o, int) and k not in self.position}
        self.stacks: dict[int, Any] = {}
        for v in sorted(_reads(self.body, plan, consts, carries)):
            if (number, v) in extra:
                self.stacks[v] = extra[number, v]
            elif v in slices:
                self.stacks[v] = read(slices[v])
            else:
                self.stacks[v] = read(equation.results[carries + staying[v]])

    def recompute(self, values: dict[int, Any]) -> dict[int, Any]:
        """Backward xs position → value of this iteration."""
        here = {v: jax.device_put(x, DEVICE) if _compat.in_host_memory(x) else x for v, x in values.items()}
        env = {**self.constants, **here}
        for o in self.again:
            equation = self.body.equations[o]
            env.update(zip(equation.results, bind(equation, [_read(env, a) for a in equation.operands]), strict=True))
        return {x: env[self.outs[y]] for y, x in self.position.items()}


def _read(env: dict[int, Any], atom: Any) -> Any:
    return env[atom] if isinstance(atom, int) else atom.val
