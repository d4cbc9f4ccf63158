"""Some places of random bits and of counts: those of the whole array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtensile.rewrites.rows import numbered

KEY = jax.random.key(11)


def random_bits(fun, *args):
    """The equation that makes random bits in what ``fun`` computes."""
    return next(e for e in jax.make_jaxpr(fun)(*args).eqns if e.primitive.name == "random_bits")


@settings(max_examples=12)
@given(st.sampled_from((8, 16, 32)), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_bits_are_those_of_the_same_places(width, shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    n = data.draw(st.integers(1, shape[dim]))
    at = data.draw(st.integers(0, shape[dim] - n))
    whole = jax.random.bits(KEY, tuple(shape), f"uint{width}")
    some = numbered.bits(KEY, width, shape, dim, np.int32(at), n)
    assert some.dtype == whole.dtype
    np.testing.assert_array_equal(some, jax.lax.dynamic_slice_in_dim(whole, at, n, dim))


def test_bits_of_64():
    with jax.enable_x64(True):
        whole = jax.random.bits(KEY, (3, 6), "uint64")
        some = numbered.bits(KEY, 64, (3, 6), 1, np.int32(2), 3)
        assert some.dtype == whole.dtype
        np.testing.assert_array_equal(some, whole[:, 2:5])


def test_counts():
    some = numbered.iota(jnp.bfloat16, (2, 9), 1, np.int32(4), 3)
    assert some.dtype == jnp.bfloat16
    np.testing.assert_array_equal(some, [[4, 5, 6], [4, 5, 6]])


def test_which_bits_are_numbered():
    def bits(key):
        return jax.random.bits(key, (4,))

    assert numbered.are_counted(random_bits(bits, KEY))
    assert not numbered.are_counted(random_bits(bits, jax.random.key(0, impl="rbg")))
    assert not numbered.are_counted(random_bits(jax.vmap(bits), jax.random.split(KEY, 3)))
    with jax.threefry_partitionable(False):
        assert not numbered.are_counted(random_bits(bits, KEY))


@pytest.mark.parametrize("shape, known", [((1 << 16, (1 << 16) - 1), True), ((1 << 16, 1 << 16), False)])
def test_numbers_have_32_bits(shape, known):
    eqn = random_bits(lambda key: jax.random.bits(key, shape, "uint8"), KEY)
    assert numbered.are_counted(eqn) == known
