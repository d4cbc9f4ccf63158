"""Keras 3 with the JAX backend: a small transformer, trained by ``train_on_batch``.

jaxtensile exec --budget 131MiB -- python examples/frameworks/keras_batches.py
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np


def block(x, width):
    y = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.MultiHeadAttention(4, width // 4)(y, y, use_causal_mask=True)
    y = keras.layers.Dense(4 * width, activation="gelu")(keras.layers.LayerNormalization()(x))
    return x + keras.layers.Dense(width)(y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    keras.utils.set_random_seed(0)
    tokens = keras.Input((options.context,), dtype="int32")
    x = keras.layers.Embedding(256, options.width)(tokens)
    for _ in range(options.layers):
        x = block(x, options.width)
    model = keras.Model(tokens, keras.layers.Dense(256)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss=loss)

    text = np.frombuffer(b"what fits is run as it is; what does not is computed again. " * 64, np.uint8)
    random = np.random.default_rng(0)
    for step in range(options.steps):
        starts = random.integers(0, len(text) - options.context - 1, options.batch)
        rows = np.stack([text[start : start + options.context + 1] for start in starts]).astype("int32")
        value = model.train_on_batch(rows[:, :-1], rows[:, 1:])
        print(f"step {step} loss {value:.6f}")


if __name__ == "__main__":
    main()
