"""ResNet-50 v1.5 on 224-pixel ImageNet (He et al., arXiv 1512.03385; stride in the 3x3), 25.6 M, in flax.linen.

NHWC, float32 parameters, bfloat16 compute, batch norm with running statistics as state, SGD with momentum.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.workloads.remat import named_input
from jaxtensile.program.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Config:
    batch: int = 256
    image: int = 224
    stages: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000
    learning_rate: float = 0.1
    dtype: str = "bfloat16"

    @classmethod
    def tiny(cls) -> "Config":
        return cls(batch=8, image=32, stages=(1, 1), width=8, classes=10, learning_rate=0.02)


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up to four times the width; projected shortcut where shapes differ."""

    width: int
    stride: int
    dtype: str

    @nn.compact
    def __call__(self, x):
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype, kernel_init=nn.initializers.he_normal())
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype)
        y = nn.relu(norm()(conv(self.width, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.width, (3, 3), strides=self.stride)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.width, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.width, (1, 1), strides=self.stride)(x))
        return nn.relu(x + y)


class NamedBottleneck(Bottleneck):
    """The same block, whose input has a name for ``jax.checkpoint`` policies."""

    @nn.compact
    def __call__(self, x):
        return Bottleneck.__call__(self, named_input(x))


class ResNet(nn.Module):
    config: Config
    remat: Any = None

    @nn.compact
    def __call__(self, images):
        config = self.config
        x = images.astype(config.dtype)
        x = nn.Conv(config.width, (7, 7), strides=2, use_bias=False, dtype=config.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=config.dtype)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        one_block = Bottleneck if self.remat is None else nn.remat(NamedBottleneck, policy=self.remat)
        for stage, blocks in enumerate(config.stages):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                name = f"Bottleneck_{sum(config.stages[:stage]) + block}"  # flax's own, with and without remat
                x = one_block(config.width * 2**stage, stride, config.dtype, name=name)(x)
        return nn.Dense(config.classes, dtype=jnp.float32)(jnp.mean(x, axis=(1, 2)))


def init_variables(config: Config, key):
    """Parameters and running statistics, as flax returns them."""
    return ResNet(config).init(key, jnp.zeros((1, config.image, config.image, 3)))


def init_params(config: Config, key: jax.Array) -> Any:
    return init_variables(config, key)["params"]


def optimizer(config: Config):
    return optax.chain(
        optax.add_decayed_weights(5e-5),
        optax.sgd(config.learning_rate, momentum=0.9, nesterov=True),
    )


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


def step(config: Config, remat: Any = None) -> Callable[..., Any]:
    model = ResNet(config, remat)

    def loss_fn(params, batch_stats, batch):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updated = model.apply(variables, batch["images"], mutable=["batch_stats"])
        targets = optax.smooth_labels(jax.nn.one_hot(batch["labels"], config.classes), 0.1)
        return optax.softmax_cross_entropy(logits, targets).mean(), updated["batch_stats"]

    def train_step(state, batch):
        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            state["params"], state["batch_stats"], batch
        )
        updates, opt_state = optimizer(config).update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "batch_stats": batch_stats, "opt_state": opt_state}, loss

    return train_step


def workload(config: Config | None = None, *, remat: Any = None, **sizes: Any) -> Workload:
    config = replace(config or Config(), **sizes)
    args = jax.eval_shape(lambda: init_args(config, jax.random.key(0)))
    return Workload(fun=step(config, remat), args=args, jit_options={"donate_argnums": (0,)}, name="resnet50")
