"""Random small JAX programs: a step over (batch, width) activations, layer by layer, with skips.

A program is data (``Program.layers``: names with numbers), so that a failing one prints as what
it is and shrinks layer by layer. Most layers end in a product, which leaves something to decide
about. Nothing in it turns a rounding difference into a large one:
branches and indices come from keys and numbers, not from activations.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax

BATCH, WIDTH = 128, 8


@dataclass(frozen=True)
class Layer:
    """One layer: ``name`` of a rule below, ``pick``: a number it may use to choose among things."""

    name: str
    pick: int


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-3)


def convolve(x, w):
    return lax.conv_general_dilated(x[:, None, :], w[:1, None, :3].astype(x.dtype), (1,), "SAME")[:, 0, :]


def attend(x):
    groups = x.reshape(-1, 16, WIDTH)
    return (jax.nn.softmax(groups @ groups.mT / WIDTH) @ groups).reshape(x.shape)


def rows(pick):
    return (jnp.arange(BATCH) * (2 * pick + 1) + pick) % BATCH


def columns(pick):
    return (jnp.arange(WIDTH // 2) * (2 * pick + 1) + pick) % WIDTH


@jax.custom_vjp
def gated(x):
    return x * jax.nn.sigmoid(x)


gated.defvjp(lambda x: (gated(x), (x, jax.nn.sigmoid(x))), lambda r, g: (g * (r[1] + r[0] * r[1] * (1 - r[1])),))


@jax.custom_jvp
def smooth(x):
    return jnp.log1p(jnp.exp(x))


smooth.defjvp(lambda p, t: (smooth(*p), t[0] * jax.nn.sigmoid(p[0])))

# x: the activation; w: this layer's weights; old: an earlier activation; n: the pick; key: this layer's key.
DENSE = {
    "dense": lambda x, w, old, n, key: x @ w.astype(x.dtype),
    "dense_bias": lambda x, w, old, n, key: x @ w.astype(x.dtype) + w[0].astype(x.dtype),
    "tanh": lambda x, w, old, n, key: jnp.tanh(x),
    "gelu": lambda x, w, old, n, key: jax.nn.gelu(x),
    "relu": lambda x, w, old, n, key: jax.nn.relu(x) - 0.1 * x,
    "sin_square": lambda x, w, old, n, key: jnp.sin(x) * x,
    "exp": lambda x, w, old, n, key: jnp.exp(-x * x),
    "skip": lambda x, w, old, n, key: x + old,
    "times": lambda x, w, old, n, key: x * jnp.tanh(old),
    "softmax": lambda x, w, old, n, key: jax.nn.softmax(x),
    "layer_norm": lambda x, w, old, n, key: layer_norm(x) * w[1].astype(x.dtype),
    "batch_mean": lambda x, w, old, n, key: x - x.mean(0),
    "attend": lambda x, w, old, n, key: attend(x),
    "outer": lambda x, w, old, n, key: (x.T @ old).T[: x.shape[0] % WIDTH + 1].sum(0) / BATCH + x,
    "custom_vjp": lambda x, w, old, n, key: gated(x),
    "custom_jvp": lambda x, w, old, n, key: smooth(x),
}
SHAPES = {
    "convolve": lambda x, w, old, n, key: convolve(x, w),
    "gather": lambda x, w, old, n, key: x[rows(n)] * 0.9,
    "take": lambda x, w, old, n, key: x.at[:, columns(n)].get() @ w[: WIDTH // 2].astype(x.dtype),
    "scatter_add": lambda x, w, old, n, key: x.at[rows(n)[: BATCH // 2]].add(jnp.sin(old[: BATCH // 2])),
    "scatter_set": lambda x, w, old, n, key: x.at[:, columns(n)].set(old[:, : WIDTH // 2]),
    "embed": lambda x, w, old, n, key: x + w.astype(x.dtype)[jax.random.randint(key, (BATCH,), 0, WIDTH)],
    "one_hot": lambda x, w, old, n, key: x * (1 + jax.nn.one_hot(rows(n) % WIDTH, WIDTH, dtype=x.dtype)),
    "sort": lambda x, w, old, n, key: jnp.sort(x, axis=-1),
    "cumsum": lambda x, w, old, n, key: jnp.cumsum(x, axis=1) / WIDTH,
    "halves": lambda x, w, old, n, key: jnp.concatenate(jnp.split(x, 2, axis=1)[::-1], axis=1),
    "pool": lambda x, w, old, n, key: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME"),
    "cast": lambda x, w, old, n, key: jnp.tanh(x.astype(jnp.bfloat16)).astype(x.dtype),
    "dropout": lambda x, w, old, n, key: jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0),
    "noise": lambda x, w, old, n, key: x + 0.1 * jax.random.normal(key, x.shape, x.dtype),
}
LOOPS = {
    "cond": lambda x, w, old, n, key: lax.cond(
        jax.random.bernoulli(key), lambda: jnp.tanh(x @ w.astype(x.dtype)), lambda: x + old
    ),
    "switch": lambda x, w, old, n, key: lax.switch(n % 3, [jnp.sin, jnp.tanh, lambda y: y * old], x),
    "fori": lambda x, w, old, n, key: lax.fori_loop(0, 2 + n % 3, lambda i, y: jnp.tanh(y @ w.astype(x.dtype)), x),
    "while": lambda x, w, old, n, key: (
        x + lax.while_loop(lambda y: y.sum() < 4, lambda y: y + 1, lax.stop_gradient(jnp.abs(x[:2]))).mean()
    ),
    "scan": lambda x, w, old, n, key: lax.scan(
        lambda c, v: (jnp.tanh(c * v + old), c.mean()), x, w[: 2 + n % 4].astype(x.dtype)
    )[0],
    "scan_stack": lambda x, w, old, n, key: lax.scan(lambda c, r: (c + r, jnp.sin(c) * r), w[0].astype(x.dtype), x)[1],
    "map": lambda x, w, old, n, key: lax.map(lambda r: jnp.tanh(r * w[n % WIDTH].astype(x.dtype)), x),
    "checkpoint": lambda x, w, old, n, key: jax.checkpoint(lambda y: jnp.tanh(y @ w.astype(x.dtype)) * y)(x),
    "inner_jit": lambda x, w, old, n, key: jax.jit(lambda y: jnp.tanh(y @ w.astype(x.dtype)))(x),
    "vmapped": lambda x, w, old, n, key: jax.vmap(lambda r: jnp.tanh(w.astype(x.dtype) @ r))(x),
}
RULES = DENSE | SHAPES | LOOPS


@dataclass(frozen=True)
class Program:
    """``layers`` in order; ``dtype`` of the activations; ``donate``: the state is donated."""

    layers: tuple[Layer, ...]
    dtype: str
    donate: bool

    def loss(self, weights, x, key):
        x = x.astype(self.dtype)
        history = [x]
        for i, layer in enumerate(self.layers):
            old = history[layer.pick % len(history)]
            x = RULES[layer.name](x, weights[i], old, layer.pick, jax.random.fold_in(key, i))
            if layer.pick % 4:
                x = jnp.tanh(x @ weights[i].astype(x.dtype))
            history.append(x)
        return (x.astype(jnp.float32) ** 2).mean(), {"last": x[0], "most": abs(x).max()}

    def step(self, state, x, rate):
        """One step with momentum; the key moves on, and what the optimizer counts is weakly typed."""
        key, now = jax.random.split(state["key"])
        (loss, aux), grads = jax.value_and_grad(self.loss, has_aux=True)(state["weights"], x, now)
        momentum = [0.9 * m + g for m, g in zip(state["momentum"], grads, strict=True)]
        weights = [w - rate * m for w, m in zip(state["weights"], momentum, strict=True)]
        return {"weights": weights, "momentum": momentum, "key": key, "count": state["count"] + 1}, loss, aux

    def args(self):
        """Fresh arguments of ``step``."""
        key = jax.random.key(len(self.layers))
        weights = [jax.random.normal(jax.random.fold_in(key, i), (WIDTH, WIDTH)) / 4 for i, _ in enumerate(self.layers)]
        momentum = [jnp.zeros_like(w) for w in weights]
        x = jax.random.normal(jax.random.fold_in(key, 99), (BATCH, WIDTH))
        return {"weights": weights, "momentum": momentum, "key": key, "count": 0}, x, 0.1


def programs(rules, *, layers=(8, 16), dtypes=("float32",)):
    """Programs made of the named rules and of the dense ones, half and half."""
    one = st.builds(
        Layer, st.one_of(st.sampled_from(sorted(rules)), st.sampled_from(sorted(DENSE))), st.integers(0, 30)
    )
    return st.builds(
        Program,
        st.lists(one, min_size=layers[0], max_size=layers[1]).map(tuple),
        st.sampled_from(dtypes),
        st.booleans(),
    )
