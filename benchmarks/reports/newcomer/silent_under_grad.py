"""The beginner's place for the decorator is the loss: the budget is then ignored without a word; so under vmap, jit."""

import os
import warnings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
warnings.simplefilter("error")
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import jaxtensile  # noqa: E402


@jaxtensile.jit(budget="1KiB")  # nothing here can fit
def loss(ws, x):
    for w in ws:
        x = x + jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


ws, x = [jnp.ones((128, 128))] * 8, jnp.ones((2048, 128))
print(
    "grad:",
    jax.grad(loss)(ws, x)[0].shape,
    "jit:",
    jax.jit(loss)(ws, x),
    "vmap:",
    jax.vmap(loss, (None, 0))(ws, x[None]),
)
try:
    loss(ws, x)
except jaxtensile.BudgetError as error:
    print("alone:", error)
