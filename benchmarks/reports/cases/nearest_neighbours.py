"""Nearest neighbours: all distances between two sets of points, and the least of each row.

Source: scikit-learn/scikit-learn#7287 and mars-project/mars#1621 (all pairs of distances do not fit).
Wanted: some queries at a time; by hand lax.map over parts of them.
Expected: chunk=True does so, at next to no cost.
"""

import jax
import jax.numpy as jnp
from jax import lax


def case(size):
    queries, points, dims, nearest, part = {"big": (32768, 65536, 128, 16, 1024), "small": (12, 20, 4, 3, 4)}[size]

    def plain(q, x):
        squares = jnp.sum(q**2, -1)[:, None] - 2 * q @ x.T + jnp.sum(x**2, -1)[None]
        least, which = lax.top_k(-squares, nearest)
        return -least, which

    def by_hand(q, x):
        found = lax.map(lambda q: plain(q, x), q.reshape(-1, part, dims))
        return tuple(a.reshape(queries, nearest) for a in found)

    args = tuple(jax.ShapeDtypeStruct((n, dims), jnp.float32) for n in (queries, points))
    if size == "small":
        args = tuple(jax.random.normal(jax.random.key(i), a.shape) for i, a in enumerate(args))
    return {"fun": plain, "args": args, "chunk": True, "hand": {"lax.map": by_hand}}
