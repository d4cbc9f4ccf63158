"""One SGD step on a hidden layer and an LM head, tokens flattened to rows, optax's own cross entropy.

Source: jax-ml/jax#35906, AI-Hypercomputer/maxtext#2242 (vocabulary tiling), HomebrewML/Olmax#25 (chunked cross
entropy).
Wanted: the step within 60 % of the bytes; by hand 8 chunks of rows (1.33 of the FLOPs, about 1.4 of the time).
Expected: chunk=True: a few parts, the multiplications of the plain step. (Found once: 256 parts, the whole loop run
twice, predicted step time x 31.)
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax


def case(size):
    rows, width, words, chunk = {"big": (8192, 2048, 128256, 1024), "small": (64, 8, 96, 16)}[size]
    dtype = jnp.bfloat16 if size == "big" else jnp.float32

    def losses(params, x, labels):
        w, v = params
        logits = (jax.nn.gelu(x @ v) @ w.T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    def plain(params, x, labels):
        return losses(params, x, labels).mean()

    def chunked(params, x, labels):
        part = jax.checkpoint(lambda p: losses(params, *p).sum())
        return lax.map(part, (x.reshape(-1, chunk, width), labels.reshape(-1, chunk))).sum() / rows

    def make(loss):
        def step(params, x, labels):
            value, grads = jax.value_and_grad(loss)(params, x, labels)
            return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), value

        return step

    params = jax.ShapeDtypeStruct((words, width), dtype), jax.ShapeDtypeStruct((width, width), dtype)
    x, labels = jax.ShapeDtypeStruct((rows, width), dtype), jax.ShapeDtypeStruct((rows,), jnp.int32)
    if size == "small":
        k = jax.random.split(jax.random.key(0), 4)
        params = tuple(jax.random.normal(k[i], p.shape) / width**0.5 for i, p in enumerate(params))
        x, labels = jax.random.normal(k[2], x.shape), jax.random.randint(k[3], (rows,), 0, words)
    return {
        "fun": make(plain),
        "args": (params, x, labels),
        "jit": {"donate_argnums": (0,)},
        "chunk": True,
        "hand": {"checkpointed chunks": make(chunked)},
    }
