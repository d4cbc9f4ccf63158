"""Training beside an inference service on one device, and what a priority does for the service's answers.

    python examples/priority.py

Three trainings and a service are jobs of one process, which take turns with their steps. Requests arrive at random,
and answering them takes 40 % of the device. Of equal jobs each has a quarter, so that requests queue up; in a higher
class the service has eight times the share of a training, and an answer waits for the step that runs and no other. The
trainings have the rest of the time, and what memory the service leaves them.
"""

import argparse
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxtensile
from jaxtensile.units import format_bytes

CAPACITY = "28MiB"
PATIENCE = 120.0
LAYERS, WIDTH, ROWS, QUESTIONS = 6, 256, 1024, 2048


def predict(params, x):
    for w in params:
        x = x + jax.nn.gelu(x @ w)
    return x


def train_step(params, x, y):
    value, grads = jax.value_and_grad(lambda p: jnp.mean((predict(p, x) - y) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def start(seed, layers):
    return [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH for key in jax.random.split(jax.random.key(seed), layers)]


def training(k, layers, config, ready, stop, told):
    """Steps until ``stop``."""
    with jaxtensile.job(f"training {k}", config=config) as job:
        step = jaxtensile.jit(train_step, job=job, donate_argnums=0)
        params, x = start(k, layers), jax.random.normal(jax.random.key(k), (ROWS, WIDTH))
        y = jnp.sin(3 * x)
        params, _ = step(params, x, y)
        job.wait()  # its plans are compiled, so that this example shows waiting for steps alone
        ready.wait(PATIENCE)
        begun = job.steps
        while not stop.is_set():
            params, _ = step(params, x, y)
        told.append((job.steps - begun, job.budget, job.rung, job.ladder))


def serve(priority, seconds, load, layers, capacity):
    """Seconds of an answer by itself, latencies of the requests, and what became of the trainings."""
    config = {"device": {"capacity": capacity, "reserve": 0}}
    stop, told, latencies = threading.Event(), [], []
    ready = threading.Barrier(4)
    arguments = (layers, config, ready, stop, told)
    trainings = [threading.Thread(target=training, args=(k, *arguments), daemon=True) for k in range(3)]
    with jaxtensile.job("service", priority=priority, config=config) as job:
        answer = jaxtensile.jit(predict, job=job)
        params, questions = start(9, layers), jax.random.normal(jax.random.key(9), (QUESTIONS, WIDTH))
        answer(params, questions)
        job.wait()
        alone = min(timed(answer, params, questions) for _ in range(10))
        for thread in trainings:
            thread.start()
        try:
            ready.wait(PATIENCE)
        except threading.BrokenBarrierError:
            stop.set()
            raise SystemExit(f"priority: {capacity} have no room for all four jobs at once") from None
        random, now = np.random.default_rng(0), time.monotonic()
        arrives, end = now, now + seconds
        while (arrives := arrives + random.exponential(alone / load)) < end:
            time.sleep(max(arrives - time.monotonic(), 0))
            answer(params, questions)
            latencies.append(time.monotonic() - arrives)  # with the time in the queue behind earlier requests
        stop.set()
        for thread in trainings:
            thread.join()
    return alone, np.array(latencies), told


def timed(call, *args):
    began = time.monotonic()
    call(*args)
    return time.monotonic() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="of requests, each way (default 6)")
    parser.add_argument("--load", type=float, default=0.4, help="share of the device that answers take (default 0.4)")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"of every model (default {LAYERS})")
    parser.add_argument("--capacity", default=CAPACITY, help=f"of the device (default {CAPACITY})")
    options = parser.parse_args()
    print("priority  requests  an answer alone     median       90 %      worst  training steps")
    for priority in (0, 1):
        alone, latencies, told = serve(priority, options.seconds, options.load, options.layers, options.capacity)
        median, most, worst = (f"{1e3 * np.quantile(latencies, q):6.1f} ms" for q in (0.5, 0.9, 1.0))
        steps = " + ".join(str(n) for n, *_ in told)
        row = f"{priority:8}  {len(latencies):8}  {1e3 * alone:12.1f} ms  {median}  {most}  {worst}  {steps}"
        _, budget, rung, ladder = told[0]
        as_is = format_bytes(ladder[-1].level)
        print(f"{row} in {format_bytes(budget)} (plan {rung + 1} of {len(ladder)}; as it is {as_is})", flush=True)


if __name__ == "__main__":
    main()
