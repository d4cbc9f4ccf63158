"""LSTM language model, the "large" of Zaremba et al. (arXiv 1409.2329): two layers of 1500 on Penn Treebank, 66 M.

One ``lax.scan`` over time with both layers in its body, unrolled over 512 steps instead of the published 35. Dropout on
the non-recurrent connections, hidden state carried from batch to batch, float32, SGD with global-norm clipping.
The loss is taken of all outputs at once, or with ``loss_in_loop`` step by step, so that no logits of all steps exist.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.workloads.remat import checkpointed
from jaxtensile.program.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Config:
    batch: int = 64
    seq: int = 512
    layers: int = 2
    hidden: int = 1500
    vocab: int = 10000
    dropout: float = 0.65
    init_scale: float = 0.04
    learning_rate: float = 1.0
    clip: float = 10.0
    dtype: str = "float32"
    loss_in_loop: bool = False

    @classmethod
    def tiny(cls) -> "Config":
        return cls(batch=2, seq=12, hidden=16, vocab=30, dropout=0.1, init_scale=0.2)


def init_params(config: Config, key: jax.Array) -> Any:
    """Uniform in ±init_scale; the four gates of a layer are one matrix over [input, hidden]."""
    key_embed, key_head, *layer_keys = jax.random.split(key, 2 + config.layers)
    hidden = config.hidden

    def uniform(key, *shape):
        return jax.random.uniform(key, shape, minval=-config.init_scale, maxval=config.init_scale)

    return {
        "embed": uniform(key_embed, config.vocab, hidden),
        "layers": [{"weight": uniform(k, 2 * hidden, 4 * hidden), "bias": jnp.zeros(4 * hidden)} for k in layer_keys],
        "head": {"weight": uniform(key_head, hidden, config.vocab), "bias": jnp.zeros(config.vocab)},
    }


def dropout(key, rate, x):
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def cell(p, carry, x):
    """One LSTM step: gates input, forget, candidate, output."""
    hidden, memory = carry
    gates = jnp.concatenate([x, hidden], axis=-1) @ p["weight"].astype(x.dtype) + p["bias"].astype(x.dtype)
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(memory), memory


def head(params, outputs):
    weight, bias = (params["head"][name].astype(outputs.dtype) for name in ("weight", "bias"))
    return (outputs @ weight + bias).astype(jnp.float32)


def unroll(config: Config, params, carry, tokens, key, remat=None, targets=None):
    """Runs all layers over ``tokens`` [batch, seq]: the carry and the top layer's outputs, [seq, batch, hidden].

    With ``targets`` [batch, seq] the loss of each step, [seq], takes the place of the outputs.
    """

    def body(carries, inputs):
        time, token, target = inputs
        keys = jax.random.split(jax.random.fold_in(key, time), config.layers + 1)
        x = params["embed"].astype(config.dtype)[token]
        after = []
        for p, layer_key, before in zip(params["layers"], keys[:-1], carries, strict=True):
            after.append(cell(p, before, dropout(layer_key, config.dropout, x)))
            x = after[-1][0]
        x = dropout(keys[-1], config.dropout, x)
        if target is not None:
            x = optax.softmax_cross_entropy_with_integer_labels(head(params, x), target).mean()
        return after, x

    body = checkpointed(body, remat, stream=0, loop=True)
    return jax.lax.scan(body, carry, (jnp.arange(config.seq), tokens.T, None if targets is None else targets.T))


def forward(config: Config, params, carry, tokens, key, remat=None):
    carry, outputs = unroll(config, params, carry, tokens, key, remat)
    return carry, head(params, outputs)


def optimizer(config: Config):
    return optax.chain(optax.clip_by_global_norm(config.clip), optax.sgd(config.learning_rate))


def init_args(config: Config, key: jax.Array) -> tuple[Any, ...]:
    key_params, key_train, key_data = jax.random.split(key, 3)
    params = init_params(config, key_params)
    shape = (config.batch, config.hidden)
    state = {
        "params": params,
        "opt_state": optimizer(config).init(params),
        "carry": [(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)) for _ in range(config.layers)],
        "key": key_train,
    }
    batch = {"tokens": jax.random.randint(key_data, (config.batch, config.seq + 1), 0, config.vocab)}
    return state, batch


def step(config: Config, remat: Any = None) -> Callable[..., Any]:
    def loss_fn(params, carry, tokens, key):
        if config.loss_in_loop:
            carry, losses = unroll(config, params, carry, tokens[:, :-1], key, remat, tokens[:, 1:])
            return losses.mean(), carry
        carry, logits = forward(config, params, carry, tokens[:, :-1], key, remat)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:].T).mean(), carry

    def train_step(state, batch):
        next_key, key = jax.random.split(state["key"])
        (loss, carry), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            state["params"], state["carry"], batch["tokens"], key
        )
        updates, opt_state = optimizer(config).update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "carry": carry, "key": next_key}, loss

    return train_step


def workload(config: Config | None = None, *, remat: Any = None, **sizes: Any) -> Workload:
    config = replace(config or Config(), **sizes)
    args = jax.eval_shape(lambda: init_args(config, jax.random.key(0)))
    return Workload(fun=step(config, remat), args=args, jit_options={"donate_argnums": (0,)}, name="lstm")
