"""Vision models of ``equimo`` 1, in equinox: one image in, so mapped over the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.estimate.model import Learner, Model, cross_entropy, labelled_images, learned


def learner(network: str, dtype: str, sizes: Mapping[str, Any]) -> Learner:
    """A constructor of ``equimo.models``; in bfloat16 with the parameters in float32, cast at their use."""
    import equimo.models
    import equinox as eqx

    made = eqx.filter_eval_shape(partial(getattr(equimo.models, network), **sizes), key=jax.random.key(0))
    params, rest = eqx.partition(made, lambda x: hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating))

    def cast(x: Any) -> Any:
        return x.astype(dtype)

    def loss(params: Any, extra: Any, batch: Any, key: Any) -> Any:
        model = eqx.combine(jax.tree.map(cast, params), rest)
        keys = jax.random.split(key, batch["labels"].shape[0])
        logits = jax.vmap(lambda image, key: model(image, key=key))(cast(batch["images"]), keys)
        return cross_entropy(logits, batch["labels"]), extra

    return Learner(params=params, extra={}, loss=loss, batch=partial(labelled_images, channels_first=True))


def models() -> Iterator[Model]:
    def model(
        name: str, network: str, family: str, batches: tuple[int, ...], dtype: str = "float32", **sizes: Any
    ) -> Model:
        name = f"equimo/{name}"
        return Model(
            name=name,
            requires="equimo",
            family=family,
            task="image classification",
            batches=batches,
            dtype=dtype,
            workload=learned(name, partial(learner, network, dtype, sizes)),
        )

    some, many = (8, 16, 32, 64), (16, 32, 64, 128)
    yield model("vit_small", "vit_small_patch16_224", "vit", many, drop_path_rate=0.1)
    yield model("convnext_tiny", "convnext_t", "convnext", some, "bfloat16", drop_path_rate=0.1)
    yield model("mobilenet_v3_large", "mobilenetv3_large", "mobilenet", some)
    yield model("iformer_t", "iformer_t", "iformer", some)
    yield model("mlla_t", "Mlla", "mlla", some, img_size=224, in_channels=3)
    yield model("vssd_t", "Vssd", "vssd", some, img_size=224, in_channels=3)
    yield model("attnet_xs", "attnet_xs", "attnet", some)
