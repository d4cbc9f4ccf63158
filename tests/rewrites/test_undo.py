"""Programs without their checkpoints: what is merged, what never is, and that the values stay."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.xla_metadata import set_xla_metadata

import jaxtensile
from checkpoints import CHECKPOINTS, checkpoints_are
from jaxtensile.ir.plan import Program
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.program.emit import emit
from jaxtensile.program.trace import jaxpr_flops, trace_jaxpr
from jaxtensile.rewrites.undo import undo
from programs import FAST, bits

P = jax.checkpoint_policies
X = jax.random.normal(jax.random.key(0), (16, 16)) / 4
W = jax.random.normal(jax.random.key(1), (4, 16, 16)) / 4


@pytest.fixture(autouse=True, params=CHECKPOINTS)
def kind(request):
    """Everything holds for both kinds of checkpoints that JAX has."""
    with checkpoints_are(request.param):
        yield request.param


newest = pytest.mark.parametrize("kind", CHECKPOINTS[-1:], indirect=True)
"""Of what is compiled each line of JAX tests its latest kind."""


def layer(w, x, key):
    h = checkpoint_name(jnp.tanh(x @ w), "hidden")
    h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0)
    return x / 2 + jax.nn.gelu(h @ w.T) / 4


def trace(fun, *args, **options):
    return trace_jaxpr(jax.jit(fun).trace(*args).jaxpr, **options)


def gradient(layer, raw_key=False):
    """A function of weights and ``x`` that differentiates four ``layer``s."""

    def loss(w, x):
        key = jax.random.PRNGKey(3) if raw_key else jax.random.key(3)
        for i in range(4):
            x = layer(w[i], x, jax.random.fold_in(key, i))
        return (x * x).sum()

    return jax.value_and_grad(loss, argnums=(0, 1))


def names(traced):
    return [op.primitive for op in traced.graph.ops]


# ---- what is merged -----------------------------------------------------------------------------


@pytest.mark.parametrize("raw_key", [False, True], ids=["key", "raw key"])
@pytest.mark.parametrize(
    "policy",
    [None, P.nothing_saveable, P.dots_saveable, P.save_only_these_names("hidden"), P.everything_saveable],
    ids=["none", "nothing", "dots", "names", "everything"],
)
def test_what_is_left_is_the_program_without_checkpoints(policy, raw_key):
    """The same matrix work and no barrier; not even masks and random numbers are made twice."""
    free = trace(gradient(layer, raw_key), W, X)
    traced = trace(gradient(jax.checkpoint(layer, policy=policy), raw_key), W, X)
    undone = undo(traced)
    if undone is None:
        assert policy is P.everything_saveable
        return
    assert undone.traced.graph.flops == free.graph.flops <= traced.graph.flops
    left = names(undone.traced)
    assert "optimization_barrier" not in left and undone.barriers == names(traced).count("optimization_barrier") > 0
    for primitive in ("dot_general", "tanh", "random_bits"):
        assert left.count(primitive) == names(free).count(primitive)


def test_ids_are_positions_and_ends_are_the_same():
    args = {"w": W, "unused": X}, X
    fun = lambda p, x: gradient(jax.checkpoint(layer))(p["w"], x)  # noqa: E731
    donated = (True, False, True)  # by name: unused, w
    traced = trace_jaxpr(jax.jit(fun).trace(*args).jaxpr, donated, keep_unused=False)
    undone = undo(traced)
    assert undone is not None
    graph, old = undone.traced.graph, traced.graph
    assert [v.id for v in graph.values] == list(range(len(graph.values)))
    assert [op.id for op in graph.ops] == list(range(len(graph.ops))) == list(range(len(undone.traced.equations)))
    for op, equation in zip(graph.ops, undone.traced.equations, strict=True):
        assert op.results == equation.results and op.primitive == equation.eqn.primitive.name
        assert op.operands == tuple(a for a in equation.operands if isinstance(a, int))
    shapes = [[g.values[v].shape for v in g.outputs] for g in (graph, old)]
    assert shapes[0] == shapes[1] and len(graph.inputs) == len(old.inputs) and len(graph.donated) == len(old.donated)
    assert len(undone.traced.arguments) == 3
    assert live_ranges(graph).argument == live_ranges(old).argument


def test_kept_is_what_waits_for_the_backward_pass():
    """Of each layer's values those that its gradient reads; what only leads to them is not among them."""
    loss = lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x * 2.0)))(x).sum()  # noqa: E731
    undone = undo(trace(jax.value_and_grad(loss), X))
    assert undone is not None
    made = {r: op.primitive for op in undone.traced.graph.ops for r in op.results}
    assert all(undone.traced.graph.values[v].shape == X.shape for v in undone.kept)
    assert {made[v] for v in undone.kept} <= {"cos", "mul", "sin"} and undone.kept


def test_masks_are_made_where_they_are_read():
    """Equal masks do not keep what they mask from being one, and none of them lives as long as all blocks."""

    def masked(w, x, key):
        mask = jnp.tril(jnp.ones(x.shape, bool))
        return jnp.tanh(jnp.where(mask, x @ w, -1e9))

    free, traced = trace(gradient(masked), W, X), trace(gradient(jax.checkpoint(masked)), W, X)
    undone = undo(traced)
    assert undone is not None and undone.traced.graph.flops == free.graph.flops
    assert names(undone.traced).count("tanh") == names(free).count("tanh") == 4
    made = {r: op for op in undone.traced.graph.ops for r in op.results}
    last = {v: op.id for op in undone.traced.graph.ops for v in op.operands}
    masks = [v for v, op in made.items() if undone.traced.graph.values[v].dtype == "bool" and v in last]
    assert len(masks) >= 4
    assert all(last[v] - made[v].id < len(undone.traced.graph.ops) / 2 for v in masks)


def test_checkpoints_within_checkpoints():
    inner = jax.checkpoint(layer)
    outer = jax.checkpoint(lambda w, x, key: inner(w, inner(w, x, key), jax.random.fold_in(key, 9)))
    plain = lambda w, x, key: layer(w, layer(w, x, key), jax.random.fold_in(key, 9))  # noqa: E731
    undone = undo(trace(gradient(outer), W, X))
    assert undone is not None
    assert undone.traced.graph.flops == trace(gradient(plain), W, X).graph.flops
    assert undone.traced.graph.flops < trace(gradient(outer), W, X).graph.flops


# ---- what is not ----------------------------------------------------------------------------------


def offloaded(w, x, key):
    policy = P.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(layer, policy=policy)(w, x, key)


def in_a_loop(w, x, key):
    step = jax.checkpoint(lambda c, _: (jnp.tanh(c @ w), None))
    return lax.scan(step, x, None, length=3)[0]


@pytest.mark.parametrize("one", [layer, offloaded, in_a_loop])
def test_programs_that_are_left_alone(one):
    assert undo(trace(gradient(one), W, X)) is None


def test_one_offloading_checkpoint_leaves_all_alone():
    both = lambda w, x, key: jax.checkpoint(layer)(w, offloaded(w, x, key), key)  # noqa: E731
    assert undo(trace(gradient(both), W, X)) is None


def twice(make):
    """``make`` in a checkpoint: how often its primitive is in the program, and without the checkpoint."""

    def loss(x):
        return jax.checkpoint(lambda x: jnp.sin(make(jnp.cos(x))))(x).sum()

    traced = trace(jax.value_and_grad(loss), X)
    undone = undo(traced)
    assert undone is not None
    assert names(undone.traced).count("cos") < names(traced).count("cos")
    return traced, undone.traced


def test_foreign_code_runs_as_often_as_before():
    callback = lambda x: x + jax.pure_callback(np.ones_like, x, lax.stop_gradient(x))  # noqa: E731
    before, after = twice(callback)
    assert names(before).count("pure_callback") == names(after).count("pure_callback")


def test_effects_happen_as_often_as_before():
    def tell(x):
        jax.debug.callback(lambda _: None, x)
        return jnp.tanh(x)

    before, after = twice(tell)
    effects = [[op.primitive for op in t.graph.ops if op.pinned] for t in (before, after)]
    assert effects[0] == effects[1] and len(effects[0]) >= 1


def test_barriers_that_the_user_wrote_stay():
    before, after = twice(lax.optimization_barrier)
    written = sum(e.eqn is not None and e.eqn.primitive.name == "optimization_barrier" for e in before.equations)
    assert names(after).count("optimization_barrier") == written >= 2


@jax.custom_vjp
def kept_apart(x):
    return jnp.sin(x)


kept_apart.defvjp(
    lambda x: (jnp.sin(x), jnp.cos(x)), lambda c, g: (lax.optimization_barrier(g) * lax.optimization_barrier(c),)
)
BARRIER = lax.optimization_barrier


@pytest.mark.parametrize(
    ("fun", "written", "inserted"),
    [
        (lambda x: jnp.sin(jax.checkpoint(lambda x: jnp.sin(jnp.cos(x)))(x)), 0, 1),
        (lambda x: jax.checkpoint(lambda x: jnp.sin(BARRIER(jnp.cos(x))))(x), 3, 1),  # forward, again, backward
        (lambda x: BARRIER(jax.checkpoint(lambda x: jnp.sin(jnp.cos(x)))(BARRIER(x))), 4, 1),
        (lambda x: jax.checkpoint(BARRIER)(jnp.sin(x)), 2, 1),
        (lambda x: jax.checkpoint(lambda x: jnp.sin(jax.checkpoint(BARRIER)(jnp.cos(x))))(x), 3, 2),
        (lambda x: jax.checkpoint(lambda x: jnp.sin(kept_apart(jnp.cos(x))))(x), 2, 1),
        (lambda x: jax.checkpoint(kept_apart)(jnp.cos(x)), 2, 1),
        (lambda x: jnp.sin(jax.checkpoint(lambda x: jnp.sin(BARRIER(jnp.cos(x))), prevent_cse=False)(x)), 3, 0),
    ],
    ids="none|inside|around|alone|alone inside|in a rule|a rule alone|not prevented".split("|"),
)
@pytest.mark.parametrize("transform", [lambda f: f, lambda f: lambda x: jax.vmap(f)(x[None])], ids=["grad", "vmap"])
def test_whose_barrier_it_is(transform, fun, written, inserted):
    """Those that the user wrote are told from those of checkpoints, however either came to be differentiated."""
    equations = trace(transform(jax.value_and_grad(lambda x: fun(x).sum())), X).equations
    barriers = [e for e in equations if e.eqn is None or e.eqn.primitive.name == "optimization_barrier"]
    assert sum(e.eqn is None for e in barriers) == inserted
    assert len(barriers) - inserted == written


def with_checkpoint(fun):
    """``fun``'s ops next to a checkpoint that makes the program one to be undone."""

    def both(x):
        return fun(x), jax.value_and_grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x).sum())(x)

    undone = undo(trace(both, X))
    assert undone is not None
    return names(undone.traced)


def test_equal_ops_of_the_same_configuration_are_one():
    assert with_checkpoint(lambda x: (jnp.exp(x), jnp.exp(x))).count("exp") == 1


def in_another_configuration(x):
    with set_xla_metadata(note="b"):
        return jnp.exp(x), jnp.exp(x)


def other_random_numbers(x):
    with jax.threefry_partitionable(False):
        one = jax.random.bits(jax.random.key(0), (4,))
    with jax.threefry_partitionable(True):
        return one, jax.random.bits(jax.random.key(0), (4,))


@pytest.mark.parametrize(
    ("fun", "primitive", "count"),
    [
        (lambda x: (jnp.exp(x), *in_another_configuration(x)), "exp", 2),
        (other_random_numbers, "random_bits", 2),
        (lambda x: (x / 0.0, x / -0.0, x / 0.0), "div", 2),
        (lambda x: (lax.integer_pow(x, 2), lax.integer_pow(x, 3)), "integer_pow", 2),
        (lambda x: (jnp.exp(x), jnp.exp(x.T)), "exp", 2),
        (lambda x: (lax.dot(x, x), lax.dot(x, x, precision="highest"), lax.dot(x, x)), "dot_general", 2),
        (
            lambda x: (lax.convert_element_type(x, jnp.int8), lax.convert_element_type(x, jnp.int16)),
            "convert_element_type",
            2,
        ),
    ],
    ids=["metadata", "threefry", "signed zeros", "parameters", "operands", "precision", "dtypes"],
)
def test_what_looks_alike_and_is_not(fun, primitive, count):
    assert with_checkpoint(fun).count(primitive) == count


# ---- values -------------------------------------------------------------------------------------


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda c, g: (jnp.clip(g, -1, 1) * c,))


def printing(w, x, key):
    jax.debug.callback(lambda _: None, x[0, 0])
    return jnp.tanh(x @ w)


def branching(w, x, key):
    return lax.cond(x[0, 0] > 0, lambda y: jnp.tanh(y @ w), lambda y: y * 2, x)


ones = partial(jax.checkpoint, layer)
LAYERS = {
    "nothing": ones(),
    "dots": ones(policy=P.dots_saveable),
    "names": ones(policy=P.save_only_these_names("hidden")),
    "not prevented": ones(prevent_cse=False),
    "nested": jax.checkpoint(lambda w, x, key: ones()(w, jnp.sin(ones()(w, x, key)), key)),
    "custom rule": jax.checkpoint(lambda w, x, key: clipped(clipped(x @ w)) + x),
    "callback": jax.checkpoint(printing),
    "branch": jax.checkpoint(branching),
    "loop inside": jax.checkpoint(
        lambda w, x, key: lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0]
    ),
    "in a loop": in_a_loop,
    "in a loop and not": lambda w, x, key: ones()(w, in_a_loop(w, x, key), key),
    "half": jax.checkpoint(lambda w, x, key: layer(w.astype("bfloat16"), x.astype("bfloat16"), key).astype(x.dtype)),
    "jit inside": jax.checkpoint(lambda w, x, key: jax.jit(layer)(w, jax.jit(jnp.sin)(x), key)),
}


LEFT_ALONE = ("in a loop", "loop inside")
"""Their recomputation is a loop, which is no loop of the forward pass: it stacks residuals."""


@newest
@pytest.mark.parametrize("name", LAYERS)
def test_the_same_bits_op_by_op(name):
    traced = trace(gradient(LAYERS[name]), W, X)
    undone = undo(traced)
    if undone is None:
        assert name in LEFT_ALONE
        return
    assert undone.barriers or name == "not prevented"
    ours, theirs = (emit(t, Program.unchanged(t.graph))([W, X]) for t in (undone.traced, traced))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


def close(ours, theirs, dtype=jnp.float32):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    tolerance = 64 * float(jnp.finfo(dtype).eps)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert jax.typeof(a) == jax.typeof(b) and (a.sharding, a.committed) == (b.sharding, b.committed)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1.0))


@newest
@pytest.mark.parametrize("name", LAYERS)
def test_a_call_computes_what_jit_computes(name):
    """Undone, as written, and by ``jax.jit``."""
    fun = gradient(LAYERS[name])
    step = jaxtensile.jit(fun, budget="1GiB", compiler_options=FAST)
    theirs = jax.jit(fun, compiler_options=FAST)(W, X)
    coarse = jnp.bfloat16 if name == "half" else jnp.float32
    close(step(W, X), theirs, coarse)
    report = step.plan(W, X)
    assert report.undone == (name not in ("loop inside", "not prevented"))
    assert report.unchanged == (not report.undone)
    kept = jaxtensile.jit(fun, budget="1GiB", undo=False, compiler_options=FAST)
    close(kept(W, X), theirs, coarse)
    assert kept.plan(W, X).unchanged


@newest
def test_in_double_precision():
    with jax.enable_x64(True):
        x, w = jnp.asarray(np.asarray(X), jnp.float64), jnp.asarray(np.asarray(W), jnp.float64)
        fun = gradient(jax.checkpoint(layer))
        step = jaxtensile.jit(fun, budget="1GiB", compiler_options=FAST)
        close(step(w, x), jax.jit(fun, compiler_options=FAST)(w, x), jnp.float64)
        assert step.plan(w, x).undone


@newest
def test_donated_arguments():
    def update(w, x):
        _, (dw, _) = gradient(jax.checkpoint(layer))(w, x)
        return w - 0.1 * dw

    options = {"donate_argnums": (0,), "compiler_options": FAST}
    step = jaxtensile.jit(update, budget="1GiB", **options)
    ours, theirs = jnp.array(W), jnp.array(W)
    close(step(ours, X), jax.jit(update, **options)(theirs, X))
    assert ours.is_deleted() and theirs.is_deleted()
    report = step.plan(W, X)
    assert report.undone and report.compiled.alias == report.baseline.alias == W.nbytes


@newest
def test_flops_are_those_without_checkpoints():
    """What runs has no more matrix work than the function without its annotation."""
    step = jaxtensile.jit(gradient(jax.checkpoint(layer)), budget="1GiB", compiler_options=FAST)
    free = jaxpr_flops(jax.jit(gradient(layer)).trace(W, X).jaxpr)
    report = step.plan(W, X)
    assert jaxpr_flops(step.trace(W, X).jaxpr) == free == report.flops + report.recompute_flops
    assert report.recompute_flops < 0 and report.overhead < 0
