"""A step of Adam on a few layers, whose state is most of its bytes."""

import jax
import jax.numpy as jnp

N, LAYERS = 512, 3


def loss(weights, x):
    for w in weights:
        x = jax.nn.gelu(x @ w)
    return (x * x).mean()


def train_step(state, x, *, rate=0.01):
    value, grads = jax.value_and_grad(loss)(state["w"], x)
    count = state["count"] + 1
    scale = 1 - 0.9 ** count.astype(jnp.float32)
    m = [0.9 * m + 0.1 * g for m, g in zip(state["m"], grads, strict=True)]
    v = [0.9 * v + 0.1 * g * g for v, g in zip(state["v"], grads, strict=True)]
    w = [w - rate * (a / scale) / (jnp.sqrt(b / scale) + 1e-3) for w, a, b in zip(state["w"], m, v, strict=True)]
    ema = [0.9 * e + 0.1 * a for e, a in zip(state["ema"], w, strict=True)]
    return {"ema": ema, "m": m, "v": v, "w": w, "count": count}, value


def init(seed=0):
    keys = jax.random.split(jax.random.key(seed), LAYERS)
    w = [jax.random.normal(k, (N, N)) / N**0.5 for k in keys]
    zeros = [jnp.zeros((N, N)) for _ in keys]
    return {"ema": [a + 0 for a in w], "m": zeros, "v": [z + 0 for z in zeros], "w": w, "count": jnp.zeros((), int)}


def batch(seed):
    return jax.random.normal(jax.random.key(100 + seed), (64, N))


def where(state):
    return {name: jax.tree.leaves(part)[0].sharding.memory_kind for name, part in state.items()}
