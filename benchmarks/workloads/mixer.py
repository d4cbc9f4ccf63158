"""MLP-Mixer-B/16 at 224 pixels (Tolstikhin et al., arXiv 2105.01601), 59.9 M parameters, in flax.nnx.

float32 parameters, bfloat16 compute, Adam with gradient clipping, layers unrolled in Python.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.workloads.remat import named_input
from jaxtensile.program.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Config:
    batch: int = 128
    image: int = 224
    patch: int = 16
    layers: int = 12
    dim: int = 768
    token_ffn: int = 384
    channel_ffn: int = 3072
    classes: int = 1000
    learning_rate: float = 1e-3
    dtype: str = "bfloat16"

    @property
    def patches(self) -> int:
        return (self.image // self.patch) ** 2

    @classmethod
    def tiny(cls) -> "Config":
        return cls(batch=4, image=16, patch=4, layers=2, dim=32, token_ffn=16, channel_ffn=64, classes=10)


class Mlp(nnx.Module):
    def __init__(self, features: int, hidden: int, dtype, rngs: nnx.Rngs):
        self.up = nnx.Linear(features, hidden, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(hidden, features, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    """Mixes patches with one MLP, then channels with another."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.token_norm = nnx.LayerNorm(config.dim, dtype=dtype, rngs=rngs)
        self.token_mlp = Mlp(config.patches, config.token_ffn, dtype, rngs)
        self.channel_norm = nnx.LayerNorm(config.dim, dtype=dtype, rngs=rngs)
        self.channel_mlp = Mlp(config.dim, config.channel_ffn, dtype, rngs)

    def __call__(self, x):
        x = x + self.token_mlp(self.token_norm(x).swapaxes(1, 2)).swapaxes(1, 2)
        return x + self.channel_mlp(self.channel_norm(x))


def checkpointed(policy):
    """``block(x)`` as a function of both, under ``nnx.remat`` where there is a policy."""
    if policy is None:
        return lambda block, x: block(x)
    return nnx.remat(lambda block, x: block(named_input(x)), policy=policy)


class Mixer(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        dtype, patch = jnp.dtype(config.dtype), (config.patch, config.patch)
        self.stem = nnx.Conv(3, config.dim, patch, strides=patch, padding="VALID", dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.dim, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(config.dim, config.classes, dtype=jnp.float32, rngs=rngs)

    def __call__(self, images, remat=None):
        one_block = checkpointed(remat)
        x = self.stem(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        for block in self.blocks:
            x = one_block(block, x)
        return self.head(jnp.mean(self.norm(x), axis=1))


def init_params(config: Config, key: jax.Array) -> Any:
    """The model's `nnx.State`."""
    return nnx.state(Mixer(config, nnx.Rngs(key)), nnx.Param)


def optimizer(config: Config):
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(config.learning_rate))


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
    graph = nnx.graphdef(nnx.eval_shape(lambda: Mixer(config, nnx.Rngs(0))))

    def loss_fn(params, batch):
        logits = nnx.merge(graph, params)(batch["images"], remat)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = optimizer(config).update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    return train_step


def workload(config: Config | None = None, *, remat: Any = None, **sizes: Any) -> Workload:
    config = replace(config or Config(), **sizes)
    args = jax.eval_shape(lambda: init_args(config, jax.random.key(0)))
    return Workload(fun=step(config, remat), args=args, jit_options={"donate_argnums": (0,)}, name="mixer")
