"""State comes in group by group and leaves again: the same values, few bytes at once, a price that is waiting."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtensile.devices.profiles import profile
from jaxtensile.errors import VerifyError
from jaxtensile.ir.plan import TO_DEVICE, TO_HOST, Link, Program
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.offload import streaming as module
from jaxtensile.passes.offload.state import movable
from jaxtensile.passes.offload.streaming import waiting
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.passes.verify.check import check
from jaxtensile.program.emit import emit
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.rewrites.state import choose, on_host
from moments import LAYERS, N, adam, loss

LINK = Link(bandwidth=1e10, latency=1e-6)
H200 = profile("nvidia-h200")


def clipped(state, x):
    """The norm of all updates goes into every parameter."""
    value, grads = jax.value_and_grad(loss)(state["w"], x)
    m = [0.9 * m + g for m, g in zip(state["m"], grads, strict=True)]
    v = [0.9 * v + g * g for v, g in zip(state["v"], grads, strict=True)]
    updates = [a / (jnp.sqrt(b) + 1) for a, b in zip(m, v, strict=True)]
    norm = jnp.sqrt(sum((u * u).sum() for u in updates))
    return {"m": m, "v": v, "w": [w - 0.1 * u / norm for w, u in zip(state["w"], updates, strict=True)]}, value


def accumulated(state, x):
    """Gradients from a scan, the update after it."""

    def body(total, part):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(state["w"], part)), None

    grads, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, state["w"]), x.reshape(2, -1, N))
    m = [0.9 * m + g for m, g in zip(state["m"], grads, strict=True)]
    v = [0.9 * v + g * g for v, g in zip(state["v"], grads, strict=True)]
    w = [w - 0.01 * a / (jnp.sqrt(b) + 1) for w, a, b in zip(state["w"], m, v, strict=True)]
    return {"m": m, "v": v, "w": w}, grads[0].sum()


STEPS = {"adam": adam, "clipped": clipped, "accumulated": accumulated}


def arguments(layers=LAYERS):
    keys = jax.random.split(jax.random.key(0), layers + 1)
    w = [jax.random.normal(k, (N, N)) / N**0.5 for k in keys[1:]]
    state = {"m": [0.1 * a for a in w], "v": [a * a for a in w], "w": w}
    return state, jax.random.normal(keys[0], (64, N))


@functools.cache
def streamed(name, layers=LAYERS, bandwidth=LINK.bandwidth):
    step, args = STEPS[name], arguments(layers)
    traced = jax.jit(step, donate_argnums=0).trace(*args)
    donated = tuple(bool(a.donated) for a in jax.tree.leaves(traced.args_info))
    plain = trace_jaxpr(traced.jaxpr, donated, keep_unused=False)
    costs = op_costs(plain.graph, H200)
    found, _ = choose(plain, costs.charge, [str(i) for i in range(len(donated))], None)
    assert len(found) == 2 * layers
    return plain, on_host(plain, found, costs.seconds, Link(bandwidth, 1e-6)), args


@pytest.mark.parametrize("name", STEPS)
def test_values_are_the_same(name):
    plain, placed, args = streamed(name)
    ours = jax.jit(lambda *a: emit(placed, Program.unchanged(placed.graph))(a))(*jax.tree.leaves(args))
    theirs = jax.tree.leaves(jax.jit(STEPS[name])(*args))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert sorted(e.eqn.primitive.name for e in placed.equations if e.eqn is not None) == sorted(
        e.eqn.primitive.name for e in plain.equations
    )


@pytest.mark.parametrize("name", STEPS)
def test_what_moves_is_on_the_host_at_both_ends(name):
    plain, placed, _ = streamed(name)
    graph = placed.graph
    there = [v for v in graph.inputs if graph.values[v].space == "host"]
    assert len(there) == 2 * LAYERS == sum(graph.values[v].space == "host" for v in graph.outputs)
    copies = [op.primitive for op in graph.ops if op.primitive in (TO_HOST, TO_DEVICE)]
    assert copies.count(TO_HOST) == copies.count(TO_DEVICE) == 2 * LAYERS
    assert all(op.pinned for op in graph.ops if op.primitive in (TO_HOST, TO_DEVICE))
    moved = 2 * LAYERS * N * N * 4
    before, after = live_ranges(plain.graph), live_ranges(graph)
    assert after.argument == before.argument - moved and after.alias == before.alias - moved


def test_only_what_was_chosen_may_change_its_memory():
    plain, _, _ = streamed("adam")
    moved, _ = movable(plain.graph, op_costs(plain.graph, H200).charge)
    program = module.stream(plain.graph, moved, op_costs(plain.graph, H200).seconds, LINK)
    ends = {v for m in moved for v in (m.value, m.output)}
    check(plain.graph, program, frozenset(ends))
    for missing in (moved[0].value, moved[0].output):
        with pytest.raises(VerifyError, match="is in host memory"):
            check(plain.graph, program, frozenset(ends - {missing}))


@pytest.mark.parametrize("bandwidth", [1e8, 1e10, 1e14])
def test_few_groups_are_here_at_once(monkeypatch, bandwidth):
    monkeypatch.setattr(module, "WINDOW", 0)
    streamed.cache_clear()
    _, placed, _ = streamed("adam", 12, bandwidth)
    streamed.cache_clear()
    graph = placed.graph
    inside, most = set(), 0
    version = {}
    for op in graph.ops:
        if op.primitive == TO_DEVICE:
            inside.add(op.results[0])
        elif op.primitive == TO_HOST:
            version[op.results[0]] = graph.values[op.results[0]].nbytes
        elif op.primitive == "optimization_barrier":
            waited = [v for v in op.operands if v in version]
            for v in waited:
                # A group has gone once somebody waits for it: as many leaves as came in have left.
                del version[v]
                inside.pop()
        most = max(most, len(inside))
    assert 2 < most <= 2 * module.AHEAD, "two leaves are a group"


def test_updates_begin_before_the_last_gradient(monkeypatch):
    monkeypatch.setattr(module, "WINDOW", 0)
    streamed.cache_clear()
    _, placed, _ = streamed("adam", 12, 1e14)
    primitives = [op.primitive for op in placed.graph.ops]
    last = max(i for i, p in enumerate(primitives) if p == "dot_general")
    assert primitives.index(TO_HOST) < last
    _, coupled, _ = streamed("clipped", 12, 1e14)
    primitives = [op.primitive for op in coupled.graph.ops]
    last = max(i for i, p in enumerate(primitives) if p == "dot_general")
    streamed.cache_clear()
    assert primitives.index(TO_HOST) > last, "nothing can leave before the norm is known"


def test_nothing_comes_in_before_the_way_down():
    _, placed, _ = streamed("adam", 12)
    primitives = [op.primitive for op in placed.graph.ops]
    products = [i for i, p in enumerate(primitives) if p == "dot_general"]
    assert primitives.index(TO_DEVICE) > products[11], "the forward pass has twelve"


def test_a_slower_link_waits_longer():
    _, placed, _ = streamed("adam", 12)
    program = Program.unchanged(placed.graph)
    seconds = op_costs(placed.graph, H200).seconds
    waits = [waiting(program, seconds, Link(b, 0.0)) for b in (1e16, 1e12, 1e10, 1e8)]
    assert waits == sorted(waits) and waits[0] < 1e-6
    once = 24 * N * N * 4 / 1e8
    assert once - sum(seconds) < waits[-1] < 2.2 * once


def test_without_copies_nobody_waits():
    plain, _, _ = streamed("adam")
    assert waiting(Program.unchanged(plain.graph), op_costs(plain.graph, H200).seconds, LINK) == 0
