"""One job of ``ray_faults``: a small training whose steps are a ``jaxtensile.job``, and which counts what it does.

    python -m benchmarks.concurrent.ray_job LAYERS STEPS FLOOR FILE

A line per start and per end goes to FILE. The loss of its last step is that of the same training with ``jax.jit``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxtensile

WIDTH, ROWS = 128, 2048


def loss(weights, x, y):
    for w in weights:
        x = x + jax.nn.gelu(x @ w)
    return jnp.mean((x - y) ** 2)


def train_step(weights, x, y):
    value, grads = jax.value_and_grad(loss)(weights, x, y)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def start(layers: int):
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH for key in jax.random.split(jax.random.key(0), layers)]
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    return weights, x, jnp.sin(3 * x)


def main() -> None:
    layers, steps, floor, file = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])

    def tell(what: str) -> None:
        with file.open("a") as told:
            told.write(f"{time.time():.3f} {what} {os.getpid()}\n")

    tell("start")
    state, x, y = start(layers)
    with jaxtensile.job(least=floor) as job:
        step = jaxtensile.jit(train_step, job=job, donate_argnums=0)
        for _ in range(steps):
            state, value = step(state, x, y)
            time.sleep(0.02)  # a loader of data: jobs share two cores
    plain, state = jax.jit(train_step, donate_argnums=0), start(layers)[0]
    for _ in range(steps):
        state, alone = plain(state, x, y)
    assert abs(float(alone) - float(value)) < 1e-5, (float(alone), float(value))
    tell("end")
    print(f"loss {float(value):.5f} after {steps} steps, {job.switches} switches", flush=True)


if __name__ == "__main__":
    main()
