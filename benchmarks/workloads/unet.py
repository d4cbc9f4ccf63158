"""DDPM's U-Net for CIFAR-10 (Ho et al., arXiv 2006.11239, section B), 35.7 M: predicts the noise in an image.

Group norm, sinusoidal time embedding, single-head attention at 16x16 and in the middle, skip connections,
dropout 0.1, float32 throughout (as published), Adam and an exponential moving average of the parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.workloads.remat import checkpointed
from jaxtensile.program.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Config:
    batch: int = 256
    image: int = 32
    width: int = 128
    multipliers: tuple[int, ...] = (1, 2, 2, 2)
    attention_levels: tuple[int, ...] = (1,)
    res_blocks: int = 2
    groups: int = 32
    dropout: float = 0.1
    diffusion_steps: int = 1000
    ema_decay: float = 0.9999
    learning_rate: float = 2e-4
    dtype: str = "float32"

    @classmethod
    def tiny(cls) -> "Config":
        sizes = {"batch": 2, "image": 8, "width": 8, "multipliers": (1, 2), "res_blocks": 1, "groups": 4}
        return cls(**sizes, learning_rate=5e-3)


class Stage(NamedTuple):
    """One node of the U: a residual block (with or without attention), a downsampling or an upsampling."""

    kind: str
    channels_in: int
    channels_out: int
    attention: bool = False


def layout(config: Config) -> tuple[list[Stage], list[Stage]]:
    """The contracting and the expanding path; each residual block of the latter also takes one skip of the former."""
    down, up, skips, channels = [], [], [config.width], config.width
    last = len(config.multipliers) - 1
    for level, multiplier in enumerate(config.multipliers):
        for _ in range(config.res_blocks):
            down.append(Stage("block", channels, config.width * multiplier, level in config.attention_levels))
            channels = config.width * multiplier
            skips.append(channels)
        if level != last:
            down.append(Stage("down", channels, channels))
            skips.append(channels)
    for level, multiplier in reversed(list(enumerate(config.multipliers))):
        for _ in range(config.res_blocks + 1):
            width = config.width * multiplier
            up.append(Stage("block", channels + skips.pop(), width, level in config.attention_levels))
            channels = width
        if level != 0:
            up.append(Stage("up", channels, channels))
    return down, up


def init_conv(key, size, channels_in, channels_out, scale=1.0):
    initializer = jax.nn.initializers.variance_scaling(max(scale, 1e-10), "fan_avg", "uniform")
    return {"weight": initializer(key, (size, size, channels_in, channels_out)), "bias": jnp.zeros(channels_out)}


def init_linear(key, channels_in, channels_out, scale=1.0):
    initializer = jax.nn.initializers.variance_scaling(max(scale, 1e-10), "fan_avg", "uniform")
    return {"weight": initializer(key, (channels_in, channels_out)), "bias": jnp.zeros(channels_out)}


def init_norm(channels):
    return {"scale": jnp.ones(channels), "bias": jnp.zeros(channels)}


def init_attention(key, channels):
    key_qkv, key_out = jax.random.split(key)
    return {
        "norm": init_norm(channels),
        "qkv": init_linear(key_qkv, channels, 3 * channels),
        "out": init_linear(key_out, channels, channels, scale=0.0),
    }


def init_stage(config: Config, key, stage: Stage):
    channels_in, channels_out = stage.channels_in, stage.channels_out
    keys = jax.random.split(key, 5)
    if stage.kind != "block":
        return {"conv": init_conv(keys[0], 3, channels_in, channels_out)}
    params = {
        "norm1": init_norm(channels_in),
        "conv1": init_conv(keys[0], 3, channels_in, channels_out),
        "time": init_linear(keys[1], 4 * config.width, channels_out),
        "norm2": init_norm(channels_out),
        "conv2": init_conv(keys[2], 3, channels_out, channels_out, scale=0.0),
    }
    if channels_in != channels_out:
        params["shortcut"] = init_linear(keys[3], channels_in, channels_out)
    if stage.attention:
        params["attention"] = init_attention(keys[4], channels_out)
    return params


def init_params(config: Config, key: jax.Array) -> Any:
    down, up = layout(config)
    middle_channels = config.width * config.multipliers[-1]
    middle = [Stage("block", middle_channels, middle_channels, attention) for attention in (True, False)]
    keys = iter(jax.random.split(key, 4 + len(down) + len(middle) + len(up)))
    return {
        "time1": init_linear(next(keys), config.width, 4 * config.width),
        "time2": init_linear(next(keys), 4 * config.width, 4 * config.width),
        "conv_in": init_conv(next(keys), 3, 3, config.width),
        "down": [init_stage(config, next(keys), stage) for stage in down],
        "middle": [init_stage(config, next(keys), stage) for stage in middle],
        "up": [init_stage(config, next(keys), stage) for stage in up],
        "norm_out": init_norm(config.width),
        "conv_out": init_conv(next(keys), 3, config.width, 3, scale=0.0),
    }


def linear(p, x):
    return x @ p["weight"].astype(x.dtype) + p["bias"].astype(x.dtype)


def conv(p, x, stride=1):
    y = jax.lax.conv_general_dilated(
        x, p["weight"].astype(x.dtype), (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y + p["bias"].astype(x.dtype)


def group_norm(config: Config, p, x):
    grouped = x.astype(jnp.float32).reshape(*x.shape[:-1], config.groups, -1)
    normed = jax.nn.standardize(grouped, axis=(1, 2, 4), epsilon=1e-6).reshape(x.shape)
    return (normed * p["scale"] + p["bias"]).astype(x.dtype)


def dropout(key, rate, x):
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def attention(config: Config, p, x):
    """Single-head self-attention over all pixels."""
    batch, height, width, channels = x.shape
    qkv = linear(p["qkv"], group_norm(config, p["norm"], x)).reshape(batch, height * width, 3, 1, channels)
    mixed = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])
    return x + linear(p["out"], mixed.reshape(x.shape))


def res_block(config: Config, p, x, time, key):
    y = conv(p["conv1"], jax.nn.silu(group_norm(config, p["norm1"], x)))
    y = y + linear(p["time"], jax.nn.silu(time))[:, None, None, :]
    y = dropout(key, config.dropout, jax.nn.silu(group_norm(config, p["norm2"], y)))
    x = (linear(p["shortcut"], x) if "shortcut" in p else x) + conv(p["conv2"], y)
    return attention(config, p["attention"], x) if "attention" in p else x


def upsample(p, x):
    return conv(p["conv"], jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2))


def time_embedding(config: Config, params, times):
    half = config.width // 2
    frequencies = jnp.exp(-jnp.log(10000.0) * jnp.arange(half) / (half - 1))
    angles = times[:, None] * frequencies
    embedding = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(config.dtype)
    return linear(params["time2"], jax.nn.silu(linear(params["time1"], embedding)))


def forward(config: Config, params, images, times, key, remat=None):
    down, up = layout(config)
    one_block = checkpointed(partial(res_block, config), remat)
    keys = iter(jax.random.split(key, len(down) + len(params["middle"]) + len(up)))
    time = time_embedding(config, params, times)
    x = conv(params["conv_in"], images.astype(config.dtype))
    skips = [x]
    for stage, p in zip(down, params["down"], strict=True):
        x = one_block(p, x, time, next(keys)) if stage.kind == "block" else conv(p["conv"], x, stride=2)
        skips.append(x)
    for p in params["middle"]:
        x = one_block(p, x, time, next(keys))
    for stage, p in zip(up, params["up"], strict=True):
        if stage.kind == "block":
            x = one_block(p, jnp.concatenate([x, skips.pop()], axis=-1), time, next(keys))
        else:
            x = upsample(p, x)
    return conv(params["conv_out"], jax.nn.silu(group_norm(config, params["norm_out"], x))).astype(jnp.float32)


def optimizer(config: Config):
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(config.learning_rate))


def init_args(config: Config, key: jax.Array) -> tuple[Any, ...]:
    key_params, key_images, key_train = jax.random.split(key, 3)
    params = init_params(config, key_params)
    state = {
        "params": params,
        "ema": jax.tree.map(jnp.array, params),
        "opt_state": optimizer(config).init(params),
        "key": key_train,
    }
    images = jax.random.uniform(key_images, (config.batch, config.image, config.image, 3), minval=-1, maxval=1)
    return state, {"images": images}


def step(config: Config, remat: Any = None) -> Callable[..., Any]:
    signal = np.cumprod(1 - np.linspace(1e-4, 0.02, config.diffusion_steps)).astype(np.float32)

    def loss_fn(params, images, key):
        key_time, key_noise, key_dropout = jax.random.split(key, 3)
        times = jax.random.randint(key_time, images.shape[:1], 0, config.diffusion_steps)
        noise = jax.random.normal(key_noise, images.shape)
        alpha = jnp.asarray(signal)[times][:, None, None, None]
        noisy = jnp.sqrt(alpha) * images + jnp.sqrt(1 - alpha) * noise
        return jnp.mean((forward(config, params, noisy, times, key_dropout, remat) - noise) ** 2)

    def train_step(state, batch):
        next_key, key = jax.random.split(state["key"])
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch["images"], key)
        updates, opt_state = optimizer(config).update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        ema = optax.incremental_update(params, state["ema"], 1 - config.ema_decay)
        return {"params": params, "ema": ema, "opt_state": opt_state, "key": next_key}, loss

    return train_step


def workload(config: Config | None = None, *, remat: Any = None, **sizes: Any) -> Workload:
    config = replace(config or Config(), **sizes)
    args = jax.eval_shape(lambda: init_args(config, jax.random.key(0)))
    return Workload(fun=step(config, remat), args=args, jit_options={"donate_argnums": (0,)}, name="unet")
