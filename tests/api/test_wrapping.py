"""Whatever wraps a planned function is a function of its own: planned again it computes what ``jax.jit`` of it does.

``functools.wraps``, and with it the transforms of JAX and of the libraries around it, copies ``__dict__`` from what it
wraps. Each is put around ``jaxtensile.jit(f)`` and around ``jax.jit(f)``, and both again under the same jit.
"""

import copy
import functools
import gc
import inspect
import pickle
import weakref

import cloudpickle
import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import checkify

import jaxtensile
from jaxtensile.api.jit import Planned

PLANNED = functools.partial(jaxtensile.jit, budget="1GiB")
W = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(3, 4)
X = np.linspace(0.1, 1.3, 6, dtype=np.float32).reshape(2, 3)


def energy(w, x):
    """A number of a matrix and rows."""
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def by_hand(f):
    @functools.wraps(f)
    def other(w, x):
        return 2 * f(w, x) + 1

    return other


class Callable:
    def __init__(self, f):
        self.f = f

    def __call__(self, w, x):
        return 3 * self.f(w, x)


class Model(nnx.Module):
    def __init__(self, w):
        self.w = nnx.Param(w)


def of_a_module(transform):
    """A transform of Flax's, of a function whose first argument is a module."""

    def around(f):
        transformed = transform(functools.wraps(f)(lambda model, x: f(model.w[...], x)))
        return lambda w, x: transformed(Model(w), x)

    return around


def equinox(transform):
    """A transform of Equinox's, which makes modules: ``jax.jit`` takes them inside of a function alone."""

    def around(f):
        made = transform(f)
        return functools.wraps(made)(lambda w, x: made(w, x))

    return around


def custom_jvp(f):
    made = jax.custom_jvp(f)
    made.defjvp(lambda primals, tangents: (f(*primals), 3 * jnp.sum(tangents[0])))
    return jax.value_and_grad(made)


def custom_vjp(f):
    made = jax.custom_vjp(f)
    made.defvjp(lambda w, x: (f(w, x), (w, x)), lambda saved, ct: (ct * 5 * saved[0], ct * saved[1]))
    return jax.value_and_grad(made)


def custom_vmap(f):
    made = jax.custom_batching.custom_vmap(f)
    made.def_vmap(lambda size, batched, w, x: (jnp.arange(size) + jnp.sum(w), True))
    return jax.vmap(made, in_axes=(None, 0))


def linen(f):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, w, x):
            return f(w * self.param("scale", nn.initializers.ones, ()), x)

    layer = nn.remat(Layer)()
    return lambda w, x: layer.apply({"params": {"scale": 2.0}}, w, x)


def haiku(transform):
    """A transform of Haiku's, inside of what ``hk.transform`` makes pure."""

    def around(f):
        made = hk.without_apply_rng(hk.transform(functools.wraps(f)(lambda w, x: transform(f)(w, x))))
        return lambda w, x: made.apply({}, w, x)

    return around


TRANSFORMS = {
    "functools.wraps": by_hand,
    "functools.wraps, around an object": lambda f: functools.wraps(f)(Callable(f)),
    "functools.partial": lambda f: functools.partial(f, x=X),
    "functools.singledispatch": functools.singledispatch,
    "jax.jit": jax.jit,
    "jax.grad": jax.grad,
    "jax.grad, twice": lambda f: jax.grad(lambda w, x: jnp.sum(jax.grad(f)(w, x) ** 2)),
    "jax.value_and_grad": jax.value_and_grad,
    "jax.jacfwd": jax.jacfwd,
    "jax.jacrev": jax.jacrev,
    "jax.hessian": jax.hessian,
    "jax.vmap": lambda f: jax.vmap(f, in_axes=(None, 0)),
    "jax.vmap of jax.grad": lambda f: jax.vmap(jax.grad(f), in_axes=(None, 0)),
    "jax.jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "jax.vjp": lambda f: lambda w, x: jax.vjp(f, w, x)[1](jnp.float32(2)),
    "jax.linearize": lambda f: lambda w, x: jax.linearize(f, w, x)[1](w, x),
    "jax.checkpoint": jax.checkpoint,
    "jax.grad of jax.checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "jax.custom_jvp": custom_jvp,
    "jax.custom_vjp": custom_vjp,
    "jax.custom_batching.custom_vmap": custom_vmap,
    "jax.closure_convert": lambda f: lambda w, x: jax.closure_convert(f, w, x)[0](w, x),
    "jax.named_call": jax.named_call,
    "jax.named_scope": lambda f: jax.named_scope("name")(f),
    "jax.default_matmul_precision": lambda f: jax.default_matmul_precision("highest")(f),
    "jax.tree_util.Partial": lambda f: lambda w, x: jax.tree_util.Partial(f, w)(x),
    "jax.lax.map": lambda f: lambda w, x: jax.lax.map(functools.partial(f, w), x),
    "checkify": lambda f: lambda w, x: checkify.checkify(f)(w, x)[1],
    "equinox.filter_jit": eqx.filter_jit,
    "equinox.filter_grad": equinox(eqx.filter_grad),
    "equinox.filter_value_and_grad": equinox(eqx.filter_value_and_grad),
    "equinox.filter_vmap": equinox(lambda f: eqx.filter_vmap(f, in_axes=(None, 0))),
    "equinox.filter_checkpoint": equinox(lambda f: eqx.filter_grad(eqx.filter_checkpoint(f))),
    "equinox.filter_jvp": lambda f: lambda w, x: eqx.filter_jvp(f, (w, x), (w, x)),
    "equinox.filter_closure_convert": lambda f: lambda w, x: eqx.filter_closure_convert(f, w, x)(w, x),
    "flax.nnx.jit": nnx.jit,
    "flax.nnx.remat": nnx.remat,
    "flax.nnx.vmap": lambda f: nnx.vmap(f, in_axes=(None, 0)),
    "flax.nnx.grad": nnx.grad,
    "flax.nnx.value_and_grad": nnx.value_and_grad,
    "flax.nnx.grad of a module": of_a_module(nnx.grad),
    "flax.linen": linen,
    "haiku.grad": haiku(hk.grad),
    "haiku.remat": haiku(hk.remat),
    "haiku.vmap": haiku(lambda f: hk.vmap(f, in_axes=(None, 0), split_rng=False)),
    "optax.value_and_grad_from_state": lambda f: (
        lambda w, x: optax.value_and_grad_from_state(f)(w, x, state=optax.lbfgs().init(w))
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_a_transform_makes_of_a_planned_function_is_planned_as_what_it_is(name):
    transform = TRANSFORMS[name]
    ours, theirs = transform(PLANNED(energy)), transform(jax.jit(energy))
    planned, jitted = PLANNED(ours), jax.jit(theirs)
    for scale in (1.0, 2.0):  # once the function itself has been planned too
        expected = theirs(W * scale, x=X) if name == "functools.partial" else theirs(W * scale, X)
        for f in (ours, planned, jitted):
            got = f(W * scale) if name == "functools.partial" else f(W * scale, X)
            assert jax.tree.structure(got) == jax.tree.structure(expected)
            for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
                np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("transform", [jax.grad, by_hand], ids=lambda t: t.__name__)
def test_under_a_budget_that_recomputes_too(transform):
    """Deep enough that a plan must recompute: what is copied could be a plan."""

    def deep(w, x):
        for _ in range(8):
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    w, x = np.linspace(-0.2, 0.3, 32 * 32, dtype=np.float32).reshape(32, 32), np.ones((512, 32), np.float32)
    inner = jaxtensile.jit(jax.value_and_grad(deep), budget="550KiB", solver="greedy")
    assert inner.plan(w, x).actions
    inner(w, x)
    around = transform(functools.wraps(inner)(lambda w, x: inner(w, x)[0] * 3))
    expected = transform(lambda w, x: deep(w, x) * 3)(w, x)
    got = jaxtensile.jit(around, budget="1GiB")(w, x)
    np.testing.assert_allclose(expected, got, rtol=2e-4, atol=1e-5)


def state_of_ours(x):
    return [
        name for name, value in vars(x).items() if type(value).__module__.startswith("jaxtensile") and value is not x
    ]


def method_of(filtered):
    class Holder:
        call = filtered

    return Holder().call


@pytest.mark.parametrize(
    "made",
    [PLANNED(energy), jaxtensile.filter_jit(energy), method_of(jaxtensile.filter_jit(energy))],
    ids=lambda made: type(made).__name__,
)
def test_nothing_of_ours_is_where_wraps_copies_from(made):
    @functools.wraps(made)
    def other():
        return None

    if type(made) is Planned:
        assert set(vars(made)) <= {*functools.WRAPPER_ASSIGNMENTS, "__wrapped__"}
    assert not state_of_ours(made)
    vars(other).pop("__wrapped__")  # the function around which it is
    assert not state_of_ours(other)
    assert not any(name.startswith("_") and not name.startswith("__") for name in vars(other))


def test_an_attribute_of_the_function_hides_none_of_ours():
    class Trainer:
        plan, lower, budget, _fun = "mine", "mine", 3, "mine"

        def __call__(self, x):
            return x * 2

    trainer = Trainer()
    vars(trainer).update(plan="mine", lower="mine", budget=3, _fun="mine")
    planned = PLANNED(trainer)
    assert planned.budget == 3
    assert planned(2.0) == 4.0
    assert planned.plan(2.0).compiled is not None
    assert planned.lower(2.0).compile()(2.0) == 4.0


def test_a_name_that_was_given_after_wrapping_is_kept():
    renamed = by_hand(jax.jit(energy))
    renamed.__name__ = renamed.__qualname__ = "mine"
    assert PLANNED(renamed).__name__ == "mine"


def trainer_of(jit):
    class Trainer:
        scale = 2.0

        @jit
        def method(self, x):
            return self.scale * x

        @classmethod
        @jit
        def from_class(cls, x):
            return cls.scale * x

        @staticmethod
        @jit
        def static(w, x):
            return energy(w, x)

        bound = functools.partialmethod(jit(lambda self, w, x: self.scale * energy(w, x)), W)

    jax.tree_util.register_static(Trainer)
    return Trainer()


def test_methods():
    ours, theirs = trainer_of(functools.partial(PLANNED, static_argnums=())), trainer_of(jax.jit)
    for trainer in (ours, theirs):
        assert trainer.method(3.0) == 6.0
        assert jax.grad(trainer.method)(3.0) == 2.0
        with pytest.raises(TypeError):
            trainer.from_class(3.0)
    for name in ("static", "bound"):
        arguments = (W, X) if name == "static" else (X,)
        np.testing.assert_allclose(getattr(ours, name)(*arguments), getattr(theirs, name)(*arguments), rtol=1e-6)
    assert PLANNED(jax.grad(ours.method))(3.0) == 2.0
    assert str(inspect.signature(ours.method)) == "(x)"


def test_names_of_a_method_s_arguments_find_their_places():
    class Scaled:
        @jaxtensile.jit(static_argnames="n")
        def method(self, x, n):
            return x * len(range(n))

    jax.tree_util.register_static(Scaled)
    assert jax.jit(Scaled().method, static_argnames="n")(2.0, 3) == 6.0
    assert PLANNED(Scaled().method, static_argnames="n")(2.0, 3) == 6.0


planned_energy = jaxtensile.jit(energy, budget="1GiB")


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda f: cloudpickle.loads(cloudpickle.dumps(f))])
def test_copies_are_planned_by_themselves(again):
    planned = PLANNED(lambda w, x: 2 * energy(w, x), keep_unused=True, compiler_options={})
    before = planned(W, X)
    other = again(planned)
    assert other is not planned and type(other) is Planned
    np.testing.assert_array_equal(other(W, X), before)
    assert repr(other) == repr(planned)
    assert PLANNED(jax.grad(other))(W, X).shape == W.shape


def test_a_module_s_own_function_is_pickled_by_pickle_itself():
    loaded = pickle.loads(pickle.dumps(planned_energy))
    np.testing.assert_array_equal(loaded(W, X), planned_energy(W, X))


def test_a_step_of_a_job_is_not_pickled():
    step = jaxtensile.jit(energy, job=jaxtensile.job("pickled"))
    with pytest.raises(pickle.PicklingError, match="pickle the function"):
        cloudpickle.dumps(step)


def test_it_is_weakly_referenced_and_goes():
    planned = PLANNED(lambda w, x: energy(w, x))
    planned(W, X)
    gone = weakref.ref(planned)
    del planned
    jax.clear_caches()
    gc.collect()
    assert gone() is None
