"""Hyper-parameter search: eight trainings share one device that has room for three of them as they are.

    python examples/search.py                             as threads of this process
    jaxtensile run --config examples/search.toml          as processes

Each training is a job. In one process jobs take turns with their steps, so that the device holds the states of all and
the temporaries of one; of processes it holds both. Either way a training that does not fit beside the others as it is
runs a plan that recomputes more, or waits; when others end it grows. In threads the worse half of the trainings ends
at each third (successive halving without a barrier: Li et al. 2020), so that the rest has more and more room.
"""

import argparse
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxtensile
from jaxtensile.units import format_bytes, parse_bytes

CONFIG = Path(__file__).with_suffix(".toml")
CAPACITY = "45MiB"  # as in that file
RATES = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001, 0.00003)
LAYERS, WIDTH, ROWS = 6, 256, 512
BEGAN = time.monotonic()


# ---- what is trained --------------------------------------------------------------------------


def loss(params, x, y):
    for w in params:
        x = x + jax.nn.gelu(x @ w)
    return jnp.mean((x - y) ** 2)


def train_step(state, x, y, rate):
    """One step of Adam. The rate is an argument: all trainings run one program, and share its plans."""
    params, mean, square, steps = state
    value, grads = jax.value_and_grad(loss)(params, x, y)
    steps = steps + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, square, grads)
    rate = rate * jnp.sqrt(1 - 0.999**steps) / (1 - 0.9**steps)
    params = jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), params, mean, square)
    return (params, mean, square, steps), value


def start():
    params = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH for key in jax.random.split(jax.random.key(0), LAYERS)]
    return params, jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params), jnp.int32(0)


def data():
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    return x, jnp.sin(3 * x)


# ---- the search -------------------------------------------------------------------------------


def tell(who, text):
    print(f"{time.monotonic() - BEGAN:6.1f}s  {who:<12} {text}", flush=True)


def train(job, rate, steps, enough=lambda step, value: False):
    """The losses of one training, until it has had enough."""
    step = jaxtensile.jit(train_step, job=job, donate_argnums=0)
    state, (x, y), losses, budget = start(), data(), [], 0
    for k in range(1, steps + 1):
        state, value = step(state, x, y, rate)
        losses.append(float(value))
        if format_bytes(job.budget) != format_bytes(budget):
            how = "begins with" if not budget else "shrinks to" if job.budget < budget else "grows to"
            budget = job.budget
            tell(job.name, f"{how} {format_bytes(budget)}, plan {job.rung + 1} of {len(job.ladder)}")
        if enough(k, losses[-1]):
            tell(job.name, f"ends at step {k}: loss {losses[-1]:.4f} is in the worse half")
            break
    else:
        tell(job.name, f"is done: loss {losses[-1]:.4f}")
    return losses


class Halving:
    """At each milestone a training goes on if it is in the better half of those that have come so far."""

    def __init__(self, milestones):
        self.lock, self.seen = threading.Lock(), {m: [] for m in milestones}

    def enough(self, step, value):
        if step not in self.seen:
            return False
        with self.lock:
            seen = self.seen[step]
            seen.append(value)
            return sorted(seen).index(value) > len(seen) // 2


def search(steps, capacity):
    """Eight threads; returns the losses by rate."""
    config = {"device": {"capacity": capacity, "reserve": 0}}
    halving, losses, errors = Halving((steps // 3, 2 * steps // 3)), {}, []

    def work(rate):
        try:
            with jaxtensile.job(f"rate {rate:g}", config=config) as job:
                losses[rate] = train(job, rate, steps, halving.enough)
        except jaxtensile.JaxtensileError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rate,)) for rate in RATES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise SystemExit(f"search: {error}")
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=90, help="of each training (default 90)")
    parser.add_argument("--capacity", default=CAPACITY, help=f"of the device (default {CAPACITY})")
    parser.add_argument("--rate", type=float, help="one training with this rate: a job of search.toml")
    options = parser.parse_args()
    if options.rate is not None:
        with jaxtensile.job(config=CONFIG) as job:  # its name and its coordinator are those that `run` gave it
            train(job, options.rate, options.steps)
        return

    plain = jaxtensile.jit(train_step, donate_argnums=0).plan(start(), *data(), RATES[0]).baseline.device
    room = parse_bytes(options.capacity)
    print(f"one training as it is: {format_bytes(plain)}; the device: {format_bytes(room)}, room for {room // plain}")
    losses = search(options.steps, options.capacity)

    print("\n    rate  steps      loss")
    for rate, values in sorted(losses.items(), key=lambda item: (-len(item[1]), item[1][-1])):
        print(f"{rate:8g}  {len(values):5}  {values[-1]:8.4f}")
    best = min(losses, key=lambda rate: (-len(losses[rate]), losses[rate][-1]))
    run, state, alone = jax.jit(train_step, donate_argnums=0), start(), []
    for _ in losses[best]:
        state, value = run(state, *data(), best)
        alone.append(float(value))
    difference = max(abs(a - b) for a, b in zip(alone, losses[best], strict=True))
    print(f"best: rate {best:g}; trained again alone, with jax.jit, no loss differs by more than {difference:.1e}")


if __name__ == "__main__":
    main()
