"""A small training step for jobs, with plans from a few hundred kilobytes to about twice as many, and who runs it
undisturbed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

WIDTH, ROWS, LAYERS = 32, 512, 6
X = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, WIDTH)), jnp.float32)
Y = jnp.sin(X)


def start(seed=0):
    """Weights."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / WIDTH, jnp.float32) for _ in range(LAYERS)]


def loss(weights, x, y):
    for w in weights:
        x = x + jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2)


def step(weights, x, y):
    value, grads = jax.value_and_grad(loss)(weights, x, y)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def predict(weights, x):
    """What a job answers that only reads its weights."""
    for w in weights:
        x = x + jnp.tanh(x @ w)
    return x.sum(axis=1)


@functools.cache
def undisturbed(steps, seed=0, rows=ROWS):
    """The losses of ``jax.jit``."""
    weights, losses = start(seed), []
    run = jax.jit(step, donate_argnums=0)
    for _ in range(steps):
        weights, value = run(weights, X[:rows], Y[:rows])
        losses.append(float(value))
    return losses


def config(capacity, **coordinator):
    """Of a device with so many bytes, whose jobs may be moved at once."""
    return {"device": {"capacity": capacity, "reserve": 0}, "coordinator": {"min_hold": 0, **coordinator}}
