"""A physics-informed network: the Laplacian at many points by jax.hessian, and the gradient of its residual.

Source: pytorch/functorch#328 and jax-ml/jax#1923 (vmap of second derivatives runs out of memory).
Wanted: some points at a time; by hand lax.map over parts with a checkpoint for the gradient.
Expected: chunk=True does so.
"""

import itertools

import jax
import jax.numpy as jnp
from jax import lax


def case(size):
    points, dims, hidden, layers, part = {"big": (131072, 3, 256, 5, 8192), "small": (12, 3, 8, 3, 4)}[size]

    def field(params, x):
        for w, b in params[:-1]:
            x = jnp.tanh(x @ w + b)
        w, b = params[-1]
        return (x @ w + b)[0]

    def residual(params, x):
        return jnp.trace(jax.hessian(field, argnums=1)(params, x)) + jnp.sin(x).sum()

    def squares(params, xs):
        return jnp.sum(jax.vmap(residual, (None, 0))(params, xs) ** 2)

    def make(total):
        def step(params, xs):
            loss, grads = jax.value_and_grad(lambda p: total(p, xs) / points)(params)
            return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), loss

        return step

    def in_parts(params, xs):
        part_of = jax.checkpoint(lambda x: squares(params, x))
        return lax.map(part_of, xs.reshape(-1, part, dims)).sum()

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    sizes = [dims, *[hidden] * (layers - 1), 1]
    params = [(f32(a, b), f32(b)) for a, b in itertools.pairwise(sizes)]
    xs = f32(points, dims)
    if size == "small":
        key = iter(jax.random.split(jax.random.key(0), 50))
        params, xs = jax.tree.map(lambda s: 0.5 * jax.random.normal(next(key), s.shape), (params, xs))
    return {
        "fun": make(squares),
        "args": (params, xs),
        "jit": {"donate_argnums": (0,)},
        "chunk": True,
        "hand": {"lax.map + checkpoint": make(in_parts)},
    }
