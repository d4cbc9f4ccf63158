"""Sinkhorn between two point clouds, kernel applied in row blocks, differentiated through its iterations.

Source: ott-jax/ott#417 ("batch_size is ineffective when reverse mode is used"); same theme jax-ml/jax#3186.
Wanted: a gradient that needs no more than a few blocks of the cost matrix, as the forward pass does.
Expected: what jax.checkpoint around one block reaches (residuals: potentials of each iteration only), unannotated.
"""

import jax
import jax.numpy as jnp
from jax import lax


def softmin_block(rows, f, cloud, g, eps):
    """eps * logsumexp over the other cloud, for one block of rows."""
    cost = jnp.sum((rows[:, None, :] - cloud[None, :, :]) ** 2, -1)
    return eps * jax.nn.logsumexp((g[None, :] - cost) / eps, axis=1)


def blocked(block, rows, f, cloud, g, eps, size):
    parts = rows.reshape(-1, size, rows.shape[-1]), f.reshape(-1, size)
    return lax.map(lambda p: block(p[0], p[1], cloud, g, eps), parts).reshape(-1)


def transport(x, y, *, block, iterations, size, eps=0.05):
    n, m = len(x), len(y)

    def iterate(potentials, _):
        f, g = potentials
        f = -blocked(block, x, f, y, g, eps, size) - eps * jnp.log(float(n))
        g = -blocked(block, y, g, x, f, eps, size) - eps * jnp.log(float(m))
        return (f, g), None

    (f, g), _ = lax.scan(iterate, (jnp.zeros(n), jnp.zeros(m)), None, length=iterations)
    return f.mean() + g.mean()


def case(size):
    n, iterations, block = {"big": (16384, 40, 1024), "small": (96, 6, 24)}[size]

    def make(inner):
        def step(x, y):
            value, grad = jax.value_and_grad(lambda x: transport(x, y, block=inner, iterations=iterations, size=block))(
                x
            )
            return x - 0.1 * grad, value

        return step

    if size == "big":
        args = (jax.ShapeDtypeStruct((n, 3), jnp.float32),) * 2
    else:
        keys = jax.random.split(jax.random.key(0))
        args = tuple(jax.random.normal(k, (n, 3)) for k in keys)
    return {
        "fun": make(softmin_block),
        "args": args,
        "hand": {"checkpoint(block)": make(jax.checkpoint(softmin_block))},
    }
