"""Marginal likelihood of 16 Gaussian processes on learned features, factorised by Cholesky, with gradients.

Source: google/neural-tangents#166 (no room for a Cholesky solve), dfm/tinygp#42 (manual vmapping),
meta-pytorch/botorch#798.
Wanted: more tasks or points; by hand the kernel is computed again, the factor is kept: it is what costs time.
Expected: kernels recomputed before factorisations are (n^3/3 each), and the report counts a second factorisation.
"""

import jax
import jax.numpy as jnp
from jax import lax


def features(p, x):
    for w, b in p[:-1]:
        x = jnp.tanh(x @ w + b)
    return x @ p[-1][0] + p[-1][1]


def kernel(z, scale):
    z = z * jnp.exp(scale)
    norm = jnp.sum(z * z, -1)
    return jnp.exp(-0.5 * jnp.maximum(norm[:, None] + norm[None, :] - 2 * z @ z.T, 0.0))


def likelihood(z, scale, noise, y, kernel=kernel):
    k = kernel(z, scale) + (1e-3 + jnp.exp(noise)) * jnp.eye(len(y))
    chol = jnp.linalg.cholesky(k)
    alpha = jax.scipy.linalg.solve_triangular(chol, y, lower=True)
    return 0.5 * jnp.sum(alpha**2) + jnp.sum(jnp.log(jnp.diagonal(chol)))


def case(size):
    tasks, n, inputs, width = {"big": (16, 3072, 16, 256), "small": (3, 12, 4, 8)}[size]

    def make(kind):
        def loss(params, x, y):
            def one(x, scale, noise, y):
                z = features(params["net"], x)
                return likelihood(z, scale, noise, y, jax.checkpoint(kernel) if kind == "kernel" else kernel)

            rest = x, params["scale"], params["noise"], y
            if kind == "map":
                return lax.map(jax.checkpoint(lambda t: one(*t)), rest).sum()
            return jax.vmap(one)(*rest).sum()

        def step(params, x, y):
            value, grads = jax.value_and_grad(loss)(params, x, y)
            return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), value

        return step

    f32 = jnp.float32
    net = [((inputs, width), (width,)), ((width, width), (width,)), ((width, 8), (8,))]
    shape = {"net": net, "scale": (tasks, 8), "noise": (tasks,)}

    def is_shape(s):
        return isinstance(s, tuple) and all(isinstance(d, int) for d in s)

    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, f32), shape, is_leaf=is_shape)
    x, y = jax.ShapeDtypeStruct((tasks, n, inputs), f32), jax.ShapeDtypeStruct((tasks, n), f32)
    if size == "small":
        key = iter(jax.random.split(jax.random.key(0), 20))
        params = jax.tree.map(lambda s: jax.random.normal(next(key), s.shape) / 3, params)
        x, y = jax.random.normal(next(key), x.shape), jax.random.normal(next(key), y.shape)
    return {
        "fun": make("plain"),
        "args": (params, x, y),
        "chunk": True,
        "hand": {"checkpoint(kernel)": make("kernel"), "lax.map over tasks": make("map")},
    }
