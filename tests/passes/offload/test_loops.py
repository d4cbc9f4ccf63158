"""Pairs of scans: what is no longer stacked is recomputed, and every value stays the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtensile.ir.plan import Link
from jaxtensile.passes.offload.loops import PairCut, find_pairs
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.program.trace import jaxpr_flops, trace_jaxpr
from jaxtensile.rewrites.loops.loops import rewrite_loops
from jaxtensile.rewrites.loops.strip_mine import strip_mine
from loop_ladders import DEVICE, ladder
from loop_programs import PROGRAMS, arguments, chained, rnn

LINK = Link(bandwidth=1e9, latency=1e-5)
LEVEL_0 = {"xla_backend_optimization_level": 0}


@pytest.fixture(params=PROGRAMS, ids=lambda f: f.__name__)
def program(request):
    return jax.value_and_grad(request.param), arguments()


def patch_sizes(monkeypatch):
    """Let everything wait on the host, however small."""
    for name in ("SLICE", "SMALLEST"):
        monkeypatch.setattr(f"jaxtensile.passes.offload.loops.{name}", 1)


def test_a_loop_is_the_backward_one_of_one_pair_and_the_forward_one_of_another(monkeypatch):
    """Nothing is differentiated: three loops, each reading what the one before stacks."""
    patch_sizes(monkeypatch)
    w = {"in": jax.random.normal(jax.random.key(0), (16, 16)), "b": jnp.ones(16)}
    args = (w, jax.random.normal(jax.random.key(1), (12, 8)), jnp.ones(8))
    traced = jax.jit(chained).trace(*args)
    flat = trace_jaxpr(traced.jaxpr)
    pairs = find_pairs(flat.graph)
    assert {p.forward for p in pairs} & {p.backward for p in pairs}
    full = ladder(flat.graph, LINK)
    ways = {full.away(rung) for rung in full.rungs} | set(full.rungs)
    both = [w for w in ways if {p.pair.forward for p in w} & {p.pair.backward for p in w}]
    assert both
    for way in ways:
        closed = rewrite_loops(flat, traced.jaxpr, way)
        run = jax.jit(lambda *xs, c=closed: jax.core.eval_jaxpr(c.jaxpr, c.consts, *xs), compiler_options=LEVEL_0)
        (new,) = run(*jax.tree.leaves(args))
        np.testing.assert_allclose(new, jax.jit(chained, compiler_options=LEVEL_0)(*args), rtol=2e-5)


def fun_name(program):
    return program[0].__wrapped__.__name__


def ways_of(fun, args):
    traced = jax.jit(fun).trace(*args)
    flat = trace_jaxpr(traced.jaxpr)
    return traced, flat, ladder(flat.graph).rungs


def test_every_way_to_rewrite_gives_the_same_values(program):
    fun, args = program
    traced, flat, ways = ways_of(fun, args)
    expected = jax.tree.leaves(jax.jit(fun, compiler_options=LEVEL_0)(*args))
    assert len(ways) > 1, "there is something to recompute"
    for way in ways:
        closed = rewrite_loops(flat, traced.jaxpr, way)
        run = jax.jit(lambda *xs, c=closed: jax.core.eval_jaxpr(c.jaxpr, c.consts, *xs), compiler_options=LEVEL_0)
        for new, old in zip(run(*jax.tree.leaves(args)), expected, strict=True):
            assert new.dtype == old.dtype and new.shape == old.shape
            np.testing.assert_allclose(new, old, rtol=2e-5, atol=2e-5)  # twelve chained f32 steps


@pytest.mark.parametrize("load_index", [False, True])
def test_stacks_on_the_host_give_the_same_values(program, load_index, monkeypatch):
    patch_sizes(monkeypatch)
    fun, args = program
    traced = jax.jit(fun).trace(*args)
    flat = trace_jaxpr(traced.jaxpr)
    expected = jax.tree.leaves(jax.jit(fun, compiler_options=LEVEL_0)(*args))
    full = ladder(flat.graph, LINK)
    ways = dict.fromkeys(way for rung in full.rungs for way in (full.away(rung), *full.aways(rung)))
    hosted = [way for way in ways if any(plan.hosted for plan in way)]
    assert bool(hosted) == (fun_name(program) != "reverse"), "a loop that runs backwards stacks on the device"
    for way in hosted:
        closed = rewrite_loops(flat, traced.jaxpr, way, load_index=load_index)
        graph = trace_jaxpr(closed).graph
        there = [v for op in graph.ops for v in op.results if graph.values[v].space == "host"]
        assert sum(graph.values[v].nbytes for v in there) == sum(plan.aside for plan in way)
        assert all(op.pinned for op in graph.ops if set(there) & set(op.results)), "none is made twice"
        run = jax.jit(lambda *xs, c=closed: jax.core.eval_jaxpr(c.jaxpr, c.consts, *xs), compiler_options=LEVEL_0)
        for new, old in zip(run(*jax.tree.leaves(args)), expected, strict=True):
            np.testing.assert_allclose(new, old, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("unroll", [2, 5, True])
def test_a_loop_that_stacks_on_the_host_is_not_unrolled(unroll, monkeypatch):
    """XLA joins the slices of an unrolled loop by a concatenation, which it runs on the host."""
    patch_sizes(monkeypatch)

    def loss(x):
        return (jax.lax.scan(lambda c, k: (jnp.sin(c * k), None), x, jnp.arange(12.0), unroll=unroll)[0] ** 2).sum()

    traced = jax.jit(jax.grad(loss)).trace(jnp.ones(8))
    flat = trace_jaxpr(traced.jaxpr)
    full = ladder(flat.graph, LINK)

    def unrolled(way):
        jaxpr = rewrite_loops(flat, traced.jaxpr, way).jaxpr
        return {eqn.params["unroll"] for eqn in jaxpr.eqns if eqn.primitive.name == "scan"}

    assert unrolled(full.rungs[-1]) == {12 if unroll is True else unroll}
    assert unrolled(full.away(full.rungs[0])) == {1}


@pytest.mark.parametrize(
    ("trips", "can"),
    [
        pytest.param(4, {4 << 20, 1 << 20}, id="short"),
        pytest.param(15, {4 << 20, 1 << 20}, id="stacks below 1 MiB stay"),
        pytest.param(16, {4 << 20, 1 << 20, 64 << 10}, id="small slices of a long loop"),
        pytest.param(64, {4 << 20, 1 << 20, 64 << 10}, id="slices below 64 KiB stay"),
    ],
)
def test_large_slices_go_to_the_host_first_and_small_ones_never(trips, can):
    def f(*carries):
        out, _ = jax.lax.scan(lambda c, k: ([jnp.sin(a * k) for a in c], None), [*carries], jnp.arange(float(trips)))
        return sum((o**2).sum() for o in out)

    sizes = (4 << 20, 1 << 20, 64 << 10, 32 << 10)
    args = [jax.ShapeDtypeStruct((n // 4,), jnp.float32) for n in sizes]
    graph = trace_jaxpr(jax.jit(jax.grad(f, argnums=(0, 1, 2, 3))).trace(*args).jaxpr).graph
    (pair,) = find_pairs(graph)
    cut = PairCut(graph, pair, op_costs(graph.ops[pair.forward].bodies[0], DEVICE).charge)

    def bytes_of(values):
        return sorted((cut.nbytes(v) for v in values), reverse=True)

    kept = min((cut.keep(p) for p in (0.0, 1.0, 1e9)), key=len)
    every = cut.hosted(kept, 1.0)
    assert set(bytes_of(every)) == can
    assert set(bytes_of(cut.hosted(kept, 0.8))) == {4 << 20}
    assert cut.hosted(kept, 0.01) == frozenset()
    assert cut.plan(kept, every).aside == trips * sum(bytes_of(every))


def test_a_copy_hides_behind_the_forward_iteration_and_not_behind_the_backward_one():
    def f(x):
        out, _ = jax.lax.scan(lambda c, k: (jnp.sin(c * k), None), x, jnp.arange(10.0))
        return (out**2).sum()

    graph = trace_jaxpr(jax.jit(jax.grad(f)).trace(jax.ShapeDtypeStruct((1 << 20,), jnp.float32)).jaxpr).graph
    (pair,) = find_pairs(graph)
    cut = PairCut(graph, pair, op_costs(graph.ops[pair.forward].bodies[0], DEVICE).charge)
    one = cut.hosted(cut.keep(1e9), 1.0)
    assert len(one) == 1
    length = LINK.latency + (4 << 20) / LINK.bandwidth
    assert cut.wait(one, LINK, length) == pytest.approx(10 * length)
    assert cut.wait(one, LINK, 0.25 * length) == pytest.approx(10 * 1.75 * length)


def test_dearer_bytes_stack_less(program):
    fun, args = program
    traced, flat, ways = ways_of(fun, args)

    def stacked(closed):
        graph = trace_jaxpr(closed).graph
        return sum(graph.values[r].nbytes for op in graph.ops if op.primitive == "scan" for r in op.results)

    bytes_of = [stacked(rewrite_loops(flat, traced.jaxpr, way)) for way in ways]
    assert bytes_of == sorted(bytes_of, reverse=True)
    assert bytes_of[-1] < bytes_of[0]


def test_recomputation_is_counted_in_the_flops():
    keys = jax.random.split(jax.random.key(0), 3)
    w = {"in": jax.random.normal(keys[0], (16, 16)), "b": jnp.ones(16)}
    args = (w, jax.random.normal(keys[1], (12, 8)), jax.random.normal(keys[2], (8,)))
    traced, flat, ways = ways_of(jax.value_and_grad(rnn), args)
    plans = ways[-1]
    body = flat.graph.ops[plans[0].pair.forward].bodies[0]
    extra = 12 * sum(body.ops[o].flops for o in plans[0].again)
    assert jaxpr_flops(rewrite_loops(flat, traced.jaxpr, plans)) == jaxpr_flops(traced.jaxpr) + extra


def test_a_stack_that_is_read_elsewhere_stays():
    def fun(x, xs):
        def body(h, x):
            h = jnp.sin(h * x)
            return h, h

        h, ys = jax.lax.scan(body, x, xs)
        return h.sum() + (ys**2).sum(), ys

    args = (jnp.ones(4), jnp.ones((5, 4)))
    graph = trace_jaxpr(jax.jit(jax.grad(fun, has_aux=True)).trace(*args).jaxpr).graph
    outputs = set(graph.outputs)
    for pair in find_pairs(graph):
        results = graph.ops[pair.forward].results[graph.ops[pair.forward].carried[1] :]
        assert not outputs & {results[y] for y, _ in pair.links}


def test_effects_are_left_alone():
    def fun(x, xs):
        def body(h, x):
            jax.debug.callback(lambda _: None, h)
            return jnp.sin(h * x), None

        return jax.lax.scan(body, x, xs)[0].sum()

    graph = trace_jaxpr(jax.jit(jax.grad(fun)).trace(jnp.ones(4), jnp.ones((5, 4))).jaxpr).graph
    assert find_pairs(graph) == ()


def test_a_loop_whose_checkpointed_body_reads_what_lives_on_is_nested():
    """Its slices are there for the backward loop anyway: only the carry is stacked, of outer iterations alone."""
    w, xs, h0 = arguments()

    def loss(w, xs, h0):
        @jax.checkpoint
        def body(h, x):
            return jnp.tanh(h @ w["in"][:8, :8] + x), None

        h, _ = jax.lax.scan(body, h0, xs * 2)
        return (h**2).sum()

    traced = jax.jit(jax.value_and_grad(loss)).trace(w, xs, h0)
    flat = trace_jaxpr(traced.jaxpr)
    forward = next(op for op in flat.graph.ops if op.primitive == "scan")
    (made,) = (op for op in flat.graph.ops if forward.slots[-1] in op.results)
    assert made.primitive == "mul", "no argument of the step"
    (inner,) = ladder(flat.graph).nests(1)
    nested = trace_jaxpr(strip_mine(flat, traced.jaxpr, inner))
    deepest = ladder(nested.graph).rungs[-1]
    assert [len(plan.dropped) for plan in deepest] == [1]


def test_free_bytes_change_nothing():
    args = ({"in": jnp.ones((16, 16)), "b": jnp.ones(16)}, jnp.ones((12, 8)), jnp.ones(8))
    graph = trace_jaxpr(jax.jit(jax.grad(rnn)).trace(*args).jaxpr).graph
    for pair in find_pairs(graph):
        charge = op_costs(graph.ops[pair.forward].bodies[0], DEVICE).charge
        cut = PairCut(graph, pair, [c + 1.0 for c in charge])
        assert cut.plan(cut.keep(1e-18)) is None


def stacked(steps, way):
    return sum(cut.stacks(k) for cut, k in zip(steps._cuts, steps._kept[way], strict=True))


def test_above_a_rung_there_are_finer_steps(program):
    """Each stacks no more than there is room for, recomputes nothing that the rung does not, and computes the same."""
    fun, args = program
    traced = jax.jit(fun).trace(*args)
    flat = trace_jaxpr(traced.jaxpr)
    steps = ladder(flat.graph)
    expected = jax.tree.leaves(jax.jit(fun, compiler_options=LEVEL_0)(*args))
    more, less = steps.rungs[0], steps.rungs[-1]
    room = (stacked(steps, more) - stacked(steps, less)) // 2

    def again(way):
        return {(p.pair, o) for p in way for o in p.again}

    for way in steps.between(less, room):
        assert way != less and again(way) < again(less)
        assert stacked(steps, way) <= stacked(steps, less) + room
        closed = rewrite_loops(flat, traced.jaxpr, way)
        run = jax.jit(lambda *xs, c=closed: jax.core.eval_jaxpr(c.jaxpr, c.consts, *xs), compiler_options=LEVEL_0)
        for new, old in zip(run(*jax.tree.leaves(args)), expected, strict=True):
            np.testing.assert_allclose(new, old, rtol=2e-5, atol=2e-5)


def test_values_of_equal_price_need_not_all_be_stacked():
    """Three products of one size are recomputed at the same price of a byte: with room for one or two of them, one or
    two are stacked, and with room for one and a half, one."""

    def loss(w, x):
        def layer(x, w):
            a, b, c = (jnp.sin(x @ m) for m in w)
            return x + a * b * c, None

        return jax.lax.scan(layer, x, w)[0].sum()

    args = tuple(jnp.ones((6, 8, 8)) for _ in range(3)), jnp.ones((4, 8))
    flat = trace_jaxpr(jax.jit(jax.grad(loss)).trace(*args).jaxpr)
    steps, nbytes = ladder(flat.graph), 6 * 4 * 8 * 4
    least = steps.rungs[-1]

    def products(way):
        body = next(op for op in flat.graph.ops if op.primitive == "scan").bodies[0]
        return sum(body.ops[o].primitive == "dot_general" for plan in way for o in plan.again)

    assert products(least) == 3
    at = {room: products(steps.between(least, int(room * nbytes))[0]) for room in (1, 1.5, 2, 3)}
    assert at == {1: 2, 1.5: 2, 2: 1, 3: 0}


def test_elementwise_work_is_repeated_before_any_product():
    """A stacked tanh looks dear in the forward body, where it is stored; where it is repeated it fuses."""

    def net(w, x):
        def body(x, _):
            h = jnp.tanh(x @ w["up"] + w["b"])
            return x + h @ w["down"], None

        return jnp.sum(jax.lax.scan(body, x, length=100)[0] ** 2)

    w = {"up": jax.ShapeDtypeStruct((2, 16), jnp.float32), "down": jax.ShapeDtypeStruct((16, 2), jnp.float32)}
    args = {**w, "b": jax.ShapeDtypeStruct((16,), jnp.float32)}, jax.ShapeDtypeStruct((1 << 18, 2), jnp.float32)
    _, flat, ways = ways_of(jax.value_and_grad(net), args)

    def products(way):
        return sum(flat.graph.ops[p.pair.forward].bodies[0].ops[o].flops > 0 for p in way for o in p.again)

    changed = [way for way in ways if way]
    assert products(changed[0]) == 0, "the wide preactivations or their tanh are kept, the rest is made again"
    assert products(changed[-1]) > 0, "at the lowest rung nothing wide is left"
