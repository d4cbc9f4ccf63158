"""Iterative charted refinement: for every pixel and radius, a window of neighbours through its own small matrix.

Source: jax-ml/jax#14808 (excessive allocation of vmap over dynamic_slice and small tensordots).
Wanted: no copy of all overlapping windows; by hand lax.map over pixels in batches, with a checkpoint for the gradient.
Expected: chunk=True or recomputation reaches it; else an error that says why.
"""

import jax
import jax.numpy as jnp
from jax import lax


def case(size):
    pixels, radii, batch = {"big": (49152, 128, 1024), "small": (12, 6, 4)}[size]
    near, children = 9, 8

    def one_pixel(coarse, near_ids, noise, olf, fks):
        """(near, radii) values → (radii - 2, children)."""
        patch = coarse[near_ids]

        def one(i, e, o, f):
            window = lax.dynamic_slice_in_dim(patch, i, 3, axis=1)
            return jnp.tensordot(o, window, axes=2) + f @ e

        return jax.vmap(one)(jnp.arange(radii - 2), noise, olf, fks)

    def energy(fine):
        return 0.5 * jnp.sum(jnp.log1p(jnp.exp(fine)) ** 2)

    def plain(coarse, noise, chart, olf, fks):
        fine = jax.vmap(lambda c, e: one_pixel(coarse, c, e, olf, fks))(chart, noise)
        return energy(fine) + 0.5 * jnp.sum(noise**2)

    def by_hand(coarse, noise, chart, olf, fks):
        def part(ce):
            return energy(jax.vmap(lambda c, e: one_pixel(coarse, c, e, olf, fks))(*ce))

        parts = jax.tree.map(lambda a: a.reshape(-1, batch, *a.shape[1:]), (chart, noise))
        return lax.map(jax.checkpoint(part), parts).sum() + 0.5 * jnp.sum(noise**2)

    f32 = jnp.float32
    args = (
        jax.ShapeDtypeStruct((pixels, radii), f32),
        jax.ShapeDtypeStruct((pixels, radii - 2, children), f32),
        jax.ShapeDtypeStruct((pixels, near), jnp.int32),
        jax.ShapeDtypeStruct((radii - 2, children, near, 3), f32),
        jax.ShapeDtypeStruct((radii - 2, children, children), f32),
    )
    if size == "small":
        k = jax.random.split(jax.random.key(0), 5)
        args = tuple(
            jax.random.randint(k[i], a.shape, 0, pixels)
            if a.dtype == jnp.int32
            else 0.3 * jax.random.normal(k[i], a.shape)
            for i, a in enumerate(args)
        )

    def grad(f):
        return jax.value_and_grad(f, argnums=(0, 1))

    return {"fun": grad(plain), "args": args, "chunk": True, "hand": {"lax.map + checkpoint": grad(by_hand)}}
