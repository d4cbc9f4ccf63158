"""Copies to the host as slices of stacks: the same values, each written once and read at an index that waits."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtensile.ir.plan import TO_DEVICE, TO_HOST, Link, Program
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.offload import offload as offloading
from jaxtensile.passes.offload.offload import offload
from jaxtensile.passes.order.schedule import Schedule
from jaxtensile.passes.verify.check import check
from jaxtensile.program.emit import emit
from jaxtensile.program.host_stacks import HostStacks, _zero
from jaxtensile.program.trace import trace_jaxpr
from programs import bits

FAST = Link(bandwidth=1e15, latency=0.0)


def layers(widths, dtype, turns=1):
    """Gradients of products of these widths, ``turns`` times one after another: what waits has several shapes."""

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return (x.astype(jnp.float32) ** 2).sum()

    def step(ws, x):
        for _ in range(turns):
            gs = jax.grad(loss)(ws, x)
            ws = [w - 0.1 * g.astype(w.dtype) for w, g in zip(ws, gs, strict=True)]
        return ws

    sides = [64, *widths]
    keys = jax.random.split(jax.random.key(0), len(sides))
    ws = [jax.random.normal(k, (a, b), dtype) * 0.1 for k, a, b in zip(keys, sides, sides[1:], strict=False)]
    return step, (ws, jax.random.normal(keys[-1], (256, 64), dtype))


def offloaded(fun, args, share):
    """The traced function, and its program with copies that spare a ``share`` of its temporaries."""
    traced = trace_jaxpr(jax.jit(fun).trace(*args).jaxpr)
    program = Program.unchanged(traced.graph)
    live = live_ranges(traced.graph)
    seconds = [1e-3] * len(traced.graph.ops)
    return traced, offload(program, seconds, FAST, live.device - int(share * live.temp), 1 << 30).program


SUBJECTS = {
    "one shape": ([64] * 8, jnp.float32, 1),
    "several shapes": ([64, 256, 64, 256, 192, 64, 256, 64], jnp.float32, 1),
    "half precision": ([64] * 8, jnp.bfloat16, 1),
    "two climbs": ([64] * 6, jnp.float32, 2),
}


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch):
    monkeypatch.setattr(offloading, "SMALLEST", 1 << 10)


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


def copies_of(program):
    return [op for op in program.graph.ops if op.primitive in (TO_HOST, TO_DEVICE)]


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_values_are_those_of_the_function(name, share):
    fun, args = layers(*SUBJECTS[name])
    traced, program = offloaded(fun, args, share)
    check(traced.graph, program)
    assert copies_of(program)
    flat = jax.tree.leaves(args)
    ours = jax.jit(emit(traced, program, stacked=True))(flat)
    controlled = jax.jit(emit(traced, program))(flat)
    same(ours, controlled)
    for a, b in zip(ours, jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=2e-3)


def by_hand(shape, dtype):
    """A function, and its program with two values away at once and a third when the first is back."""

    def fun(x):
        a = jnp.sin(x)
        b = jnp.cos(a)
        c = jnp.tanh(b)
        d = a * c
        e = jnp.sin(d)
        f = b * e
        return f + d

    traced = trace_jaxpr(jax.jit(fun).trace(jax.ShapeDtypeStruct(shape, dtype)).jaxpr)
    graph = traced.graph
    a, b, c, d, e, f, _ = (op.results[0] for op in graph.ops)
    new = Schedule(graph.values, range(len(graph.values)))
    host = {}

    def run(k):
        op = graph.ops[k]
        new.put(op, [new.now.get(v, v) for v in op.operands], op.results, k)

    def leave(v):
        host[v] = new.put_copy(TO_HOST, new.now.get(v, v), "host")

    def tie(v, held):
        host[v], new.now[held] = new.put_barrier([host[v], new.now.get(held, held)])

    def back(v, held):
        tie(v, held)
        new.now[v] = new.put_copy(TO_DEVICE, host[v], "device")

    for move in (0, (leave, a), 1, (leave, b), (tie, a, b), 2, (back, a, c), 3, (leave, d), 4, (back, b, e), 5):
        run(move) if isinstance(move, int) else move[0](*move[1:])
    back(d, f)
    run(6)
    made = replace(graph, values=tuple(new.values), ops=tuple(new.ops))
    return fun, traced, Program(made, tuple(new.origin), tuple(new.version_of))


@pytest.mark.parametrize("shape", [(), (300,), (3, 100), (2, 3, 50), (1, 300, 1), (2, 3, 4, 5, 6)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_of_any_shape_wait(shape, dtype):
    fun, traced, program = by_hand(shape, dtype)
    check(traced.graph, program)
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    (ours,) = jax.jit(emit(traced, program, stacked=True))([x])
    near = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(
        np.asarray(ours, np.float32), np.asarray(jax.jit(fun)(x), np.float32), rtol=near, atol=near
    )


def test_a_stack_that_is_read_is_closed():
    """The third value gets a stack of its own, as nothing waits any more behind a read of the first."""
    _, traced, program = by_hand((300,), jnp.float32)
    made = jax.make_jaxpr(lambda x: emit(traced, program, stacked=True)([x]))(np.ones(300, np.float32))
    assert [e.outvars[0].aval.shape for e in made.jaxpr.eqns if e.primitive.name == "empty"] == [(2, 1, 300)] * 2


@settings(max_examples=8, deadline=None)
@given(st.lists(st.sampled_from([32, 64, 128]), min_size=3, max_size=8), st.floats(0.1, 1.0), st.integers(1, 2))
def test_any_of_them(widths, share, turns):
    fun, args = layers(widths, jnp.float32, turns)
    traced, program = offloaded(fun, args, share)
    flat = jax.tree.leaves(args)
    same(jax.jit(emit(traced, program, stacked=True))(flat), jax.jit(emit(traced, program))(flat))


def equations_of(name, share=0.9):
    fun, args = layers(*SUBJECTS[name])
    traced, program = offloaded(fun, args, share)
    flat = jax.tree.leaves(args)
    return program, jax.make_jaxpr(lambda *xs: emit(traced, program, stacked=True)(xs))(*flat).jaxpr.eqns


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_copy_is_a_slice_of_a_stack_that_is_not_written_any_more(name):
    program, equations = equations_of(name)
    out = [op for op in copies_of(program) if op.primitive == TO_HOST]
    writes = [e for e in equations if e.primitive.name == "dynamic_update_slice"]
    reads = [e for e in equations if e.primitive.name == "dynamic_slice"]
    whole = [e for e in reads if e.outvars[0].aval.shape[1:] == e.invars[0].aval.shape[1:]]
    assert len(writes) == len(out)
    assert len(whole) >= len(copies_of(program)) - len(out) > 0
    # XLA would copy a stack that is written after a read: every version is read or written over, not both.
    over = {e.invars[0] for e in writes}
    assert over.isdisjoint({e.invars[0] for e in whole})
    # And a slice of all that there is would be none.
    assert all(e.invars[0].aval.shape[0] >= 2 for e in (*writes, *reads))


def test_reads_wait_for_data():
    """An index that XLA could know would let it read at once."""
    _, equations = equations_of("one shape")
    made = {v: e for e in equations for v in e.outvars}
    for e in equations:
        if e.primitive.name == "dynamic_slice":
            index, seen = [e.invars[1]], set()
            while index:
                v = index.pop()
                if v in made and v not in seen:
                    seen.add(v)
                    index += [w for w in made[v].invars if not hasattr(w, "val")]
            assert {"ne", "slice"} <= {made[v].primitive.name for v in seen}


def test_a_value_that_is_no_number_is_not_taken_for_an_index():
    """Whatever is in the value that a copy is tied to, the slot is the right one."""
    fun, args = layers(*SUBJECTS["one shape"])
    traced, program = offloaded(fun, args, 0.9)
    ws, x = args
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        flat = [*ws, x.at[0, 0].set(bad)]
        ours = jax.jit(emit(traced, program, stacked=True))(flat)
        theirs = jax.jit(emit(traced, program))(flat)
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_graph_without_copies_has_no_places():
    traced = trace_jaxpr(jax.jit(lambda x: jnp.sin(x) * 2).trace(np.ones(3, np.float32)).jaxpr)
    stacks = HostStacks(traced.graph)
    assert not any(stacks.holds(op) for op in traced.graph.ops)
    evaluate = emit(traced, Program.unchanged(traced.graph), stacked=True)
    assert "dynamic" not in str(jax.make_jaxpr(lambda x: evaluate([x]))(np.ones(3, np.float32)))


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float8_e4m3fn", "int32", "uint8", "bool", "complex64", "key"]
)
def test_what_a_copy_waits_for_is_nothing_of_its_value(dtype):
    x = jax.random.split(jax.random.key(0), 3) if dtype == "key" else jnp.array([1, 0, 1]).astype(dtype)
    assert jax.jit(_zero)(x) == 0
