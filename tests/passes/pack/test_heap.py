"""`passes.heap`: XLA's heap, by hand, by invariant on random buffers, and as XLA compiles."""

import random

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxtensile
from graphs import Builder
from jaxtensile import switches
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.pack.best_fit import best_fit
from jaxtensile.passes.pack.buffers import Buffer, max_load
from jaxtensile.passes.pack.heap import heap, temporaries
from jaxtensile.passes.pack.pack import pack
from jaxtensile.passes.verify.pack_check import faults
from jaxtensile.program.trace import trace_jaxpr


def test_the_smallest_hole_is_taken_and_of_like_holes_the_lowest():
    tall, wide, low, small = Buffer(0, 9, 10), Buffer(0, 3, 8), Buffer(2, 9, 6), Buffer(4, 6, 5)
    assert best_fit([tall, wide, low, small]).offsets == (0, 10, 18, 10)
    assert best_fit([Buffer(0, 2, 4), Buffer(2, 4, 4)]).offsets == (0, 0)
    assert best_fit([]).height == 0


def test_of_like_buffers_the_longest_lies_lowest():
    assert best_fit([Buffer(0, 2, 4), Buffer(0, 5, 4)]).offsets == (4, 0)


def test_offsets_are_aligned():
    found = best_fit([Buffer(0, 4, 10), Buffer(1, 3, 6, 4), Buffer(1, 3, 5, 4)])
    assert found.offsets == (0, 12, 20)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_there_together_does_not_overlap(seed):
    dice = random.Random(seed)
    buffers = []
    for _ in range(dice.randrange(1, 60)):
        lower = dice.randrange(40)
        buffers.append(Buffer(lower, lower + dice.randrange(1, 12), dice.randrange(0, 100)))
    found = best_fit(buffers)
    assert not list(faults(buffers, found))
    assert max_load(buffers) <= pack(buffers).height <= found.height
    for k, b in enumerate(buffers):  # every buffer lies on the ground or on another one
        below = [o for o, (low, other) in enumerate(zip(found.offsets, buffers, strict=True)) if o != k and other.size]
        ends = {found.offsets[o] + buffers[o].size for o in below}
        assert found.offsets[k] in {0, *ends} or not b.size


def test_holes_count():
    """Of random programs some have holes in their heap; the others need what is there at the peak."""
    holes = 0
    for seed in range(60):
        dice, b = random.Random(seed), Builder()
        made = [b.input(1)]
        for _ in range(12):
            made.append(b.op("cumsum", made[-1], dice.choice(made[-4:]), shape=(dice.randrange(1, 20),)))
        live = live_ranges(b.graph(made[-1]))
        assert heap(live) == best_fit([Buffer(r.start, r.stop, r.nbytes) for r in live.ranges]).height
        holes += heap(live) > live.temp
        with switches.off("heap_holes"):
            assert heap(live) == live.temp
    assert 0 < holes < 60


def test_steps_are_kernels():
    """Ops that are computed where they are read make no buffer live longer."""
    b = Builder()
    x = b.input(8)
    a = b.op("cumsum", x)
    for _ in range(5):
        x = b.op("sin", x)
    live = live_ranges(b.graph(b.op("cumsum", x, a)))
    assert [(buffer.lower, buffer.upper) for buffer in temporaries(live)] == [(0, 3), (1, 3)]
    assert [(r.start, r.stop) for r in live.ranges] == [(0, 7), (5, 7)]


def test_what_loops_need_inside_lies_there_too():
    def looped(w, x):
        y = jnp.cumsum(x, 0)
        return lax.scan(lambda c, _: (jnp.sin(jnp.sin(c @ w) @ w), None), y, None, length=4)[0] + y

    shapes = jnp.ones((64, 64)), jnp.ones((256, 64))
    live = live_ranges(trace_jaxpr(jax.make_jaxpr(looped)(*shapes)).graph)
    outside = sum(r.nbytes for r in live.ranges)
    assert heap(live) == live.temp > outside > 0
    *_, inside = temporaries(live)
    assert (inside.size, inside.upper) == (live.temp - outside, inside.lower + 1)


@pytest.mark.cuda_aot
def test_of_like_buffers_the_one_that_outlives_most_kernels_lies_lowest():
    """Layers whose products compute what they read: ten ops lie between the last two kernels, and no kernel."""

    def loss(weights, x):
        for w, b in weights:
            x = jax.nn.relu(x @ w + b)
        return jnp.mean(x**2)

    s = jax.ShapeDtypeStruct
    args = [(s((256, 256), jnp.float32), s((256,), jnp.float32))] * 6, s((4096, 256), jnp.float32)
    exact, static = (jaxtensile.estimate(loss, *args, target="nvidia-h200", exact=e) for e in (True, False))
    assert static.temp == pytest.approx(exact.temp, rel=0.01) == 2 * 4096 * 256 * 4
