"""Flax linen: a convolutional network with batch norm and dropout, on images like those of MNIST.

jaxtensile exec --budget 64MiB -- python examples/frameworks/linen_mnist.py
"""

import argparse
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x, *, train: bool):
        for features in (32, 64):
            x = nn.Conv(features, kernel_size=(3, 3))(x)
            x = nn.BatchNorm(use_running_average=not train)(x)
            x = nn.relu(x)
            x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(256)(x))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(10)(x)


class TrainState(train_state.TrainState):
    batch_stats: Any


@jax.jit
def train_step(state, images, labels, key):
    def loss_fn(params):
        logits, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            images,
            train=True,
            rngs={"dropout": jax.random.fold_in(key, state.step)},
            mutable=["batch_stats"],
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), (logits, updates)

    (loss, (logits, updates)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
    return state, loss, jnp.mean(jnp.argmax(logits, -1) == labels)


@jax.jit
def eval_step(state, images, labels):
    logits = state.apply_fn({"params": state.params, "batch_stats": state.batch_stats}, images, train=False)
    return jnp.mean(jnp.argmax(logits, -1) == labels)


def digits(count):
    """Images of ten classes: a blurred prototype of each, and noise."""
    random = np.random.default_rng(0)
    prototypes = random.normal(size=(10, 7, 7, 1)).repeat(4, 1).repeat(4, 2)
    labels = random.integers(0, 10, count)
    return (prototypes[labels] + random.normal(size=(count, 28, 28, 1))).astype(np.float32), labels.astype(np.int32)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    images, labels = digits(options.batch * 4)
    model = CNN()
    variables = model.init(jax.random.key(0), images[:1], train=False)
    state = TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.sgd(0.05, momentum=0.9),
    )
    for step in range(options.steps):
        rows = slice(step % 4 * options.batch, (step % 4 + 1) * options.batch)
        state, loss, accuracy = train_step(state, images[rows], labels[rows], jax.random.key(1))
        print(f"step {step} loss {loss:.6f} accuracy {accuracy:.3f}")
    print(f"evaluation accuracy {eval_step(state, images[: options.batch], labels[: options.batch]):.3f}")


if __name__ == "__main__":
    main()
