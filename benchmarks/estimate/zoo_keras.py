"""``keras.applications`` and models made of Keras layers, on Keras' JAX backend.

Keras makes the weights with the model; under ``jax.eval_shape`` they have shapes and no memory. Running statistics
and the seeds of its dropout are variables that no gradient reaches: ``Learner.extra``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax

from benchmarks.estimate.model import Learner, Model, cross_entropy, floats, integers, labelled_images, learned


def load() -> Any:
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    if keras.backend.backend() != "jax":
        raise RuntimeError(f"Keras was imported with the backend {keras.backend.backend()!r}; these models need jax")
    return keras


def learner(build: Callable[[], Any], name: str, batch: Callable[[int], Any]) -> Learner:
    """The model that ``build`` returns, which reads ``batch[name]`` and is to say ``batch["labels"]``."""
    built: list[Any] = []

    def variables() -> Any:
        built.append(build())
        return [v.value for v in built[0].trainable_variables], [v.value for v in built[0].non_trainable_variables]

    params, extra = jax.eval_shape(variables)

    def loss(params: Any, extra: Any, batch: Any, key: Any) -> Any:
        logits, extra = built[0].stateless_call(params, extra, batch[name], training=True)
        return cross_entropy(logits, batch["labels"]), extra

    return Learner(params=params, extra=extra, loss=loss, batch=batch)


def application(network: str, pixels: int, dtype: str) -> Learner:
    """A network of ``keras.applications`` with its classifier on top."""
    keras = load()

    def build() -> Any:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_bfloat16" if dtype == "bfloat16" else dtype)
        try:
            kind = getattr(keras.applications, network)
            return kind(weights=None, input_shape=(pixels, pixels, 3), classes=1000, classifier_activation=None)
        finally:
            keras.config.set_dtype_policy(before)

    return learner(build, "images", partial(labelled_images, pixels=pixels))


def sentiment(layer: str, context: int = 256) -> Learner:
    """Two classes of text from two bidirectional recurrent layers."""
    keras = load()

    def build() -> Any:
        recurrent = partial(getattr(keras.layers, layer), 256)
        return keras.Sequential(
            [
                keras.Input((context,), dtype="int32"),
                keras.layers.Embedding(20_000, 256),
                keras.layers.Bidirectional(recurrent(return_sequences=True)),
                keras.layers.Dropout(0.5),
                keras.layers.Bidirectional(recurrent()),
                keras.layers.Dense(2),
            ]
        )

    return learner(build, "tokens", lambda size: {"tokens": integers(size, context), "labels": integers(size)})


def tabular(columns: int = 512, width: int = 2048, layers: int = 6) -> Learner:
    """Wide dense layers with batch norm and dropout."""
    keras = load()

    def build() -> Any:
        model = keras.Sequential([keras.Input((columns,))])
        for _ in range(layers):
            model.add(keras.layers.Dense(width, "relu"))
            model.add(keras.layers.BatchNormalization())
            model.add(keras.layers.Dropout(0.3))
        model.add(keras.layers.Dense(100))
        return model

    return learner(build, "rows", lambda size: {"rows": floats(size, columns), "labels": integers(size)})


def segmentation(pixels: int = 160, classes: int = 3) -> Learner:
    """A label for each pixel, by a U-Net of separable convolutions."""
    keras = load()
    layers = keras.layers

    def twice(x: Any, filters: int, kind: Any) -> Any:
        for _ in range(2):
            x = layers.BatchNormalization()(kind(filters, 3, padding="same")(layers.Activation("relu")(x)))
        return x

    def build() -> Any:
        images = keras.Input((pixels, pixels, 3))
        x = layers.Activation("relu")(
            layers.BatchNormalization()(layers.Conv2D(32, 3, strides=2, padding="same")(images))
        )
        skips = []
        for filters in (64, 128, 256):
            skips.append(x)
            x = layers.MaxPooling2D(3, strides=2, padding="same")(twice(x, filters, layers.SeparableConv2D))
        for filters in (256, 128, 64):
            x = layers.UpSampling2D(2)(twice(x, filters, layers.Conv2DTranspose))
            x = layers.Concatenate()([x, skips.pop()])
        x = layers.UpSampling2D(2)(twice(x, 32, layers.Conv2DTranspose))
        return keras.Model(images, layers.Conv2D(classes, 3, padding="same")(x))

    return learner(
        build,
        "images",
        lambda size: {"images": floats(size, pixels, pixels, 3), "labels": integers(size, pixels, pixels)},
    )


def models() -> Iterator[Model]:
    def model(
        name: str, family: str, task: str, batches: tuple[int, ...], make: Callable[[], Learner], dtype: str = "float32"
    ) -> Model:
        name = f"keras/{name}"
        return Model(
            name=name,
            requires="keras",
            family=family,
            task=task,
            batches=batches,
            dtype=dtype,
            workload=learned(name, make),
        )

    def network(
        name: str, kind: str, family: str, batches: tuple[int, ...], pixels: int = 224, dtype: str = "float32"
    ) -> Model:
        return model(name, family, "image classification", batches, partial(application, kind, pixels, dtype), dtype)

    some, many = (8, 16, 32, 64), (16, 32, 64, 128)
    yield network("resnet50_v2", "ResNet50V2", "resnet", some)
    yield network("vgg16", "VGG16", "vgg", some)
    yield network("densenet121", "DenseNet121", "densenet", some)
    yield network("mobilenet_v2", "MobileNetV2", "mobilenet", many)
    yield network("mobilenet_v3_small", "MobileNetV3Small", "mobilenet", many, 224, "bfloat16")
    yield network("efficientnet_b0", "EfficientNetB0", "efficientnet", some)
    yield network("efficientnet_v2b0", "EfficientNetV2B0", "efficientnet", many, 224, "bfloat16")
    yield network("convnext_tiny", "ConvNeXtTiny", "convnext", some)
    yield network("inception_v3", "InceptionV3", "inception", some, 299)
    yield network("inception_resnet_v2", "InceptionResNetV2", "inception-resnet", some, 299)
    yield network("xception", "Xception", "xception", some, 299)
    yield network("nasnet_mobile", "NASNetMobile", "nasnet", some)
    yield model("lstm_sentiment", "lstm", "text classification", some, partial(sentiment, "LSTM"))
    yield model("gru_sentiment", "gru", "text classification", some, partial(sentiment, "GRU"))
    yield model("tabular", "mlp", "tabular classification", (1024, 2048, 4096, 8192), tabular)
    yield model("segmentation", "u-net", "segmentation", some, segmentation)
