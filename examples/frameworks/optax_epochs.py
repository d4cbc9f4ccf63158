"""optax alone: whole epochs inside of one ``jax.jit``, by ``lax.scan`` over the batches.

jaxtensile exec --budget 25MiB -- python examples/frameworks/optax_epochs.py
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import optax

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def network(params, x):
    for w, b in params[:-1]:
        x = jax.nn.gelu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((network(params, x) - y) ** 2)


@partial(jax.jit, donate_argnums=(0, 1))
def epoch(params, state, x, y):
    def step(carry, batch):
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = OPTIMIZER.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    (params, state), losses = jax.lax.scan(step, (params, state), (x, y))
    return params, state, losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    sizes = [16, *[options.width] * options.layers, 1]
    keys = jax.random.split(jax.random.key(0), len(sizes))
    params = [
        (jax.random.normal(key, (a, b)) / a**0.5, jnp.zeros(b))
        for key, a, b in zip(keys, sizes[:-1], sizes[1:], strict=False)
    ]
    state = OPTIMIZER.init(params)
    x = jax.random.normal(keys[-1], (8, options.batch, 16))
    y = jnp.sin(x.sum(-1, keepdims=True))
    for number in range(options.epochs):
        params, state, losses = epoch(params, state, x, y)
        print(f"epoch {number} loss {losses.mean():.6f}")


if __name__ == "__main__":
    main()
