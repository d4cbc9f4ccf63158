"""Flax nnx: a stack of layers under ``nnx.scan``, with ``nnx.jit`` and ``nnx.Optimizer``.

jaxtensile exec --budget 105MiB -- python examples/frameworks/nnx_scan.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


class Net(nnx.Module):
    def __init__(self, width, layers, rngs):
        self.enter = nnx.Linear(16, width, rngs=rngs)
        self.leave = nnx.Linear(width, 1, rngs=rngs)

        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def blocks(rngs):
            return Block(width, rngs)

        self.blocks = blocks(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, block):
            return block(x)

        return self.leave(forward(self.enter(x), self.blocks))


@nnx.jit
def train_step(model, optimizer, metrics, x, y):
    def loss_fn(model):
        return jnp.mean((model(x) - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    metrics.update(loss=loss)
    optimizer.update(model, grads)
    return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    model = Net(options.width, options.layers, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    x = jax.random.normal(jax.random.key(1), (options.batch, 16))
    y = jnp.sin(x.sum(-1, keepdims=True))
    for step in range(options.steps):
        loss = train_step(model, optimizer, metrics, x, y)
        print(f"step {step} loss {loss:.6f}")
    print(f"mean loss {np.asarray(metrics.compute()['loss']):.6f}")


if __name__ == "__main__":
    main()
