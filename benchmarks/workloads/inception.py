"""InceptionV3 (Szegedy et al., arXiv 1512.00567) on 299-pixel ImageNet, 23.8 M, in flax.linen.

Without the auxiliary head. NHWC, float32, batch norm with running statistics as state, label smoothing and dropout
as published; SGD with momentum where the paper has RMSProp.
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
    image: int = 299
    stem: tuple[int, ...] = (32, 32, 64, 80, 192)
    pooled: tuple[int, ...] = (32, 64, 64)
    """Width of the pooled branch of each block on the 35-pixel grid."""
    sevens: tuple[int, ...] = (128, 160, 160, 192)
    """Width inside the factorized 7x7 branches of each block on the 17-pixel grid."""
    fine: int = 2
    """Blocks on the 8-pixel grid."""
    divide: int = 1
    """All other widths by this."""
    classes: int = 1000
    dropout: float = 0.5
    learning_rate: float = 0.045
    dtype: str = "float32"

    @classmethod
    def tiny(cls) -> "Config":
        return cls(
            batch=8, image=79, stem=(4, 4, 8, 8, 16), pooled=(8,), sevens=(8,), fine=1, divide=8,
            classes=10, dropout=0.1, learning_rate=0.02,
        )  # fmt: skip


class Convolution(nn.Module):
    """Convolution, batch norm, ReLU."""

    width: int
    kernel: tuple[int, int]
    dtype: str
    strides: int = 1
    padding: str = "SAME"

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(
            self.width, self.kernel, self.strides, self.padding, use_bias=False, dtype=self.dtype,
            kernel_init=nn.initializers.he_normal(),
        )(x)  # fmt: skip
        return nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-3, dtype=self.dtype)(x))


class Inception(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, images):
        config = self.config
        conv = partial(Convolution, dtype=config.dtype)
        shrink = partial(nn.max_pool, window_shape=(3, 3), strides=(2, 2))

        def chain(x, *layers):
            """One branch: convolutions of (width, rows, columns), widths divided."""
            for width, rows, columns in layers:
                x = conv(width // config.divide, (rows, columns))(x)
            return x

        def halve(x, width):
            return conv(width // config.divide, (3, 3), strides=2, padding="VALID")(x)

        def pool(x):
            return nn.avg_pool(x, (3, 3), padding="SAME")

        a, b, c, d, e = config.stem
        x = conv(a, (3, 3), strides=2, padding="VALID")(images.astype(config.dtype))
        x = conv(c, (3, 3))(conv(b, (3, 3), padding="VALID")(x))
        x = conv(e, (3, 3), padding="VALID")(conv(d, (1, 1))(shrink(x)))
        x = shrink(x)
        for width in config.pooled:
            one = chain(x, (64, 1, 1))
            five = chain(x, (48, 1, 1), (64, 5, 5))
            three = chain(x, (64, 1, 1), (96, 3, 3), (96, 3, 3))
            x = jnp.concatenate([one, five, three, conv(width, (1, 1))(pool(x))], axis=-1)
        three = halve(x, 384)
        double = halve(chain(x, (64, 1, 1), (96, 3, 3)), 96)
        x = jnp.concatenate([three, double, shrink(x)], axis=-1)
        for inner in config.sevens:
            w = inner * config.divide  # these are given as they are
            one = chain(x, (192, 1, 1))
            seven = chain(x, (w, 1, 1), (w, 1, 7), (192, 7, 1))
            double = chain(x, (w, 1, 1), (w, 7, 1), (w, 1, 7), (w, 7, 1), (192, 1, 7))
            x = jnp.concatenate([one, seven, double, chain(pool(x), (192, 1, 1))], axis=-1)
        three = halve(chain(x, (192, 1, 1)), 320)
        seven = halve(chain(x, (192, 1, 1), (192, 1, 7), (192, 7, 1)), 192)
        x = jnp.concatenate([three, seven, shrink(x)], axis=-1)
        for _ in range(config.fine):
            one = chain(x, (320, 1, 1))
            three = chain(x, (384, 1, 1))
            double = chain(x, (448, 1, 1), (384, 3, 3))
            split = [chain(y, (384, *kernel)) for y in (three, double) for kernel in ((1, 3), (3, 1))]
            x = jnp.concatenate([one, *split, chain(pool(x), (192, 1, 1))], axis=-1)
        x = jnp.mean(x, axis=(1, 2))
        x = nn.Dropout(config.dropout, deterministic=not self.has_rng("dropout"))(x)
        return nn.Dense(config.classes, dtype=jnp.float32)(x)


def init_variables(config: Config, key):
    """Parameters and running statistics, as flax returns them."""
    return Inception(config).init(key, jnp.zeros((1, config.image, config.image, 3)))


def init_params(config: Config, key: jax.Array) -> Any:
    return init_variables(config, key)["params"]


def optimizer(config: Config):
    return optax.chain(optax.add_decayed_weights(4e-5), optax.sgd(config.learning_rate, momentum=0.9))


def init_args(config: Config, key: jax.Array) -> tuple[Any, ...]:
    key_params, key_images, key_labels, key_dropout = jax.random.split(key, 4)
    variables = init_variables(config, key_params)
    state = {
        "params": variables["params"],
        "batch_stats": variables["batch_stats"],
        "opt_state": optimizer(config).init(variables["params"]),
        "key": key_dropout,
    }
    batch = {
        "images": jax.random.normal(key_images, (config.batch, config.image, config.image, 3)),
        "labels": jax.random.randint(key_labels, (config.batch,), 0, config.classes),
    }
    return state, batch


def step(config: Config) -> Callable[..., Any]:
    model = Inception(config)

    def loss_fn(params, batch_stats, key, batch):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updated = model.apply(variables, batch["images"], mutable=["batch_stats"], rngs={"dropout": key})
        targets = optax.smooth_labels(jax.nn.one_hot(batch["labels"], config.classes), 0.1)
        return optax.softmax_cross_entropy(logits, targets).mean(), updated["batch_stats"]

    def train_step(state, batch):
        key, now = jax.random.split(state["key"])
        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            state["params"], state["batch_stats"], now, batch
        )
        updates, opt_state = optimizer(config).update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "batch_stats": batch_stats, "opt_state": opt_state, "key": key}, loss

    return train_step


def workload(config: Config | None = None, **sizes: Any) -> Workload:
    config = replace(config or Config(), **sizes)
    args = jax.eval_shape(lambda: init_args(config, jax.random.key(0)))
    return Workload(fun=step(config), args=args, jit_options={"donate_argnums": (0,)}, name="inception_v3")
