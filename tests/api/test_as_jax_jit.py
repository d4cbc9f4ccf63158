"""Where no budget is given, ours is ``jax.jit`` to whoever looks at it: objects, stages, platforms, references."""

import gc
import importlib
import pickle
import weakref
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import jaxtensile
from jaxtensile import _compat
from jaxtensile.api import jit as api
from jaxtensile.planner import pipeline
from jaxtensile.program import upperbound
from programs import chain_args, squeezed, step

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def double(x):
    return x * 2


def test_it_looks_like_a_jit():
    ours, theirs = jaxtensile.jit(double), jax.jit(double)
    assert repr(ours) == repr(theirs)
    assert ours.__getstate__()["function_name"] == "double"
    assert "budget='1GiB'" in repr(jaxtensile.jit(double, budget="1GiB"))


def test_eval_shape_knows_it_as_a_jit():
    with jax.sharding.Mesh(np.array(jax.devices()[:2]), "x") as mesh:
        placed = NamedSharding(mesh, PartitionSpec("x"))
    for wrapper in (jax.jit, jaxtensile.jit):
        made = wrapper(double, out_shardings=placed)
        assert jax.eval_shape(made, X).sharding == placed
        assert jax.eval_shape(lambda x, made=made: made(x), X).sharding is None
    assert pickle.loads(pickle.dumps(jax.eval_shape)) is jax.eval_shape


def test_it_is_pickled_by_value():
    cloudpickle = pytest.importorskip("cloudpickle")
    ours = jaxtensile.jit(lambda x, n: x * n, static_argnums=1, budget="1GiB")
    copy = pickle.loads(cloudpickle.dumps(ours))
    assert (copy(3.0, 2), repr(copy)) == (6.0, repr(ours))


@pytest.mark.parametrize("planned", [False, True])
def test_what_it_closes_over_goes_with_it(planned):
    held = jnp.ones(10)

    def closing(held):
        return lambda *args: (held + 1, step(*args))

    args = chain_args()
    found = squeezed(closing(held), *args) if planned else (jaxtensile.jit(closing(held)),)
    ours, reference = found[0], weakref.ref(held)
    ours(*args)
    ours(*args)
    del held, found
    gc.collect()
    gc.disable()
    try:
        assert reference() is not None
        del ours
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("look", [lambda f: f.trace(X).lower(), lambda f: f.lower(X)])
def test_looking_compiles_nothing(look):
    absent = jax.ffi.ffi_call("there_is_no_such_function", X)
    lowered = look(jaxtensile.jit(absent))
    assert "there_is_no_such_function" in lowered.as_text()
    with pytest.raises(Exception, match="there_is_no_such_function"):
        lowered.compile()


def test_it_is_lowered_for_another_platform():
    def which(x):
        return jax.lax.platform_dependent(x, cpu=lambda x: x + 17, tpu=lambda x: x - 19)

    text = jaxtensile.jit(which).trace(X).lower(lowering_platforms=("tpu",)).as_text()
    assert "subtract" in text and "17" not in text


@pytest.mark.parametrize("size", [1 << 30, 1 << 50])
def test_what_no_machine_holds_is_looked_at(size):
    large = jax.ShapeDtypeStruct((size, 1 << 10), jnp.float32)
    ours = jaxtensile.jit(lambda x: jnp.sin(x).sum())
    assert "sin" in str(ours.trace(large).jaxpr)
    assert str(size) in ours.lower(large).as_text()
    with pytest.raises(jaxtensile.BudgetError):
        ours.plan(large)
    with pytest.raises(jaxtensile.BudgetError):
        jaxtensile.jit(jnp.sin, budget="1GiB").lower(large)


def test_a_mesh_without_devices():
    place = NamedSharding(AbstractMesh((2,), ("x",)), PartitionSpec("x"))
    there = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=place)
    for ours, arg in ((jaxtensile.jit(double), there), (jaxtensile.jit(double, in_shardings=place), X)):
        lowered = ours.trace(arg).lower(lowering_platforms=("tpu",))
        assert "num_partitions = 2" in lowered.as_text()
    with pytest.raises(jaxtensile.TargetError, match="mesh without devices"):
        jaxtensile.jit(double, budget="1GiB").lower(there)


@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_symbolic_sizes_are_passed_on(budget):
    rows = export.symbolic_shape("rows, 4")
    ours = jaxtensile.jit(jax.grad(lambda x: jnp.sin(x).sum()), budget=budget)
    abstract = jax.ShapeDtypeStruct(rows, jnp.float32)
    exported = export.export(ours)(abstract)
    x = np.arange(12, dtype="f").reshape(3, 4)
    np.testing.assert_array_equal(exported.call(x), jax.jit(jnp.cos)(x))
    for _ in range(2):
        report = ours.plan(abstract)
        assert not report.fits and report.unchanged and "symbolic" in report.notes[0]
        assert "symbolic" in str(report) and report.to_json() and report.to_html()
    assert ours.plan(x).fits


def test_nothing_is_asked_where_there_is_ample_room(monkeypatch):
    asked = []
    fit = pipeline.fit
    monkeypatch.setattr(pipeline, "fit", lambda *a, **k: asked.append(1) or fit(*a, **k))
    ours = jaxtensile.jit(double)
    ours(jnp.ones(3)), ours.lower(X)
    assert not asked
    ours.clear_cache()
    monkeypatch.setattr(api, "AMPLE", 1 << 40)
    ours(jnp.ones(3))
    assert len(asked) == 1


@pytest.mark.parametrize(("size", "undo", "undone"), [(1 << 18, True, True), (1 << 18, False, False), (3, True, False)])
def test_checkpoints_are_undone_without_a_budget_where_it_is_worth_it(size, undo, undone):
    ours = jaxtensile.jit(jax.value_and_grad(lambda x: checkpointed(x).sum()), undo=undo)
    x = jnp.ones(size)
    assert ("opt-barrier" in ours.lower(x).as_text("hlo")) is not undone
    assert ours.plan(x).undone is undone
    np.testing.assert_allclose(ours(x)[1], np.cos(np.sin(1)) * np.cos(1), rtol=1e-6)


@jax.checkpoint
def checkpointed(x):
    return jnp.sin(jnp.sin(x))


def of_a_loop(x):
    def body(c, _):
        return c + 1, jnp.sin(c)

    return jax.lax.scan(body, x, length=5)


@pytest.mark.parametrize(
    ("fun", "args", "least"),
    [
        (of_a_loop, [1.0], 5 * 4 + 4),
        (jax.random.normal, [jax.random.key(0)], 2 * 4),
        (lambda x: x.astype(jnp.int4), [np.zeros(16, "f")], 16 * 4 + 8),
        (lambda x: jax.new_ref(x)[...], [np.zeros(16, "f")], 2 * 16 * 4),
        (jax.jit(jax.jit(jnp.sin)), [np.zeros(16, "f")], 2 * 16 * 4),
        (lambda x: jax.lax.after_all(jax.lax.create_token(x)), [1.0], 4),
        (jax.lax.ragged_dot, [np.zeros((64, 8), "f"), np.zeros((16, 8, 8), "f"), np.zeros(16, "i")], 16 * 64 * 8 * 4),
    ],
)
def test_all_values_are_at_least_what_must_be_there(fun, args, least):
    most = upperbound.all_values(jax.make_jaxpr(fun)(*args))
    assert least <= most <= 200 * least


def test_a_body_counts_once_however_often_it_is_called():
    f = jnp.sin
    for _ in range(60):
        f = jax.jit(lambda x, f=f: f(f(x)))
    most = upperbound.all_values(jax.make_jaxpr(f)(np.zeros(16, "f")))
    assert most < 61 * 4 * 16 * 4


def test_a_type_whose_parts_may_change_has_no_size():
    """A mutable box of ``jax.experimental.hijax``: how many arrays it is made of is known while it runs."""
    box = getattr(importlib.import_module("jax._src.hijax"), "Box", None)
    if box is None:
        aval = SimpleNamespace(has_qdd=True, lo_ty=lambda: pytest.fail("it has none"))
        with pytest.raises(_compat.UnknownSizeError):
            list(_compat.arrays_of(aval))
        return

    def double(held, x):
        held.set(held.get() * 2 + x)
        return x.sum()

    for options in ({}, {"budget": "1GiB"}):
        held = box(jnp.ones(5))
        assert jaxtensile.jit(double, **options)(held, jnp.ones(5)) == 5.0
        np.testing.assert_array_equal(held.get(), np.full(5, 3.0))


def test_a_class_that_takes_arrays_alone_is_planned():
    """The user's own containers are made of arrays, and of nothing else that a program is asked with."""

    @jax.tree_util.register_pytree_node_class
    class Named:
        def __init__(self, data, names):
            assert len(names) == data.ndim and data.dtype == jnp.float32
            self.data, self.names = data, names

        def tree_flatten(self):
            return (self.data,), self.names

        @classmethod
        def tree_unflatten(cls, names, leaves):
            return cls(*leaves, names)

    def fun(weights, x):
        named, scale = x
        return step(weights, named.data * scale)

    weights, x = chain_args()
    args = weights, (Named(x, ("rows", "columns")), jnp.float32(1.0))
    for options in ({}, {"donate_argnums": 0}):
        found = squeezed(fun, *args, **options)
        assert found is not None
        expected = jax.jit(fun)(*args)
        got = found[0](*jax.tree.map(jnp.copy, args))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
        assert found[0].trace(*args).jaxpr is not None


@pytest.mark.parametrize("chunk", [False, True])
def test_arrays_that_a_planned_function_closed_over_go_with_it(chunk):
    """Also where no budget was met: what is remembered of a program holds none of them."""

    def planned():
        data = jax.device_put(np.ones(4096, np.float32))

        def fun():
            return lax.cond(True, jaxtensile.jit(lambda: data[0]), lambda: data[1])

        with pytest.raises(jaxtensile.BudgetError) as refused:
            jaxtensile.jit(fun, budget=1, chunk=chunk).plan()
        jaxtensile.jit(fun, budget=refused.value.needs, chunk=chunk)().block_until_ready()

    planned()
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(2):
        planned()
    gc.collect()
    assert len(jax.live_arrays()) == before
