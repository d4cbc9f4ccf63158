"""Energy and its gradient for a complex wave function: local energies over all connected configurations.

Source: netket/netket#711 (excessively out of memory in expect_and_grad), netket merge request 925 (batched
vmap and vjp).
Wanted: local energies in chunks of samples; the gradient too.
Expected: chunk=True works on some samples at a time; complex numbers are right.
"""

import jax
import jax.numpy as jnp
from jax import lax


def log_psi(params, spins):
    z = spins.astype(jnp.complex64) @ params["w"] + params["b"]
    return jnp.sum(jnp.log(jnp.cosh(z)), -1) + spins.astype(jnp.complex64) @ params["a"]


def local_energy(params, spins, field):
    """Transverse-field chain: one flip at a time."""
    n = spins.shape[-1]
    flipped = spins[..., None, :] * (1 - 2 * jnp.eye(n))
    ratio = jnp.exp(log_psi(params, flipped) - log_psi(params, spins)[..., None])
    return -jnp.sum(spins * jnp.roll(spins, 1, -1), -1) - field * jnp.sum(ratio, -1)


def case(size):
    samples, n, hidden, batch = {"big": (8192, 96, 384, 256), "small": (24, 6, 12, 8)}[size]

    def finish(params, spins, e):
        e = lax.stop_gradient(e)
        centred = e - e.mean()

        def force(p):
            return 2 * jnp.real(jnp.mean(jnp.conj(centred) * log_psi(p, spins)))

        grads = jax.grad(force)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * jnp.conj(g), params, grads), e.mean()

    def plain(params, spins):
        return finish(params, spins, local_energy(params, spins, 1.0))

    def by_hand(params, spins):
        return finish(params, spins, lax.map(lambda s: local_energy(params, s, 1.0), spins, batch_size=batch))

    c64 = jnp.complex64
    params = {
        "w": jax.ShapeDtypeStruct((n, hidden), c64),
        "b": jax.ShapeDtypeStruct((hidden,), c64),
        "a": jax.ShapeDtypeStruct((n,), c64),
    }
    spins = jax.ShapeDtypeStruct((samples, n), jnp.float32)
    if size == "small":
        k = jax.random.split(jax.random.key(0), 4)
        params = {name: 0.1 * jax.random.normal(k[i], s.shape, c64) for i, (name, s) in enumerate(params.items())}
        spins = 2.0 * jax.random.bernoulli(k[3], 0.5, (samples, n)) - 1
    return {"fun": plain, "args": (params, spins), "chunk": True, "hand": {"lax.map(batch_size)": by_hand}}
