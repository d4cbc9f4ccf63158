"""`passes.sums`: what batch norm centres, stored or not, by rule and as XLA has it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxtensile
from graphs import Builder
from jaxtensile.passes.lifetimes.fusion import fuse
from programs import descent

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


def weighed(images, pixels, channels, steps, *, window=False):
    """Whether what a network computes in so many steps is stored, whose mean over each image weighs its channels."""
    b = Builder()
    shape = images, pixels, pixels, channels
    x = b.op("conv_general_dilated", b.input(*shape))
    for step in steps:
        x = b.op(step, x)
    small = (images, 1, 1, channels) if window else (images, channels)
    mean = b.op("reduce_window_sum" if window else "reduce_sum", x, shape=small)
    weights = b.op("broadcast_in_dim", b.op("conv_general_dilated", mean), shape=shape)
    out = b.op("conv_general_dilated", b.op("mul", x, weights))
    return fuse(b.graph(out), written=True).home[x] == x


RELU, SILU = ("mul", "add", "max"), ("mul", "add", "logistic", "neg")


@pytest.mark.parametrize(
    "images, pixels, channels, steps, stored",
    [
        (8, 56, 64, ("mul", "add"), True),
        (32, 56, 128, RELU, True),
        (32, 14, 512, RELU, False),
        (32, 14, 512, ("sub", *RELU), True),
        (32, 14, 512, SILU, True),
        (32, 7, 1024, SILU, False),
        (128, 14, 512, SILU, False),
        (16, 64, 48, SILU, True),
        (16, 65, 48, SILU, False),
    ],
)
def test_what_is_added_up_for_each_image_is_stored_where_computing_it_there_takes_long(
    images, pixels, channels, steps, stored
):
    """As compiled networks have it (H200, jax 0.10.2): the more steps, the more channels."""
    assert weighed(images, pixels, channels, steps) is stored
    assert weighed(images, pixels, channels, steps, window=True) is stored


def test_sums_over_channels_in_front_of_pixels_store_nothing():
    b = Builder()
    x = b.op("conv_general_dilated", b.input(8, 96, 28, 28))
    moved = b.op("mul", b.op("sub", x))
    outs = b.op("reduce_sum", moved, shape=(8, 28, 28)), b.op("conv_general_dilated", b.op("neg", moved))
    assert fuse(b.graph(*outs), written=True).home[moved] == -1


def excited(weights, x):
    """``relu`` of what was shifted and scaled, channels weighed by their means."""
    for w in weights:
        x = jax.nn.relu((conv(x, w["conv"]) - w["norm"][0]) * w["norm"][1] + w["norm"][2])
        mean = jax.nn.relu(conv(x.mean((1, 2), keepdims=True), w["down"]))
        x = x * jax.nn.sigmoid(conv(mean, w["up"]))
    return (x * x).mean()


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@pytest.mark.cuda_aot
@pytest.mark.parametrize("images", [16, 128])
def test_a_network_that_weighs_its_channels_needs_what_was_said(images):
    """Of 16 images what is weighed is stored, a third of all, of 128 it is computed again; the rest is holes."""

    step = descent(excited)

    shapes = {"conv": (1, 1, 384, 384), "norm": (3, 384), "down": (1, 1, 384, 24), "up": (1, 1, 24, 384)}
    layer = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    args = [layer] * 6, jax.ShapeDtypeStruct((images, 14, 14, 384), jnp.float32)
    said = jaxtensile.estimate(step, *args, target=H200, donate_argnums=0)
    true = jaxtensile.estimate(step, *args, target=H200, donate_argnums=0, exact=True)
    assert said.device == pytest.approx(true.device, rel=0.14)


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

    step = descent(loss)

    NHWC = ("NHWC", "HWIO", "NHWC")
    layer = jax.ShapeDtypeStruct((1, 1, 384, 384), jnp.float32), jax.ShapeDtypeStruct((2, 384), jnp.float32)
    args = [layer] * 12, jax.ShapeDtypeStruct((batch, 14, 14, 384), jnp.float32)
    said = jaxtensile.estimate(step, *args, target=H200, donate_argnums=0)
    true = jaxtensile.estimate(step, *args, target=H200, donate_argnums=0, exact=True)
    assert said.device == pytest.approx(true.device, rel=within)
