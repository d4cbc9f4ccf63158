"""Dense Hessian of an energy over pairs: jacfwd of grad, all basis vectors at once.

Source: jax-ml/jax#787 (551 GB for a Hessian of 221 MB), PlasmaControl/DESC#826 and #1512 (chunked jacobians).
Wanted: the Hessian in memory of the order of its result; by hand: lax.map over Hessian-vector products.
Expected: chunk=True finds the axis of basis vectors, or an honest error that says to chunk.
"""

import jax
import jax.numpy as jnp
from jax import lax


def energy(x):
    d = jnp.sum((x[:, None] - x[None, :]) ** 2, -1)
    d = jnp.where(jnp.eye(len(x), dtype=bool), 1.0, d)
    r6 = 1.0 / (0.1 + d) ** 3
    return jnp.sum(jnp.where(jnp.eye(len(x), dtype=bool), 0.0, r6 * r6 - r6 + jnp.sqrt(d)))


def case(size):
    n, batch = {"big": (640, 60), "small": (8, 6)}[size]

    def by_hand(x):
        def flat(z):
            return jax.grad(lambda y: energy(y.reshape(n, 3)))(z)

        def hvp(v):
            return jax.jvp(flat, (x.reshape(-1),), (v,))[1]

        return lax.map(hvp, jnp.eye(3 * n), batch_size=batch).reshape(n, 3, n, 3)

    arg = jax.ShapeDtypeStruct((n, 3), jnp.float32)
    if size == "small":
        arg = jax.random.normal(jax.random.key(0), (n, 3))
    return {
        "fun": jax.jacfwd(jax.grad(energy)),
        "args": (arg,),
        "chunk": True,
        "hand": {"lax.map(batch_size)": by_hand},
    }
