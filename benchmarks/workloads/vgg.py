"""VGG-16 (Simonyan & Zisserman, arXiv 1409.1556, table 1, D) on 224-pixel ImageNet, 138.4 M, in flax.linen.

NHWC, float32, dropout between the dense layers, SGD with momentum as published.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from jaxtensile.program.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Config:
    batch: int = 16
    image: int = 224
    stages: tuple[int, ...] = (2, 2, 3, 3, 3)
    """Convolutions before each max pool; the width doubles from stage to stage up to eight times the first."""
    width: int = 64
    dense: int = 4096
    classes: int = 1000
    dropout: float = 0.5
    learning_rate: float = 0.01
    dtype: str = "float32"

    @classmethod
    def tiny(cls) -> "Config":
        return cls(batch=8, image=32, stages=(1, 1, 2), width=8, dense=64, classes=10, dropout=0.1)


class VGG(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, images):
        config = self.config
        x = images.astype(config.dtype)
        for stage, convolutions in enumerate(config.stages):
            for _ in range(convolutions):
                width = config.width * min(2**stage, 8)
                x = nn.Conv(width, (3, 3), dtype=config.dtype, kernel_init=nn.initializers.he_normal())(x)
                x = nn.relu(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(config.dense, dtype=config.dtype, kernel_init=nn.initializers.he_normal())(x))
            x = nn.Dropout(config.dropout, deterministic=not self.has_rng("dropout"))(x)
        return nn.Dense(config.classes, dtype=jnp.float32)(x)


def init_params(config: Config, key: jax.Array) -> Any:
    return VGG(config).init(key, jnp.zeros((1, config.image, config.image, 3)))["params"]


def optimizer(config: Config):
    return optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(config.learning_rate, momentum=0.9))


def init_args(config: Config, key: jax.Array) -> tuple[Any, ...]:
    key_params, key_images, key_labels, key_dropout = jax.random.split(key, 4)
    params = init_params(config, key_params)
    state = {"params": params, "opt_state": optimizer(config).init(params), "key": key_dropout}
    batch = {
        "images": jax.random.normal(key_images, (config.batch, config.image, config.image, 3)),
        "labels": jax.random.randint(key_labels, (config.batch,), 0, config.classes),
    }
    return state, batch


def step(config: Config) -> Callable[..., Any]:
    model = VGG(config)

    def loss_fn(params, key, batch):
        logits = model.apply({"params": params}, batch["images"], rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    def train_step(state, batch):
        key, now = jax.random.split(state["key"])
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], now, batch)
        updates, opt_state = optimizer(config).update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state, "key": key}, loss

    return train_step


def workload(config: Config | None = None, **sizes: Any) -> Workload:
    config = replace(config or Config(), **sizes)
    args = jax.eval_shape(lambda: init_args(config, jax.random.key(0)))
    return Workload(fun=step(config), args=args, jit_options={"donate_argnums": (0,)}, name="vgg16")
