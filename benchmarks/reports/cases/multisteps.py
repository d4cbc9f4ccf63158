"""Gradient accumulation by optax.MultiSteps around clipping and AdamW: what does it really need?

Source: google-deepmind/optax#472, #320, #528 (out of memory with MultiSteps, even with k=1).
Wanted: to know the bytes before running; to have the accumulator and the moments out of the way.
Expected: an estimate within a few per cent; a budget is met with offload_state, or the error is honest.
"""

import jax
import jax.numpy as jnp
import optax


def case(size):
    width, layers, rows = {"big": (4096, 6, 4096), "small": (32, 3, 64)}[size]
    optimizer = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), every_k_schedule=4)

    def loss(params, x, y):
        for w1, w2 in params:
            x = x + jax.nn.gelu(x @ w1) @ w2
        return jnp.mean((x - y) ** 2)

    def make(loss):
        def step(params, state, x, y):
            value, grads = jax.value_and_grad(loss)(params, x, y)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        return step

    params = [
        (jax.ShapeDtypeStruct((width, 4 * width), jnp.float32), jax.ShapeDtypeStruct((4 * width, width), jnp.float32))
        for _ in range(layers)
    ]
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    if size == "small":
        key = iter(jax.random.split(jax.random.key(0), 20))
        params = jax.tree.map(lambda s: jax.random.normal(next(key), s.shape) / s.shape[0] ** 0.5, params)
        x = jax.random.normal(next(key), x.shape)
        state = optimizer.init(params)
        state = state._replace(mini_step=jnp.int32(3))
    else:
        state = jax.eval_shape(optimizer.init, params)
    return {
        "fun": make(loss),
        "args": (params, state, x, x),
        "jit": {"donate_argnums": (0, 1)},
        "hand": {"checkpoint(loss)": make(jax.checkpoint(loss))},
    }
