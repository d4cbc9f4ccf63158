"""A training script that knows nothing of jaxtensile.

jaxtensile exec --budget 24MiB -- python examples/plain.py
"""

from functools import partial

import jax
import jax.numpy as jnp


def loss(weights, x, y):
    for w in weights:
        x = x + jax.nn.gelu(x @ w)
    return jnp.mean((x - y) ** 2)


@partial(jax.jit, donate_argnums=0)
def train_step(weights, x, y):
    value, grads = jax.value_and_grad(loss)(weights, x, y)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


if __name__ == "__main__":
    weights = [0.05 * jax.random.normal(key, (128, 128)) for key in jax.random.split(jax.random.key(0), 8)]
    x = jax.random.normal(jax.random.key(1), (4096, 128))
    y = jnp.sin(x)
    for _ in range(10):
        weights, value = train_step(weights, x, y)
    print(f"loss {value:.6f}")
