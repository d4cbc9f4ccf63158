"""Budgets in a config file: no option of ``jaxtensile.jit`` is in this code, all are in budgets.toml.

    python examples/budgets.py
    jaxtensile config --config examples/budgets.toml      # is it right, and what does it say

A ``jaxtensile.toml`` in the working directory, or above it, needs no ``config=``.
"""

from pathlib import Path

import jax
import jax.numpy as jnp

import jaxtensile
from jaxtensile.units import format_bytes

CONFIG = Path(__file__).with_suffix(".toml")
WIDTH, LAYERS, ROWS = 256, 6, 2048


def loss(weights, x):
    for w in weights:
        x = x + jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def train_step(weights, x):
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))


def train_step_in_parts(weights, x):
    return train_step(weights, x)


def evaluate(weights, x):
    return loss(weights, x)


weights = [0.05 * jax.random.normal(key, (WIDTH, WIDTH)) for key in jax.random.split(jax.random.key(0), LAYERS)]
x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))

for fun in (train_step, train_step_in_parts, evaluate):
    report = jaxtensile.jit(fun, config=CONFIG).plan(weights, x)
    plain, planned = format_bytes(report.baseline.device), format_bytes(report.compiled.device)
    print(f"{fun.__name__}: {plain} as it is, {planned} within its budget of {format_bytes(report.budget)}")
    # What print(report) says of where its options are from.
    print(*(line for line in str(report).splitlines() if ".toml" in line or "by default" in line), sep="\n")

step = jaxtensile.jit(train_step, budget="64MiB", config=CONFIG)  # what is in the code wins
print(f"train_step with budget='64MiB' in the code: {format_bytes(step.plan(weights, x).budget)}")
