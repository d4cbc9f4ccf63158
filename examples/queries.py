"""Learning queries on SQLite data beside a long training: jobs that come and go, with batches of many sizes.

    python examples/queries.py

A database keeps its rows in SQLite and trains one large model on them all day. Now and then somebody asks for a small
model of some rows ("what does a house cost, of those in region 3"), which is there for a second and wants as many rows
in a step as the WHERE clause finds: dynamic workloads on one device, the setting of TENSILE (Zhang et al. 2021). Every
query is a job. While it is there the training runs a plan that recomputes more, from one step to the next; afterwards
it takes the memory back. Its losses stay those of a training that nobody has disturbed.
"""

import argparse
import sqlite3
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxtensile
from jaxtensile.units import format_bytes

CAPACITY = "17MiB"
FEATURES = ("area", "rooms", "age", "floor", "distance", "garden", "noise", "sun")
WIDTH, LAYERS, BATCH, MOST = 128, 8, 2048, 4096
BEGAN = time.monotonic()


# ---- the data ---------------------------------------------------------------------------------


def fill(houses):
    """A table of houses whose prices follow from what they are, otherwise in each of eight regions."""
    database = sqlite3.connect(":memory:", check_same_thread=False)
    random = np.random.default_rng(0)
    x = random.normal(size=(houses, len(FEATURES)))
    region = np.minimum(random.geometric(0.35, size=houses), 8)  # from many houses to few
    slopes = random.normal(size=(9, len(FEATURES)))
    price = np.einsum("nf,nf->n", x, slopes[region]) + 0.5 * np.sin(2 * x[:, 0] * x[:, 1])
    database.execute(f"CREATE TABLE houses (region INTEGER, {', '.join(f'{f} REAL' for f in FEATURES)}, price REAL)")
    rows = np.column_stack([region, x, price]).tolist()
    database.executemany(f"INSERT INTO houses VALUES ({', '.join('?' * (len(FEATURES) + 2))})", rows)
    return database


def select(database, lock, where, most):
    """Features and prices of some rows. Of their number a power of two: queries of one size share their plans."""
    with lock:
        found = database.execute(f"SELECT {', '.join(FEATURES)}, price FROM houses WHERE {where} LIMIT {most}")
        rows = np.array(found.fetchall(), np.float32)
    rows = rows[: 1 << (len(rows).bit_length() - 1)]
    return jnp.asarray(rows[:, :-1]), jnp.asarray(rows[:, -1])


# ---- what is learned --------------------------------------------------------------------------


def predict(params, x):
    x = x @ params["in"]
    for w in params["blocks"]:
        x = x + jax.nn.gelu(x @ w)
    return (x @ params["out"])[:, 0]


def train_step(params, x, y):
    value, grads = jax.value_and_grad(lambda p: jnp.mean((predict(p, x) - y) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.02 * g, params, grads), value


def start(seed, layers):
    first, last, *keys = jax.random.split(jax.random.key(seed), layers + 2)
    return {
        "in": jax.random.normal(first, (len(FEATURES), WIDTH)) / len(FEATURES) ** 0.5,
        "blocks": [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH for key in keys],
        "out": jax.random.normal(last, (WIDTH, 1)) / WIDTH**0.5,
    }


# ---- the service ------------------------------------------------------------------------------


def tell(who, text):
    print(f"{time.monotonic() - BEGAN:6.1f}s  {who:<9} {text}", flush=True)


def held(job):
    return f"{format_bytes(job.budget)}, plan {job.rung + 1} of {len(job.ladder)}"


def answer(name, data, where, steps, layers, config):
    """Seconds of one query: a small model of the rows that it finds."""
    asked = time.monotonic()
    with jaxtensile.job(name, priority=1, config=config) as job:
        step = jaxtensile.jit(train_step, job=job, donate_argnums=0)
        params, first = step(start(1, layers), *data)
        tell(name, f"{len(data[0])} rows WHERE {where}: {held(job)}")
        for _ in range(steps - 1):
            params, last = step(params, *data)
    took = time.monotonic() - asked
    tell(name, f"answered after {took:.1f}s, error {float(first):.2f} to {float(last):.2f}")
    return took


class Training:
    """The long one: a thread of its own until the end of the block."""

    def __init__(self, data, layers, config):
        self.losses, self.budgets, self.error = [], set(), None
        self._data, self._start, self._config = data, start(0, layers), config
        self._end, self._begun = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()
        if self.error is not None:
            raise SystemExit(f"queries: {self.error}")

    def _run(self):
        try:
            with jaxtensile.job("training", config=self._config) as job:
                self._train(job)
        except jaxtensile.JaxtensileError as error:
            self.error = error
        finally:
            self._begun.set()

    def _train(self, job):
        step, before = jaxtensile.jit(train_step, job=job, donate_argnums=0), ""
        params, self._start = self._start, None
        while not self._end.is_set():
            params, value = step(params, *self._data)
            self.losses.append(float(value))
            if len(self.losses) == 1:
                job.wait()  # its plans are compiled before anybody asks
                self._begun.set()
                continue
            self.budgets.add(format_bytes(job.budget))
            if held(job) != before:
                before = held(job)
                tell("training", f"step {len(self.losses)}: {before}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--queries", type=int, default=10, help="how many arrive (default 10)")
    parser.add_argument("--steps", type=int, default=40, help="of each query (default 40)")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"of the training (default {LAYERS})")
    parser.add_argument("--capacity", default=CAPACITY, help=f"of the device (default {CAPACITY})")
    options = parser.parse_args()
    database, lock, random = fill(20_000), threading.Lock(), np.random.default_rng(1)
    config = {"device": {"capacity": options.capacity, "reserve": 0}, "coordinator": {"min_hold": "0.2s"}}
    data, took, errors = select(database, lock, "1", BATCH), [], []

    def query(name, where):
        try:
            rows = select(database, lock, where, MOST)
            took.append(answer(name, rows, where, options.steps, max(options.layers // 2, 1), config))
        except jaxtensile.JaxtensileError as error:
            errors.append(error)
            tell(name, f"not answered: {error}")

    with Training(data, options.layers, config) as training:
        threads = []
        for k in range(options.queries):
            where = f"region = {random.integers(1, 9)}" + (" AND age < 0" if random.random() < 0.3 else "")
            threads.append(threading.Thread(target=query, args=(f"query {k + 1}", where)))
            threads[-1].start()
            time.sleep(random.exponential(1.5))
        for thread in threads:
            thread.join()

    run, params, alone = jax.jit(train_step, donate_argnums=0), start(0, options.layers), []
    for _ in training.losses:
        params, value = run(params, *data)
        alone.append(float(value))
    difference = max(abs(a - b) for a, b in zip(alone, training.losses, strict=True))
    if took:
        print(f"\n{len(took)} queries answered, half of them within {np.median(took):.1f}s")
    print(f"the training made {len(training.losses)} steps, within {', '.join(sorted(training.budgets))}")
    print(f"undisturbed, with jax.jit, none of its losses differs by more than {difference:.1e}")
    raise SystemExit(bool(errors))


if __name__ == "__main__":
    main()
