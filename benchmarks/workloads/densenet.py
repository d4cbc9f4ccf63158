"""DenseNet-121 with bottlenecks and compression (Huang et al., arXiv 1608.06993, table 1), 7.98 M, in flax.linen.

224-pixel ImageNet, NHWC, float32, batch norm with running statistics as state, SGD with Nesterov momentum as published.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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
    blocks: tuple[int, ...] = (6, 12, 24, 16)
    growth: int = 32
    classes: int = 1000
    learning_rate: float = 0.1
    dtype: str = "float32"

    @classmethod
    def tiny(cls) -> "Config":
        return cls(batch=8, image=32, blocks=(2, 2), growth=8, classes=10, learning_rate=0.02)


class DenseNet(nn.Module):
    """Every layer reads all that its block has made so far; the width halves between blocks."""

    config: Config

    @nn.compact
    def __call__(self, images):
        config = self.config
        conv = partial(nn.Conv, use_bias=False, dtype=config.dtype, kernel_init=nn.initializers.he_normal())
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=config.dtype)
        x = conv(2 * config.growth, (7, 7), strides=2)(images.astype(config.dtype))
        x = nn.max_pool(nn.relu(norm()(x)), (3, 3), strides=(2, 2), padding="SAME")
        for block, layers in enumerate(config.blocks):
            for _ in range(layers):
                y = conv(4 * config.growth, (1, 1))(nn.relu(norm()(x)))
                y = conv(config.growth, (3, 3))(nn.relu(norm()(y)))
                x = jnp.concatenate([x, y], axis=-1)
            if block + 1 < len(config.blocks):
                x = conv(x.shape[-1] // 2, (1, 1))(nn.relu(norm()(x)))
                x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(config.classes, dtype=jnp.float32)(jnp.mean(nn.relu(norm()(x)), axis=(1, 2)))


def init_variables(config: Config, key):
    """Parameters and running statistics, as flax returns them."""
    return DenseNet(config).init(key, jnp.zeros((1, config.image, config.image, 3)))


def init_params(config: Config, key: jax.Array) -> Any:
    return init_variables(config, key)["params"]


def optimizer(config: Config):
    return optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(config.learning_rate, momentum=0.9, nesterov=True))


def init_args(config: Config, key: jax.Array) -> tuple[Any, ...]:
    key_params, key_images, key_labels = jax.random.split(key, 3)
    variables = init_variables(config, key_params)
    state = {
        "params": variables["params"],
        "batch_stats": variables["batch_stats"],
        "opt_state": optimizer(config).init(variables["params"]),
    }
    batch = {
        "images": jax.random.normal(key_images, (config.batch, config.image, config.image, 3)),
        "labels": jax.random.randint(key_labels, (config.batch,), 0, config.classes),
    }
    return state, batch


def step(config: Config) -> Callable[..., Any]:
    model = DenseNet(config)

    def loss_fn(params, batch_stats, batch):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updated = model.apply(variables, batch["images"], mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
        return loss, updated["batch_stats"]

    def train_step(state, batch):
        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            state["params"], state["batch_stats"], batch
        )
        updates, opt_state = optimizer(config).update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "batch_stats": batch_stats, "opt_state": opt_state}, loss

    return train_step


def workload(config: Config | None = None, **sizes: Any) -> Workload:
    config = replace(config or Config(), **sizes)
    args = jax.eval_shape(lambda: init_args(config, jax.random.key(0)))
    return Workload(fun=step(config), args=args, jit_options={"donate_argnums": (0,)}, name="densenet121")
