"""The networks that ``dm-haiku`` brings, and models made of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.estimate.model import Learner, Model, cross_entropy, floats, integers, labelled_images, learned


def classifier(network: str, dtype: str) -> Learner:
    """One of ``hk.nets``; in bfloat16 with the parameters and the batch norm's statistics in float32."""
    import haiku as hk
    import jmp

    kind = getattr(hk.nets, network)
    if dtype == "bfloat16":
        policy = jmp.get_policy("params=float32,compute=bfloat16,output=bfloat16")
        hk.mixed_precision.set_policy(kind, policy)
        full = jmp.get_policy("params=float32,compute=float32,output=bfloat16")
        hk.mixed_precision.set_policy(hk.BatchNorm, full)

    def forward(images: Any) -> Any:
        return kind(num_classes=1000)(images, is_training=True)

    model = hk.transform_with_state(forward)
    shapes = jax.eval_shape(model.init, jax.random.key(0), labelled_images(1)["images"])

    def loss(params: Any, extra: Any, batch: Any, key: Any) -> Any:
        logits, extra = model.apply(params, extra, key, batch["images"])
        return cross_entropy(logits, batch["labels"]), extra

    return Learner(params=shapes[0], extra=shapes[1], loss=loss, batch=labelled_images)


def language_model(layer: str, layers: int, width: int, context: int, vocabulary: int = 32_000) -> Learner:
    """Next words from recurrent layers with dropout between them, unrolled as a loop."""
    import haiku as hk

    def forward(tokens: Any) -> Any:
        x = hk.dropout(hk.next_rng_key(), 0.2, hk.Embed(vocabulary, width)(tokens))
        for _ in range(layers):
            core = getattr(hk, layer)(width)
            x, _ = hk.dynamic_unroll(core, x, core.initial_state(tokens.shape[0]), time_major=False)
            x = hk.dropout(hk.next_rng_key(), 0.2, x)
        return hk.Linear(vocabulary)(x)

    model = hk.transform(forward)
    params = jax.eval_shape(model.init, jax.random.key(0), integers(1, context))

    def loss(params: Any, extra: Any, batch: Any, key: Any) -> Any:
        logits = model.apply(params, key, batch["tokens"])
        return cross_entropy(logits[:, :-1], batch["tokens"][:, 1:]), extra

    return Learner(params=params, extra={}, loss=loss, batch=lambda size: {"tokens": integers(size, context)})


def vq_vae(pixels: int, width: int = 128, residual: int = 2) -> Learner:
    """Images through a codebook and back (van den Oord et al. 2017); the codebook by moving averages."""
    import haiku as hk

    def block(x: Any) -> Any:
        for _ in range(residual):
            x = x + hk.Conv2D(width, 1)(jax.nn.relu(hk.Conv2D(width // 4, 3)(jax.nn.relu(x))))
        return jax.nn.relu(x)

    def forward(images: Any) -> Any:
        x = jax.nn.relu(hk.Conv2D(width // 2, 4, stride=2)(images))
        x = block(hk.Conv2D(width, 3)(jax.nn.relu(hk.Conv2D(width, 4, stride=2)(x))))
        codes = hk.nets.VectorQuantizerEMA(64, 512, 0.25, 0.99)(hk.Conv2D(64, 1)(x), is_training=True)
        x = block(hk.Conv2D(width, 3)(codes["quantize"]))
        x = jax.nn.relu(hk.Conv2DTranspose(width // 2, 4, stride=2)(x))
        x = hk.Conv2DTranspose(3, 4, stride=2)(x)
        return jnp.mean((x - images) ** 2) / 0.06 + codes["loss"]

    model = hk.transform_with_state(forward)
    shapes = jax.eval_shape(model.init, jax.random.key(0), floats(1, pixels, pixels, 3))

    def loss(params: Any, extra: Any, batch: Any, key: Any) -> Any:
        return model.apply(params, extra, key, batch["images"])

    def batch(size: int) -> Any:
        return {"images": floats(size, pixels, pixels, 3)}

    return Learner(params=shapes[0], extra=shapes[1], loss=loss, batch=batch)


def models() -> Iterator[Model]:
    def model(
        name: str, family: str, task: str, batches: tuple[int, ...], make: Callable[[], Learner], dtype: str = "float32"
    ) -> Model:
        name = f"haiku/{name}"
        return Model(
            name=name,
            requires="haiku",
            family=family,
            task=task,
            batches=batches,
            dtype=dtype,
            workload=learned(name, make),
        )

    images, many = "image classification, batch norm", (16, 32, 64, 128)
    yield model("resnet18", "resnet", images, (32, 64, 128, 256), partial(classifier, "ResNet18", "float32"))
    yield model("resnet101", "resnet", images, many, partial(classifier, "ResNet101", "bfloat16"), "bfloat16")
    yield model("mobilenet_v1", "mobilenet", images, many, partial(classifier, "MobileNetV1", "float32"))
    yield model("vq_vae", "vq-vae", "reconstruction", many, partial(vq_vae, 128))
    for layer in ("LSTM", "GRU"):
        make = partial(language_model, layer, 2, 1024, 128)
        yield model(f"{layer.lower()}_words", layer.lower(), "causal language model", (16, 32, 64, 128), make)
