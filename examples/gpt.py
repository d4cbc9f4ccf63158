"""A GPT and its whole train step in plain JAX: what the other examples train and plan.

Nothing here knows about jaxtensile: the layers are unrolled, there is no ``jax.checkpoint`` and no
annotation, so what the plain program keeps for its backward pass is what JAX and XLA make of it.
The model is GPT-2's (Radford et al. 2019: pre-norm blocks, learned positions, tied head); the
optimizer is Adam (Kingma & Ba 2015, Algorithm 1). Parameters and moments are float32, the blocks
compute in ``GPTConfig.dtype``, the loss in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Params = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of a model; ``context`` is the number of positions predicted per sequence."""

    layers: int
    width: int
    heads: int
    context: int
    vocab: int
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")

    @classmethod
    def small(cls) -> GPTConfig:
        """GPT-2 small, computing in bfloat16."""
        return cls(layers=12, width=768, heads=12, context=1024, vocab=50257, dtype=jnp.bfloat16)


class State(NamedTuple):
    """What a train step takes and gives back: parameters, Adam's two moments, steps done."""

    params: Params
    mean: Params
    square: Params
    step: jax.Array


# ---- parameters -------------------------------------------------------------------------------


def init(config: GPTConfig, key: jax.Array) -> Params:
    """GPT-2's initial values: normal(0, 0.02), smaller where a block adds to the residual stream."""
    width = config.width

    def dense(key: jax.Array, rows: int, columns: int, scale: float = 0.02) -> Params:
        return {"kernel": scale * jax.random.normal(key, (rows, columns)), "bias": jnp.zeros(columns)}

    def norm() -> Params:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    def block(key: jax.Array) -> Params:
        qkv, out, up, down = jax.random.split(key, 4)
        residual = 0.02 / math.sqrt(2 * config.layers)
        return {
            "norm_attention": norm(),
            "qkv": dense(qkv, width, 3 * width),
            "out": dense(out, width, width, residual),
            "norm_mlp": norm(),
            "up": dense(up, width, 4 * width),
            "down": dense(down, 4 * width, width, residual),
        }

    token, position, *blocks = jax.random.split(key, 2 + config.layers)
    return {
        "token": 0.02 * jax.random.normal(token, (config.vocab, width)),
        "position": 0.02 * jax.random.normal(position, (config.context, width)),
        "blocks": [block(key) for key in blocks],
        "norm": norm(),
    }


def start(config: GPTConfig, key: jax.Array) -> State:
    """The state before the first step. ``jax.eval_shape`` of it needs no memory at all."""
    params = init(config, key)
    return State(params, jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params), jnp.int32(0))


# ---- model ------------------------------------------------------------------------------------


def _dense(p: Params, x: jax.Array) -> jax.Array:
    return x @ p["kernel"].astype(x.dtype) + p["bias"].astype(x.dtype)


def _norm(p: Params, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    return (normal * p["scale"] + p["bias"]).astype(x.dtype)


def _attention(p: Params, x: jax.Array, heads: int) -> jax.Array:
    batch, length, width = x.shape
    q, k, v = jnp.split(_dense(p["qkv"], x).reshape(batch, length, 3 * heads, width // heads), 3, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / math.sqrt(width // heads)
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)).astype(x.dtype)
    return _dense(p["out"], jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))


def _mlp(p: Params, x: jax.Array) -> jax.Array:
    return _dense(p["down"], jax.nn.gelu(_dense(p["up"], x)))


def loss(params: Params, tokens: jax.Array, config: GPTConfig) -> jax.Array:
    """Mean cross entropy, in nats, of each token given those before it; ``tokens``: (batch, context + 1)."""
    x = (params["token"][tokens[:, :-1]] + params["position"]).astype(config.dtype)
    for p in params["blocks"]:
        x = x + _attention(p, _norm(p["norm_attention"], x), config.heads)
        x = x + _mlp(p, _norm(p["norm_mlp"], x))
    logits = (_norm(params["norm"], x) @ params["token"].T.astype(config.dtype)).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


# ---- train step -------------------------------------------------------------------------------


def make_step(config: GPTConfig, learning_rate: float) -> Callable[[State, jax.Array], tuple[State, jax.Array]]:
    """One Adam step, ``(state, tokens) -> (state, loss)``. Jit it with ``donate_argnums=(0,)``."""
    b1, b2, epsilon = 0.9, 0.999, 1e-8

    def train_step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state.params, tokens, config)
        step = state.step + 1
        mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mean, grads)
        square = jax.tree.map(lambda s, g: b2 * s + (1 - b2) * g * g, state.square, grads)
        rate = learning_rate * jnp.sqrt(1 - b2**step) / (1 - b1**step)
        params = jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(s) + epsilon), state.params, mean, square)
        return State(params, mean, square, step), value

    return train_step


def tokens_like(config: GPTConfig, batch: int) -> jax.ShapeDtypeStruct:
    """The shape of one batch, for planning without data."""
    return jax.ShapeDtypeStruct((batch, config.context + 1), jnp.int32)


def parameters(state: State) -> int:
    """Number of parameters of a state, real or abstract."""
    return sum(math.prod(p.shape) for p in jax.tree.leaves(state.params))
