"""GPT-2 small (124M parameters): Radford et al. 2019, table 2; Adam, bf16 compute.

Layers are unrolled, or with ``scan`` stacked and scanned over, as most large models are written.

``remat`` applies a ``jax.checkpoint`` policy to every block: what a user does by hand today,
kept here, as in all these files, so that the peers are measured on the same step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workloads.remat import checkpointed
from jaxtensile.program.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the published model; ``tiny()`` runs in milliseconds on a CPU."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocab: int = 50257
    context: int = 1024
    batch: int = 16
    learning_rate: float = 3e-4
    compute: Any = jnp.bfloat16
    scan: bool = False

    @classmethod
    def tiny(cls) -> Config:
        return cls(layers=2, width=32, heads=4, vocab=97, context=16, batch=4, learning_rate=1e-2)


def init_params(config: Config, key: jax.Array) -> Any:
    d, n = config.width, config.layers
    normal = jax.nn.initializers.normal(0.02)
    keys = iter(jax.random.split(key, 2 + 4 * n))

    def block() -> Any:
        return {
            "ln1": {"scale": jnp.ones(d), "bias": jnp.zeros(d)},
            "qkv": {"w": normal(next(keys), (d, 3 * d)), "b": jnp.zeros(3 * d)},
            "proj": {"w": normal(next(keys), (d, d)) / (2 * n) ** 0.5, "b": jnp.zeros(d)},
            "ln2": {"scale": jnp.ones(d), "bias": jnp.zeros(d)},
            "up": {"w": normal(next(keys), (d, 4 * d)), "b": jnp.zeros(4 * d)},
            "down": {"w": normal(next(keys), (4 * d, d)) / (2 * n) ** 0.5, "b": jnp.zeros(d)},
        }

    embed, position = normal(next(keys), (config.vocab, d)), normal(next(keys), (config.context, d))
    blocks: Any = [block() for _ in range(n)]
    return {
        "embed": embed,
        "position": position,
        "blocks": jax.tree.map(lambda *layers: jnp.stack(layers), *blocks) if config.scan else blocks,
        "ln": {"scale": jnp.ones(d), "bias": jnp.zeros(d)},
    }


def layer_norm(p: Any, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)
    return (y * p["scale"] + p["bias"]).astype(x.dtype)


def dense(p: Any, x: jax.Array) -> jax.Array:
    return x @ p["w"].astype(x.dtype) + p["b"].astype(x.dtype)


def attention(p: Any, x: jax.Array, heads: int) -> jax.Array:
    b, t, d = x.shape
    q, k, v = jnp.split(dense(p["qkv"], x).reshape(b, t, 3 * heads, d // heads), 3, axis=2)
    scores = jnp.einsum("bqhc,bkhc->bhqk", q, k) / (d // heads) ** 0.5
    mask = jnp.tril(jnp.ones((t, t), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores.astype(jnp.float32), -1e9), axis=-1).astype(x.dtype)
    return dense(p["proj"], jnp.einsum("bhqk,bkhc->bqhc", weights, v).reshape(b, t, d))


def block(p: Any, x: jax.Array, heads: int) -> jax.Array:
    x = x + attention(p, layer_norm(p["ln1"], x), heads)
    return x + dense(p["down"], jax.nn.gelu(dense(p["up"], layer_norm(p["ln2"], x))))


def loss(params: Any, tokens: jax.Array, config: Config, remat: Any = None) -> jax.Array:
    """Mean next-token cross-entropy of ``tokens`` (batch, context + 1)."""
    one_block = checkpointed(partial(block, heads=config.heads), remat, loop=config.scan)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = (params["embed"][inputs] + params["position"][: inputs.shape[1]]).astype(config.compute)
    if config.scan:
        x, _ = jax.lax.scan(lambda x, p: (one_block(p, x), None), x, params["blocks"])
    else:
        for p in params["blocks"]:
            x = one_block(p, x)
    x = layer_norm(params["ln"], x)
    logits = (x @ params["embed"].T.astype(x.dtype)).astype(jnp.float32)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -picked.mean()


def adam(grads: Any, state: Any, learning_rate: float) -> Any:
    """One Adam update of ``state`` = {params, m, v, count} (Kingma & Ba 2015, algorithm 1)."""
    count = state["count"] + 1
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["v"], grads)
    c1, c2 = 1 - 0.9**count, 1 - 0.999**count
    params = jax.tree.map(
        lambda p, m, v: p - learning_rate * (m / c1) / (jnp.sqrt(v / c2) + 1e-8), state["params"], m, v
    )
    return {"params": params, "m": m, "v": v, "count": count}


def step(config: Config, remat: Any = None) -> Callable[..., Any]:
    """``(state, tokens) -> (state, loss)``, the state to be donated."""

    def train_step(state: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], tokens, config, remat)
        return adam(grads, state, config.learning_rate), value

    return train_step


def init_args(config: Config, key: jax.Array) -> tuple[Any, ...]:
    """Concrete arguments of ``step(config)``: a fresh state and one batch."""
    params = init_params(config, key)
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = {"params": params, "m": zeros, "v": jax.tree.map(jnp.zeros_like, params), "count": jnp.zeros((), jnp.int32)}
    tokens = jax.random.randint(key, (config.batch, config.context + 1), 0, config.vocab, jnp.int32)
    return state, tokens


def workload(config: Config | None = None, *, remat: Any = None) -> Workload:
    """The step with abstract arguments; nothing is allocated."""
    config = config or Config()
    args = jax.eval_shape(partial(init_args, config), jax.random.key(0))
    return Workload(fun=step(config, remat), args=args, jit_options={"donate_argnums": (0,)}, name="gpt2_small")
