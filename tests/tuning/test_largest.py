"""The largest batch: no larger one fits, also where bytes do not grow with it, as it is and with a plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtensile
from jaxtensile.errors import BudgetError, OptionError
from jaxtensile.tuning import largest
from jaxtensile.tuning.largest import Needs, Search
from jaxtensile.tuning.making import maker_of

WIDTH, LAYERS = 64, 4


def loss(w, x):
    for _ in range(LAYERS):
        x = x + jnp.tanh(x @ w)
    return (x * x).sum()


def make(batch=8):
    shapes = (WIDTH, WIDTH), (batch, WIDTH)
    args = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return jaxtensile.Workload(fun=jax.grad(loss), args=args)


def in_fours(batch_size):
    if batch_size % 4:
        raise ValueError("batches of four")
    return make(batch_size)


def found(needs, room, near=0):
    asked = []

    def at(batch):
        asked.append(batch)
        nbytes = needs(batch)
        return None if nbytes is None else Needs(nbytes, room)

    return Search(at).largest(near), asked


@pytest.mark.parametrize("near", [0, 3, 500])
@pytest.mark.parametrize("least", [1, 2, 77, 100, 101, 999])
def test_one_more_does_not_fit(least, near):
    best, asked = found(lambda b: 1000 + 10 * b, 1000 + 10 * least + 9, near)
    assert best == least and len(asked) == len(set(asked)) < 40


def test_sizes_that_need_less_than_smaller_ones_are_found():
    # As a step that works in eighths of its batch where it can.
    best, _ = found(lambda b: 10 * b if b % 8 else 10 * (b // 8), 1000)
    assert best == 800
    # As tiles of 128: the bytes stand still, and jump.
    best, _ = found(lambda b: -(-b // 128) * 1280, 6400)
    assert best == 640
    # One size in the middle that is no good.
    best, _ = found(lambda b: 10**6 if b == 51 else 10 * b, 1000)
    assert best == 100


def test_sizes_that_are_refused_and_none_that_fits():
    assert found(lambda b: None if b % 4 else 10 * b, 999)[0] == 96
    assert found(lambda b: None, 999)[0] is None
    assert found(lambda b: 1000 + b, 100)[0] == 0
    assert found(lambda b: 1, 100)[0] == 1 << 30


@pytest.mark.parametrize("function", [make, in_fours])
def test_no_larger_batch_fits_as_it_is_and_with_a_plan(function):
    options = {"target": "nvidia-h200", "budget": "128KiB"}
    step = 4 if function is in_fours else 1
    plain = jaxtensile.largest_batch(function, planned=False, **options)
    planned = jaxtensile.largest_batch(function, **options)
    assert planned > plain > 0 and planned % step == plain % step == 0
    for batch, fits in ((plain, True), (plain + step, False)):
        e = jaxtensile.estimate(function(batch).fun, *function(batch).args, target=options["target"])
        assert (e.device <= 128 << 10) == fits


SLOPE = jax.grad(loss)


def test_arrays_are_made_for_small_batches_alone():
    """Larger ones have the shapes that go on from theirs, so that no machine is too small to look."""
    made = []

    def arrays(batch=512):
        made.append(batch)
        return jaxtensile.Workload(fun=SLOPE, args=(np.ones((WIDTH, WIDTH), np.float32), jnp.ones((batch, WIDTH))))

    options = {"target": "nvidia-h200", "budget": "4GiB"}
    found = jaxtensile.largest_batch(arrays, **options)
    assert found == jaxtensile.largest_batch(make, **options)
    assert max(made) * WIDTH * 4 <= 2 * largest.FEW < found * WIDTH * 4


def test_a_target_with_a_number_of_devices_that_are_nowhere():
    """Of a mesh without devices: as many more as there are, since what grows with the batch is divided among them."""

    def divided(batch=8):
        if batch % 8:
            raise ValueError("JAX divides no array unevenly")
        mesh = AbstractMesh((8,), ("rows",), axis_types=(AxisType.Auto,))
        shapes = ((WIDTH, WIDTH), P()), ((batch, WIDTH), P("rows"))
        args = tuple(jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, p)) for s, p in shapes)
        return jaxtensile.Workload(fun=SLOPE, args=args)

    options = {"target": "nvidia-h200:8", "budget": "1MiB"}
    plain, planned = (jaxtensile.largest_batch(divided, planned=p, **options) for p in (False, True))
    assert planned > plain > 0 and plain % 8 == planned % 8 == 0
    assert plain > 4 * jaxtensile.largest_batch(make, planned=False, target="nvidia-h200", budget="1MiB")


def test_a_machine_that_cannot_hold_the_arrays_is_told(monkeypatch):
    """Where each batch has a function of its own, whose shapes say nothing of others."""
    monkeypatch.setattr(largest, "FEW", 0)
    monkeypatch.setattr(largest, "host_memory", lambda: 64 << 20)

    def arrays(batch=512):
        return jaxtensile.Workload(fun=jax.grad(loss), args=(jnp.ones((WIDTH, WIDTH)), jnp.ones((batch, WIDTH))))

    sizes = largest.Sizes(maker_of(arrays), ("nvidia-h200",))
    found = sizes.largest("nvidia-h200")
    assert 16 << 20 >= found * WIDTH * 4 > 8 << 20
    assert "arrays makes arrays" in sizes.limit and "jax.ShapeDtypeStruct" in sizes.limit


def test_the_figures_of_the_compiler_on_this_machine():
    def sixties(batch):
        if batch % 64:
            raise ValueError("multiples of 64")
        return make(batch)

    options = {"budget": "512KiB", "exact": True}
    planned = jaxtensile.largest_batch(sixties, chunk=False, **options)
    plain = jaxtensile.largest_batch(sixties, planned=False, **options)
    assert planned > plain

    def plans(batch):
        work = sixties(batch)
        return jaxtensile.jit(work.fun, budget="512KiB", chunk=False).plan(*work.args)

    assert plans(planned).fits and plans(plain).unchanged and plans(plain + 64).baseline.device > 512 << 10
    with pytest.raises(BudgetError):
        plans(planned + 64)


def test_mistakes_are_told():
    with pytest.raises(OptionError, match="give it a parameter named batch"):
        jaxtensile.largest_batch(lambda: make())
    with pytest.raises(OptionError, match="chunk= is for plans"):
        jaxtensile.largest_batch(make, planned=False, chunk=True)
    with pytest.raises(jaxtensile.TargetError, match="unknown target"):
        jaxtensile.largest_batch(make, target="nvidia-h20")

    def broken(batch):
        raise KeyError("no such thing")

    with pytest.raises(jaxtensile.JaxtensileError, match=r"broken\(batch=128\) raised KeyError"):
        jaxtensile.largest_batch(broken)
