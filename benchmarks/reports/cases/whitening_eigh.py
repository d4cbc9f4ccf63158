"""Whitening layers by eigh between dense layers: dear to compute, small beside activations.

Source: jax-ml/jax#23410 and #12846 (cuSOLVER and memory), #9755 (memory of decompositions).
Wanted: to fit by computing cheap things again (activations), not eigendecompositions.
Expected: a plan at 60 % runs no eigh twice; the report counts it where it must.
"""

import jax
import jax.numpy as jnp


def whiten(x, groups):
    """(groups, rows, features): each group by its own covariance."""
    x = x - x.mean(1, keepdims=True)
    c = jnp.einsum("grf,grk->gfk", x, x) / x.shape[1] + 1e-3 * jnp.eye(x.shape[-1])
    values, vectors = jnp.linalg.eigh(c)
    root = (vectors * jax.lax.rsqrt(values)[:, None, :]) @ vectors.swapaxes(-1, -2)
    return x @ root, vectors


def case(size):
    groups, rows, width, layers = {"big": (32, 1024, 1024, 4), "small": (2, 24, 4, 2)}[size]

    def layer(p, x):
        h, _ = whiten(x, groups)
        return x + jax.nn.gelu(h @ p["w1"]) @ p["w2"]

    def make(wrap):
        def loss(params, x, y):
            for p in params:
                x = wrap(layer)(p, x)
            return jnp.mean((x - y) ** 2)

        def step(params, x, y):
            value, grads = jax.value_and_grad(loss)(params, x, y)
            return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), value

        return step

    f32 = jnp.float32
    params = [
        {"w1": jax.ShapeDtypeStruct((width, 2 * width), f32), "w2": jax.ShapeDtypeStruct((2 * width, width), f32)}
        for _ in range(layers)
    ]
    x = jax.ShapeDtypeStruct((groups, rows, width), f32)
    if size == "small":
        key = iter(jax.random.split(jax.random.key(0), 50))
        params = jax.tree.map(lambda s: jax.random.normal(next(key), s.shape) / s.shape[0] ** 0.5, params)
        x = jax.random.normal(next(key), x.shape)
    return {
        "fun": make(lambda f: f),
        "args": (params, x, x),
        "jit": {"donate_argnums": (0,)},
        "hand": {"checkpoint(layer)": make(jax.checkpoint)},
    }
