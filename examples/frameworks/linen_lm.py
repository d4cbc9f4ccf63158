"""Flax linen: a small transformer language model on the bytes of a text.

jaxtensile exec --budget 99MiB -- python examples/frameworks/linen_lm.py
"""

import argparse
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x, mask):
        width = x.shape[-1]
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
        y = nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x)))
        return x + nn.Dense(width)(y)


class Transformer(nn.Module):
    layers: int
    width: int
    heads: int = 4

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, self.width)(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            x = Block(self.heads)(x, mask)
        return nn.Dense(256)(nn.LayerNorm()(x))


@partial(jax.jit, donate_argnums=0)
def train_step(state, tokens):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    model = Transformer(options.layers, options.width)
    params = model.init(jax.random.key(0), jnp.zeros((1, options.context), jnp.int32))["params"]
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, 2, max(options.steps, 3))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
    text = np.frombuffer(b"what fits is run as it is; what does not is computed again. " * 64, np.uint8)
    random = np.random.default_rng(0)
    for step in range(options.steps):
        starts = random.integers(0, len(text) - options.context - 1, options.batch)
        batch = np.stack([text[start : start + options.context + 1] for start in starts]).astype(np.int32)
        state, loss = train_step(state, batch)
        print(f"step {step} loss {loss:.6f}")


if __name__ == "__main__":
    main()
