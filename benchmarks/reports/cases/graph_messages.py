"""A graph network: messages on two million edges, summed where they arrive, four layers.

Source: google-deepmind/graph_nets#81 (a small network on a graph of many edges runs out of memory).
Wanted: to fit without code around every layer; by hand jax.checkpoint of each.
Expected: recomputation that does not run the sums again.
"""

import jax
import jax.numpy as jnp


def case(size):
    nodes, edges, width, layers = {"big": (131072, 2097152, 128, 4), "small": (10, 24, 6, 2)}[size]

    def layer(p, h, senders, receivers):
        messages = jax.nn.silu(jnp.concatenate([h[senders], h[receivers]], -1) @ p["first"]) @ p["second"]
        summed = jax.ops.segment_sum(messages, receivers, nodes)
        return h + jax.nn.silu(jnp.concatenate([h, summed], -1) @ p["update"])

    def make(wrap):
        def step(params, h, senders, receivers, target):
            def loss(params):
                x = h
                for p in params:
                    x = wrap(lambda p, x: layer(p, x, senders, receivers))(p, x)
                return jnp.mean((x - target) ** 2)

            value, grads = jax.value_and_grad(loss)(params)
            return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), value

        return step

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    shapes = {"first": f32(2 * width, width), "second": f32(width, width), "update": f32(2 * width, width)}
    ends = jax.ShapeDtypeStruct((edges,), jnp.int32)
    args = ([dict(shapes) for _ in range(layers)], f32(nodes, width), ends, ends, f32(nodes, width))
    if size == "small":
        key = iter(jax.random.split(jax.random.key(0), 50))
        args = jax.tree.map(
            lambda s: (
                jax.random.randint(next(key), s.shape, 0, nodes)
                if s.dtype == jnp.int32
                else 0.3 * jax.random.normal(next(key), s.shape)
            ),
            args,
        )
    return {
        "fun": make(lambda f: f),
        "args": args,
        "jit": {"donate_argnums": (0,)},
        "hand": {"checkpoint(layer)": make(jax.checkpoint)},
    }
