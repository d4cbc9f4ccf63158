"""Llama-style decoder (GQA, RoPE, RMSNorm, SwiGLU); sizes of TinyLlama-1.1B (arXiv 2401.02385).

float32 parameters, bfloat16 compute, AdamW with global-norm clipping, layers unrolled in Python.
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
    batch: int = 2
    seq: int = 2048
    layers: int = 22
    dim: int = 2048
    heads: int = 32
    kv_heads: int = 4
    ffn: int = 5632
    vocab: int = 32000
    rope_theta: float = 10000.0
    learning_rate: float = 4e-4
    dtype: str = "bfloat16"

    @classmethod
    def tiny(cls) -> "Config":
        return cls(batch=2, seq=16, layers=2, dim=32, heads=4, kv_heads=2, ffn=48, vocab=64, learning_rate=1e-2)


def init_params(config: Config, key: jax.Array) -> Any:
    """Normal(0.02) matrices and unit norms; embedding and output head are not tied."""
    head_dim = config.dim // config.heads
    kv_dim = config.kv_heads * head_dim
    key_embed, key_head, *layer_keys = jax.random.split(key, 2 + config.layers)

    def matrix(key, rows, columns):
        return 0.02 * jax.random.normal(key, (rows, columns))

    def layer(key):
        keys = jax.random.split(key, 7)
        return {
            "attention_norm": jnp.ones(config.dim),
            "query": matrix(keys[0], config.dim, config.dim),
            "key": matrix(keys[1], config.dim, kv_dim),
            "value": matrix(keys[2], config.dim, kv_dim),
            "out": matrix(keys[3], config.dim, config.dim),
            "ffn_norm": jnp.ones(config.dim),
            "gate": matrix(keys[4], config.dim, config.ffn),
            "up": matrix(keys[5], config.dim, config.ffn),
            "down": matrix(keys[6], config.ffn, config.dim),
        }

    return {
        "embed": matrix(key_embed, config.vocab, config.dim),
        "layers": [layer(key) for key in layer_keys],
        "norm": jnp.ones(config.dim),
        "head": matrix(key_head, config.dim, config.vocab),
    }


def rms_norm(x, scale):
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def rope(x, theta):
    """Rotates the two halves of each head's features by angles that grow with position; x is [batch, seq, heads, …]."""
    _, seq, _, head_dim = x.shape
    frequencies = theta ** (-jnp.arange(0, head_dim, 2) / head_dim)
    angles = jnp.arange(seq)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def dense(x, weight):
    return x @ weight.astype(x.dtype)


def attention(config: Config, p, x):
    batch, seq, _ = x.shape
    query = dense(x, p["query"]).reshape(batch, seq, config.heads, -1)
    key = dense(x, p["key"]).reshape(batch, seq, config.kv_heads, -1)
    value = dense(x, p["value"]).reshape(batch, seq, config.kv_heads, -1)
    query, key = rope(query, config.rope_theta), rope(key, config.rope_theta)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return dense(mixed.reshape(x.shape), p["out"])


def swiglu(p, x):
    return dense(jax.nn.silu(dense(x, p["gate"])) * dense(x, p["up"]), p["down"])


def block(config: Config, p, x):
    x = x + attention(config, p, rms_norm(x, p["attention_norm"]))
    return x + swiglu(p, rms_norm(x, p["ffn_norm"]))


def forward(config: Config, params, tokens, remat=None):
    one_block = checkpointed(partial(block, config), remat)
    x = params["embed"].astype(config.dtype)[tokens]
    for p in params["layers"]:
        x = one_block(p, x)
    return dense(rms_norm(x, params["norm"]), params["head"]).astype(jnp.float32)


def optimizer(config: Config):
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(config.learning_rate, b1=0.9, b2=0.95, weight_decay=0.1),
    )


def init_args(config: Config, key: jax.Array) -> tuple[Any, ...]:
    key_params, key_data = jax.random.split(key)
    params = init_params(config, key_params)
    state = {"params": params, "opt_state": optimizer(config).init(params)}
    batch = {"tokens": jax.random.randint(key_data, (config.batch, config.seq + 1), 0, config.vocab)}
    return state, batch


def step(config: Config, remat: Any = None) -> Callable[..., Any]:
    def loss_fn(params, batch):
        logits = forward(config, params, batch["tokens"][:, :-1], remat)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = optimizer(config).update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    return train_step


def workload(config: Config | None = None, *, remat: Any = None, **sizes: Any) -> Workload:
    config = replace(config or Config(), **sizes)
    args = jax.eval_shape(lambda: init_args(config, jax.random.key(0)))
    return Workload(fun=step(config, remat), args=args, jit_options={"donate_argnums": (0,)}, name="llama")
