"""`passes.sums`: what batch norm centres, stored or not, by rule and as XLA has it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxtensile
from graphs import Builder
from jaxtensile.passes.fusion import fuse

H200 = "nvidia-h200"


def centred(rows, columns, *, again=True, dtype="float32"):
    """Whether ``x - mean(x)`` is stored, whose squares are added up; ``again``: and that is read once more."""
    b = Builder()
    x, y = b.input(rows, columns, dtype=dtype), b.input(rows, columns, dtype=dtype)
    mean = b.op("mul", b.op("reduce_sum", x, shape=(columns,)), b.input(columns))
    away = b.op("sub", x, b.op("broadcast_in_dim", mean, shape=(rows, columns)))
    outs = [b.op("reduce_sum", b.op("square", away), shape=(columns,))]
    outs += [b.op("cumsum", b.op("mul", away, y))] if again else []
    return fuse(b.graph(*outs)).home[away] == away


@pytest.mark.parametrize(
    "rows, columns, stored",
    [
        (784, 960, True),
        (4096, 128, True),
        (3136, 2048, True),
        (4352, 128, False),
        (12544, 32, False),
        (3136, 4096, False),
    ],
)
def test_what_is_centred_is_stored_where_few_rows_are_added_up(rows, columns, stored):
    assert centred(rows, columns) is stored


def test_what_one_kernel_reads_is_made_in_it():
    assert not centred(784, 960, again=False)


def test_what_is_made_without_totals_is_not_stored():
    b = Builder()
    x, y = b.input(784, 960), b.input(960)
    away = b.op("sub", x, b.op("broadcast_in_dim", y, shape=(784, 960)))
    outs = [b.op("reduce_sum", b.op("square", away), shape=(960,)), b.op("cumsum", b.op("neg", away))]
    assert fuse(b.graph(*outs)).home[away] == -1


def test_sums_of_two_arrays_make_them_on_the_way():
    """As in the gradient of batch norm: what flows back times what was centred."""
    b = Builder()
    x, back = b.input(784, 960), b.input(784, 960)
    mean = b.op("reduce_sum", x, shape=(960,))
    away = b.op("sub", x, b.op("broadcast_in_dim", mean, shape=(784, 960)))
    outs = [b.op("reduce_sum", b.op("mul", away, back), shape=(960,)), b.op("cumsum", b.op("neg", away))]
    assert fuse(b.graph(*outs)).home[away] == -1


def norm(x, p):
    mean, variance = x.mean((0, 1, 2), keepdims=True), jnp.var(x, axis=(0, 1, 2), keepdims=True)
    scale = lax.rsqrt(variance + 1e-3) * p[0]
    return x * scale + (p[1] - mean * scale)


@pytest.mark.cuda_aot
@pytest.mark.parametrize("batch, within", [(16, 0.07), (64, 0.07)])
def test_a_network_with_batch_norm_needs_what_was_said(batch, within):
    """At 16 images 3,136 rows are added up at once, at 64 12,544 in two goes."""

    def loss(weights, x):
        for w, p in weights:
            x = jax.nn.relu(norm(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC), p))
        return x.mean()

    def step(weights, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    NHWC = ("NHWC", "HWIO", "NHWC")
    layer = jax.ShapeDtypeStruct((1, 1, 384, 384), jnp.float32), jax.ShapeDtypeStruct((2, 384), jnp.float32)
    args = [layer] * 12, jax.ShapeDtypeStruct((batch, 14, 14, 384), jnp.float32)
    said = jaxtensile.estimate(step, *args, target=H200, donate_argnums=0)
    true = jaxtensile.estimate(step, *args, target=H200, donate_argnums=0, exact=True)
    assert said.device == pytest.approx(true.device, rel=within)
