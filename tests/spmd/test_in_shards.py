"""Programs made of ``shard_map``s as one of a single device: what is brought inside, what is not, what may run again.

A mesh of one device is enough for most: arrays are divided by its axes as they are by others.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from four_devices import on_four_devices
from jaxtensile import _compat
from jaxtensile.ir.ir import is_fixed
from jaxtensile.program.trace import trace_jaxpr, traced_within, why_pinned
from jaxtensile.spmd.in_shards import NotInShardsError, in_shards
from jaxtensile.spmd.local_shapes import sharded

MESH = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))
X = np.linspace(-1.0, 1.0, 12, dtype="f").reshape(4, 3)


ROWS = P("rows")


def mapped(fun, ins=ROWS, outs=ROWS, **options):
    return jax.shard_map(fun, mesh=MESH, in_specs=ins, out_specs=outs, **options)


def place(x, *spec):
    return jax.device_put(x, NamedSharding(MESH, P(*spec)))


def shards_of(fun, *args):
    jitted = jax.jit(fun)
    traced = jitted.trace(*args)
    where = sharded(traced, args, {}, _compat.static_arguments(jitted), 1)
    return in_shards(trace_jaxpr(traced.jaxpr), where)


def inside(found):
    with traced_within(found.within):
        return trace_jaxpr(found.closed)


def clipped(x):
    y = mapped(lambda x: jnp.sin(x) * jax.lax.psum(x.sum(), "rows"))(x)
    y = jnp.where(y > 0, y, 0.5) / jnp.sqrt((y**2).sum())
    return mapped(lambda y: y + 1)(y) * jnp.full(y.shape, 2.0), y.max(0)


@pytest.mark.parametrize("spec", [P("rows"), P()], ids=str)
def test_values_and_shardings(spec):
    """Rows that are divided, and what every device has whole; ``clipped`` takes rows."""
    fun = clipped if spec == P("rows") else lambda x: mapped(lambda x: x * 2, P(), P())(x) @ x.T
    found = shards_of(fun, place(X, *spec))
    assert found.inputs == (P(*spec, *(None,) * (2 - len(spec))),)
    got = jax.jit(lambda x: found.around(lambda flat: jaxpr_as_fun(found.closed)(*flat))([x]))(place(X, *spec))
    for e, g in zip(jax.tree.leaves(jax.jit(fun)(place(X, *spec))), got, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-6)
    assert "shard_map" not in [op.primitive for op in inside(found).graph.ops]


def through_layers(weights, x):
    """A loop around a ``shard_map``, in a loop: a carry of rows, one of a number that is repeated along them, one that
    every device has whole; stacks of each, and a slice of a repeated number."""

    def layer(carry, w):
        x, seen, total, key = carry
        w, extra = w
        key, now = jax.random.split(key)
        y = mapped(lambda x, w: jnp.tanh(x @ w) * jax.lax.psum(x.sum(), "rows") / 9, (ROWS, P()))(x, w)
        x = x + y * extra + jax.random.normal(now)
        return (x, seen + x, total + x.sum(), key), (y, total)

    def block(carry, w):
        return jax.lax.scan(layer, carry, (w, jnp.ones((2, *x.shape))))

    first = x, jnp.zeros_like(x), jnp.float32(0), jax.random.key(1)
    (x, seen, total, _), stacks = jax.lax.scan(block, first, weights, reverse=True)
    return x, seen, total, stacks


def test_a_loop_around_a_shard_map():
    weights = np.linspace(-1.0, 1.0, 54, dtype="f").reshape(3, 2, 3, 3)
    args = place(weights), place(X, "rows")
    for fun in (through_layers, jax.grad(lambda w, x: sum(y.sum() for y in jax.tree.leaves(through_layers(w, x))))):
        found = shards_of(fun, *args)
        got = jax.jit(lambda *flat, found=found: found.around(lambda flat: jaxpr_as_fun(found.closed)(*flat))(flat))(
            *args
        )
        for e, g in zip(jax.tree.leaves(jax.jit(fun)(*args)), got, strict=True):
            np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-6)
        names = [op.primitive for op in inside(found).graph.ops]
        assert "scan" in names and "shard_map" not in names
    assert shards_of(through_layers, *args).outputs[:3] == (P("rows", None), P("rows", None), P())


def test_types_that_say_where_an_array_is():
    """On an explicit mesh numbers and arrays are placed by ``reshard``: as they are, they stay parts."""
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, ROWS)
        whole = jax.jit(jax.shard_map(lambda x: jax.lax.psum((x**3).sum(), "rows"), in_specs=ROWS, out_specs=P()))
        rows = jax.shard_map(jnp.sin, in_specs=ROWS, out_specs=ROWS)
        for fun in (jax.grad(whole), lambda x: rows(jax.sharding.reshard(x * 2.0, ROWS))):
            jitted = jax.jit(fun)
            traced = jitted.trace(x)
            where = sharded(traced, (x,), {}, _compat.static_arguments(jitted), 1)
            found = in_shards(trace_jaxpr(traced.jaxpr), where)
            assert found is not None
            assert "reshard" in str(traced.jaxpr) and "reshard" not in [op.primitive for op in inside(found).graph.ops]
            (got,) = jax.jit(lambda x, found=found: found.around(lambda flat: jaxpr_as_fun(found.closed)(*flat))([x]))(
                x
            )
            np.testing.assert_allclose(got, jitted(x), rtol=1e-6)


def test_an_argument_without_a_place_goes_where_its_reader_wants_it():
    assert shards_of(clipped, X).inputs == (P("rows", None),)


def test_a_program_without_a_shard_map():
    assert shards_of(jnp.sin, place(X, "rows")) is None


@pytest.mark.parametrize(
    ("fun", "why"),
    [
        (lambda x: jnp.einsum("ij,ij->i", mapped(jnp.sin)(x), x), "dot_general at .* is not done part by part"),
        (lambda x: mapped(jnp.sin)(jax.lax.scan(lambda c, y: (c, y + c), 1.0, x)[1]), "scan at .* part by part"),
        (lambda x: mapped(jnp.sin, P(), P())(mapped(jnp.cos)(x)), "takes an array that is divided as"),
        (lambda x: mapped(jnp.sin, check_vma=False)(mapped(jnp.cos)(x)), "check differently"),
    ],
)
def test_what_is_not_done_part_by_part(fun, why):
    with pytest.raises(NotInShardsError, match=why):
        shards_of(fun, place(X, "rows"))


def test_a_bitcast_that_adds_a_dimension():
    with pytest.raises(NotInShardsError, match=r"bitcast_convert_type at .* is not done part by part"):
        shards_of(lambda x: jax.lax.bitcast_convert_type(mapped(jnp.sin)(x), "uint8"), place(X, "rows"))


FOUR = """
import jax, jax.numpy as jnp, numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxtensile import _compat
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.spmd.in_shards import NotInShardsError, in_shards
from jaxtensile.spmd.local_shapes import sharded

rows = NamedSharding(jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,)), P("rows"))
x = jax.device_put(np.linspace(-1, 1, 24, dtype="f").reshape(8, 3), rows)

def step(count):
    def fun(x):
        y = jax.shard_map(jnp.sin, mesh=rows.mesh, in_specs=P("rows"), out_specs=P("rows"))(x)
        return y / jnp.var(y) * jax.lax.with_sharding_constraint(jnp.ones(count), rows).sum()
    return fun

def found(fun):
    jitted = jax.jit(fun)
    traced = jitted.trace(x)
    return in_shards(trace_jaxpr(traced.jaxpr), sharded(traced, (x,), {}, _compat.static_arguments(jitted), 4))

shards = found(step(12))
(got,) = jax.jit(lambda x: shards.around(lambda flat: jaxpr_as_fun(shards.closed)(*flat))([x]))(x)
got.block_until_ready()
np.testing.assert_allclose(got, jax.jit(step(12))(x), rtol=1e-5)
try:
    found(step(10))
except NotInShardsError as error:
    assert "of shape (10,) is divided unevenly" in str(error)
else:
    raise AssertionError("ten numbers in four equal parts")
"""


def test_numbers_that_are_repeated_along_divided_dimensions(tmp_path):
    """Dimensions of 1 stay; others are divided into equal parts, or not at all."""
    done = on_four_devices(FOUR, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_gathers_may_run_again_except_where_devices_may_part():
    def gather(x):
        return jax.lax.all_gather(x, "rows").sum(0)

    def fun(x):
        x = x + gather(x)
        x = jax.lax.scan(lambda c, _: (c + gather(c), None), x, None, length=3)[0]
        return jax.lax.cond(x.sum() > 0, gather, lambda x: x, x) * jax.lax.psum(x, "rows")

    traced = inside(shards_of(mapped(fun), place(X, "rows")))
    pinned = {op.primitive: op.pinned for op in traced.graph.ops}
    assert not pinned["all_gather"] and not pinned["scan"] and pinned["cond"]
    cond = next(op.id for op in traced.graph.ops if op.primitive == "cond")
    assert why_pinned(traced, cond) == "all_gather inside"
    assert [op.primitive for op in traced.graph.ops if op.pinned and op.primitive.startswith("psum")]


def test_a_loop_around_a_sum_stays_and_may_stack_less():
    def loss(w, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jax.lax.psum((jax.lax.scan(layer, x, w)[0] ** 2).sum(), "rows")

    w = np.ones((2, 3, 3), "f")
    found = shards_of(mapped(jax.grad(loss), (P(), P("rows")), P()), place(w), place(X, "rows"))
    forward, backward = (op for op in inside(found).graph.ops if op.primitive == "scan")
    assert not forward.pinned and backward.pinned and not is_fixed(backward)
