"""A train step that fits a byte budget with no annotation: the README's first screen."""

import jax
import jax.numpy as jnp

import jaxtensile


def loss(weights, x, y):
    for w in weights:
        x = x + jax.nn.gelu(x @ w)
    return jnp.mean((x - y) ** 2)


def train_step(weights, x, y):
    value, grads = jax.value_and_grad(loss)(weights, x, y)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


weights = [0.02 * jax.random.normal(key, (256, 256)) for key in jax.random.split(jax.random.key(0), 16)]
x = jax.random.normal(jax.random.key(1), (4096, 256))
y = jnp.sin(x)

step = jaxtensile.jit(train_step, budget="128MiB", donate_argnums=(0,))  # on a CPU, jax.jit takes 204 MiB
print(step.plan(weights, x, y))  # what was decided, and what XLA says of it; runs nothing

for _ in range(5):
    weights, value = step(weights, x, y)
    print(f"loss {value:.6f}")
