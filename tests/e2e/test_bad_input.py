"""Every wrong input is one clear line, or what ``jax.jit`` does; and the caller keeps what is theirs."""

import re
from decimal import Decimal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtensile
from four_devices import on_four_devices
from jaxtensile.errors import IgnoredBudgetWarning, ManyPlansWarning
from jaxtensile.units import GIB, MIB
from jaxtensile.xla import target as targets
from programs import FAST


def product(x):
    return jnp.tanh(x @ x.T).sum()


def lines(error):
    return str(error).count("\n") + 1


# ---- budgets --------------------------------------------------------------------------------------

UNREADABLE = [
    "lots",
    "",
    " ",
    "12 parsecs",
    "1..2GiB",
    "GiB",
    "%",
    "nan",
    "inf",
    "1e400GiB",
    "0x10",
    "１２"[:0] + "12G B",
]
NO_SIZE = [-5, -1.5, "-1GiB", "-3%", float("nan"), float("inf"), "120%", "100.1%", 10**30, "1e20GiB", (1 << 60) + 1]
NO_BYTES = [0, 0.5, "0", "0%", "0GiB", "0.1B", -0.0]
NO_NUMBER = [True, False, [1], {}, (), b"1GiB", object(), Decimal(5), np.float32(3), np.ones(2), 1j]


@pytest.mark.parametrize(
    "budget", [*UNREADABLE, *NO_SIZE, *NO_BYTES, *NO_NUMBER], ids=lambda x: repr(x).split(" at 0x")[0]
)
@pytest.mark.parametrize("form", ["call", "decorator", "target"])
def test_a_bad_budget_is_refused_where_it_is_written(budget, form):
    with pytest.raises(jaxtensile.BudgetError) as info:
        match form:
            case "call":
                jaxtensile.jit(product, budget=budget)
            case "decorator":
                jaxtensile.jit(budget=budget)
            case "target":
                jaxtensile.jit(product, budget=budget, target="nvidia-h200")
    assert isinstance(info.value, ValueError)
    assert f"budget={budget!r}" in str(info.value) and lines(info.value) == lines(repr(budget))


@pytest.mark.parametrize(
    "budget, size",
    [(GIB, GIB), (np.int64(GIB), GIB), (1e9, 10**9), ("1GiB", GIB), (" 1.5 gib ", 3 * GIB // 2), ("1_000_000", 10**6)],
    ids=repr,
)
def test_good_budgets(budget, size):
    assert jaxtensile.jit(product, budget=budget, compiler_options=FAST).plan(jnp.ones((4, 4))).budget == size


def test_a_percentage_is_of_the_device_it_runs_on():
    x = jnp.ones((4, 4))
    whole = jaxtensile.jit(product, budget="100%", compiler_options=FAST).plan(x).budget
    assert jaxtensile.jit(product, budget="50%", compiler_options=FAST).plan(x).budget == whole // 2
    assert jaxtensile.jit(product, compiler_options=FAST).plan(x).budget == whole - GIB


@pytest.mark.parametrize("budget", [1, 1000, 30_000, "0.000001%"])
def test_a_budget_that_nothing_can_meet(budget):
    x = jnp.ones((64, 64))
    step = jaxtensile.jit(lambda x: x - jax.grad(product)(x), budget=budget, donate_argnums=0, compiler_options=FAST)
    for attempt in (step, step.plan, step.lower, step.trace, step):
        with pytest.raises(jaxtensile.BudgetError) as info:
            attempt(x)
        assert not x.is_deleted()
        error = info.value
        assert error.has < error.needs and lines(error) == 1
        assert error.culprits and error.culprits[0].primitive in str(error.culprits[0])
        assert re.search(r"budget \S+ is below the smallest (reachable|found), \S+, for <lambda>", str(error))
    if budget in (1, 1000):
        assert "the arguments alone are 16.00KiB" in str(info.value)


def deep(ws, x):
    for w in ws:
        x = x + jnp.tanh(x @ w)
    return (x * x).sum()


@pytest.mark.parametrize("share, chunk", [(0.01, False), (0.3, False), (0.01, "auto")])
def test_the_smallest_reachable_budget_is_reached(share, chunk):
    """Whatever was asked first, what the error names is met at the first attempt."""
    keys = jax.random.split(jax.random.key(0), 13)
    ws, x = [jax.random.normal(key, (64, 64)) / 16 for key in keys[1:]], jax.random.normal(keys[0], (512, 64))
    plain = jaxtensile.jit(jax.grad(deep), budget=GIB, compiler_options=FAST)
    budget = int(share * plain.plan(ws, x).compiled.device)
    with pytest.raises(jaxtensile.BudgetError) as info:
        jaxtensile.jit(jax.grad(deep), budget=budget, chunk=chunk, compiler_options=FAST).plan(ws, x)
    needs = info.value.needs
    assert needs is not None
    fitted = jaxtensile.jit(jax.grad(deep), budget=needs, chunk=chunk, compiler_options=FAST)
    assert fitted.plan(ws, x).compiled.device <= needs
    for ours, theirs in zip(fitted(ws, x), jax.jit(jax.grad(deep), compiler_options=FAST)(ws, x), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6 * float(jnp.abs(theirs).max()))


ONES = jnp.ones((128, 128))


@pytest.mark.parametrize(
    "fun, x",
    [
        (lambda x: jnp.linalg.svd(x), ONES),
        (lambda x: jnp.argsort(x.ravel()), ONES),
    ],
    ids=["svd", "argsort"],
)
def test_where_nothing_can_be_made_again_the_program_as_it_is_is_the_smallest(fun, x):
    plain = jaxtensile.jit(fun, budget=GIB).plan(x).compiled.device
    with pytest.raises(jaxtensile.BudgetError) as info:
        jaxtensile.jit(fun, budget=int(0.9 * plain)).plan(x)
    assert info.value.needs == plain
    assert "about" not in str(info.value)
    assert jaxtensile.jit(fun, budget=plain).plan(x).unchanged


def test_what_a_cpu_stores_before_it_sums_is_summed_in_parts():
    """By the rules of a GPU none of it would be there, and nothing could be saved."""
    fun, x = lambda i: jax.nn.one_hot(i, 512).sum(0), jnp.arange(256)
    plain = jax.jit(fun).lower(x).compile().memory_analysis().temp_size_in_bytes
    counted = jaxtensile.jit(fun, budget=int(0.9 * plain))
    assert counted.plan(x).parts > 1 and counted.plan(x).compiled.temp < 0.6 * plain
    np.testing.assert_array_equal(counted(x), jax.jit(fun)(x))


def test_what_the_model_takes_to_fit_is_worked_on_in_few_parts_after_all():
    """By the rules of a GPU nothing is stored, by a CPU's a quarter of what is. The smallest plan is in 256 parts."""
    fun, key = lambda key: jax.random.normal(key, (256, 256)).sum(0), jax.random.key(0)
    plain = jax.jit(fun).lower(key).compile().memory_analysis().temp_size_in_bytes
    drawn = jaxtensile.jit(fun, budget=int(0.9 * plain))
    assert 1 < drawn.plan(key).parts <= 16 and drawn.plan(key).fits
    np.testing.assert_allclose(drawn(key), jax.jit(fun)(key), atol=1e-4)


def test_the_smallest_of_a_program_with_checkpoints_may_be_without_them():
    def loss(w, x):
        block = jax.checkpoint(lambda h: jnp.tanh(jnp.tanh(h @ w) @ w))
        return (block(block(x)) ** 2).sum()

    args = ONES / 16, jnp.ones((1024, 128))
    grad = jax.grad(loss)
    plain = jaxtensile.jit(grad, budget=GIB, compiler_options=FAST).plan(*args).compiled.device
    for share in (0.5, 0.65):
        with pytest.raises(jaxtensile.BudgetError) as info:
            jaxtensile.jit(grad, budget=int(share * plain), chunk=False, compiler_options=FAST).plan(*args)
        needs = info.value.needs
        assert needs < plain
        assert (
            jaxtensile.jit(grad, budget=needs, chunk=False, compiler_options=FAST).plan(*args).compiled.device <= needs
        )


def test_after_a_budget_error_smaller_arguments_run_and_larger_ones_do_not():
    step = jaxtensile.jit(product, budget=MIB, compiler_options=FAST)
    small, large = jnp.ones((8, 8)), jnp.ones((1024, 512))
    for _ in range(2):
        with pytest.raises(jaxtensile.BudgetError):
            step(large)
        assert step(small) == jax.jit(product, compiler_options=FAST)(small)


# ---- targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, nearest", [("h200", "nvidia-h200"), ("nvidia_a100", "nvidia-a100"), ("v5e", "tpu-v5e"), ("CPU", "cpu")]
)
def test_an_unknown_target_names_its_neighbours(name, nearest):
    for form in (lambda: jaxtensile.jit(product, target=name), lambda: jaxtensile.jit(target=name)):
        with pytest.raises(jaxtensile.TargetError, match=f"unknown target '{name}': nearest '{nearest}") as info:
            form()
        assert lines(info.value) == 1 and all(t in str(info.value) for t in jaxtensile.targets())


@pytest.mark.parametrize("name", [3, b"cpu", ["cpu"], jax.devices], ids=lambda x: str(x).split(" at 0x")[0])
def test_a_target_is_a_name(name):
    with pytest.raises(jaxtensile.TargetError, match="is no name"):
        jaxtensile.jit(product, target=name)
    with pytest.raises(jaxtensile.TargetError, match="is no name"):
        jaxtensile.estimate(product, np.ones((2, 2)), target=name)


@pytest.fixture
def bare(monkeypatch):
    """No plugin installed, and nothing remembered of the ones that are."""
    monkeypatch.setattr(targets, "_wheel_folder", lambda module: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    targets._resolve.cache_clear()
    yield
    targets._resolve.cache_clear()


@pytest.mark.parametrize("name, extra", [("nvidia-h200", "cuda-aot"), ("tpu-v5e", "tpu-aot")])
def test_a_missing_plugin_names_the_extra(bare, name, extra):
    step = jaxtensile.jit(product, target=name, budget="1GiB")
    for attempt in (step.plan, step.lower, step.trace):
        with pytest.raises(jaxtensile.TargetError, match=rf'pip install "jaxtensile\[{extra}\]"') as info:
            attempt(jnp.ones((4, 4)))
        assert lines(info.value) == 1


@pytest.mark.parametrize("plugins", ["installed", "missing"])
def test_calling_for_a_device_that_is_not_here(plugins, request):
    if plugins == "missing":
        request.getfixturevalue("bare")
    x = jnp.ones((4, 4))
    step = jaxtensile.jit(product, target="nvidia-h200", budget="1GiB", donate_argnums=0)
    for args in ((x,), (np.ones((4, 4)),), (x,)):
        with pytest.raises(jaxtensile.TargetError, match=r"is not here.*on .*cpu.*\.plan\(.*\.lower\(") as info:
            step(*args)
        assert lines(info.value) == 1 and not x.is_deleted()
    assert jax.jit(step)(x).shape == ()  # under a trace nothing is planned


@pytest.mark.cuda_aot
def test_a_callback_for_a_gpu_that_is_not_here():
    def shout(x):
        jax.debug.callback(lambda _: None, x.sum())
        return jnp.sin(x)

    with pytest.raises(jaxtensile.TargetError, match="leave them out to plan for it"):
        jaxtensile.jit(shout, budget="1GiB", target="nvidia-h200").plan(jax.ShapeDtypeStruct((8,), jnp.float32))


def test_the_cpu_is_a_target_that_is_here():
    step = jaxtensile.jit(product, target="cpu", budget="1GiB", compiler_options=FAST)
    assert step(jnp.ones((4, 4))) == jax.jit(product, compiler_options=FAST)(jnp.ones((4, 4)))
    assert step.plan(jnp.ones((4, 4))).target == "cpu"


@pytest.mark.cuda_aot
@pytest.mark.parametrize("fun, args", [(lambda: jnp.ones(3), ()), (lambda n: n * jnp.ones(3), (2.0,))])
def test_a_program_without_arrays_has_no_target(fun, args):
    with pytest.raises(jaxtensile.TargetError, match="takes no array"):
        jaxtensile.jit(fun, target="nvidia-h200").plan(*args)


# ---- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option, error",
    [
        ({"solver": "clairvoyant"}, ValueError),
        ({"objective": "speed"}, jaxtensile.JaxtensileError),
        ({"bugdet": "1GiB"}, TypeError),
        ({"bugdet": "1GiB"}, jaxtensile.JaxtensileError),
        ({"donate_argnum": 0}, jaxtensile.JaxtensileError),
        ({"host_budget": "much"}, jaxtensile.BudgetError),
        ({"host_budget": -1}, jaxtensile.BudgetError),
        ({"job": "bert"}, TypeError),
        ({"undo": "no"}, jaxtensile.JaxtensileError),
        ({"offload_state": "no"}, jaxtensile.JaxtensileError),
        ({"config": 5}, jaxtensile.ConfigError),
        ({"config": {"functions": {"step": {"bugdet": 1}}}}, jaxtensile.ConfigError),
    ],
)
def test_options_that_are_not_there(option, error):
    with pytest.raises(error, match=next(iter(option)).split("_")[0]) as info:
        jaxtensile.jit(product, **option)
    assert lines(info.value) == 1


@pytest.mark.parametrize(
    "wrong, right", [("buget", "budget"), ("donate_argnum", "donate_argnums"), ("hostbudget", "host_budget")]
)
def test_the_nearest_option_is_named(wrong, right):
    with pytest.raises(TypeError, match=f"'{wrong}': did you mean '{right}'"):
        jaxtensile.jit(product, **{wrong: 1})


def test_a_budget_of_a_few_bytes_was_probably_meant_with_a_unit():
    big = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    with pytest.raises(jaxtensile.BudgetError, match=r"did you mean 12MiB\?"):
        jaxtensile.jit(product, budget="12", compiler_options=FAST).plan(big)


@pytest.mark.parametrize("transform", [jax.grad, jax.vmap, jax.jit])
def test_a_budget_inside_of_another_transformation_is_told_once(transform):
    inner = jaxtensile.jit(lambda x: (x * x).sum(), budget="1GiB")
    with pytest.warns(IgnoredBudgetWarning, match=r"budget='1GiB' and is called inside of another") as told:
        transform(inner)(jnp.ones((4, 4)))
        transform(inner)(jnp.ones((4, 5)))
    assert len(told) == 1


def test_many_shapes_are_told_once_where_they_are_planned():
    def loss(w, x):
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return x.sum()

    w = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    room = jaxtensile.jit(jax.grad(loss), compiler_options=FAST)
    plain = room.plan(w, jax.ShapeDtypeStruct((4096, 32), jnp.float32)).compiled.device
    step = jaxtensile.jit(jax.grad(loss), budget=int(0.9 * plain), compiler_options=FAST)

    def planned(count):
        for rows in range(4096, 4096 + count):
            step.plan(w, jax.ShapeDtypeStruct((rows, 32), jnp.float32))

    planned(1)
    step.clear_cache()
    planned(7)  # the first of which is planned again, and one shape all the same
    with pytest.warns(ManyPlansWarning, match=r"planned for 8 shapes of its arguments, in \d+ s: pad them") as told:
        planned(9)
    assert [Path(warning.filename).name for warning in told] == ["test_bad_input.py"]


def test_advice_is_what_can_be_done():
    """Who donates is not told to; rows that can be split are to be, whole matrices are not."""
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def refused(fun, *args, **options):
        with pytest.raises(jaxtensile.BudgetError) as info:
            jaxtensile.jit(fun, budget=1000, chunk=False, compiler_options=FAST, **options).plan(*args)
        return str(info.value)

    def update(x):
        return x - jax.grad(product)(x)

    assert "donate" in refused(update, x) and "donate" not in refused(update, x, donate_argnums=0)
    rows = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    assert "chunk=True" in refused(jax.grad(lambda w, x: (jnp.tanh(x @ w) ** 2).sum()), x, rows)
    assert "chunk=True" not in refused(lambda x: jnp.linalg.inv(x), x)


def test_what_checkpoints_cost_is_told_where_they_stay():
    def block(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    def loss(w, x):
        return (jax.checkpoint(block)(x, w) ** 2).sum()

    def loop(w, x):
        return (jax.lax.scan(lambda x, _: (jax.checkpoint(block)(x, w), None), x, length=3)[0] ** 2).sum()

    w, x = jnp.eye(32) / 2, jnp.ones((64, 32))
    (note,) = jaxtensile.jit(jax.value_and_grad(loss), budget="1GiB", undo=False).plan(w, x).notes
    # Two products forward, both again for the gradient, and three for that.
    assert note.startswith("its own checkpoints recompute 28.6% of its matrix FLOPs")
    notes = jaxtensile.jit(jax.value_and_grad(loop), budget="1GiB").plan(w, x).notes
    assert any(note.startswith("a checkpoint inside of a loop is honoured") for note in notes)


def test_host_memory_of_a_cpu_is_its_own():
    notes = jaxtensile.jit(product, budget="1GiB", host_budget="1GiB").plan(jnp.ones((4, 4))).notes
    assert any("host_budget= has no effect on a CPU" in note for note in notes)


def test_options_are_given_by_name():
    with pytest.raises(TypeError, match="positional"):
        jaxtensile.jit(product, "1GiB")


# ---- devices --------------------------------------------------------------------------------------

SEVERAL_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, jaxtensile
from jax.sharding import NamedSharding, PartitionSpec as P
from programs import same, squeezed, step

here, there = jax.devices()[:2]
a, b = jax.device_put(jnp.ones(3), here), jax.device_put(jnp.ones(3), there)

def fun(x, y):
    return x + y

def words(call):
    try:
        call(a, b)
    except ValueError as error:
        return str(error).splitlines()[0]

plain, ours = jax.jit(fun, donate_argnums=0), jaxtensile.jit(fun, budget="1GiB", donate_argnums=0)
assert words(ours) == words(plain) and "incompatible devices" in words(ours)
assert words(ours.lower) == words(plain.lower)
assert "incompatible devices" in words(ours.plan)
assert not a.is_deleted() and not b.is_deleted()
free = jaxtensile.jit(fun, budget="1GiB")
for args in ((a, a), (b, b), (np.ones(3), b), (np.ones(3), 1.0), (b, a * 0 + 1) if False else (b, 2)):
    same(free(*args), jax.jit(fun)(*args))
with jax.default_device(there):
    assert free(np.ones(3), 1.0).device == there

mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
rows, everywhere = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
weights = [jax.device_put(jnp.eye(8) / 2, everywhere) for _ in range(24)]
x = jax.device_put(jnp.ones((4096, 8)), rows)
planned, report = squeezed(step, weights, x)
assert any("4 devices" in note for note in report.notes) and report.compiled.exact
expected = jax.jit(step)(weights, x)
got = planned(weights, x)
for g, e in zip(got, expected):
    assert g.sharding.is_equivalent_to(e.sharding, g.ndim)
    np.testing.assert_allclose(g, e, rtol=1e-6)
before = len(next(iter(planned._entries.values())))
planned(planned(got, x), x)
assert len(next(iter(planned._entries.values()))) == before == 1  # the step's own results plan nothing anew

doubled = jaxtensile.jit(lambda x: x * 2, in_shardings=rows, budget="1GiB")
same(doubled(np.ones(8)), jax.jit(lambda x: x * 2, in_shardings=rows)(np.ones(8)))
assert doubled.plan(np.ones(8)).notes
inside = jaxtensile.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, rows), budget="1GiB")
assert inside(np.ones(8)).sharding == rows and inside.plan(np.ones(8)).notes
print("all well")
"""


def test_arguments_on_several_devices(tmp_path):
    """In a process with four CPU devices: errors of JAX's own, sharded steps, one plan per placement."""
    done = on_four_devices(SEVERAL_DEVICES, tmp_path)
    assert done.stdout == "all well\n", done.stderr[-3000:]
