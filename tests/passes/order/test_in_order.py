"""`passes.in_order`: barriers that keep XLA in the order of the trace, and bodies of loops that are kept in theirs."""

import importlib

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings

import jaxtensile
from differential import same_bits
from graphs import Builder, graphs, train_steps
from jax_lines import SOAK
from jaxtensile.devices.profiles import profile
from jaxtensile.ir.plan import Problem, Program
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.order.in_order import in_order, valleys
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.passes.solvers.greedy import prepare
from jaxtensile.passes.verify.check import BARRIER, check
from jaxtensile.program.emit import emit
from jaxtensile.program.trace import jaxpr_flops, trace_jaxpr
from jaxtensile.search import variants
from jaxtensile.search.candidates import Candidates
from jaxtensile.search.request import Request
from ordered import barriers, same_kernels

QUICK = settings(max_examples=60, deadline=None, derandomize=True)
FEWER = settings(QUICK, max_examples=60 if SOAK else 15)
"""For what plans each example first."""


def holds(before):
    """What a program kept in order is like."""
    after = in_order(before)
    assert len(same_kernels(before, after)) <= len(valleys(live_ranges(before.graph)))
    return after


@QUICK
@given(graphs())
def test_it_computes_what_the_program_computes(graph):
    check(graph, holds(Program.unchanged(graph)))


@FEWER
@given(train_steps())
def test_plans_are_kept_in_order_too(graph):
    costs = op_costs(graph, profile("nvidia-h200"))
    live = live_ranges(graph)
    solve = prepare(Problem(graph=graph, costs=costs, budget=live.device))
    for share in (1.0, 0.6, 0.0):
        check(graph, holds(solve(live.device - live.temp + int(share * live.temp)).program))


def test_what_was_begun_is_ended_in_every_valley():
    """Three products and their gradients: before the next gradient the last one's weights have theirs."""
    b = Builder()
    weights = [b.input(256, 256) for _ in range(3)]
    x, hidden = b.input(4096, 256), []
    for w in weights:
        x = b.op("exp", b.dot(x, w), shape=(4096, 256))
        hidden.append(x)
    d, sums = x, []
    for w, h in zip(reversed(weights), reversed(hidden), strict=True):
        d = b.op("mul", b.dot(d, w), h, shape=(4096, 256))
        t = b.op("transpose", h, shape=(256, 4096))
        sums.append(b.dot(t, d))
    graph = b.graph(*sums)
    program = in_order(Program.unchanged(graph))
    new = barriers(Program.unchanged(graph), program)
    assert new
    made = [
        {program.version_of[v] for op in program.graph.ops[: barrier.id] for v in op.results} & set(sums)
        for barrier in new
    ]
    held = [{program.version_of[v] for v in barrier.operands} & set(sums) for barrier in new]
    assert made == held and any(held)


def test_what_was_begun_is_ended_before_the_peak_too():
    """The gradient of a wide layer is there before what takes most bytes begins."""
    b = Builder()
    x, w, narrow, wide = b.input(4096, 256), b.input(256, 512), b.input(512, 16), b.input(16, 4096)
    hidden = b.op("exp", b.dot(x, w), shape=(4096, 512))
    d = b.op("sort", b.dot(hidden, narrow), shape=(4096, 16))
    gradient = b.dot(b.op("transpose", hidden, shape=(512, 4096)), d)
    most = b.op("sort", b.dot(d, wide), shape=(4096, 4096))
    graph = b.graph(gradient, b.op("reduce_sum", most, shape=()))
    live = live_ranges(graph)
    peak = max(range(len(live.profile)), key=live.profile.__getitem__)
    (step,) = valleys(live)
    assert step <= peak
    program = holds(Program.unchanged(graph))
    (barrier,) = barriers(Program.unchanged(graph), program)
    assert {program.version_of[v] for v in barrier.operands} == {d, gradient}


def test_a_buffer_may_cross_in_several_shapes():
    """Barriers of the user's own over a view and over what it is a view of."""
    b = Builder()
    x, w = b.input(4096, 256), b.input(256, 256)
    y = b.dot(x, w)
    flat = b.op("reshape", y, shape=(4096 * 256,))
    y2 = b.op("optimization_barrier", y, shape=(4096, 256))
    flat2 = b.op("optimization_barrier", flat, shape=(4096 * 256,))
    high = b.op("reduce_sum", b.dot(b.dot(b.dot(x, w), w), w), shape=())
    rise = b.op("reduce_sum", b.dot(b.dot(x, w), w), shape=())
    graph = b.graph(high, rise, b.dot(y2, w), b.op("reduce_sum", flat2, shape=()))
    program = holds(Program.unchanged(graph))
    check(graph, program)
    put = [op for op in program.graph.ops if op.primitive == BARRIER]
    crossing = [{program.graph.values[v].shape for v in op.operands} for op in put]
    assert any({(4096, 256), (4096 * 256,)} <= shapes for shapes in crossing)


def test_a_chain_has_one_order():
    b = Builder()
    x = b.input(64, 64)
    for _ in range(6):
        x = b.dot(x, x)
    program = Program.unchanged(b.graph(x))
    assert in_order(program) is program


def runge_kutta(w, x):
    def rate(h):
        return jnp.tanh(h @ w) @ w.T

    def body(h, _):
        k1 = rate(h)
        k2 = rate(h + 0.5 * k1)
        k3 = rate(h + 0.5 * k2)
        return h + 0.1 * (k1 + 2 * k2 + rate(h + k3)), h.mean()

    h, means = jax.lax.scan(body, x, None, length=6)
    return (h**2).mean() + means.sum()


def batches(w, x):
    """A loop in the body of a loop."""
    return jax.lax.scan(lambda total, y: (total + runge_kutta(w, y), None), 0.0, jnp.stack([x, x + 1]))[0]


W = jax.random.normal(jax.random.key(0), (8, 16)) / 4
X = jax.random.normal(jax.random.key(1), (256, 8))


@pytest.mark.parametrize("loss", [runge_kutta, batches])
def test_bodies_in_their_order_have_the_same_bits(loss):
    """As they are, rewritten, planned, and nested."""
    closed = jax.jit(jax.value_and_grad(loss)).trace(W, X).jaxpr
    traced = trace_jaxpr(closed)
    work = Request(
        name="loss",
        jaxpr=closed,
        donated=(False, False),
        args=(W, X),
        kwargs={},
        budget=1 << 40,
        device=profile("nvidia-h200"),
        shards=1,
        make=lambda evaluate, options: None,
        options={},
    )
    candidates = Candidates(variants.written(work, traced, op_costs(traced.graph, work.device), prepare))
    needed = live_ranges(traced.graph).device
    found = [(v, v.solve(1 << 40)) for v in candidates.variants]
    found += [candidates.cheapest(int(share * needed)) for share in (0.5, 0.3, 0.15, 0.0)]
    kept = 0
    for variant, plan in found:
        held = candidates.held((variant, plan), 1 << 40)
        if held is None:
            continue
        kept += 1
        assert candidates.held(held, 1 << 40) is None, "once is enough"
        check(held[0].problem.graph, held[1].program)
        evaluate = emit(held[0].traced, held[1].program)
        ours = jax.make_jaxpr(lambda w, x, f=evaluate: f([w, x]))(W, X)
        same_bits(ours, closed, [W, X])
    assert kept


@pytest.mark.cuda_aot
@pytest.mark.xdist_group("deviceless")
def test_a_policy_by_hand_is_met_below_its_bytes_with_its_flops():
    """XLA puts the gradients of all weights off to the end of the body, with everything that they are made of."""
    load = importlib.import_module("benchmarks.workloads").workload
    by_hand, plain = load("ode", remat=jax.checkpoint_policies.nothing_saveable), load("ode")
    options = {"target": "nvidia-h200", **plain.jit_options}
    theirs = jaxtensile.jit(by_hand.fun, budget="100GiB", **options)
    needed = theirs.plan(*by_hand.args).compiled.device
    ours = jaxtensile.jit(plain.fun, budget=needed - 1_000_000, **options)
    report = ours.plan(*plain.args)
    assert report.fits
    assert jaxpr_flops(ours.trace(*plain.args).jaxpr) <= jaxpr_flops(theirs.trace(*by_hand.args).jaxpr)
