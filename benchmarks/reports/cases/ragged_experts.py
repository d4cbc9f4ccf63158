"""Mixture of experts with jax.lax.ragged_dot over tokens sorted by expert, six layers, bf16.

Source: marin-community/marin#5394 (temporaries 14.97 → 54 GiB when ragged_dot began to lower densely on GPUs).
Wanted: to see that before running (a memory check in CI), and to fit again.
Expected: an estimate that knows what XLA makes of ragged_dot; expert products count as products, so that they are not
computed again for free.
"""

import jax
import jax.numpy as jnp


def route(p, x, experts, top):
    scores = jax.nn.softmax((x @ p["router"]).astype(jnp.float32), -1)
    weight, choice = jax.lax.top_k(scores, top)
    order = jnp.argsort(choice.reshape(-1))
    sizes = jnp.bincount(choice.reshape(-1), length=experts).astype(jnp.int32)
    return weight.reshape(-1)[order].astype(x.dtype), order // top, sizes


def layer(p, x, experts, top):
    h = x * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6).astype(x.dtype)
    weight, token, sizes = route(p, h, experts, top)
    rows = h[token]
    gate = jax.nn.silu(jax.lax.ragged_dot(rows, p["gate"], sizes)) * jax.lax.ragged_dot(rows, p["up"], sizes)
    out = jax.lax.ragged_dot(gate, p["down"], sizes) * weight[:, None]
    return x + jax.ops.segment_sum(out, token, num_segments=len(x))


def case(size):
    tokens, width, hidden, experts, top, layers = {"big": (8192, 1024, 2048, 16, 2, 6), "small": (24, 8, 12, 4, 2, 2)}[
        size
    ]
    dtype = jnp.bfloat16 if size == "big" else jnp.float32
    shape = {
        "router": (width, experts),
        "gate": (experts, width, hidden),
        "up": (experts, width, hidden),
        "down": (experts, hidden, width),
    }
    params = [{k: jax.ShapeDtypeStruct(s, dtype) for k, s in shape.items()} for _ in range(layers)]
    x = jax.ShapeDtypeStruct((tokens, width), dtype)
    if size == "small":
        key = iter(jax.random.split(jax.random.key(0), 50))
        params = jax.tree.map(lambda s: jax.random.normal(next(key), s.shape) / s.shape[-2] ** 0.5, params)
        x = jax.random.normal(next(key), x.shape)

    def make(wrap):
        def loss(params, x):
            for p in params:
                x = wrap(lambda p, x: layer(p, x, experts, top))(p, x)
            return jnp.mean(x.astype(jnp.float32) ** 2)

        def step(params, x):
            value, grads = jax.value_and_grad(loss)(params, x)
            return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), value

        return step

    return {
        "fun": make(lambda f: f),
        "args": (params, x),
        "jit": {"donate_argnums": (0,)},
        "hand": {"checkpoint(layer)": make(jax.checkpoint)},
    }
