"""What bodies of loops keep: the model's bytes beside the compiler's."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxtensile

H200 = "nvidia-h200"
X, W = jax.ShapeDtypeStruct((1024, 256), jnp.float32), jax.ShapeDtypeStruct((256, 256), jnp.float32)
XS, WS = (jax.ShapeDtypeStruct((4, *v.shape), jnp.float32) for v in (X, W))


def over(body):
    """``body`` of a carry and a matrix, four times."""
    return (lambda x, w: lax.scan(lambda c, _: body(c, w), x, None, length=4)), X, W


def along(body):
    """``body`` of a carry, a matrix and a slice, four times."""
    return (lambda x, w, xs: lax.scan(lambda c, u: body(c, w, u), x, xs)), X, W, XS


def leapfrog(c, w):
    position, speed = c
    position = position + 0.1 * speed
    return (position, speed - 0.1 * jnp.sin(position)), None


def wave(c, w):
    before, now = c
    return (now, 2 * now - before + jnp.roll(now, 1, 0)), None


def pair(body):
    return (lambda x, w: lax.scan(lambda c, _: body(c, w), (x, x + 1), None, length=4)), X, W


def layers(x, ws):
    return lax.scan(lambda c, w: (c + jnp.tanh(c @ w), None), x, ws)[0]


def stacked(x, w):
    def body(c, _):
        y = jnp.sin(c @ w)
        return jnp.cos(y @ w), y

    last, ys = lax.scan(body, jnp.sin(x), None, length=4)
    return last.sum(), ys


CASES = {
    "a carry written over the old one": over(lambda c, w: (jnp.sin(c), None)),
    "that a product has read before": over(lambda c, w: (jnp.sin(c @ w), None)),
    "that is read elementwise then": over(lambda c, w: (c + jnp.sin(c @ w), None)),
    "that the product reads which makes it": over(lambda c, w: (c @ w, None)),
    "that is read at other places": over(lambda c, w: (c + jnp.roll(c, 1, 0), None)),
    "that is only moved": over(lambda c, w: (jnp.roll(c, 1, 0), None)),
    "two carries that take turns": pair(leapfrog),
    "one that becomes the other": pair(wave),
    "an elementwise slice": along(lambda c, w, u: (jnp.sin(c + u), None)),
    "a slice that a product reads": along(lambda c, w, u: (c + jnp.sin(u @ w), None)),
    "a stacked product": along(lambda c, w, u: (jnp.sin(c + u), c @ w)),
    "stacked elementwise": along(lambda c, w, u: (jnp.sin(c), jnp.cos(u))),
    "stacked and read by a product": (stacked, X, W),
    "a while loop": ((lambda x: lax.while_loop(lambda c: c.sum() < 0, lambda c: c + jnp.roll(c, 1, 0), x)), X),
    "matrices of layers": (layers, X, WS),
}


@pytest.mark.parametrize("name", CASES)
def test_on_a_cpu(name):
    fun, *args = CASES[name]
    exact, static = (jaxtensile.estimate(jax.jit(fun), *args, target="cpu", exact=e) for e in (True, False))
    assert static.device == pytest.approx(exact.device, rel=0.02)


OTHERS = {"that another result reads": over(lambda c, w: (jnp.sin(c), (c @ w).sum(0)))}


@pytest.mark.cuda_aot
@pytest.mark.parametrize("name", [*OTHERS, "that is read at other places", "a stacked product", "matrices of layers"])
def test_on_a_gpu(name):
    fun, *args = (CASES | OTHERS)[name]
    exact, static = (jaxtensile.estimate(jax.jit(fun), *args, target=H200, exact=e) for e in (True, False))
    assert static.device == pytest.approx(exact.device, rel=0.02)
