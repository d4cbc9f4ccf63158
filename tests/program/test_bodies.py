"""Bodies of loops and branches as programs of their own: exchanged, planned within, and of the same values."""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtensile
from jaxtensile.ir.plan import Program
from jaxtensile.program.bodies import bodies_of, maker, with_bodies
from jaxtensile.program.emit import emit
from jaxtensile.program.trace import trace_jaxpr
from programs import FAST, same


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w) + x
    return (x**2).mean()


def accumulate(weights, batches):
    """Gradients of micro-batches, summed by a scan: forward and backward pass are both in its body."""

    def body(total, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(jnp.add, total, grads), value

    grads, values = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, weights), batches)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), values.mean()


def many_steps(weights, batches):
    """Steps of training in a loop whose trip count is known when it runs."""

    def body(i, weights):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, batches[i]))

    return jax.lax.fori_loop(0, jnp.int32(batches.shape[0]), body, weights)


def either(weights, batches):
    return jax.lax.cond(
        batches.sum() > 0,
        lambda: jax.grad(loss)(weights, batches[0]),
        lambda: jax.tree.map(lambda g: 2 * g, jax.grad(loss)(weights, batches[1])),
    )


def scanned_layers(weights, batches):
    """A loop over layers, differentiated inside a loop over batches."""

    def layers(stacked, x):
        return (jax.lax.scan(lambda h, w: (jnp.sin(jnp.tanh(h @ w)) * h + h, None), x, stacked)[0] ** 2).mean()

    def body(stacked, x):
        value, grads = jax.value_and_grad(layers)(stacked, x)
        return stacked - 0.1 * grads, value

    return jax.lax.scan(body, jnp.stack(weights), batches)


@pytest.fixture(scope="module")
def args():
    keys = jax.random.split(jax.random.key(0), 13)
    weights = [0.1 * jax.random.normal(k, (96, 96)) for k in keys[:12]]
    return weights, jax.random.normal(keys[12], (3, 2048, 96))


PROGRAMS = (accumulate, many_steps, either, scanned_layers)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_what_needs_memory_inside_a_body_is_planned_there(program, args):
    plain = jaxtensile.jit(program).plan(*args).compiled
    step = jaxtensile.jit(program, budget=plain.device - plain.temp // 3, chunk=False)
    report = step.plan(*args)
    assert report.compiled.device <= report.budget < plain.device
    assert not report.unchanged and report.stages > 0
    assert {"keep", "recompute"} <= {d.kind for d in report.decisions} or program is scanned_layers
    for new, old in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(jax.jit(program)(*args)), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_exchanged_for_themselves_bodies_change_nothing(program, args):
    closed = jax.make_jaxpr(program)(*args)
    traced = trace_jaxpr(closed)
    new, carried = {}, 0
    for op in traced.graph.ops:
        for k, body in enumerate(bodies_of(traced, op.id) if op.bodies else ()):
            inner = body.traced()
            assert body.trips == op.runs
            carried += sum(body.donated)
            new[op.id, k] = emit(inner, Program.unchanged(inner.graph))
    assert new and bool(carried) == (program is not either), "a loop's carry is replaced by its results"
    again = with_bodies(traced, closed, new)
    assert [v.aval for v in again.jaxpr.outvars] == [v.aval for v in closed.jaxpr.outvars]
    run = jax.jit(jax.extend.core.jaxpr_as_fun(again))
    for found, old in zip(run(*jax.tree.leaves(args)), jax.tree.leaves(jax.jit(program)(*args)), strict=True):
        np.testing.assert_array_equal(found, old)


def test_bodies_with_effects_or_references_stay():
    def loud(x):
        def body(c, _):
            jax.debug.callback(lambda _: None, c.sum())
            return jnp.sin(c), None

        return jax.lax.scan(body, x, length=3)[0]

    traced = trace_jaxpr(jax.make_jaxpr(loud)(jnp.ones(4)))
    (scan,) = [op.id for op in traced.graph.ops if op.primitive == "scan"]
    assert bodies_of(traced, scan) == []


def test_a_product_is_no_body():
    traced = trace_jaxpr(jax.make_jaxpr(lambda x: x @ x)(jnp.ones((4, 4))))
    assert bodies_of(traced, 0) == []


def wavy(x):
    return jnp.sin(jnp.sin(x) * jnp.cos(2 * x) + jnp.tanh(x)) * 0.9


def test_what_an_outer_loop_stacks_no_more_is_dead_in_the_inner_one():
    def inner(x, _):
        return jax.lax.scan(lambda x, _: (wavy(x), None), x, length=12)[0], None

    grad = jax.grad(lambda x: (jax.lax.scan(inner, x, length=12)[0] ** 2).sum())
    x = jnp.linspace(-1, 1, 64 * 64).reshape(64, 64)
    plain = jaxtensile.jit(grad, budget="1GiB", compiler_options=FAST).plan(x).compiled.device
    step = jaxtensile.jit(grad, budget=plain // 20, compiler_options=FAST)
    assert step.plan(x).compiled.device <= plain // 20
    same(step(x), jax.jit(grad, compiler_options=FAST)(x))


def test_a_function_that_switches_to_64_bits_inside():
    """Its gradient's equations have 64 bits, and not the switch; the loop and its body are rewritten all the same."""

    def loss(x):
        with jax.enable_x64(True):
            y = jax.lax.scan(lambda y, _: (wavy(y), None), x.astype(jnp.float64), length=36)[0]
            return (y**2).sum().astype(jnp.float32)

    grad, x = jax.grad(loss), jnp.linspace(-1, 1, 64 * 64).reshape(64, 64)
    plain = jaxtensile.jit(grad, budget="1GiB", compiler_options=FAST).plan(x).compiled.device
    step = jaxtensile.jit(grad, budget=plain // 6, compiler_options=FAST)
    assert not step.plan(x).unchanged
    same(step(x), jax.jit(grad, compiler_options=FAST)(x))


def test_of_what_a_scan_stacks_the_op_inside_is_named():
    """In loops of loops too; a carry and the rest are the scan's own."""

    def fun(x, ws):
        def inner(x, w):
            return x @ w, jnp.tanh(x)

        def outer(x, ws):
            x, stacked = jax.lax.scan(inner, x, ws)
            return x, (stacked, jnp.sin(x))

        return jax.lax.scan(outer, x, ws)

    traced = trace_jaxpr(jax.jit(fun).trace(jnp.ones((4, 4)), jnp.ones((2, 3, 4, 4))).jaxpr)
    op = next(op for op in traced.graph.ops if op.primitive == "scan")
    line = fun.__code__.co_firstlineno
    told = [maker(traced, op.id, value) for value in op.results]
    assert [primitive for primitive, _ in told] == ["scan", "scan of scan of tanh", "scan of sin"]
    assert [f".py:{line + n} " in source for n, (_, source) in zip((2, 6), told[1:], strict=True)] == [True, True]
