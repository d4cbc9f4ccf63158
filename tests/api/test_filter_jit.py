"""``jaxtensile.filter_jit`` is ``equinox.filter_jit`` with a budget, and flax's nnx works as the README says."""

import functools
import inspect
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxtensile
from programs import FAST

OURS = functools.partial(jaxtensile.filter_jit, budget="1TiB", compiler_options=FAST)
THEIRS = functools.partial(eqx.filter_jit, compiler_options=FAST)
X = np.linspace(-1, 1, 512 * 16, dtype=np.float32).reshape(512, 16)


def mlp(depth=5):
    return eqx.nn.MLP(16, 10, 32, depth, key=jax.random.key(0))


def train(model, x, rate=0.1, *, name="a step"):
    """One step of descent; its name comes back."""
    value, grads = eqx.filter_value_and_grad(lambda m: (jax.vmap(m)(x) ** 2).mean())(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -rate * g, grads)), value, {"name": name, "rate": rate}


def alike(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert type(a) is type(b)
        if eqx.is_array(a):
            assert jax.typeof(a) == jax.typeof(b)
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        else:
            assert a is b or a == b


def squeezed(fun, *args, share=0.7, **options):
    """Planned for a share of the plain program's temporary bytes."""
    plain = OURS(fun, **options).plan(*args).compiled
    planned = OURS(fun, **{"budget": int(plain.device - (1 - share) * plain.temp), **options})
    assert not planned.plan(*args).unchanged
    return planned


def test_a_planned_step_returns_what_equinox_returns():
    planned = squeezed(train, mlp(), X)
    expected = THEIRS(train)(mlp(), X)
    alike(planned(mlp(), X), expected)
    alike(planned.lower(mlp(), X).compile()(mlp(), X), expected)
    report = planned.plan(eqx.filter_eval_shape(mlp), jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert report.compiled.device <= report.budget < report.baseline.device
    assert "optimization_barrier" in str(planned.trace(mlp(), X).jaxpr)
    assert planned._cache_size() == 1
    planned.clear_cache()
    assert planned._cache_size() == 0


@pytest.mark.parametrize(
    "fun, args, kwargs",
    [
        (lambda x, y: (x + y, x - y), (1, 2), {}),
        (lambda x, y: (x + y, y, type(y).__name__), (X, 2), {}),
        (lambda x, y: (x, y), (True, 1), {}),
        (lambda a, *rest, k=3, **more: (a, rest, k, more), (X, "s", X[0], None), {"z": X[1], "f": print}),
        (lambda: ("nothing", jnp.ones(2)), (), {}),
        (lambda x: None, (X,), {}),
        (lambda x: {"set": {1, 2}, "array": np.ones(3), "scalar": np.float32(2)}, (X,), {}),
        (lambda x: (lambda y: y, x)[1], ([X, (X, "a")],), {}),
        (lambda key: jax.random.normal(key, (3,)), (jax.random.key(1),), {}),
        (lambda m: m, (mlp(1),), {}),
    ],
)
def test_every_kind_of_argument_and_result(fun, args, kwargs):
    ours, theirs = OURS(fun), THEIRS(fun)
    expected = theirs(*args, **kwargs)
    for _ in range(2):
        alike(ours(*args, **kwargs), expected)
    assert ours._cache_size() == 1


def test_static_values_of_other_types_are_other_programs():
    ours = OURS(lambda x, n: (x * n, n))
    results = [ours(X[0], n)[1] for n in (1, True, 1.0, 0.0, -0.0, 1)]
    assert [repr(r) for r in results] == ["1", "True", "1.0", "0.0", "-0.0", "1"]
    assert ours._cache_size() == 5


def test_one_form_of_a_call_is_one_program():
    ours = OURS(train)
    for call in (lambda: ours(mlp(), X), lambda: ours(mlp(), x=X), lambda: ours(model=mlp(), x=X)):
        call()
    assert ours._cache_size() == 1


@pytest.mark.parametrize("donate", ["all", "all-except-first", "warn", "warn-except-first", "none"])
def test_donation_is_that_of_equinox(donate):
    def fun(a, b, c):
        return a * 2, c.sum()

    seen = []
    for jit in (OURS, THEIRS):
        args = jnp.ones(4), jnp.ones(3), jnp.ones((5, 5))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            jit(fun, donate=donate)(*args)
        seen.append(([x.is_deleted() for x in args], len(said) > 0))
    assert seen[0] == seen[1]


def test_what_is_not_told_of_one_call_is_told_of_others_of_whatever_threads(caplog):
    """Calls overlap, and the first to begin is the first to end; the second fails in its own words."""
    inside, leave = ([threading.Event() for _ in range(2)] for _ in range(2))

    def call(k):
        def fun(x):
            inside[k].set()
            assert leave[k].wait(60)
            return eqx.error_if(x.sum(), x.sum() > 0, "the sum is positive") if k else x.sum()

        return jaxtensile.filter_jit(fun, donate="all")(jnp.ones(4))

    def donates_in_vain():
        jax.jit(lambda x: x.sum(), donate_argnums=0)(jnp.ones(4))

    with warnings.catch_warnings(record=True) as said, ThreadPoolExecutor(2) as pool:
        warnings.simplefilter("always")
        calls = []
        for k in range(2):
            calls.append(pool.submit(call, k))
            assert inside[k].wait(60)
        for k in range(2):
            donates_in_vain()
            leave[k].set()
            error = calls[k].exception()
        donates_in_vain()
    assert len(said) == 3 and isinstance(error, eqx.EquinoxRuntimeError) and not caplog.records


def test_modules_their_methods_and_decorated_methods():
    class Net(eqx.Module):
        layer: eqx.nn.Linear
        scale: float = 2.0

        @OURS
        def __call__(self, x):
            return self.layer(x) * self.scale

        @jaxtensile.filter_jit(budget="1GiB")
        def shifted(self, x, by=1.0):
            """Shifted."""
            return self.layer(x) + by

    model, x = mlp(1), X[0]
    alike(OURS(model)(x), THEIRS(model)(x))
    alike(OURS(model.__call__)(x), THEIRS(model.__call__)(x))
    net = Net(eqx.nn.Linear(16, 4, key=jax.random.key(1)))
    alike(net(x), net.layer(x) * 2)
    alike(net.shifted(x), net.layer(x) + 1)
    alike(Net.shifted(net, x, by=2.0), net.layer(x) + 2)
    assert net.shifted.plan(x).unchanged and net.shifted.__doc__ == "Shifted."
    alike(net.shifted.lower(x).compile()(net, x), net.layer(x) + 1)
    grads = eqx.filter_grad(lambda n: n.shifted(x).sum())(net)
    alike(grads.layer.bias, jnp.ones(4))
    alike(jax.vmap(net.shifted)(X[:2]), jax.vmap(net.layer)(X[:2]) + 1)
    other = eqx.tree_at(lambda n: n.layer.bias, net, jnp.zeros(4))
    alike(other.shifted(x), other.layer(x) + 1)  # arrays of the module are arguments, not constants


def test_under_other_transformations():
    model = mlp(1)
    for budget in ("1TiB", 1):  # one byte: nothing is planned there
        inner = jaxtensile.filter_jit(lambda m, x: jax.vmap(m)(x).sum(), budget=budget)
        expected = eqx.filter_grad(lambda m, x: jax.vmap(m)(x).sum())(model, X)
        alike(eqx.filter_grad(inner)(model, X), expected)
        alike(eqx.filter_jit(inner)(model, X), THEIRS(inner.__wrapped__)(model, X))
    stacked = eqx.filter_vmap(lambda k: eqx.nn.Linear(16, 4, key=k))(jax.random.split(jax.random.key(0), 3))
    assert eqx.filter_vmap(jaxtensile.filter_jit(lambda m, x: m(x)), in_axes=(0, None))(stacked, X[0]).shape == (3, 4)
    assert len(jax.tree.leaves(OURS(model))) == 4  # a tree of the function's arrays, as equinox's


def test_errors_inside_are_raised_by_the_call_in_their_own_words():
    def fun(x):
        return eqx.error_if(x, x.sum() > 0, "the sum is positive") * 2

    ours = OURS(fun)
    with pytest.raises(eqx.EquinoxRuntimeError, match=r"^the sum is positive$"):
        ours(jnp.ones(3))
    assert ours(-jnp.ones(3))[0] == -2


def test_what_it_looks_like_and_what_it_refuses():
    ours = jaxtensile.filter_jit(budget="1GiB")(train)
    assert ours.__name__ == "train" and ours.__wrapped__ is train and ours.__doc__ == train.__doc__
    assert inspect.signature(ours) == inspect.signature(train)
    assert "filter_jit" in repr(ours) and "1GiB" in repr(ours)
    assert ours.eval_shape(mlp(), X)[1].shape == ()
    with pytest.raises(ValueError, match="'all-except-first'"):
        jaxtensile.filter_jit(train, donate="some")
    with pytest.raises(ValueError, match="static_argnums"):
        jaxtensile.filter_jit(train, static_argnums=0)
    for form in (lambda: jaxtensile.filter_jit(budget="lots"), lambda: jaxtensile.filter_jit(train, budget="lots")):
        with pytest.raises(jaxtensile.BudgetError, match="lots"):
            form()
    with pytest.raises(TypeError) as expected:
        THEIRS(train)(mlp())
    with pytest.raises(TypeError) as got:
        ours(mlp())
    assert str(got.value) == str(expected.value)
    with pytest.raises(jaxtensile.BudgetError, match="for train"):
        jaxtensile.filter_jit(train, budget=1000)(mlp(), X)


WITHOUT = """
import sys
sys.modules["equinox"] = None
import jaxtensile
try:
    jaxtensile.filter_jit(lambda x: x)
except ModuleNotFoundError as error:
    print(error)
"""


def test_equinox_is_imported_late_and_named_where_it_is_missing():
    late = "import sys, jaxtensile.api.filter_jit; jaxtensile.jit; assert 'equinox' not in sys.modules"
    subprocess.run([sys.executable, "-c", late], check=True)
    said = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True).stdout
    assert "pip install equinox" in said and said.count("\n") == 1


# ---- flax.nnx, as the README has it ---------------------------------------------------------------


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List(nnx.Linear(16, 16, rngs=rngs) for _ in range(8))
        self.norm, self.dropout = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = x + nnx.gelu(layer(x))
        return self.dropout(self.norm(x))


def test_a_step_of_nnx_is_planned_and_its_objects_come_back():
    def both():
        model = Classifier(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3, eps=1e-3), wrt=nnx.Param)

    model, optimizer = both()
    graph, state = nnx.split((model, optimizer))

    def step(state, x, y):
        model, optimizer = nnx.merge(graph, state)
        loss = lambda model, x, y: optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()  # noqa: E731
        value, grads = nnx.value_and_grad(loss)(model, x, y)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    y = np.arange(512) % 16
    plain = jax.jit(step, compiler_options=FAST)
    use = jaxtensile.jit(step, budget="1TiB", compiler_options=FAST).plan(state, X, y).compiled
    planned = jaxtensile.jit(step, budget=int(use.device - 0.3 * use.temp), donate_argnums=0, compiler_options=FAST)
    assert not planned.plan(state, X, y).unchanged
    theirs = jax.tree.map(jnp.copy, state)
    for _ in range(3):
        theirs, expected = plain(theirs, X, y)
        state, value = planned(state, X, y)
        np.testing.assert_allclose(value, expected, rtol=1e-4)
    nnx.update((model, optimizer), state)
    assert int(optimizer.step[...]) == 3
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(theirs), strict=True):
        a, b = (jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("ask", [jaxtensile.estimate, lambda f, *args: jaxtensile.jit(f, budget="1TiB")(*args)])
def test_who_gives_a_module_to_jit_is_told_what_takes_one(ask):
    with pytest.raises(Exception) as info:
        ask(train, mlp(), X)
    assert any("jaxtensile.filter_jit(train)" in note for note in info.value.__notes__)
