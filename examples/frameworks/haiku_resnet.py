"""Haiku: a small residual network with state (batch norm), by ``hk.transform_with_state``.

jaxtensile exec --budget 20MiB -- python examples/frameworks/haiku_resnet.py
"""

import argparse
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax


class TrainState(NamedTuple):
    params: hk.Params
    state: hk.State
    optimizer: optax.OptState


def forward(images, is_training):
    net = hk.nets.ResNet(
        blocks_per_group=(1, 1, 1, 1),
        num_classes=10,
        channels_per_group=(16, 32, 64, 64),
        bottleneck=False,
        use_projection=(False, True, True, True),
        bn_config={"decay_rate": 0.9},
        initial_conv_config={"output_channels": 16, "stride": 1},
        strides=(1, 2, 2, 2),
    )
    return net(images, is_training=is_training)


model = hk.transform_with_state(forward)
optimizer = optax.chain(optax.trace(decay=0.9, nesterov=True), optax.scale(-0.02))


def loss_fn(params, state, images, labels):
    logits, state = model.apply(params, state, None, images, is_training=True)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    weights = [p for name, _, p in hk.data_structures.traverse(params) if "batchnorm" not in name]
    return loss + 1e-4 * 0.5 * sum(jnp.sum(p * p) for p in weights), state


@jax.jit
def train_step(at, images, labels):
    (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(at.params, at.state, images, labels)
    updates, new = optimizer.update(grads, at.optimizer)
    return TrainState(optax.apply_updates(at.params, updates), state, new), loss


@jax.jit
def initial_state(key, images):
    params, state = model.init(key, images, is_training=True)
    return TrainState(params, state, optimizer.init(params))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, options.batch).astype(np.int32)
    images = random.normal(size=(10, 32, 32, 3))[labels] + random.normal(size=(options.batch, 32, 32, 3))
    images = images.astype(np.float32)
    at = initial_state(jax.random.key(0), images)
    for step in range(options.steps):
        at, loss = train_step(at, images, labels)
        print(f"step {step} loss {loss:.6f}")


if __name__ == "__main__":
    main()
