"""BERT-base masked-language-model pre-training (Devlin et al., arXiv 1810.04805), 110 M parameters.

Post-norm encoder, 76 masked positions per sequence of 512, dropout 0.1 on embeddings, attention and sub-layers,
output matrix tied to the word embedding; float32 parameters, bfloat16 compute, AdamW; layers unrolled in Python.
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
    batch: int = 32
    seq: int = 512
    predictions: int = 76
    layers: int = 12
    dim: int = 768
    heads: int = 12
    ffn: int = 3072
    vocab: int = 30522
    segments: int = 2
    dropout: float = 0.1
    learning_rate: float = 1e-4
    dtype: str = "bfloat16"

    @classmethod
    def tiny(cls) -> "Config":
        return cls(batch=2, seq=16, predictions=3, layers=2, dim=32, heads=4, ffn=64, vocab=50, learning_rate=1e-2)


def init_params(config: Config, key: jax.Array) -> Any:
    """Normal(0.02) matrices, zero biases, unit norms."""
    key_word, key_position, key_segment, key_head, *layer_keys = jax.random.split(key, 4 + config.layers)

    def matrix(key, rows, columns):
        return 0.02 * jax.random.normal(key, (rows, columns))

    def linear(key, rows, columns):
        return {"weight": matrix(key, rows, columns), "bias": jnp.zeros(columns)}

    def norm():
        return {"scale": jnp.ones(config.dim), "bias": jnp.zeros(config.dim)}

    def layer(key):
        keys = jax.random.split(key, 4)
        return {
            "qkv": linear(keys[0], config.dim, 3 * config.dim),
            "out": linear(keys[1], config.dim, config.dim),
            "norm1": norm(),
            "up": linear(keys[2], config.dim, config.ffn),
            "down": linear(keys[3], config.ffn, config.dim),
            "norm2": norm(),
        }

    return {
        "word": matrix(key_word, config.vocab, config.dim),
        "position": matrix(key_position, config.seq, config.dim),
        "segment": matrix(key_segment, config.segments, config.dim),
        "norm": norm(),
        "layers": [layer(key) for key in layer_keys],
        "head": linear(key_head, config.dim, config.dim),
        "head_norm": norm(),
        "head_bias": jnp.zeros(config.vocab),
    }


def layer_norm(p, x):
    return (jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-12) * p["scale"] + p["bias"]).astype(x.dtype)


def linear(p, x):
    return x @ p["weight"].astype(x.dtype) + p["bias"].astype(x.dtype)


def dropout(key, rate, x):
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def attention(config: Config, p, x, mask, key):
    """Bidirectional self-attention with dropout on its weights; ``mask`` is false at padding."""
    batch, seq, dim = x.shape
    head_dim = dim // config.heads
    query, key_, value = jnp.split(linear(p["qkv"], x).reshape(batch, seq, 3 * config.heads, head_dim), 3, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key_) / head_dim**0.5
    scores = jnp.where(mask[:, None, None, :], scores.astype(jnp.float32), -1e9)
    weights = dropout(key, config.dropout, jax.nn.softmax(scores).astype(x.dtype))
    return linear(p["out"], jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape))


def layer(config: Config, p, x, mask, key):
    key1, key2, key3 = jax.random.split(key, 3)
    mixed = attention(config, p, x, mask, key1)
    x = layer_norm(p["norm1"], x + dropout(key2, config.dropout, mixed))
    hidden = linear(p["down"], jax.nn.gelu(linear(p["up"], x), approximate=False))
    return layer_norm(p["norm2"], x + dropout(key3, config.dropout, hidden))


def encode(config: Config, params, batch, key, remat=None):
    one_layer = checkpointed(partial(layer, config), remat)
    key_embed, *layer_keys = jax.random.split(key, 1 + config.layers)
    x = params["word"][batch["tokens"]] + params["position"] + params["segment"][batch["segments"]]
    x = dropout(key_embed, config.dropout, layer_norm(params["norm"], x).astype(config.dtype))
    for p, layer_key in zip(params["layers"], layer_keys, strict=True):
        x = one_layer(p, x, batch["mask"], layer_key)
    return x


def predict(params, x, positions):
    """Logits over the vocabulary at the masked positions only."""
    x = jnp.take_along_axis(x, positions[:, :, None], axis=1)
    x = layer_norm(params["head_norm"], jax.nn.gelu(linear(params["head"], x), approximate=False))
    return (x @ params["word"].T.astype(x.dtype)).astype(jnp.float32) + params["head_bias"]


def optimizer(config: Config):
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(config.learning_rate, weight_decay=0.01))


def init_args(config: Config, key: jax.Array) -> tuple[Any, ...]:
    key_params, key_train, key_tokens, key_positions, key_labels = jax.random.split(key, 5)
    params = init_params(config, key_params)
    state = {"params": params, "opt_state": optimizer(config).init(params), "key": key_train}
    masked = (config.batch, config.predictions)
    batch = {
        "tokens": jax.random.randint(key_tokens, (config.batch, config.seq), 0, config.vocab),
        "segments": jnp.zeros((config.batch, config.seq), jnp.int32),
        "mask": jnp.ones((config.batch, config.seq), bool),
        "positions": jax.random.randint(key_positions, masked, 0, config.seq),
        "labels": jax.random.randint(key_labels, masked, 0, config.vocab),
    }
    return state, batch


def step(config: Config, remat: Any = None) -> Callable[..., Any]:
    def loss_fn(params, batch, key):
        logits = predict(params, encode(config, params, batch, key, remat), batch["positions"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    def train_step(state, batch):
        next_key, key = jax.random.split(state["key"])
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch, key)
        updates, opt_state = optimizer(config).update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "key": next_key}, loss

    return train_step


def workload(config: Config | None = None, *, remat: Any = None, **sizes: Any) -> Workload:
    config = replace(config or Config(), **sizes)
    args = jax.eval_shape(lambda: init_args(config, jax.random.key(0)))
    return Workload(fun=step(config, remat), args=args, jit_options={"donate_argnums": (0,)}, name="bert_base")
