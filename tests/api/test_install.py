"""``install``: programs that know nothing of us keep their values, fit, and get JAX's own objects."""

import functools
import gc
import sys
import weakref

import cloudpickle
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxtensile
from jaxtensile.api import install as api
from jaxtensile.api.beside import bytes_beside
from jaxtensile.api.substitute import Substitute
from jaxtensile.errors import BudgetError, OptionError
from jaxtensile.planner import pipeline
from jaxtensile.units import MIB

D, ROWS, LAYERS = 64, 2048, 6
KIND = type(jax.jit(lambda: None))
HELD = [jax.jit]  # as a global of its own it would be replaced


@pytest.fixture(autouse=True)
def as_it_was():
    yield
    jaxtensile.uninstall()


@pytest.fixture
def weights():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return [jax.random.normal(k, (D, D)) / 8 for k in keys]


@pytest.fixture
def x():
    return jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, D)), jnp.float32)


def loss(weights, x):
    for w in weights:
        x = x + jnp.sin(x @ w)
    return jnp.mean(x**2)


def train(weights, x, rate=0.1):
    value, grads = jax.value_and_grad(loss)(weights, x)
    return jax.tree.map(lambda w, g: w - rate * g, weights, grads), value


def fresh():
    """``train`` as a function of its own: what JAX has compiled of a function it does not compile again."""

    def step(weights, x, rate=0.1):
        return train(weights, x, rate)

    return step


def as_written(fun):
    """JAX's own of another function with the same code."""
    return HELD[0](lambda *args: fun(*args))


def tight(args, budget="4MiB"):
    """A budget of which what lives in this process beside ``args`` takes nothing."""
    return bytes_beside(jax.devices()[:1], args, {}) * 129 // 128 + jaxtensile.units.parse_bytes(budget)


def programs():
    assert api._installed is not None and api._installed._session is not None
    return api._installed._session.tally.programs


def planned():
    return [p for p in programs() if p.report is not None and not p.report.unchanged]


# ---- what a program may write ----------------------------------------------------------------------

WAYS = {
    "call": lambda f: jax.jit(f),
    "options": lambda f: jax.jit(f, donate_argnums=()),
    "decorator": lambda f: jax.jit(static_argnames=("rate",))(f),
    "partial": lambda f: functools.partial(jax.jit, static_argnames="rate")(f),
    "imported": lambda f: jit_of_ours()(f),
    "method": lambda f: jax.jit(type("Trainer", (), {"train": staticmethod(f)})().train),
    "of a partial": lambda f: jax.jit(functools.partial(f, rate=0.1)),
}


def jit_of_ours():
    from jax import jit

    return jit


def test_all_ways_to_write_it(weights, x, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXTENSILE_PLAN_CACHE", str(tmp_path))  # all are one program
    for way, make in WAYS.items():
        step = fresh()
        expected = as_written(step)(weights, x)
        jaxtensile.install(chunk=False, budget=tight((weights, x)))
        found = make(step)
        assert type(found) is KIND, way
        results = [found(weights, x) for _ in range(2)]
        assert len(planned()) == 1, way
        assert planned()[0].report.compiled.device <= planned()[0].budget, way
        for result in results:
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), result, expected)
        jaxtensile.uninstall()


def nnx_losses(x):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(D, D, rngs=rngs) for _ in range(LAYERS)])

        def __call__(self, x):
            for layer in self.layers:
                x = x + jnp.sin(layer(x))
            return x

    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(net, optimizer, x):
        value, grads = nnx.value_and_grad(lambda n: jnp.mean(n(x) ** 2))(net)
        optimizer.update(net, grads)
        return value

    return [float(step(net, optimizer, x)) for _ in range(3)]


def equinox_losses(x):
    net = eqx.nn.MLP(D, D, D, LAYERS, key=jax.random.key(0))
    optimizer = optax.adam(1e-3)
    state = optimizer.init(eqx.filter(net, eqx.is_array))

    @eqx.filter_jit
    def step(net, state, x):
        value, grads = eqx.filter_value_and_grad(lambda n: jnp.mean((jax.vmap(n)(x) - x) ** 2))(net)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(net, updates), state, value

    found = []
    for _ in range(3):
        net, state, value = step(net, state, x)
        found.append(float(value))
    return found


def haiku_losses(x):
    model = hk.without_apply_rng(hk.transform(lambda x: jnp.mean((hk.nets.MLP([D] * LAYERS)(x) - x) ** 2)))
    params, optimizer = model.init(jax.random.key(0), x), optax.adam(1e-3)
    state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, x):
        value, grads = jax.value_and_grad(model.apply)(params, x)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    found = []
    for _ in range(3):
        params, state, value = step(params, state, x)
        found.append(float(value))
    return found


@pytest.mark.parametrize("losses", [nnx_losses, equinox_losses, haiku_losses])
def test_libraries_keep_their_losses(losses, x):
    expected = losses(x)
    with jaxtensile.installed(chunk=False, budget=tight((x,), "6MiB")):
        assert losses(x) == pytest.approx(expected, rel=1e-5)
        assert planned(), [p.name for p in programs()]
        assert {p.place.rpartition(":")[0] for p in planned()} == {__file__}, "a line of the library"


def test_loops_outside_of_any_jit(weights, x):
    def losses(body):
        return lax.scan(body, weights, None, length=3)[1]

    own = lax.scan_p.impl
    expected = losses(lambda weights, _: train(weights, x))
    body = lambda weights, _: train(weights, x)  # noqa: E731
    jaxtensile.install(chunk=False, budget=tight((weights, x)))
    for _ in range(2):
        np.testing.assert_allclose(losses(body), expected, rtol=1e-5)
    (found,) = planned()
    assert found.name == "scan" and found.place.rpartition(":")[0] == __file__
    assert lax.fori_loop(0, x.shape[0], lambda i, at: at + i, 0) == sum(range(ROWS))
    assert lax.cond(x[0, 0] < 99, jnp.sin, jnp.cos, 0.0) == 0
    with jax.disable_jit():
        assert lax.scan(lambda c, y: (c + y, c), 0.0, jnp.arange(3.0))[0] == 3
    assert api._installed._session.tally.small == 2
    jaxtensile.uninstall()
    assert lax.scan_p.impl is own
    np.testing.assert_allclose(losses(body), expected, rtol=1e-5)


# ---- what it costs -----------------------------------------------------------------------------------


def test_what_fits_comes_to_us_once(weights, x, monkeypatch):
    misses = []
    choose = Substitute.choose
    monkeypatch.setattr(Substitute, "choose", lambda self, *given: misses.append(self) or choose(self, *given))
    jaxtensile.install(budget="64GiB")
    step = jax.jit(fun := fresh())
    for _ in range(5):
        weights, _ = step(weights, x)
    assert len(misses) == 1 and not programs()
    jax.jit(fun)(weights, x)  # another object of the same function finds its entry
    assert len(misses) == 1
    calls = len(misses)
    jnp.linalg.norm(x)  # JAX's own functions stay its own
    assert len(misses) == calls and jax.numpy.linalg.norm.__module__.startswith("jax")


def test_a_planned_function_is_timed_and_then_left_to_jax(weights, x, monkeypatch):
    misses = []
    choose = Substitute.choose
    monkeypatch.setattr(Substitute, "choose", lambda self, *given: misses.append(self) or choose(self, *given))
    jaxtensile.install(chunk=False, budget=tight((weights, x)))
    step = jax.jit(fresh())
    for _ in range(14):
        step(weights, x)
    assert 1 < len(misses) < 12
    assert planned()[0].report.measured is not None


# ---- bytes ---------------------------------------------------------------------------------------------


def test_arrays_beside_a_call_are_taken_off_its_budget(weights, x):
    budget = tight((weights, x), "24MiB")
    jaxtensile.install(chunk=False, budget=budget)
    jax.jit(fresh())(weights, x)
    assert not planned()
    other = jnp.zeros(20 * MIB // 4)
    jax.jit(fresh())(weights, x)
    (found,) = planned()
    assert found.report.compiled.device + other.nbytes <= budget


def test_arguments_views_and_deleted_arrays_are_not_beside(weights, x):
    before = bytes_beside(jax.devices()[:1], (weights, x), {})
    more, alias = jnp.ones(MIB), None
    assert bytes_beside(jax.devices()[:1], (weights, x), {}) == before + 4 * MIB
    alias = jax.device_put(more, more.sharding)  # may share its buffer
    assert bytes_beside(jax.devices()[:1], (weights, x, {"a": more, "b": alias}), {}) == before
    alias = None
    more.delete()
    assert bytes_beside(jax.devices()[:1], (weights, x), {}) == before
    assert alias is None


def test_what_is_compiled_ahead_is_planned_too(weights, x):
    budget = tight((weights, x))
    expected = as_written(train).lower(weights, x).compile().memory_analysis()
    jaxtensile.install(chunk=False, budget=budget)
    step = jax.jit(fresh())
    memory = step.lower(weights, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < expected.temp_size_in_bytes
    assert step.eval_shape(weights, x)[1].shape == ()
    assert jax.grad(jax.jit(loss))(weights, x)[0].shape == (D, D)  # inside of another transform


def test_a_budget_that_cannot_be_met(weights, x, capsys):
    jaxtensile.install(chunk=False, budget="512KiB")
    step = jax.jit(fresh())
    for _ in range(2):
        with pytest.raises(BudgetError, match=r"best-effort") as caught:
            step(weights, x)
        assert caught.value.needs > MIB // 2
    expected = as_written(train)(weights, x)
    jaxtensile.install(chunk=False, budget="512KiB", best_effort=True)
    found = jax.jit(fresh())(weights, x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)
    assert "the least that was found" in capsys.readouterr().err


def test_an_interrupted_planning_is_told(weights, x, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    jaxtensile.install(chunk=False, budget=tight((weights, x)))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pipeline, "fit", interrupted)
        jax.jit(fresh())(weights, x)
    jaxtensile.uninstall()
    assert "nothing was planned: step: its planning did not end" in capsys.readouterr().err


def test_a_fault_of_ours_leaves_the_program_as_it_is(weights, x, monkeypatch, capsys):
    def fails(*_, **__):
        raise ZeroDivisionError("planted")

    monkeypatch.delenv("JAXTENSILE_STRICT")
    monkeypatch.setattr(pipeline, "fit", fails)
    jaxtensile.install(chunk=False, budget=tight((weights, x)))
    step = jax.jit(fresh())
    expected = as_written(train)(weights, x)
    for _ in range(3):
        found = step(weights, x)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    said = [line for line in capsys.readouterr().err.splitlines() if "planted" in line]
    assert len(said) == 1 and "runs as it was written" in said[0]


# ---- the way there and back --------------------------------------------------------------------------------


def test_uninstall_leaves_jax_as_it_was(weights, x):
    hook, traced = sys.excepthook, KIND.trace
    before = as_written(train).lower(weights, x).compile().memory_analysis().temp_size_in_bytes
    jaxtensile.install(chunk=False, budget=tight((weights, x)))
    assert jax.jit is not HELD[0] and jit_of_ours() is jax.jit
    step = jax.jit(fresh())
    step(weights, x)
    assert planned()
    gone = weakref.ref(jax.jit(lambda x: x))
    assert gone() is None
    jaxtensile.uninstall()
    jaxtensile.uninstall()
    assert jax.jit is HELD[0] and jit_of_ours() is HELD[0] and sys.excepthook is hook
    assert HELD[0](lambda: None) and KIND.trace is traced
    assert step.lower(weights, x).compile().memory_analysis().temp_size_in_bytes == before
    step(weights, x)


def test_modules_that_hold_jit_already(weights, x):
    module = sys.modules[__name__]
    module.held = HELD[0]
    try:
        jaxtensile.install(budget="1GiB")
        assert module.held is jax.jit
        jaxtensile.uninstall()
        assert module.held is HELD[0]
    finally:
        del module.held


def test_errors_and_copies_are_those_of_jax(weights, x):
    jaxtensile.install(chunk=False, budget=tight((weights, x)))
    with pytest.raises(TypeError, match="unexpected keyword"):
        jax.jit(train, nothing=1)
    with pytest.raises(TypeError, match="dot_general"):
        jax.jit(loss)(weights, x[:, :3])
    step = jax.jit(fresh())
    copied = cloudpickle.loads(cloudpickle.dumps(step))
    np.testing.assert_allclose(copied(weights, x)[1], as_written(train)(weights, x)[1], rtol=1e-5)
    lax.fori_loop(0, 3, lambda i, x: step(weights, x)[1] + x, x)


def test_options_and_the_config(weights, x, tmp_path):
    with pytest.raises(BudgetError, match="12Gib3"):
        jaxtensile.install(budget="12Gib3")
    with pytest.raises(OptionError, match="there is no option 'buget': did you mean 'budget'"):
        jaxtensile.install(buget="1GiB")
    with pytest.raises(OptionError, match="'speed' is not known"):
        jaxtensile.install(objective="speed")
    assert jax.jit is HELD[0]
    file = tmp_path / "jaxtensile.toml"
    file.write_text(
        f'[exec]\nbudget = "1KiB"\nbest_effort = true\n[functions.step]\nchunk = false\nbudget = {tight((), "4MiB")}\n'
    )
    jaxtensile.install(config=file)
    jax.jit(fresh())(weights, x)
    assert programs()[0].budget == tight((), "4MiB")
    assert api._installed._wanted.best_effort and api._installed._wanted.budget == "1KiB"


class Trainer:
    """Holds the jit object of its own method, as nobody else does."""

    def __init__(self, weights):
        self.weights, self.step = weights, jax.jit(self.train)

    def train(self, weights, x):
        return train(weights, x)


@pytest.mark.parametrize("called", [False, True], ids=["unused", "planned"])
def test_what_holds_its_own_jit_object_goes_when_nothing_else_does(weights, x, called):
    jaxtensile.install(chunk=False, budget=tight((weights, x)))
    trainer = Trainer(weights)
    if called:
        trainer.step(weights, x)
        assert len(planned()) == 1
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None


class Slots:
    """A callable without weak references."""

    __slots__ = ()

    def __call__(self, x):
        return x + 1


def test_a_function_without_weak_references_is_an_error_of_jax_when_it_is_called():
    errors = []
    for install in (False, True):
        if install:
            jaxtensile.install(budget="1GiB")
        step = jax.jit(Slots())
        with pytest.raises(TypeError, match="weak reference") as error:
            step(3)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
