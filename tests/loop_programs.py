"""Programs with loops for tests: what they stack, carry and close over is of many kinds. Each on ``arguments()``."""

import jax
import jax.numpy as jnp


def rnn(w, xs, h0):
    """A recurrent net whose body has cheap and dear residuals; the outputs are used afterwards."""

    def body(carry, x):
        h, c = carry
        z = jnp.tanh(jnp.concatenate([x, h]) @ w["in"] + w["b"])
        gate, update = jnp.split(z, 2)
        c = jax.nn.sigmoid(gate) * c + jnp.sin(update)
        return (jnp.exp(-(c**2)) * h + x, c), (h * c, jnp.cos(c))

    (h, c), (a, b) = jax.lax.scan(body, (h0, 0.5 * h0), xs)
    return (h * c).sum() + (a * b).sum() + (a[::2] ** 2).sum()


def reverse(w, xs, h0):
    """A scan that runs backwards already, without outputs."""

    def body(h, x):
        return jnp.tanh(h @ w["in"][: h.size, : h.size] + x) * 0.9, None

    return (jax.lax.scan(body, h0, xs, reverse=True)[0] ** 2).sum()


def two_loops(w, xs, h0):
    """The second loop reads what the first one made; constants are closed over."""
    table = jnp.arange(8.0)

    def first(h, x):
        h = jnp.sin(h @ w["in"][:8, :8] + x * table)
        return h, jnp.exp(h)

    h, ys = jax.lax.scan(first, h0, xs)

    def second(h, y):
        return jnp.tanh(h * y @ w["in"][8:, 8:]), h.sum()

    h, sums = jax.lax.scan(second, h, ys, unroll=2)
    return (h**2).sum() + sums.sum()


def masked(w, xs, h0):
    """Integers, booleans and random keys among the residuals."""

    def body(carry, x):
        h, key, i = carry
        key, now = jax.random.split(key)
        keep = jax.random.bernoulli(now, 0.7, h.shape)
        h = jnp.where(keep, jnp.tanh(h @ w["in"][:8, :8] + x), 0.0) * (1 + i % 3)
        return (h, key, i + 1), h.max()

    (h, _, _), m = jax.lax.scan(body, (h0, jax.random.key(3), 0), xs)
    return (h**2).sum() + m.sum()


def chained(w, xs, h0):
    """Loops that read what the loop before stacks, twice, and stack something themselves."""

    def first(h, x):
        h = jnp.tanh(h @ w["in"][:8, :8] + x)
        return h, (jnp.sin(h), h)

    def second(h, x):
        h = h * 0.5 + jnp.sin(x[0]) * x[1]
        return h, jnp.cos(h * x[0])

    h, ab = jax.lax.scan(first, h0, xs)
    h, c = jax.lax.scan(second, h, ab)
    h, d = jax.lax.scan(lambda h, x: (h * 0.5 + x, jnp.exp(-((h * x) ** 2))), h, c, reverse=True)
    return (h**2).sum() + (d**2).sum()


def raw_keys(w, xs, h0):
    """Noise from keys that are plain words among what the loop reads."""

    def body(h, at):
        x, key = at
        keep = jax.random.bernoulli(key, 0.7, h.shape)
        return jnp.where(keep, jnp.tanh(h @ w["in"][:8, :8] + x), 0.5 * h), None

    h, _ = jax.lax.scan(body, h0, (xs, jax.random.split(jax.random.PRNGKey(3), len(xs))))
    return (h**2).sum()


PROGRAMS = (rnn, reverse, two_loops, masked, raw_keys)


def arguments():
    """Weights, twelve inputs and a start."""
    keys = jax.random.split(jax.random.key(0), 3)
    w = {"in": 0.5 * jax.random.normal(keys[0], (16, 16)), "b": jnp.ones(16)}
    return w, jax.random.normal(keys[1], (12, 8)), jax.random.normal(keys[2], (8,))
