"""Keras 3 with the JAX backend: ``model.fit`` of a convolutional network with a loss of its own.

jaxtensile exec --budget 89MiB -- python examples/frameworks/keras_fit.py
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np


class Smoothed(keras.Model):
    """Cross entropy of smoothed labels, and a penalty on large logits."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        smooth = 0.9 * keras.ops.one_hot(y, 10) + 0.01
        entropy = keras.ops.categorical_crossentropy(smooth, y_pred, from_logits=True)
        return keras.ops.mean(entropy) + 1e-4 * keras.ops.mean(keras.ops.square(y_pred))


def network():
    inputs = x = keras.Input((28, 28, 1))
    for features in (32, 64):
        x = keras.layers.Conv2D(features, 3, padding="same")(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.Activation("relu")(x)
        x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = keras.layers.Dropout(0.2)(x)
    return Smoothed(inputs, keras.layers.Dense(10)(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, 4 * options.batch).astype("int32")
    images = random.normal(size=(10, 7, 7, 1)).repeat(4, 1).repeat(4, 2)[labels]
    images = (images + random.normal(size=images.shape)).astype("float32")

    model = network()
    metric = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    model.compile(optimizer=keras.optimizers.Adam(1e-3), metrics=[metric])
    found = model.fit(images, labels, batch_size=options.batch, epochs=options.epochs, verbose=0)
    for epoch, loss in enumerate(found.history["loss"]):
        print(f"epoch {epoch} loss {loss:.6f}")
    print(f"evaluation loss {model.evaluate(images, labels, batch_size=options.batch, verbose=0)[0]:.6f}")
    print(f"predictions {model.predict(images, batch_size=options.batch, verbose=0).shape}")


if __name__ == "__main__":
    main()
