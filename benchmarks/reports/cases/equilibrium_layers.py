"""Deep equilibrium layers: a fixed point by a while loop, its gradient by another one (custom_vjp).

Source: google/jaxopt#426 and pull request #83 (DEQ), jax-md/jax-md#158 (memory of explicit against implicit gradients).
Wanted: constant memory in the iterations, which the implicit gradient gives; the fixed points are all that is kept.
Expected: the planner does not run a solver again to save its result as if it took one iteration, or says what it costs.
"""

import jax
import jax.numpy as jnp
from jax import lax


def cell(p, z, x):
    return jnp.tanh(z @ p["z"] + x @ p["x"] + p["b"])


def solve(f, z, tolerance, most):
    def going(c):
        i, z, old = c
        return (i < most) & (jnp.max(jnp.abs(z - old)) > tolerance)

    return lax.while_loop(going, lambda c: (c[0] + 1, f(c[1]), c[1]), (1, f(z), z))[1]


@jax.custom_vjp
def equilibrium(p, x):
    return solve(lambda z: cell(p, z, x), jnp.zeros_like(x), 1e-4, 60)


def forward(p, x):
    z = equilibrium(p, x)
    return z, (p, x, z)


def backward(kept, dz):
    p, x, z = kept
    _, pull_z = jax.vjp(lambda z: cell(p, z, x), z)
    u = solve(lambda u: dz + pull_z(u)[0], dz, 1e-4, 60)
    return jax.vjp(lambda p, x: cell(p, z, x), p, x)[1](u)


equilibrium.defvjp(forward, backward)


def case(size):
    rows, width, layers = {"big": (65536, 512, 8), "small": (32, 8, 3)}[size]

    def make(wrap):
        def loss(params, x, y):
            for p in params:
                x = x + wrap(lambda p, x: equilibrium(p, x))(p, x) @ p["o"]
            return jnp.mean((x - y) ** 2)

        def step(params, x, y):
            value, grads = jax.value_and_grad(loss)(params, x, y)
            return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), value

        return step

    shape = {"z": (width, width), "x": (width, width), "b": (width,), "o": (width, width)}
    f32 = jnp.float32
    params = [{k: jax.ShapeDtypeStruct(s, f32) for k, s in shape.items()} for _ in range(layers)]
    x = jax.ShapeDtypeStruct((rows, width), f32)
    if size == "small":
        key = iter(jax.random.split(jax.random.key(0), 50))
        params = jax.tree.map(lambda s: 0.3 * jax.random.normal(next(key), s.shape) / s.shape[0] ** 0.5, params)
        x = jax.random.normal(next(key), x.shape)
    return {
        "fun": make(lambda f: f),
        "args": (params, x, x),
        "jit": {"donate_argnums": (0,)},
        "hand": {"checkpoint(layer)": make(jax.checkpoint)},
    }
