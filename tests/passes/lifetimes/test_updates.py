"""What updates in place store and what they compute as they write: the model's bytes beside the compiler's."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxtensile

H200 = "nvidia-h200"
ROWS, TABLE = jax.ShapeDtypeStruct((8192, 128), jnp.float32), jax.ShapeDtypeStruct((50_000, 128), jnp.float32)
PLACES = jax.ShapeDtypeStruct((8192,), jnp.int32)
WIDE = jax.ShapeDtypeStruct((128, 50_000), jnp.float32), jax.ShapeDtypeStruct((128, 8192), jnp.float32)


def messages(w, x, edges):
    return jax.ops.segment_sum(jax.nn.relu(x @ w)[edges[:, 0]], edges[:, 1], 8192)


def bag(table, rows):
    """The gradient of a mean over rows of a table."""
    return jax.grad(lambda t: jnp.mean(t[rows].mean(1) ** 2))(table)


CASES = {
    "a slice": (lambda t, x: lax.dynamic_update_slice(t, jnp.tanh(x) * 2, (5, 0)), TABLE, ROWS),
    "a slice put together": (
        lambda t, x: lax.dynamic_update_slice(t, jnp.concatenate([x, x * 2]), (5, 0)),
        TABLE,
        ROWS,
    ),
    "a product": (lambda t, x: lax.dynamic_update_slice(t, x @ x.T @ x, (5, 0)), TABLE, ROWS),
    "a slice of itself, moved": (
        lambda t: lax.dynamic_update_slice(t, jnp.tanh(t[7:8199]), (5, 0)),
        TABLE,
    ),
    "a slice of itself, where it was": (
        lambda t, i: lax.dynamic_update_slice(t, jnp.tanh(lax.dynamic_slice(t, (i, 0), (8192, 128))) * 2, (i, 0)),
        TABLE,
        jax.ShapeDtypeStruct((), jnp.int32),
    ),
    "rows": (lambda t, i, x: t.at[i].set(jnp.tanh(x)), TABLE, PLACES, ROWS),
    "rows added up": (lambda t, i, x: t.at[i].add(jnp.tanh(x) * 2), TABLE, PLACES, ROWS),
    "rows of itself": (lambda t, i: t.at[i].add(jnp.tanh(t[i + 1])), TABLE, PLACES),
    "turned rows": (lambda t, i, x: t.at[i].add(x.T * 2), TABLE, PLACES, WIDE[1]),
    "columns": (lambda t, i, x: t.at[:, i].add(jnp.tanh(x)), WIDE[0], PLACES, WIDE[1]),
}
ON_A_GPU = {
    "rows that two tables get": (
        lambda t, u, i, x: (t.at[i].add(x * 2), u.at[i].add(x * 2)),
        TABLE,
        TABLE,
        PLACES,
        ROWS,
    ),
    "messages along edges": (
        messages,
        jax.ShapeDtypeStruct((64, 64), jnp.float32),
        jax.ShapeDtypeStruct((8192, 64), jnp.float32),
        jax.ShapeDtypeStruct((100_000, 2), jnp.int32),
    ),
    "the gradient of a table": (bag, TABLE, jax.ShapeDtypeStruct((4096, 16), jnp.int32)),
}


def test_on_a_cpu():
    """Slices are computed as they are written, rows before."""
    for name, (fun, *args) in CASES.items():
        exact, static = (jaxtensile.estimate(jax.jit(fun), *args, target="cpu", exact=e) for e in (True, False))
        assert static.device == pytest.approx(exact.device, rel=0.01), name


@pytest.mark.cuda_aot
@pytest.mark.parametrize("name", [*ON_A_GPU, "rows added up", "rows of itself", "columns", "a slice put together"])
def test_on_a_gpu(name):
    fun, *args = (CASES | ON_A_GPU)[name]
    exact, static = (jaxtensile.estimate(jax.jit(fun), *args, target=H200, exact=e) for e in (True, False))
    assert static.device == pytest.approx(exact.device, rel=0.01)


def test_what_is_far_away_counts_as_stored():
    """The way back from an update is followed for a while: its array may be at the end of it."""

    def chain(count):
        def fun(t, x):
            for k in range(count):
                x = jnp.tanh(x) + k
            return lax.dynamic_update_slice(t, x, (5, 0))

        return jaxtensile.estimate(jax.jit(fun), TABLE, ROWS, target="cpu").temp

    assert chain(10) == 0 and chain(50) == 8192 * 128 * 4
