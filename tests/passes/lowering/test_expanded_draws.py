"""XLA:CPU's memory for random numbers: the model's bytes beside the compiler's."""

import jax
import jax.numpy as jnp
import pytest

import jaxtensile

SHAPE = (512, 1024)
X = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
KEY = jax.eval_shape(lambda: jax.random.key(0))
OTHER = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
OLD = jax.eval_shape(lambda: jax.random.PRNGKey(0))


def dropped(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


def layers(w, x, key):
    for i in range(4):
        x = dropped(jax.random.fold_in(key, i), jnp.tanh(x @ w))
    return (x**2).sum()


SQUARE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
CASES = {
    "bits": (lambda key: jax.random.bits(key, SHAPE), KEY),
    "of an old key": (lambda key: jax.random.bits(key, SHAPE), OLD),
    "of eight bits": (lambda key: jax.random.bits(key, SHAPE, "uint8"), KEY),
    "read in one kernel": (lambda key: jax.random.bits(key, SHAPE).sum(), KEY),
    "normal": (lambda key: jax.random.normal(key, SHAPE), KEY),
    "a mask": (lambda key: jax.random.bernoulli(key, 0.9, SHAPE), KEY),
    "dropout": (dropped, KEY, X),
    "another kind of key": (lambda key: jax.random.bits(key, SHAPE), OTHER),
    "masks that wait for the backward part": (jax.grad(layers), SQUARE, X, KEY),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_xla(name):
    fun, *args = CASES[name]
    use = jaxtensile.estimate(fun, *args, exact=True)
    assert jaxtensile.estimate(fun, *args).device == pytest.approx(use.device, rel=0.02, abs=4096)
