"""Two towers and the similarities of all pairs of a batch, bf16, twelve blocks each.

Source: mlfoundations/open_clip#229 and #85 (large batches of pairs do not fit; checkpoints of towers).
Wanted: to fit at a large batch; by hand jax.checkpoint of each block.
Expected: recomputation of blocks, the matrix of pairs kept.
"""

import jax
import jax.numpy as jnp


def case(size):
    batch, width, layers, out = {"big": (16384, 1024, 12, 512), "small": (8, 6, 2, 4)}[size]
    dtype = jnp.bfloat16 if size == "big" else jnp.float32

    def block(a, b, x):
        return x + jax.nn.gelu(x @ a) @ b

    def make(wrap):
        def tower(params, x):
            *blocks, last = params
            for a, b in blocks:
                x = wrap(block)(a, b, x)
            z = x @ last
            return z / jnp.linalg.norm(z.astype(jnp.float32), axis=-1, keepdims=True).astype(z.dtype)

        def step(params, x, y):
            def loss(params):
                scores = 20.0 * (tower(params[0], x) @ tower(params[1], y).T).astype(jnp.float32)
                own = jnp.arange(batch)
                return -sum(jax.nn.log_softmax(scores, axis)[own, own].mean() for axis in (0, 1)) / 2

            value, grads = jax.value_and_grad(loss)(params)
            return jax.tree.map(lambda p, g: p - (1e-3 * g).astype(p.dtype), params, grads), value

        return step

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    def tower_params():
        return [*((array(width, 4 * width), array(4 * width, width)) for _ in range(layers)), array(width, out)]

    args = ((tower_params(), tower_params()), array(batch, width), array(batch, width))
    if size == "small":
        key = iter(jax.random.split(jax.random.key(0), 50))
        args = jax.tree.map(lambda s: 0.3 * jax.random.normal(next(key), s.shape), args)
    return {
        "fun": make(lambda f: f),
        "args": args,
        "jit": {"donate_argnums": (0,)},
        "hand": {"checkpoint(block)": make(jax.checkpoint)},
    }
