"""A jax.checkpoint inside lax.scan stays as it is although the budget has room for all: no word in the report.

Compare: the same without jax.checkpoint within the same budget costs x 1.000.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAXTENSILE_PLAN_CACHE"] = "off"
import jax
import jax.numpy as jnp

import jaxtensile


def layer(x, w):
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None


def make(body):
    def loss(ws, x):
        return jnp.mean(jax.lax.scan(body, x, ws)[0] ** 2)

    def train_step(ws, x):
        value, grads = jax.value_and_grad(loss)(ws, x)
        return jax.tree.map(lambda a, b: a - 0.1 * b, ws, grads), value

    return train_step


S = jax.ShapeDtypeStruct
args = ({"up": S((12, 256, 1024), jnp.float32), "down": S((12, 1024, 256), jnp.float32)}, S((8, 256, 256), jnp.float32))
for name, body in (("with jax.checkpoint", jax.checkpoint(layer)), ("without", layer)):
    print("---", name)
    print(jaxtensile.jit(make(body), budget="400MiB", donate_argnums=0).plan(*args))
