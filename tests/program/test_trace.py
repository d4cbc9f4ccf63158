"""What JAX functions become: flat ops, bodies kept, bytes and FLOPs by hand, and evaluation that changes nothing."""

import importlib.util
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxtensile
from jaxtensile.ir.ir import producers
from jaxtensile.passes.lifetimes.fusion import fuse
from jaxtensile.program.trace import bind, jaxpr_flops, trace_jaxpr

F32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


def trace(fun, *args, **options):
    return trace_jaxpr(jax.jit(fun).trace(*args).jaxpr, **options)


def names(traced):
    return [op.primitive for op in traced.graph.ops]


def evaluate(traced, args):
    """Run the flat equations one by one: every value, and the outputs."""
    env = {**dict(zip(traced.arguments, jax.tree.leaves(args), strict=True)), **traced.consts}
    for equation in traced.equations:
        operands = [env[a] if isinstance(a, int) else a.val for a in equation.operands]
        env.update(zip(equation.results, bind(equation, operands), strict=True))
    return env, [env[o] if isinstance(o, int) else o.val for o in traced.outputs]


def only(traced, primitive):
    (op,) = (op for op in traced.graph.ops if op.primitive == primitive)
    return op


# ---- structure --------------------------------------------------------------------------------


@jax.jit
def inner(x):
    return jnp.sin(x)


@jax.custom_jvp
def smooth(x):
    return jnp.log1p(jnp.exp(x))


smooth.defjvp(lambda primals, tangents: (smooth(*primals), tangents[0] * jax.nn.sigmoid(primals[0])))


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, ()), lambda _, g: (jnp.clip(g, -1, 1),))


@pytest.mark.parametrize(
    ("fun", "found"),
    [
        (lambda x: inner(inner(x)), ["sin", "sin"]),
        (lambda x: jax.jit(lambda y: inner(y) + 1)(x), ["sin", "add"]),
        (smooth, ["exp", "log1p"]),
        (lambda x: jnp.cos(clipped(x)), ["cos"]),
        (jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))), ["cos", "sin"]),
    ],
    ids=["jit", "nested jit", "custom_jvp", "custom_vjp", "checkpoint"],
)
def test_calls_are_inlined(fun, found):
    assert names(trace(fun, F32((4,)))) == found


def solved(matrix, b, shift):
    """A linear solve whose functions all close over other arrays."""
    return lax.custom_linear_solve(
        lambda x: matrix @ x,
        b,
        solve=lambda _, y: jnp.sin(shift) + jnp.exp(y),
        transpose_solve=lambda _, y: jnp.cos(y),
        symmetric=False,
    )


def test_a_linear_solve_is_what_its_solver_does():
    """Also in gradients, where the transposed one is run; each takes the arrays that it closes over."""
    args = F32((4, 4)), F32((4,)), F32((4,))
    forward = trace(solved, *args)
    assert [n for n in names(forward) if n in ("sin", "exp", "cos")] == ["sin", "exp"]
    sources = {forward.graph.ops[i].primitive: forward.graph.ops[i].operands for i in range(len(forward.graph.ops))}
    shift, b = forward.arguments[2], forward.arguments[1]
    assert sources["sin"] == (shift,) and sources["exp"] == (b,)
    slopes = names(trace(jax.grad(lambda m, b, s: solved(m, b, s).sum(), (0, 1)), *args))
    assert "cos" in slopes and "custom_linear_solve" not in slopes


def test_a_linear_call_is_what_it_calls():
    def twice(residual, x):
        return x * jnp.sin(residual)

    fun = lambda r, x: jax.custom_derivatives.linear_call(twice, twice, r, x)  # noqa: E731
    assert names(trace(fun, F32((4,)), F32((4,)))) == ["sin", "mul"]


def test_ids_are_positions_and_bodies_follow_the_same_rule():
    def fun(x, w):
        return lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, w)

    def check(graph):
        assert [op.id for op in graph.ops] == list(range(len(graph.ops)))
        assert [v.id for v in graph.values] == list(range(len(graph.values)))
        made = producers(graph)
        for op in graph.ops:
            assert all(made[v] < op.id for v in op.operands)
            for body in op.bodies:
                check(body)

    check(trace(jax.grad(lambda x, w: fun(x, w)[0].sum()), F32((4, 4)), F32((3, 4, 4))).graph)


def test_a_differentiated_checkpoint_is_its_ops_behind_a_barrier():
    """As JAX lowers it: the recomputation reads the inputs behind the barrier, so that it is not merged away."""

    def loss(x, w):
        return jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ w) @ w))(x).sum()

    traced = trace(jax.value_and_grad(loss), F32((8, 8)), F32((8, 8)))
    barrier = only(traced, "optimization_barrier")
    assert len(barrier.operands) == len(barrier.results) >= 1
    for v, r in zip(barrier.operands, barrier.results, strict=True):
        assert traced.graph.values[v].shape == traced.graph.values[r].shape
    after = [op for op in traced.graph.ops if op.id > barrier.id]
    assert any(set(op.operands) & set(barrier.results) for op in after)
    assert sum(op.primitive == "tanh" for op in traced.graph.ops) >= 3
    assert traced.source(barrier.id) == "<checkpoint>"


def test_a_checkpoint_without_cse_prevention_has_no_barrier():
    loss = jax.checkpoint(lambda x: jnp.tanh(jnp.sin(x)).sum(), prevent_cse=False)
    assert "optimization_barrier" not in names(trace(jax.grad(loss), F32((8,))))


def test_loops_and_branches_keep_their_bodies():
    def fun(x, n):
        x, ys = lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=7)
        x = lax.fori_loop(0, n, lambda i, c: c * 2, x)
        return lax.cond(n > 3, jnp.cos, lambda y: y + 1, x), ys

    traced = trace(fun, F32((5,)), jnp.int32(4))
    scan, loop, branch = (only(traced, name) for name in ("scan", "while", "cond"))
    assert (scan.trip_count, loop.trip_count, branch.trip_count) == (7, 1, 1)
    assert [op.primitive for op in scan.bodies[0].ops] == ["sin"]
    assert len(loop.bodies) == 1
    assert sorted(op.primitive for body in branch.bodies for op in body.ops) == ["add", "cos"]
    assert [traced.graph.values[r].shape for r in scan.results] == [(5,), (7, 5)]


def test_positions_of_a_scan():
    """One constant, two carries (one of them a literal), one slice."""

    def fun(w, x, xs):
        return lax.scan(lambda c, s: ((jnp.sin(c[0] @ w) + s, c[1] + 1), c[0]), (x, 0), xs)

    traced = trace(fun, F32((4, 4)), F32((4,)), F32((3, 4)))
    scan = only(traced, "scan")
    w, x, xs = traced.arguments
    assert scan.carried == (1, 2)
    assert scan.slots == (w, x, -1, xs)
    assert scan.operands == (w, x, xs)
    assert len(scan.bodies[0].inputs) == 4
    assert len(scan.bodies[0].output_slots) == len(scan.results) == 3


def test_a_barrier_before_a_literal_says_which_of_its_results_that_is():
    def fun(x, y):
        x, one, y = lax.optimization_barrier((x, 1.0, y))
        return x * one, y

    traced = trace(fun, F32((4,)), F32((8,)))
    barrier, x, y = only(traced, "optimization_barrier"), *traced.arguments
    assert barrier.slots == (x, -1, y) and barrier.operands == (x, y)
    first, one, last = barrier.results
    assert [fuse(traced.graph).home[r] for r in (first, one, last)] == [x, one, y]


def test_a_jit_with_shardings_stays_an_op():
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    traced = trace(lambda x: jax.jit(jnp.sin, in_shardings=sharding)(x) + 1, F32((4,)))
    call = traced.graph.ops[0]
    assert call.primitive in ("jit", "pjit")
    assert [op.primitive for op in call.bodies[0].ops] == ["sin"]
    assert names(traced)[1:] == ["add"]


# ---- inputs and outputs -----------------------------------------------------------------------


def test_outputs_may_be_arguments_literals_and_repeated():
    def fun(x, y):
        s = jnp.sin(x)
        return s, y, s, 3.0

    traced = trace(fun, F32((4,)), F32((2,)))
    graph = traced.graph
    assert len(traced.outputs) == len(graph.output_slots) == 4
    assert graph.outputs[0] == graph.outputs[2]
    assert graph.outputs[1] == traced.arguments[1]
    assert [o is None for o in graph.output_slots] == [not isinstance(o, int) for o in traced.outputs]


def test_constants_are_inputs_with_their_values():
    table = np.arange(6.0, dtype=np.float32)
    traced = trace(lambda x: x * jnp.asarray(table) + jnp.asarray(table).sum(), F32((6,)))
    assert set(traced.graph.inputs) == {*traced.arguments, *traced.consts}
    assert any(np.array_equal(value, table) for value in traced.consts.values())


def test_donation_follows_the_flat_arguments():
    def fun(state, x):
        return jax.tree.map(lambda p: p + x.sum(), state)

    traced = trace(fun, {"a": F32((2,)), "b": F32((3,))}, F32((4,)), donated=(True, False, False))
    assert [traced.graph.values[v].shape for v in traced.graph.donated] == [(2,)]


def test_unused_arguments_are_no_inputs_if_jit_drops_them():
    def fun(x, unused):
        return jnp.sin(x)

    kept, dropped = (trace(fun, F32((2,)), F32((3,)), keep_unused=k) for k in (True, False))
    assert [kept.graph.values[v].shape for v in kept.graph.inputs] == [(2,), (3,)]
    assert [dropped.graph.values[v].shape for v in dropped.graph.inputs] == [(2,)]
    assert len(dropped.arguments) == 2


# ---- effects ----------------------------------------------------------------------------------


def test_effects_are_pinned_in_bodies_too():
    def fun(x):
        jax.debug.print("{}", x)
        y = jax.pure_callback(np.sin, x, x)

        def body(c, _):
            jax.debug.callback(lambda v: None, c)
            return c * 2, None

        return lax.scan(body, y, None, length=2)[0] + jnp.cos(x)

    traced = trace(fun, F32((3,)))
    pinned = {op.primitive for op in traced.graph.ops if op.pinned}
    assert {"pure_callback", "scan"} <= pinned
    assert any("debug" in name for name in pinned)
    assert "cos" not in pinned
    assert any(op.pinned for op in only(traced, "scan").bodies[0].ops)


def test_random_numbers_from_a_key_are_not_pinned():
    traced = trace(lambda key: jax.random.normal(key, (8,)), jax.eval_shape(lambda: jax.random.key(0)))
    assert not any(op.pinned for op in traced.graph.ops)


# ---- bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [
        (jnp.float32, 400),
        (jnp.bfloat16, 200),
        (jnp.float8_e4m3fn, 100),
        (jnp.float4_e2m1fn, 50),
        (jnp.int4, 50),
        (jnp.uint4, 50),
        (jnp.int8, 100),
        (jnp.bool_, 100),
        (jnp.complex64, 800),
        (jnp.uint16, 200),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_bytes_of_a_hundred_elements(dtype, nbytes):
    traced = trace(lambda x: x, jax.ShapeDtypeStruct((4, 25), dtype))
    (value,) = traced.graph.values
    assert value.nbytes == nbytes
    assert value.shape == (4, 25)
    assert value.dtype == jnp.dtype(dtype).name
    assert value.space == "device"


@pytest.mark.parametrize(("dtype", "nbytes"), [("float64", 800), ("int64", 800), ("complex128", 1600)])
def test_bytes_of_wide_types(dtype, nbytes):
    with jax.enable_x64(True):
        assert trace(lambda x: x, jax.ShapeDtypeStruct((4, 25), dtype)).graph.values[0].nbytes == nbytes


def test_an_odd_count_of_small_integers_is_rounded_up():
    traced = trace(lambda x: x, jax.ShapeDtypeStruct((3,), jnp.int4))
    assert traced.graph.values[0].nbytes == 2


@pytest.mark.parametrize(("impl", "words"), [("threefry2x32", 2), ("rbg", 4)])
def test_bytes_of_keys(impl, words):
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl=impl), 10))
    traced = trace(lambda k: k, keys)
    assert traced.graph.values[0].nbytes == 10 * words * 4


def test_bytes_of_other_extended_types():
    """They count as what they are stored in."""
    both = jax.experimental.primal_tangent_dtype(jnp.int8, jnp.bfloat16)
    numbers = jax.ShapeDtypeStruct((10,), jnp.int8)
    traced = trace(lambda x: lax.convert_element_type(lax.convert_element_type(x, both), jnp.int8), numbers)
    assert [value.nbytes for value in traced.graph.values if "PrimalTangent" in value.dtype] == [10]


def test_empty_arrays_and_scalars():
    traced = trace(lambda x, y: (x, y), F32((0, 7)), F32(()))
    assert [v.nbytes for v in traced.graph.values] == [0, 4]


# ---- FLOPs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subscripts", "left", "right", "flops"),
    [
        ("ij,jk->ik", (3, 4), (4, 5), 2 * 3 * 4 * 5),
        ("bij,bjk->bik", (2, 3, 4), (2, 4, 5), 2 * 2 * 3 * 4 * 5),
        ("ij,j->i", (3, 4), (4,), 2 * 3 * 4),
        ("bqhd,bkhd->bhqk", (2, 5, 3, 8), (2, 7, 3, 8), 2 * 2 * 3 * 5 * 7 * 8),
        ("ijk,jkl->il", (2, 3, 4), (3, 4, 5), 2 * 2 * 3 * 4 * 5),
    ],
)
def test_flops_of_products(subscripts, left, right, flops):
    traced = trace(lambda x, y: jnp.einsum(subscripts, x, y), F32(left), F32(right))
    assert traced.graph.flops == flops


CONVOLUTIONS = {
    "plain": ({}, (2, 8, 8, 3), (3, 3, 3, 16), 2 * (2 * 8 * 8 * 16) * (3 * 3 * 3)),
    "strided": ({"window_strides": (2, 2)}, (2, 8, 8, 3), (3, 3, 3, 16), 2 * (2 * 4 * 4 * 16) * (3 * 3 * 3)),
    "grouped": ({"feature_group_count": 4}, (2, 8, 8, 8), (3, 3, 2, 16), 2 * (2 * 8 * 8 * 16) * (3 * 3 * 2)),
    "depthwise": ({"feature_group_count": 8}, (2, 8, 8, 8), (5, 5, 1, 8), 2 * (2 * 8 * 8 * 8) * (5 * 5)),
    # Transposed: each input element meets each tap once.
    "transposed": (
        {"lhs_dilation": (2, 2), "padding": [(2, 2), (2, 2)]},
        *((2, 8, 8, 3), (4, 4, 3, 16), 2 * (2 * 16 * 16 * 16) * (4 * 4 * 3) / 4),
    ),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_flops_of_convolutions(name):
    options, image, kernel, flops = CONVOLUTIONS[name]
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC"), **options}
    traced = trace(lambda x, k: lax.conv_general_dilated(x, k, **options), F32(image), F32(kernel))
    assert traced.graph.flops == flops


def test_flops_of_loops_and_branches():
    w = F32((8, 8))

    def fun(x, w):
        x, _ = lax.scan(lambda c, _: (c @ w, None), x, None, length=5)
        x = lax.cond(x[0, 0] > 0, lambda y: y @ w @ w, lambda y: y @ w, x)
        return lax.while_loop(lambda c: c[0, 0] > 0, lambda c: c @ w, x)

    jaxpr = jax.jit(fun).trace(w, w).jaxpr
    once = 2 * 8**3
    assert trace_jaxpr(jaxpr).graph.flops == (5 + 2 + 1) * once
    assert jaxpr_flops(jaxpr) == (5 + 2 + 1) * once


def test_flops_are_the_same_inlined_or_not():
    def fun(x):
        return jax.checkpoint(lambda y: jax.jit(lambda z: z @ z)(y) @ y)(x).sum()

    jaxpr = jax.jit(jax.value_and_grad(fun)).trace(F32((8, 8))).jaxpr
    assert trace_jaxpr(jaxpr).graph.flops == jaxpr_flops(jaxpr)


def test_what_nothing_reads_is_no_part_of_a_program():
    """Unused gradients, arguments that only they read, what loops stack for nobody; prints stay."""

    def fun(w, unused, x):
        jax.grad(lambda w: (jnp.tanh(x @ w) * unused).sum())(w)
        y, stacked = jax.lax.scan(lambda y, _: (jnp.sin(y), y @ w), x, length=3)
        jax.debug.print("{}", stacked[0].sum())
        return jax.lax.scan(lambda y, _: (jnp.cos(y), y @ w), y, length=3)[0]

    jaxpr = jax.jit(fun).trace(F32((8, 8)), F32((8, 8)), F32((8, 8))).jaxpr
    found = trace_jaxpr(jaxpr, keep_unused=False)
    assert [op.primitive for op in found.graph.ops if op.primitive in ("tanh", "scan")] == ["scan", "scan"]
    first, second = (op for op in found.graph.ops if op.primitive == "scan")
    assert len(first.results) == 2 and len(second.results) == 1 and first.flops > second.flops == 0
    assert found.graph.inputs == (found.arguments[0], found.arguments[2]) and len(found.arguments) == 3
    assert any(op.pinned for op in found.graph.ops)


def test_elementwise_work_is_no_matrix_work():
    assert trace(lambda x: jnp.exp(x * x).sum(), F32((100,))).graph.flops == 0


# ---- source lines and evaluation --------------------------------------------------------------


def test_an_op_knows_the_users_line():
    def fun(x):
        y = jnp.sin(x)
        return y @ y

    traced = trace(fun, F32((4, 4)))
    line = fun.__code__.co_firstlineno
    assert f"test_trace.py:{line + 1}" in traced.source(0)
    product = only(traced, "dot_general")
    assert f"test_trace.py:{line + 2}" in traced.source(product.id)


def test_the_line_of_an_op_is_the_users_where_a_library_made_it(tmp_path):
    """Layers come from installed packages; what is all in one keeps its own line, and who calls it is not asked."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "layers.py").write_text("import jax.numpy as jnp\n\n\ndef layer(x):\n    return jnp.tanh(x)\n")
    spec = importlib.util.spec_from_file_location("layers", folder / "layers.py")
    layers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(layers)

    def own(x):
        return layers.layer(x)

    lines = []
    for fun in (own, layers.layer):
        planned = jaxtensile.jit(fun, budget="1GiB")
        traced = trace_jaxpr(planned.trace(jax.ShapeDtypeStruct((8,), jnp.float32)).jaxpr)
        lines.append(traced.source(0))
    line = own.__code__.co_firstlineno + 1
    assert lines[0].endswith(f"test_trace.py:{line} ({own.__qualname__})")
    assert lines[1].endswith("layers.py:5 (layer)")


def program(x, w):
    @jax.checkpoint
    def layer(x):
        return smooth(x @ w) + inner(x)

    def body(c, s):
        return layer(c) * s, c.sum()

    x, sums = lax.scan(body, layer(x), jnp.arange(1.0, 4.0))
    x = lax.cond(sums[0] > 0, layer, lambda y: y * 2, x)
    noise = jax.random.normal(jax.random.key(7), x.shape)
    return (x + noise).sum() + sums.max()


def test_the_flat_equations_compute_the_same_and_look_as_said():
    """The outputs are those of the function and of its gradient; every array has its value's bytes."""
    args = tuple(jax.random.normal(jax.random.key(0), (2, 6, 6)) / 4)
    fun = jax.value_and_grad(program, argnums=(0, 1))
    traced = trace(fun, *args)
    fast = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    arrays, outputs = fast(lambda *args: evaluate(traced, args))(*args)
    for got, want in zip(outputs, jax.tree.leaves(fast(fun)(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)
    for v, array in arrays.items():
        value = traced.graph.values[v]
        assert value.shape == np.shape(array)
        if not jnp.issubdtype(array.dtype, jax.dtypes.extended):
            assert value.nbytes == math.prod(value.shape) * np.dtype(array.dtype).itemsize
