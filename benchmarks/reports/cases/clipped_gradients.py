"""Gradients of every example, clipped to a norm and added up, of a network of six layers (DP-SGD).

Source: meta-pytorch/opacus#25 and google/objax#178 (gradients of all examples at once need too much memory).
Wanted: the same sums without the gradients of a whole batch; by hand a scan over parts of the batch.
Expected: chunk=True does so; the model knows that XLA multiplies outer products where it adds them up.
"""

import itertools

import jax
import jax.numpy as jnp
from jax import lax


def case(size):
    batch, features, hidden, layers, part = {"big": (2048, 1024, 2048, 6, 64), "small": (8, 6, 10, 3, 2)}[size]
    classes = 64

    def loss(params, x, label):
        for w, b in params[:-1]:
            x = jax.nn.gelu(x @ w + b)
        w, b = params[-1]
        return -jax.nn.log_softmax(x @ w + b)[label]

    def clipped(params, x, label):
        grads = jax.grad(loss)(params, x, label)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm), grads)

    def update(params, sums):
        return jax.tree.map(lambda p, g: p - 1e-3 * g / batch, params, sums)

    def of_part(params, xs, labels):
        grads = jax.vmap(clipped, (None, 0, 0))(params, xs, labels)
        return jax.tree.map(lambda g: g.sum(0), grads)

    def plain(params, xs, labels):
        return update(params, of_part(params, xs, labels))

    def by_hand(params, xs, labels):
        def add(sums, part):
            return jax.tree.map(jnp.add, sums, of_part(params, *part)), None

        parts = xs.reshape(-1, part, features), labels.reshape(-1, part)
        return update(params, lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)[0])

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    sizes = [features, *[hidden] * (layers - 1), classes]
    params = [(f32(a, b), f32(b)) for a, b in itertools.pairwise(sizes)]
    xs, labels = f32(batch, features), jax.ShapeDtypeStruct((batch,), jnp.int32)
    if size == "small":
        key = iter(jax.random.split(jax.random.key(0), 50))
        params = jax.tree.map(lambda s: 0.3 * jax.random.normal(next(key), s.shape), params)
        xs = jax.random.normal(next(key), xs.shape)
        labels = jax.random.randint(next(key), labels.shape, 0, classes)
    return {
        "fun": plain,
        "args": (params, xs, labels),
        "jit": {"donate_argnums": (0,)},
        "chunk": True,
        "hand": {"scan over parts": by_hand},
    }
