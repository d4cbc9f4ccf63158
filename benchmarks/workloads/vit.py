"""Vision Transformer ViT-B/16 at 224 pixels (Dosovitskiy et al., arXiv 2010.11929), 86.6 M parameters.

float32 parameters, bfloat16 compute, AdamW, layers unrolled in Python.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.workloads.remat import checkpointed
from jaxtensile.program.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Config:
    batch: int = 128
    image: int = 224
    patch: int = 16
    layers: int = 12
    dim: int = 768
    heads: int = 12
    ffn: int = 3072
    classes: int = 1000
    learning_rate: float = 1e-3
    dtype: str = "bfloat16"

    @classmethod
    def tiny(cls) -> "Config":
        return cls(batch=4, image=16, patch=4, layers=2, dim=32, heads=4, ffn=64, classes=10, learning_rate=3e-3)


def init_params(config: Config, key: jax.Array) -> Any:
    """Patch embedding, class token, learned positions, pre-norm encoder blocks, linear head."""
    dim, patches = config.dim, (config.image // config.patch) ** 2
    key_patch, key_class, key_position, key_head, *block_keys = jax.random.split(key, 4 + config.layers)
    lecun, trunc = jax.nn.initializers.lecun_normal(), jax.nn.initializers.truncated_normal(0.02)

    def norm():
        return {"scale": jnp.ones(dim), "bias": jnp.zeros(dim)}

    def linear(key, *shape):
        return {"weight": lecun(key, shape), "bias": jnp.zeros(shape[-1])}

    def block(key):
        keys = jax.random.split(key, 4)
        return {
            "norm1": norm(),
            "qkv": linear(keys[0], dim, 3 * dim),
            "out": linear(keys[1], dim, dim),
            "norm2": norm(),
            "up": linear(keys[2], dim, config.ffn),
            "down": linear(keys[3], config.ffn, dim),
        }

    return {
        "patch": linear(key_patch, config.patch, config.patch, 3, dim),
        "class": trunc(key_class, (1, 1, dim)),
        "position": trunc(key_position, (1, patches + 1, dim)),
        "blocks": [block(key) for key in block_keys],
        "norm": norm(),
        "head": linear(key_head, dim, config.classes),
    }


def layer_norm(p, x):
    return (jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-6) * p["scale"] + p["bias"]).astype(x.dtype)


def linear(p, x):
    return x @ p["weight"].astype(x.dtype) + p["bias"].astype(x.dtype)


def attention(config: Config, p, x):
    batch, tokens, dim = x.shape
    qkv = linear(p["qkv"], x).reshape(batch, tokens, 3, config.heads, dim // config.heads)
    mixed = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])
    return linear(p["out"], mixed.reshape(x.shape))


def block(config: Config, p, x):
    x = x + attention(config, p, layer_norm(p["norm1"], x))
    return x + linear(p["down"], jax.nn.gelu(linear(p["up"], layer_norm(p["norm2"], x)), approximate=False))


def forward(config: Config, params, images, remat=None):
    one_block = checkpointed(partial(block, config), remat)
    dtype = jnp.dtype(config.dtype)
    patches = jax.lax.conv_general_dilated(
        images.astype(dtype),
        params["patch"]["weight"].astype(dtype),
        window_strides=(config.patch, config.patch),
        padding="VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    x = patches.reshape(images.shape[0], -1, config.dim) + params["patch"]["bias"].astype(dtype)
    class_token = jnp.broadcast_to(params["class"].astype(dtype), (x.shape[0], 1, config.dim))
    x = jnp.concatenate([class_token, x], axis=1) + params["position"].astype(dtype)
    for p in params["blocks"]:
        x = one_block(p, x)
    return linear(params["head"], layer_norm(params["norm"], x)[:, 0]).astype(jnp.float32)


def optimizer(config: Config):
    return optax.adamw(config.learning_rate, weight_decay=0.1)


def init_args(config: Config, key: jax.Array) -> tuple[Any, ...]:
    key_params, key_images, key_labels = jax.random.split(key, 3)
    params = init_params(config, key_params)
    state = {"params": params, "opt_state": optimizer(config).init(params)}
    batch = {
        "images": jax.random.normal(key_images, (config.batch, config.image, config.image, 3)),
        "labels": jax.random.randint(key_labels, (config.batch,), 0, config.classes),
    }
    return state, batch


def step(config: Config, remat: Any = None) -> Callable[..., Any]:
    def loss_fn(params, batch):
        logits = forward(config, params, batch["images"], remat)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = optimizer(config).update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    return train_step


def workload(config: Config | None = None, *, remat: Any = None, **sizes: Any) -> Workload:
    config = replace(config or Config(), **sizes)
    args = jax.eval_shape(lambda: init_args(config, jax.random.key(0)))
    return Workload(fun=step(config, remat), args=args, jit_options={"donate_argnums": (0,)}, name="vit_b")
