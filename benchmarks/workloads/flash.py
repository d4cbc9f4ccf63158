"""GPT-2 small with the attention that JAX users call today, ``jax.nn.dot_product_attention``, by cuDNN's kernels.

Only an NVIDIA GPU has them; ``tiny()`` says the same in operations that every device has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads import gpt2
from benchmarks.workloads.gpt2 import init_args, init_params
from benchmarks.workloads.remat import checkpointed
from jaxtensile.program.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Config(gpt2.Config):
    """Sizes of the published model, and whose kernels the attention is."""

    kernels: str = "cudnn"

    @classmethod
    def tiny(cls) -> Config:
        return cls(layers=2, width=32, heads=4, vocab=97, context=16, batch=4, learning_rate=1e-2, kernels="xla")


def attention(p: Any, x: jax.Array, config: Config) -> jax.Array:
    b, t, d = x.shape
    q, k, v = jnp.split(gpt2.dense(p["qkv"], x).reshape(b, t, 3 * config.heads, d // config.heads), 3, axis=2)
    kernels: Any = config.kernels
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernels)
    return gpt2.dense(p["proj"], out.reshape(b, t, d))


def block(config: Config, p: Any, x: jax.Array) -> jax.Array:
    x = x + attention(p, gpt2.layer_norm(p["ln1"], x), config)
    return x + gpt2.dense(p["down"], jax.nn.gelu(gpt2.dense(p["up"], gpt2.layer_norm(p["ln2"], x))))


def loss(params: Any, tokens: jax.Array, config: Config, remat: Any = None) -> jax.Array:
    """Mean next-token cross-entropy of ``tokens`` (batch, context + 1)."""
    one_block = checkpointed(partial(block, config), remat)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = (params["embed"][inputs] + params["position"][: inputs.shape[1]]).astype(config.compute)
    for p in params["blocks"]:
        x = one_block(p, x)
    x = gpt2.layer_norm(params["ln"], x)
    logits = (x @ params["embed"].T.astype(x.dtype)).astype(jnp.float32)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -picked.mean()


def step(config: Config, remat: Any = None) -> Callable[..., Any]:
    """``(state, tokens) -> (state, loss)``, the state to be donated."""

    def train_step(state: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], tokens, config, remat)
        return gpt2.adam(grads, state, config.learning_rate), value

    return train_step


def workload(config: Config | None = None, *, remat: Any = None) -> Workload:
    """The step with abstract arguments; nothing is allocated."""
    config = config or Config()
    args = jax.eval_shape(partial(init_args, config), jax.random.key(0))
    return Workload(fun=step(config, remat), args=args, jit_options={"donate_argnums": (0,)}, name="flash")


__all__ = ["Config", "init_args", "init_params", "step", "workload"]
