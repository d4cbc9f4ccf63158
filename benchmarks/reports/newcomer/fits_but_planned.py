"""One step, one budget, two outcomes: .plan() first says 'as it is', a call first plans and recomputes.

The gradient is not returned, XLA drops it: 6.5 MiB of a budget of 14 MiB. After a call the report says 'fits its budget
of 14.00MiB: 6.50MiB, down from 6.50MiB', lists 'recomputed' values and a price, and its own prediction (20.50MiB) is
over the budget. The static estimate is 25.50MiB, "between 23.58MiB and 30.54MiB": dead code is counted.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAXTENSILE_PLAN_CACHE"] = "off"
import jax
import jax.numpy as jnp

import jaxtensile


def loss(ws, x):
    for w in ws:
        x = x + jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def train_step(ws, x):
    value, grads = jax.value_and_grad(loss)(ws, x)
    return jax.tree.map(lambda a, b: a - 0.1 * b, ws, grads), value


def evaluate(ws, x):
    return train_step(ws, x)[1]


ws = [0.01 * jax.random.normal(jax.random.key(i), (128, 128)) for i in range(8)]
x = jax.random.normal(jax.random.key(9), (2048, 128))
print(jaxtensile.jit(evaluate, budget="14MiB").plan(ws, x), "\n")
step = jaxtensile.jit(evaluate, budget="14MiB")
step(ws, x)
print(step.plan(ws, x), "\n")
print(str(jaxtensile.estimate(evaluate, ws, x)).splitlines()[0])
