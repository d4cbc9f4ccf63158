"""Ways to rewrite a program before it is planned: what each costs over the program as written, and which wins."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxtensile.devices.profiles import profile
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.passes.solvers import greedy
from jaxtensile.passes.solvers.by_name import named
from jaxtensile.passes.solvers.greedy import Searches, prepare
from jaxtensile.program.bodies import bodies_of
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.rewrites.split import EACH, SLICES
from jaxtensile.rewrites.undo import undo
from jaxtensile.search import variants
from jaxtensile.search.candidates import Candidates
from jaxtensile.search.cheapest import cheapest, without_host
from jaxtensile.search.loop_variants import with_loops
from jaxtensile.search.registry import ways as rewritten
from jaxtensile.search.request import Request

W, X = jnp.eye(16) / 2, jnp.ones((512, 16))
ROOM = 8 * X.nbytes
"""Bytes of one stack of the loop."""


@jax.checkpoint
def block(w, x):
    return jnp.tanh(jnp.tanh(x @ w) @ w)


def unrolled(w, x):
    for _ in range(6):
        x = block(w, x)
    return (x * x).sum()


def looped(w, x):
    return (lax.scan(lambda c, _: (jnp.tanh(jnp.sin(c @ w)), None), block(w, x), None, length=8)[0] ** 2).sum()


def job(loss, budget=1 << 30, **fields):
    jaxpr = jax.jit(jax.grad(loss)).trace(W, X).jaxpr
    known = {
        "name": "step",
        "jaxpr": jaxpr,
        "donated": (False, False),
        "args": (W, X),
        "kwargs": {},
        "budget": budget,
        "device": profile("cpu"),
        "shards": 1,
        "make": lambda evaluate, options: None,
        "options": {},
    }
    return Request(**(known | fields))


def both(work):
    """The program as written and without its checkpoints."""
    traced = trace_jaxpr(work.jaxpr, work.donated)
    costs, lighter = op_costs(traced.graph, work.device), undo(traced)
    assert lighter is not None
    return variants.written(work, traced, costs, prepare), variants.undone(work, lighter, costs, prepare)


def test_costs_are_over_the_program_as_written():
    written, undone = both(job(unrolled))
    assert written.charge == written.seconds == 0.0 and written.undone is None
    assert undone.charge < 0.0 and undone.seconds < 0.0 and undone.undone is not None
    assert undone.traced is undone.base is undone.undone.traced
    total = [sum(v.problem.costs.charge) - v.charge for v in (written, undone)]
    assert total[0] == pytest.approx(total[1])


def test_the_cheapest_that_fits_wins():
    written, undone = both(job(unrolled))
    order = [undone, written]
    most, least = (v.solve(1 << 40).predicted.device for v in order)
    assert most > least
    variant, plan = cheapest(order, most)
    assert variant is undone and plan.changes_nothing
    variant, plan = cheapest(order, (most + least) // 2)
    assert plan.predicted.device <= (most + least) // 2
    assert variant is undone and not plan.changes_nothing


def test_the_program_as_written_wins_where_nothing_else_fits():
    written, undone = both(job(unrolled))
    as_is = written.solve(1 << 40)
    stuck = replace(undone, prepare=lambda problem: lambda budget, **_: undone.solve(1 << 40))
    variant, plan = cheapest([stuck, written], as_is.predicted.device)
    assert variant is written and plan.changes_nothing


def test_loops_are_rewritten_on_top():
    _, undone = both(job(looped))
    found = with_loops(undone)
    assert found[0].traced is undone.traced and not found[0].loops and len(found) > 1
    assert [v.charge for v in found] == sorted(v.charge for v in found)
    for variant in found[1:]:
        assert variant.loops and variant.base is undone.traced and variant.undone is undone.undone
        assert variant.charge > undone.charge and variant.traced is not undone.traced


def test_between_two_rungs_the_steps_are_finer():
    written, _ = both(job(looped))
    found = with_loops(written)
    assert found[0].finer(ROOM) == []
    for rung in found[1:]:
        for step in rung.finer(ROOM):
            assert step.loops != rung.loops
            assert step.charge <= rung.charge and step.base is written.base
        assert rung.finer(ROOM) == rung.finer(ROOM), "rewritten and planned once"


def test_a_step_between_wins_where_it_fits():
    """A budget that the first rung misses by little is not met by dropping everything the second drops."""
    work = job(looped)
    written, _ = both(work)
    found = with_loops(written)
    steps = [s for rung in found for s in rung.finer(ROOM)]
    assert steps
    for step in steps:
        need = step.solve(0).predicted.device
        variant, plan = cheapest(found, need)
        assert plan.predicted.device <= need and variant.charge <= step.charge


def large_and_small(w, x):
    """Slices that can wait on the host, and many that are too small for it."""

    def body(carry, _):
        h, s = carry
        y = jnp.sin(jnp.tanh(h @ w)) * jnp.cos(h)
        t = s
        for i in range(8):
            t = jnp.sin(jnp.tanh(t * (i + 1) + y[:128].mean(0)[:1]))
        return (y + h, t), None

    (h, s), _ = lax.scan(body, (x, jnp.zeros(1 << 17)), None, length=64)
    return (h**2).sum() + (s**2).sum()


def test_of_stacks_on_the_host_the_cheapest_that_fits_is_found():
    """The dearest way keeps most: here its small slices need more than all that the cheapest one recomputes."""
    args = jnp.zeros((512, 512)), jnp.zeros((1024, 512))
    jaxpr = jax.jit(jax.grad(large_and_small)).trace(*args).jaxpr
    work = job(looped, jaxpr=jaxpr, args=args, device=profile("nvidia-h200"), host_budget=8 << 30)
    traced = trace_jaxpr(jaxpr)
    written = variants.written(work, traced, op_costs(traced.graph, work.device), prepare)
    found = sorted(with_loops(written), key=lambda v: v.charge)
    hosted = [v for v in found if v.aside]
    needs = [v.solve(0).predicted.device for v in hosted]
    assert needs[-1] > min(needs)
    for need in needs:
        variant, plan = cheapest(found, need)
        assert plan.predicted.device <= need
        assert variant.charge <= min(v.charge for v, n in zip(hosted, needs, strict=True) if n <= need)


def two_carries(w, x):
    def body(carry, k):
        a, b = carry
        return (jnp.sin(a * k) @ w, jnp.cos(b * k) @ w), None

    a, b = lax.scan(body, (x, x + 1), jnp.arange(1.0, 9.0))[0]
    return (a**2).sum() + (b**2).sum()


@pytest.mark.parametrize("slices", [0, 4, 8, 12, 16, 24, 32])
def test_of_what_loops_keep_as_much_is_on_the_host_as_there_is_room_for(slices):
    args = jnp.zeros((256, 256)), jnp.zeros((1024, 256))
    jaxpr = jax.jit(jax.grad(two_carries)).trace(*args).jaxpr
    room = slices * (1 << 20) + (1 << 19)
    work = job(looped, jaxpr=jaxpr, args=args, device=profile("nvidia-h200"), host_budget=room)
    traced = trace_jaxpr(jaxpr)
    found = with_loops(variants.written(work, traced, op_costs(traced.graph, work.device), prepare))
    asides = {v.aside for v in (*found, *(s for v in found for s in v.finer(ROOM)))}
    assert max(asides) == slices // 8 * (8 << 20), "whole stacks of eight slices of 1 MiB"


def test_without_the_host_nothing_waits_there():
    work = job(unrolled, device=profile("nvidia-h200"), host_budget=1 << 30)
    written, _ = both(work)
    (again,) = without_host([written])
    assert written.problem.link == work.link is not None and written.problem.host_budget == 1 << 30
    assert again.problem.link is None and again.problem.host_budget == 0 and again.charge == written.charge


def interactions(w, x):
    v = jnp.stack([x @ w, x, jnp.tanh(x)], axis=1)
    return (jnp.einsum("bid,bjd->bij", v, v) ** 3).sum()


def test_products_that_are_read_in_slices():
    work = job(interactions)
    traced = trace_jaxpr(work.jaxpr, work.donated)
    costs = op_costs(traced.graph, work.device)
    written = variants.written(work, traced, costs, prepare)
    nothing, _ = both(job(unrolled))
    assert not rewritten(nothing, SLICES)
    *pieces, sliced = rewritten(written, SLICES)
    assert [v.taken[0].sites[1] for v in (*pieces, sliced)] == [2, EACH] and len(sliced.taken[0].sites[0]) == 3
    # Only the gradient of one vector is asked for: the other slices are never made.
    assert 0 < sliced.traced.graph.flops < traced.graph.flops


def test_products_are_sliced_only_when_nothing_else_fits():
    work = job(interactions)
    traced = trace_jaxpr(work.jaxpr, work.donated)
    costs = op_costs(traced.graph, work.device)
    written = variants.written(work, traced, costs, prepare)
    chosen = Candidates(written)
    plain, least = (written.solve(budget).predicted.device for budget in (1 << 40, 0))
    assert chosen.cheapest(plain)[0] is chosen.variants[0] and len(chosen.variants) == 1
    variant, plan = chosen.cheapest(least - 1)
    assert variant.has(SLICES) and plan.predicted.device < least
    assert variant in chosen.variants and chosen.cheapest(least - 1)[0] is variant
    smallest = chosen.shallow()
    assert smallest[1].predicted.device <= least
    assert chosen.has_shallow(smallest[1].predicted.device), "one that fits is among those that are compared"
    assert not chosen.has_shallow(smallest[1].predicted.device // 2) and chosen.shallow() == smallest


def test_equal_bodies_of_several_variants_are_searched_once(monkeypatch):
    """A scan under a checkpoint with a policy at 40 % of its temporaries searched one body in eight variants: 20 s."""
    asked = []

    def searches(graph, charge):
        asked.append((graph, charge))
        return Searches(graph, charge)

    monkeypatch.setattr(greedy, "Searches", searches)
    written, _ = both(job(looped))
    written = replace(written, prepare=named("auto"))
    again = replace(written, base=trace_jaxpr(written.request.jaxpr, written.request.donated))
    bodies = 0
    for variant in (written, again):
        for op in variant.base.graph.ops:
            for body in bodies_of(variant.base, op.id):
                variants.body_alone(variant, body).solve(0)
                bodies += 1
    assert bodies == 4 and len(asked) == 4  # two bodies, by FLOPs and, as nothing fits, by seconds
