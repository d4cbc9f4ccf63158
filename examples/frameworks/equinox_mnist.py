"""Equinox: a convolutional network on images like those of MNIST, with filtered transformations.

jaxtensile exec --budget 58MiB -- python examples/frameworks/equinox_mnist.py
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax


class CNN(eqx.Module):
    layers: list

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.layers = [
            eqx.nn.Conv2d(1, 16, kernel_size=4, key=keys[0]),
            eqx.nn.MaxPool2d(kernel_size=2, stride=2),
            jax.nn.relu,
            eqx.nn.Conv2d(16, 16, kernel_size=3, key=keys[1]),
            jax.nn.gelu,
            jnp.ravel,
            eqx.nn.Linear(1600, 256, key=keys[2]),
            jax.nn.sigmoid,
            eqx.nn.Linear(256, 10, key=keys[3]),
            jax.nn.log_softmax,
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model, x, y):
    predicted = jax.vmap(model)(x)
    return -jnp.mean(jnp.take_along_axis(predicted, y[:, None], axis=1))


@eqx.filter_jit
def make_step(model, state, optimizer, x, y):
    value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
    updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, value


@eqx.filter_jit
def accuracy(model, x, y):
    return jnp.mean(jnp.argmax(jax.vmap(model)(x), axis=1) == y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, (4, options.batch)).astype(np.int32)
    images = random.normal(size=(10, 1, 28, 28))[labels] + random.normal(size=(4, options.batch, 1, 28, 28))
    images = images.astype(np.float32)
    model = CNN(jax.random.key(0))
    optimizer = optax.adamw(1e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_array))
    for step in range(options.steps):
        model, state, value = make_step(model, state, optimizer, images[step % 4], labels[step % 4])
        print(f"step {step} loss {value:.6f}")
    print(f"evaluation accuracy {accuracy(model, images[0], labels[0]):.3f}")


if __name__ == "__main__":
    main()
