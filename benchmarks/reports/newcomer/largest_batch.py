"""Only powers of two are tried, and nothing says so: "largest batch 32", and 48 fits.

jaxtensile estimate largest_batch.py:step --target nvidia-a100-40gb
jaxtensile estimate largest_batch.py:step48 --target nvidia-a100-40gb --no-batch
"""

import jax
import jax.numpy as jnp

import jaxtensile


def loss(ws, x):
    for w in ws:
        x = x + jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def train_step(ws, x):
    value, grads = jax.value_and_grad(loss)(ws, x)
    return jax.tree.map(lambda a, b: a - 0.1 * b, ws, grads), value


def step(batch=24):
    S = jax.ShapeDtypeStruct
    return jaxtensile.Workload(
        fun=train_step,
        args=([S((4096, 4096), jnp.float32)] * 16, S((batch, 1024, 4096), jnp.float32)),
        jit_options={"donate_argnums": 0},
    )


def step48():
    return step(48)
