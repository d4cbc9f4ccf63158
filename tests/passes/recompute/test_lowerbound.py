"""The bound is below what XLA:GPU compiles, and as high as the rules allow: by hand, and by compiling."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from jax import lax
from jax.sharding import SingleDeviceSharding

from graphs import Builder, graphs, train_steps
from jax_lines import SOAK
from jaxtensile.devices.backends import CPU, TPU
from jaxtensile.devices.profiles import profile
from jaxtensile.ir.plan import Problem
from jaxtensile.passes.recompute.lowerbound import lower_bound
from jaxtensile.passes.seconds.cost import op_costs
from jaxtensile.passes.solvers.greedy import solve
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.xla.compile import compile_program
from jaxtensile.xla.target import resolve

N = 64
M = 4 * N * N
"""Bytes of the square f32 matrices below."""


def ops_of(graph, **options):
    return [(graph.ops[o].primitive, nbytes) for o, nbytes in lower_bound(graph, **options).ops]


# ---- by hand ----------------------------------------------------------------------------------


def test_arguments_and_outputs_are_always_there():
    b = Builder()
    x = b.input(N, N)
    bound = lower_bound(b.graph(b.op("exp", x)))
    assert (bound.nbytes, bound.ops) == (2 * M, ())


def test_a_product_between_products_needs_its_operand_and_its_result():
    """x, then (x @ x) and ((x @ x) @ x) at once; the output waits for no one, its memory is one of them."""
    b = Builder()
    x = b.input(N, N)
    y = b.dot(b.dot(b.dot(x, x), x), x)
    graph = b.graph(y)
    assert lower_bound(graph).nbytes == M + 2 * M
    assert ops_of(graph) == [("dot_general", 2 * M), ("dot_general", 2 * M), ("dot_general", M)]


def test_an_elementwise_operand_counts_as_the_less_of_itself_and_its_sources():
    b = Builder()
    x, k = b.input(N, N), b.input(2 * N, N)
    narrow = b.dot(x, x)
    wide = b.op("concatenate", narrow, narrow, shape=(N, 2 * N))
    y = b.dot(wide, k)
    assert ops_of(b.graph(b.op("reduce_max", y, shape=())))[0] == ("dot_general", 2 * M)


def test_operands_with_one_source_count_once_with_two_twice():
    def operands(second):
        b = Builder()
        x, w, k = b.input(N, N), b.input(N, N), b.input(N, N)
        left, other = b.dot(x, w), b.dot(x, k)
        right = b.op("transpose", {"same": left, "other": other}[second])
        return ops_of(b.graph(b.op("reduce_max", b.dot(left, right), shape=())))[0][1]

    assert operands("same") == 2 * M
    assert operands("other") == 3 * M


def test_what_common_subexpressions_make_equal_counts_once():
    b = Builder()
    x, w = b.input(N, N), b.input(N, N)
    y = b.dot(b.dot(x, w), b.dot(x, w))
    assert ops_of(b.graph(b.op("reduce_max", y, shape=())))[0][1] == 2 * M


@pytest.mark.parametrize(("dtype", "nbytes"), [("bfloat16", M // 2), ("bool", M // 4), ("float32", M)])
def test_an_epilogue_stores_what_its_reader_wants(dtype, nbytes):
    b = Builder()
    x = b.input(N, N)
    y = b.op("convert_element_type", b.dot(x, x), dtype=dtype)
    assert ops_of(b.graph(b.op("reduce_max", y, shape=()))) == [("dot_general", nbytes)]


def test_the_most_demanding_reader_decides():
    """Somebody reads the product as it is; a clone may serve the other reader, but not this one."""
    b = Builder()
    x = b.input(N, N)
    y = b.dot(x, x)
    sign = b.op("reduce_max", b.op("gt", y, dtype="bool"), shape=())
    assert ops_of(b.graph(sign, b.op("reduce_max", y, shape=()))) == [("dot_general", M)]


def test_an_epilogue_may_write_over_a_donated_argument():
    def need(donate):
        b = Builder()
        p, x = b.input(N, N), b.input(N, N)
        updated = b.op("sub", p, b.dot(x, x))
        return lower_bound(b.graph(updated, donated=[p] if donate else [])).nbytes

    assert need(donate=False) == 3 * M
    assert need(donate=True) == 2 * M


def test_a_product_cannot_write_over_its_own_operand():
    """state @ w into the donated state: the new state needs a place while the old one is read."""
    b = Builder()
    state, w = b.input(N, N), b.input(N, N)
    assert lower_bound(b.graph(b.dot(state, w), donated=[state])).nbytes == 3 * M


def test_a_donated_argument_stays_for_what_depends_on_the_op():
    """Updated from a gradient: there beside the products. Read before them only: its memory is free."""

    def need(late):
        b = Builder()
        p, x = b.input(N, N), b.input(N, N)
        loss = b.op("reduce_max", b.dot(b.dot(x, x), x), shape=())
        scaled = b.op("mul", p, loss) if late else b.op("neg", p)
        return lower_bound(b.graph(scaled, loss, donated=[p])).nbytes

    assert need(late=True) == 2 * M + 2 * M + 4 - 4
    assert need(late=False) == 2 * M + 2 * M  # an early output holds what the argument held


def test_dead_ops_and_unused_arguments_do_not_count():
    b = Builder()
    x, unused = b.input(N, N), b.input(N, N)
    b.dot(b.dot(x, x), unused)
    bound = lower_bound(b.graph(b.op("neg", x)))
    assert (bound.nbytes, bound.ops) == (2 * M, ())


def test_effects_keep_ops_alive():
    b = Builder()
    x = b.input(N, N)
    b.op("debug_callback", b.op("reduce_max", b.dot(x, x), shape=()), results=[], pinned=True)
    assert ops_of(b.graph(x)) == [("dot_general", M)]


def test_donation_pairs_by_size():
    b = Builder()
    x = b.input(N, N)
    y = b.op("reshape", b.op("exp", x), shape=(N * N,))
    assert lower_bound(b.graph(y, donated=[x])).nbytes == M


def test_constants_and_host_values_are_not_counted():
    b = Builder()
    x, table = b.input(N, N), b.input(N, N)
    graph = b.graph(b.op("add", x, table))
    assert lower_bound(graph).nbytes == 3 * M
    assert lower_bound(graph, constants=[table]).nbytes == 2 * M
    values = [replace(v, space="host") if v.id == table else v for v in graph.values]
    assert lower_bound(replace(graph, values=tuple(values))).nbytes == 2 * M


def test_other_compilers_promise_arguments_and_outputs_only():
    b = Builder()
    x = b.input(N, N)
    graph = b.graph(b.op("reduce_max", b.dot(b.dot(x, x), x), shape=()))
    assert lower_bound(graph).nbytes == 3 * M
    for backend in (CPU, TPU):
        bound = lower_bound(graph, bounded=backend.bounded)
        assert bound.nbytes == M + 4
        assert bound.ops == lower_bound(graph).ops


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "counts"),
    [
        (N, N, N, True),
        (N, N, 1, False),  # a vector: a reduction, which fuses
        (1, N, N, False),
        (N, 1, N, False),  # an outer product: elementwise
        (3, 4, 3, False),  # too small for a kernel of its own
        (N, 2, N, True),
    ],
)
def test_which_products_are_kernels(rows, depth, columns, counts):
    b = Builder()
    x, w = b.input(rows, depth), b.input(depth, columns)
    y = b.op("exp", b.dot(x, w))
    assert bool(lower_bound(b.graph(b.op("reduce_max", y, shape=()))).ops) == counts


def test_a_scatter_with_many_places_exists_with_one_it_may_fuse():
    def ops(places):
        b = Builder()
        table = b.op("broadcast_in_dim", b.input(1), shape=(N, N))
        scattered = b.op("scatter-add", table, b.input(places, 1, dtype="int32"), b.input(places, N))
        return ops_of(b.graph(b.op("reduce_max", b.op("exp", scattered), shape=())))

    assert ops(16) == [("scatter-add", M)]
    assert ops(1) == []


def loop(primitive="scan", stacked=False, trips=3, used=True):
    """A loop over c → (c @ c) @ c whose inner product goes to a stack, too."""
    body = Builder()
    c = body.input(N, N)
    inner = body.dot(c, c)
    body_graph = body.graph(body.dot(inner, c), *([inner] if stacked else []))
    b = Builder()
    x = b.input(N, N)
    fields = {"bodies": (body_graph,), "slots": (x,), "trip_count": trips}
    if primitive == "scan":
        fields["carried"] = (0, 1)
    carry, *_ = b.op(primitive, x, results=[(N, N), *([(trips, N, N)] if stacked else [])], **fields)
    return b.graph(b.op("reduce_max", carry, shape=()) if used else x)


@pytest.mark.parametrize(
    ("graph", "nbytes"),
    [
        (loop(), 2 * M),
        (loop("while"), 2 * M),
        (loop(stacked=True), 2 * M),  # the stack itself may be recomputed by whoever reads it
        (loop(trips=0), None),
        (loop(used=False), None),
    ],
    ids=["scan", "while", "stacked", "no trips", "unused"],
)
def test_a_loop_needs_what_one_iteration_needs(graph, nbytes):
    assert [n for _, n in ops_of(graph)] == ([nbytes] if nbytes else [])


def test_of_two_branches_the_smaller_is_sure():
    def branch(products):
        b = Builder()
        c = b.input(N, N)
        y = c
        for _ in range(products):
            y = b.dot(y, c)
        return b.graph(y)

    b = Builder()
    x = b.input(N, N)
    y = b.op("cond", x, bodies=(branch(1), branch(4)), slots=(-1, x))
    assert ops_of(b.graph(b.op("reduce_max", y, shape=()))) == [("cond", M)]


def test_at_most_three_ops_the_largest_first():
    b = Builder()
    x = b.input(N, N)
    y = x
    for _ in range(6):
        y = b.dot(y, x)
    big = b.dot(b.op("concatenate", y, y, x, shape=(3 * N, N)), x)
    ops = lower_bound(b.graph(b.op("reduce_max", big, shape=()))).ops
    assert len(ops) == 3
    assert [n for _, n in ops] == [4 * M, 2 * M, 2 * M]


@given(graphs())
@settings(max_examples=60)
def test_more_arguments_donated_never_need_more(graph):
    bound = lower_bound(replace(graph, donated=frozenset()))
    assert lower_bound(graph).nbytes <= bound.nbytes
    assert lower_bound(replace(graph, donated=frozenset(graph.inputs))).nbytes <= bound.nbytes


@given(train_steps())
@settings(max_examples=60 if SOAK else 10)
def test_no_plan_promises_less(graph):
    """The model and the bound agree on what is possible, whatever the budget."""
    costs = op_costs(graph, profile("nvidia-h200"))
    plan = solve(Problem(graph=graph, costs=costs, budget=0))
    assert lower_bound(graph).nbytes <= plan.predicted.device


# ---- by compiling -----------------------------------------------------------------------------


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


X, H = f32(1024, 1024), bf16(1024, 1024)
TABLE = jnp.ones((1024, 1024))


def attention(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k).astype(jnp.float32))
    return jnp.einsum("hqk,khd->qhd", weights.astype(q.dtype), v)


def sgd(loss):
    return lambda params, *args: jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, *args))


def mlp(params, x):
    return (jax.nn.gelu(jax.nn.gelu(x @ params[0]) @ params[1]).astype(jnp.float32) ** 2).mean()


def embedding(params, tokens):
    logits = params[0][tokens] @ params[1]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1).mean()


def convolutions(k, x):
    def conv(x):
        return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return conv(jnp.exp(conv(x))).sum()


PROGRAMS = {  # name -> (function, arguments, donated, share of the compiled bytes that the bound reaches)
    "outputs hold temporaries": (lambda a: jnp.sin(jnp.tanh(a @ a) @ a) @ a, (X,), (), 0.99),
    "constant": (lambda a: a @ TABLE, (X,), (), 0.99),
    "reduced product": (lambda a, b: jnp.exp(a @ b).sum(0), (X, X), (), 0.99),
    "sliced product": (lambda a, b: (a @ b)[:8], (X, X), (), 0.6),
    "low rank": (lambda a, b: (a @ b) @ a, (f32(1024, 16), f32(16, 1024)), (), 0.85),
    "mask": (lambda a, b: ((a @ b) > 0).astype(a.dtype) @ b, (H, H), (), 0.99),
    "update in an epilogue": (lambda p, a, b: p - 0.1 * (a @ b), (H, H, H), (0,), 0.99),
    "overwritten, no output": (lambda p, a, b: ((p - 0.1 * (a @ b)).sum(), b + 1), (H, H, H), (0,), 0.99),
    "state": (lambda s, w: s @ w, (X, X), (0,), 0.99),
    "donated by size": (lambda a: (a + 1).reshape(512, 2048), (X,), (0,), 0.99),
    "attention": (attention, (bf16(1024, 4, 64),) * 3, (), 0.4),
    "train step": (sgd(mlp), ([H, H], bf16(4096, 1024)), (0,), 0.5),
    "sparse update": (
        sgd(embedding),
        ([f32(4096, 128), f32(128, 4096)], jax.ShapeDtypeStruct((256,), jnp.int32)),
        (0,),
        0.4,
    ),
    "convolutions": (jax.grad(convolutions), (f32(3, 3, 32, 32), f32(4, 32, 32, 32)), (), 0.3),
    "loop": (lambda c, w: lax.fori_loop(0, 4, lambda _, c: jnp.tanh(c @ w) @ w, c), (X, X), (), 0.99),
}


def compiled_and_bound(name, target):
    fun, args, donate, share = PROGRAMS[name]
    sharding = SingleDeviceSharding(resolve(target))
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)
    flags = tuple(i in donate for i, a in enumerate(args) for _ in jax.tree.leaves(a))
    bounded = profile(target).backend.bounded
    traced = trace_jaxpr(jax.jit(fun).trace(*args).jaxpr, flags, keep_unused=False)
    bound = lower_bound(traced.graph, traced.consts, bounded=bounded)

    def make(options):
        return jax.jit(fun, donate_argnums=donate, compiler_options=dict(options))

    return compile_program(make, args, {}, {}).device, bound.nbytes, share


@pytest.mark.cuda_aot
@pytest.mark.parametrize("name", PROGRAMS)
def test_below_what_xla_compiles_for_a_gpu(name):
    compiled, bound, share = compiled_and_bound(name, "nvidia-h200")
    assert share * compiled <= bound <= compiled


@pytest.mark.parametrize("name", ["outputs hold temporaries", "reduced product", "state", "donated by size"])
def test_below_what_xla_compiles_for_a_cpu(name):
    compiled, bound, _ = compiled_and_bound(name, "cpu")
    assert bound <= compiled


@pytest.mark.tpu_aot
@pytest.mark.parametrize("name", ["reduced product", "low rank"])
def test_below_what_xla_compiles_for_a_tpu(name):
    compiled, bound, _ = compiled_and_bound(name, "tpu-v5e")
    assert bound <= compiled
