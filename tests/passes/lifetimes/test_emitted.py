"""XLA:CPU stores what a kernel would compute at several places: the model's bytes beside the compiler's."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxtensile

HALF, WHOLE = jax.ShapeDtypeStruct((8, 512, 256), jnp.float32), jax.ShapeDtypeStruct((8, 1024, 256), jnp.float32)


def even(x):
    return lax.pad(x, 0.0, ((0, 0, 0), (0, 1, 1), (0, 0, 0)))


def odd(x):
    return lax.pad(x, 0.0, ((0, 0, 0), (1, 0, 1), (0, 0, 0)))


def twice(x):
    return x[:, 1:514] + x[:, 3:516]


def here_and_there(x):
    return x + 1, x[:, 1:514] + 2


def clipped(x):
    return jnp.maximum(x, 1) * jnp.minimum(x, 2)


def joined(x, y):
    return jnp.concatenate([x * 2, y * 3], 1)


def at_places(count):
    def fun(x):
        twofold = x * 2
        return sum(twofold[:, i : i + 512] for i in range(count))

    return fun


CASES = {
    "an array in halves, at two places": (lambda x, y: twice(joined(x, y)), HALF, HALF),
    "in two kernels": (lambda x, y: here_and_there(joined(x, y)), HALF, HALF),
    "a padded array at two places": (lambda x: twice(even(x * 2)), HALF),
    "a padded array in two kernels": (lambda x: here_and_there(even(x * 2)), HALF),
    "a padded array at one place": (lambda x: jnp.maximum(even(x * 2), 1) * 2, HALF),
    "through an elementwise op": (lambda x: clipped(even(x * 2) * 3), HALF),
    "a sum of two at two places": (lambda x, y: twice(even(x * 2) + odd(y * 3)), HALF, HALF),
    "a sum of two in two kernels": (lambda x, y: here_and_there(even(x * 2) + odd(y * 3)), HALF, HALF),
    "a sum of two at one place": (lambda x, y: (even(x * 2) + odd(y * 3))[:, 1:514] + 1, HALF, HALF),
    "any array at fifteen places": (at_places(15), WHOLE),
    "and at sixteen": (at_places(16), WHOLE),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_xla(name):
    fun, *args = CASES[name]
    use = jaxtensile.estimate(fun, *args, exact=True)
    assert jaxtensile.estimate(fun, *args).device == pytest.approx(use.device, rel=0.01)


def test_a_step_through_an_associative_scan():
    """Each level adds two padded halves and reads the sum in slices; 57 MiB without the rule, where XLA needs 89."""

    def loss(w, x):
        rates, inputs = jax.nn.sigmoid(x @ w[0]), x @ w[1]
        states = lax.associative_scan(lambda a, b: (b[0] * a[0], b[0] * a[1] + b[1]), (rates, inputs), axis=1)[1]
        return ((states @ w[2]) ** 2).mean()

    def step(w, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x))

    args = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 3, WHOLE
    use = jaxtensile.estimate(step, *args, exact=True)
    assert 0.85 < jaxtensile.estimate(step, *args).device / use.device <= 1.05
