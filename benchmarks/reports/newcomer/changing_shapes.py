"""A loader whose last dimension changes: every call plans anew, seconds each beside 0.3 s of jax.jit, silently."""

import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAXTENSILE_PLAN_CACHE"] = "off"
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


ws = [0.01 * jax.random.normal(jax.random.key(i), (128, 128)) for i in range(8)]
x = jax.random.normal(jax.random.key(9), (2048, 128))
for name, step in (("jax.jit", jax.jit(train_step)), ("jaxtensile.jit", jaxtensile.jit(train_step, budget="14MiB"))):
    for rows in (1900, 1901, 1902, 2000, 2001):
        start = time.perf_counter()
        jax.block_until_ready(step(ws, x[:rows]))
        print(f"{name:<15} {rows} rows: {time.perf_counter() - start:5.2f} s", end="")
        if name != "jax.jit":
            r = step.plan(ws, x[:rows])
            print(
                f"; {r.compiled.device / 2**20:.2f} MiB of 14, overhead {r.overhead_ratio:.3f}, rounds {r.rounds}",
                end="",
            )
        print()
