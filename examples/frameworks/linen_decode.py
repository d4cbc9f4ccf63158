"""Flax linen: tokens one after the other from a decoder whose layers are scanned, with caches that are given away.

jaxtensile exec --budget 70MiB -- python examples/frameworks/linen_decode.py
"""

import argparse
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x, _):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, decode=True)(y, y)
        y = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y), None


class Decoder(nn.Module):
    layers: int
    width: int
    heads: int = 4

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, self.width)(tokens)
        scanned = nn.scan(
            Block,
            variable_axes={"params": 0, "cache": 0},
            split_rngs={"params": True},
            length=self.layers,
        )
        x, _ = scanned(self.heads)(x, None)
        return nn.Dense(256)(nn.LayerNorm()(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    model = Decoder(options.layers, options.width)
    key = jax.random.key(0)
    params = jax.jit(model.init)(key, jnp.zeros((options.batch, 1), jnp.int32))["params"]
    whole = jax.eval_shape(model.init, key, jax.ShapeDtypeStruct((options.batch, options.context), jnp.int32))
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), whole["cache"])

    @partial(jax.jit, donate_argnums=1)
    def next_token(params, cache, tokens):
        logits, changed = model.apply({"params": params, "cache": cache}, tokens, mutable=["cache"])
        best = jax.nn.log_softmax(logits[:, -1])
        return best.argmax(-1)[:, None], best.max(-1).mean(), changed["cache"]

    tokens = jnp.asarray(np.arange(options.batch)[:, None] % 256)
    for step in range(options.steps):
        tokens, score, cache = next_token(params, cache, tokens)
        print(f"step {step} first token {tokens[0, 0]} mean log probability {score:.6f}")


if __name__ == "__main__":
    main()
