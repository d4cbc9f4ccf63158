"""Sparse decoder with top-2 routed experts: GShard's dense dispatch (arXiv 2006.16668), 8 experts in every other layer.

Width, heads and vocabulary of GPT-2-small; each sequence is one routing group; tokens beyond an expert's capacity
pass by on the residual. float32 parameters, bfloat16 compute, Adafactor (as the T5 and Switch models), unrolled layers.
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
    batch: int = 16
    seq: int = 1024
    layers: int = 12
    dim: int = 768
    heads: int = 12
    ffn: int = 3072
    experts: int = 8
    capacity_factor: float = 1.25
    balance_weight: float = 0.01
    vocab: int = 50257
    learning_rate: float = 1e-3
    dtype: str = "bfloat16"

    @property
    def capacity(self) -> int:
        """Slots of one expert in one sequence."""
        return max(1, int(2 * self.seq * self.capacity_factor / self.experts))

    @classmethod
    def tiny(cls) -> "Config":
        return cls(batch=2, seq=16, layers=2, dim=32, heads=4, ffn=64, experts=4, vocab=64, learning_rate=1e-2)


def is_sparse(layer: int) -> bool:
    return layer % 2 == 1


def init_params(config: Config, key: jax.Array) -> Any:
    """Normal(0.02) matrices; expert matrices are stacked along a leading expert axis."""
    key_embed, key_position, *layer_keys = jax.random.split(key, 2 + config.layers)
    dim, ffn, experts = config.dim, config.ffn, config.experts

    def matrix(key, *shape):
        return 0.02 * jax.random.normal(key, shape)

    def layer(index, key):
        keys = jax.random.split(key, 5)
        params = {
            "attention_norm": jnp.ones(dim),
            "qkv": matrix(keys[0], dim, 3 * dim),
            "out": matrix(keys[1], dim, dim),
            "ffn_norm": jnp.ones(dim),
        }
        if is_sparse(index):
            params["router"] = matrix(keys[2], dim, experts)
        leading = (experts,) if is_sparse(index) else ()
        params["up"] = matrix(keys[3], *leading, dim, ffn)
        params["down"] = matrix(keys[4], *leading, ffn, dim)
        return params

    return {
        "embed": matrix(key_embed, config.vocab, dim),
        "position": matrix(key_position, config.seq, dim),
        "layers": [layer(index, key) for index, key in enumerate(layer_keys)],
        "norm": jnp.ones(dim),
    }


def rms_norm(x, scale):
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def attention(config: Config, p, x):
    batch, seq, dim = x.shape
    qkv = (x @ p["qkv"].astype(x.dtype)).reshape(batch, seq, 3, config.heads, dim // config.heads)
    mixed = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
    return mixed.reshape(x.shape) @ p["out"].astype(x.dtype)


def route(config: Config, logits):
    """Combine weights [batch, seq, expert, slot] of each token's two best experts, and the load-balancing loss.

    First choices of the whole sequence take slots before second choices; a token finding no free slot is dropped.
    """
    gates = jax.nn.softmax(logits)
    values, chosen = jax.lax.top_k(gates, 2)
    values = values / jnp.sum(values, axis=-1, keepdims=True)
    used = 0
    combine = 0
    for choice in range(2):
        expert = jax.nn.one_hot(chosen[..., choice], config.experts)
        slot = jnp.cumsum(expert, axis=1) - expert + used
        slot = jnp.sum(slot * expert, axis=-1).astype(jnp.int32)
        used = used + jnp.sum(expert, axis=1, keepdims=True)
        weighted = values[..., choice, None] * expert
        combine = combine + weighted[..., None] * jax.nn.one_hot(slot, config.capacity)[:, :, None, :]
    first = jax.nn.one_hot(chosen[..., 0], config.experts)
    balance = config.experts * jnp.mean(jnp.sum(jnp.mean(first, axis=1) * jnp.mean(gates, axis=1), axis=-1))
    return combine, balance


def dense_ffn(p, x):
    return jax.nn.gelu(x @ p["up"].astype(x.dtype)) @ p["down"].astype(x.dtype)


def sparse_ffn(config: Config, p, x):
    combine, balance = route(config, x.astype(jnp.float32) @ p["router"])
    dispatch = (combine > 0).astype(x.dtype)
    inputs = jnp.einsum("bsec,bsd->ebcd", dispatch, x)
    hidden = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", inputs, p["up"].astype(x.dtype)))
    outputs = jnp.einsum("ebcf,efd->ebcd", hidden, p["down"].astype(x.dtype))
    return jnp.einsum("bsec,ebcd->bsd", combine.astype(x.dtype), outputs), balance


def block(config: Config, p, x):
    """The stream after one layer, and the load-balancing loss of its experts where it has any."""
    x = x + attention(config, p, rms_norm(x, p["attention_norm"]))
    normed = rms_norm(x, p["ffn_norm"])
    y, balance = sparse_ffn(config, p, normed) if "router" in p else (dense_ffn(p, normed), None)
    return x + y, balance


def forward(config: Config, params, tokens, remat=None):
    one_block = checkpointed(partial(block, config), remat)
    x = (params["embed"][tokens] + params["position"]).astype(config.dtype)
    balances = []
    for p in params["layers"]:
        x, balance = one_block(p, x)
        if balance is not None:
            balances.append(balance)
    logits = rms_norm(x, params["norm"]) @ params["embed"].T.astype(x.dtype)
    return logits.astype(jnp.float32), sum(balances)


def optimizer(config: Config):
    return optax.adafactor(config.learning_rate)


def init_args(config: Config, key: jax.Array) -> tuple[Any, ...]:
    key_params, key_data = jax.random.split(key)
    params = init_params(config, key_params)
    state = {"params": params, "opt_state": optimizer(config).init(params)}
    batch = {"tokens": jax.random.randint(key_data, (config.batch, config.seq + 1), 0, config.vocab)}
    return state, batch


def step(config: Config, remat: Any = None) -> Callable[..., Any]:
    def loss_fn(params, batch):
        logits, balance = forward(config, params, batch["tokens"][:, :-1], remat)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
        return losses.mean() + config.balance_weight * balance

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = optimizer(config).update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    return train_step


def workload(config: Config | None = None, *, remat: Any = None, **sizes: Any) -> Workload:
    config = replace(config or Config(), **sizes)
    args = jax.eval_shape(lambda: init_args(config, jax.random.key(0)))
    return Workload(fun=step(config, remat), args=args, jit_options={"donate_argnums": (0,)}, name="moe")
