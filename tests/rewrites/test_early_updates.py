"""Updates behind their gradients: what moves and what stays, the same program, and fewer bytes once it is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given

import jaxtensile
from graphs import Builder, graphs
from jaxtensile.devices.profiles import profile
from jaxtensile.ir.ir import producers
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.order.early_updates import early_updates
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.passes.solvers.greedy import prepare
from jaxtensile.passes.verify.check import check
from jaxtensile.program.cse import rebuilt
from jaxtensile.program.emit import emit
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.rewrites.early_updates import EARLY_UPDATES
from jaxtensile.search.candidates import Candidates
from jaxtensile.search.recipe import recipe_of, replay
from jaxtensile.search.registry import ways
from jaxtensile.search.request import Request
from jaxtensile.search.variants import written

LAYERS, WIDTH, BATCH = 6, 1024, 2048


def backward(updates, layers=3, last=None, early=True):
    """Weights, products that make gradients one after the other, and then ``updates(b, weight, gradient)`` of each;
    ``early``: only the product before a gradient reads its weight."""
    b = Builder()
    weights = [b.input(256, 256) for _ in range(layers)]
    x = b.input(256, 256)
    gradients = []
    for w in weights:
        x = b.dot(x, w)
        gradients.append(b.dot(x, x))
    if not early:
        x = b.dot(x, weights[0])
    out = [updates(b, w, g) for w, g in zip(weights, gradients, strict=True)]
    return b.graph(*out, *([] if last is None else [last(b, x)]), donated=weights), gradients


def places(graph, order):
    """Each op's place by what it makes."""
    made = producers(graph)
    where = {o: k for k, o in enumerate(order)}
    return lambda v: where[made[v]]


def test_each_update_stands_behind_its_own_gradient():
    graph, gradients = backward(lambda b, w, g: b.op("sub", w, b.op("mul", g, g)))
    order = early_updates(graph)
    at = places(graph, order)
    for update, gradient, following in zip(graph.outputs, gradients, [*gradients[1:], None], strict=True):
        assert at(gradient) < at(update)
        assert following is None or at(update) < at(following)
    heavy = [o for o in order if graph.ops[o].flops]
    assert heavy == sorted(heavy), "products keep their order"


def test_it_needs_fewer_bytes_by_the_gradients_that_waited():
    def plain(b, w, g):
        return b.op("sub", w, g)

    def profile_of(graph, order):
        ops = [graph.ops[o] for o in order]
        last = {v: k for k, op in enumerate(ops) for v in op.operands}
        alive, most = 0, 0
        for k, op in enumerate(ops):
            alive += sum(graph.values[r].nbytes for r in op.results if r not in graph.outputs)
            most = max(most, alive)
            alive -= sum(graph.values[v].nbytes for v in {*op.operands} if last[v] == k and v not in graph.inputs)
        return most

    graph, gradients = backward(plain, layers=5)
    size = graph.values[gradients[0]].nbytes
    before, after = (profile_of(graph, o) for o in (range(len(graph.ops)), early_updates(graph)))
    assert (before, after) == (6 * size, 2 * size)


def test_what_all_updates_read_is_made_first_however_late_it_was_written():
    """As Adam's count of steps, which is written behind all moments."""
    scale = []

    def update(b, w, g):
        if not scale:
            scale.append(b.op("pow", b.input(1)))
        return b.op("sub", w, b.op("mul", g, b.op("broadcast_in_dim", scale[0], shape=(256, 256))))

    graph, gradients = backward(update)
    at = places(graph, early_updates(graph))
    assert at(scale[0]) == 0 and at(graph.outputs[0]) < at(gradients[1])


def test_a_norm_of_all_gradients_keeps_their_updates_where_they_are():
    b = Builder()
    weights, x = [b.input(256, 256) for _ in range(3)], b.input(256, 256)
    gradients = [b.dot(x, w) for w in weights]
    norms = [b.op("reduce_sum", g, shape=()) for g in gradients]
    norm = b.op("add", b.op("add", norms[0], norms[1]), norms[2])
    out = [b.op("sub", w, b.op("div", g, norm)) for w, g in zip(weights, gradients, strict=True)]
    order = early_updates(b.graph(*out, donated=weights), least=b.values[gradients[0]].nbytes)
    assert order is None


def test_a_norm_of_each_gradient_moves_with_its_update():
    """The update waits for the norm, and the norm for the square that the update's gradient has in common with it."""

    def update(b, w, g):
        turned = b.op("transpose", g)
        norm = b.op("reduce_sum", b.op("mul", turned, turned), shape=(1,))
        return b.op("sub", w, b.op("div", turned, b.op("broadcast_in_dim", norm, shape=(256, 256))))

    graph, gradients = backward(update)
    at = places(graph, early_updates(graph))
    assert at(gradients[0]) < at(graph.outputs[0]) < at(gradients[1]) < at(graph.outputs[1]) < at(gradients[2])


def test_an_update_waits_for_all_that_read_the_weight_it_takes_over():
    graph, gradients = backward(lambda b, w, g: b.op("sub", w, g), last=lambda b, x: x, early=False)
    at = places(graph, early_updates(graph))
    last_reader = graph.outputs[-1]
    assert at(graph.outputs[0]) > at(last_reader), "the last product reads the first weight"
    assert at(graph.outputs[1]) < at(gradients[2])


def test_what_is_freed_has_to_be_worth_it():
    """The last update stands behind its gradient already."""
    graph, gradients = backward(lambda b, w, g: b.op("sub", w, g))
    freed = 2 * graph.values[gradients[0]].nbytes
    assert early_updates(graph, least=freed) is not None and early_updates(graph, least=freed + 1) is None


@given(graphs())
def test_any_order_is_one_in_which_the_graph_can_run(graph):
    order = early_updates(graph, least=0)
    if order is None:
        return
    assert sorted(order) == list(range(len(graph.ops)))
    where, made = {o: k for k, o in enumerate(order)}, producers(graph)
    assert all(made[v] < 0 or where[made[v]] < where[op.id] for op in graph.ops for v in op.operands)
    fixed = [o for o in order if graph.ops[o].flops or graph.ops[o].bodies or graph.ops[o].pinned]
    assert fixed == sorted(fixed)


# ---- whole steps --------------------------------------------------------------------------------

ADAM = optax.adam(1e-3)


def step(params, state, x, y):
    def loss(params):
        h = x
        for w in params:
            h = jax.nn.gelu(h @ w)
        return jnp.mean((h - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    updates, state = ADAM.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


def arguments(width=WIDTH, batch=BATCH, make=jax.ShapeDtypeStruct):
    params = [make((width, width), jnp.float32)] * LAYERS
    state = jax.eval_shape(ADAM.init, params) if make is jax.ShapeDtypeStruct else ADAM.init(params)
    x = make((batch, width), jnp.float32)
    return params, state, x, x


def moved(start):
    return next(iter(ways(start, EARLY_UPDATES)), None)


def opened(width=WIDTH, batch=BATCH, **fields):
    """A variant of the step as it is written."""
    args = arguments(width, batch)
    traced = jax.jit(step, donate_argnums=(0, 1)).trace(*args)
    flags = [False] * len(jax.tree.leaves(args))
    flags[: len(jax.tree.leaves(args[:2]))] = [True] * len(jax.tree.leaves(args[:2]))
    work = Request(
        **{
            "name": "step",
            "jaxpr": traced.jaxpr,
            "donated": tuple(flags),
            "args": args,
            "kwargs": {},
            "budget": 1 << 40,
            "device": profile("nvidia-h200"),
            "shards": 1,
            "make": None,
            "options": {},
            **fields,
        }
    )
    program = trace_jaxpr(work.jaxpr, work.donated)
    return written(work, program, op_costs(program.graph, work.device), prepare)


def test_adam_without_a_norm_is_planned_without_all_gradients_at_once():
    start = opened()
    lower = moved(start)
    assert lower.has(EARLY_UPDATES) and lower.as_it_is and lower.charge == pytest.approx(0.0, abs=1e-12)
    assert sorted(map(repr, lower.base.graph.values)) == sorted(map(repr, start.base.graph.values))
    gradients = LAYERS * WIDTH * WIDTH * 4
    before, after = (v.solve(0).predicted.device for v in (start, lower))
    assert after < before - 0.4 * gradients
    found = Candidates(start)
    assert found.early and found.cheapest(0)[1].predicted.device < before - 0.4 * gradients
    (without,) = found.without_early_updates()
    assert not without.early and without.cheapest(0)[1].predicted.device == before
    found.forget_early_updates()
    assert not found.early and not found.without_early_updates() and found.cheapest(0)[1].predicted.device == before


def test_the_order_is_kept_in_recipes():
    start = opened()
    variant, plan = Candidates(start).cheapest(moved(start).solve(0).predicted.device)
    assert variant.has(EARLY_UPDATES)
    again, same = replay(recipe_of(variant, plan), start)
    assert again.has(EARLY_UPDATES) and same == plan


def test_updates_that_wait_for_state_from_the_host_stay():
    start = opened()
    assert moved(start) is not None
    state = jaxtensile.jit(step, budget="200MB", target="nvidia-h200", donate_argnums=(0, 1), offload_state=True)
    report = state.plan(*arguments())
    assert report.fits and report.compiled.host > 0


def test_xla_allocates_less():
    """Where only the order of updates makes it possible."""
    start = opened()
    least = start.solve(0).predicted.device
    budget = least - LAYERS * WIDTH * WIDTH * 4 // 4
    planned = jaxtensile.jit(step, budget=budget, target="nvidia-h200", donate_argnums=(0, 1))
    report = planned.plan(*arguments())
    assert report.fits and report.compiled.device <= budget


def test_values_are_those_of_the_plain_step():
    """The program that a GPU would get, run here."""
    keys = iter(jax.random.split(jax.random.key(0), 99))
    params, state, x, y = arguments(64, 512, lambda shape, dtype: jax.random.normal(next(keys), shape, dtype) / 8)
    flat = jax.tree.leaves((params, state, x, y))
    start = opened(64, 512)
    lower = moved(start)
    plan = lower.solve(0)
    assert lower.has(EARLY_UPDATES)
    assert plan.recompute_flops > 0
    check(lower.problem.graph, plan.program)
    ours = jax.jit(emit(lower.traced, plan.program))(flat)
    for a, b in zip(ours, jax.tree.leaves(jax.jit(step)(params, state, x, y)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_cpu_whose_compiler_follows_no_barriers_is_left_alone():
    start = opened(device=profile("cpu"))
    assert moved(start) is None and Candidates(start).without_early_updates() == []


def test_rebuilt_in_the_order_it_is_the_same_graph():
    start = opened()
    order = early_updates(start.base.graph)
    again = rebuilt(start.base, {}, order)[0]
    assert [op.primitive for op in again.graph.ops] == [start.base.graph.ops[o].primitive for o in order]
    assert live_ranges(again.graph).use().argument == live_ranges(start.base.graph).use().argument
