"""`passes.lodgers`: temporaries in the memory of results, by rule and as XLA assigns them."""

import random

import jax
import jax.numpy as jnp
import pytest

import jaxtensile
from graphs import Builder
from jaxtensile.passes.lifetimes.liveness import live_ranges
from jaxtensile.passes.lifetimes.output_reuse import reusing_outputs

WORD = 4


def chain(*sizes, donated=()):
    """Ops one after another, each reading the one before; the last is the result."""
    b = Builder()
    v = b.input(sizes[0])
    for words in sizes[1:]:
        v = b.op("cumsum", v, shape=(words,))
    return b.graph(v, donated=donated)


def test_what_is_dead_before_the_result_is_written_takes_no_memory():
    graph = chain(1, 5, 7, 3, 9)
    live = live_ranges(graph)
    assert live.temp == 12 * WORD
    found = reusing_outputs(graph, live)
    assert found.temp == 5 * WORD, "7 goes where 9 will be; 5 is read while 7 is written, 3 while 9 is"
    assert [r.nbytes // WORD for r in found.ranges] == [5, 3]


def test_a_result_that_is_too_small_or_takes_over_an_argument_has_no_room():
    small = chain(1, 5, 7, 4)
    assert reusing_outputs(small, live_ranges(small)).temp == 12 * WORD
    donated = chain(9, 5, 7, 9, donated=(0,))
    assert reusing_outputs(donated, live_ranges(donated)).temp == 12 * WORD


@pytest.mark.parametrize("seed", range(20))
def test_profiles_are_those_of_what_is_left(seed):
    dice = random.Random(seed)
    b = Builder()
    known = [b.input(dice.randrange(1, 50))]
    for _ in range(30):
        known.append(b.op("cumsum", *dice.sample(known, min(len(known), 2)), shape=(dice.randrange(1, 50),)))
    graph = b.graph(*dice.sample(known[1:], 6))
    live = live_ranges(graph)
    found = reusing_outputs(graph, live)
    gone = {r.value: r for r in live.ranges}
    for r in found.ranges:
        assert gone.pop(r.value) == r
    for k, nbytes in enumerate(found.profile):
        assert nbytes == sum(r.nbytes for r in found.ranges if r.start <= k < r.stop)
    assert found.temp <= live.temp
    room = sum(graph.values[v].nbytes for v in set(graph.outputs))
    for k in range(len(graph.ops)):
        assert sum(r.nbytes for r in gone.values() if r.start <= k < r.stop) <= room
    assert (found.argument, found.output, found.alias) == (live.argument, live.output, live.alias)


@pytest.mark.cuda_aot
@pytest.mark.parametrize("rows, arrays", [(1024, 2), (4096, 7)], ids=("fewer bytes than a weight", "more"))
def test_xla_keeps_activations_where_gradients_will_be(rows, arrays):
    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x * x).sum()

    args = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 6, jax.ShapeDtypeStruct((rows, 2048), jnp.float32)
    f = jax.jit(jax.grad(loss))
    static = jaxtensile.estimate(f, *args, target="nvidia-h200")
    exact = jaxtensile.estimate(f, *args, target="nvidia-h200", exact=True)
    activation = rows * 2048 * 4
    assert exact.temp // activation == static.temp // activation == arrays
