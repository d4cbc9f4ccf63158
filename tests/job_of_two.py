"""A training in two processes, each with a lease of a coordinator: ``python job_of_two.py STOP``, until STOP is there.

It prints the levels of its ladder, and at the end what it was on in each step. Its losses are those of ``jax.jit``.
"""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtensile

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], 2, int(os.environ["JAX_PROCESS_ID"]))
mesh = Mesh(np.array(jax.devices()), ("x",))
N, ROWS, LAYERS = 64, 4096, 6


def put(a, spec):
    return jax.make_array_from_callback(a.shape, NamedSharding(mesh, spec), lambda i: a[i])


def step(ws, x):
    def loss(ws):
        y = x
        for w in ws:
            y = jnp.sin(y @ w)
        return jnp.mean(y**2)

    value, grads = jax.value_and_grad(loss)(ws)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value


def start():
    rnd = np.random.default_rng(0)
    return [put(rnd.normal(size=(N, N)).astype("f") / 8, P()) for _ in range(LAYERS)]


x = put(np.random.default_rng(1).normal(size=(ROWS, N)).astype("f"), P("x"))
stop = put(np.zeros((2,), "f"), P("x"))
rungs, losses, state = [], [], start()
with jaxtensile.job("both") as job:
    ours = jaxtensile.jit(step, job=job, donate_argnums=0)
    any_says = jax.jit(lambda a: a.max())
    for k in range(100_000):
        state, value = ours(state, x)
        rungs.append(job.budget)
        losses.append(float(value))
        if k == 0:
            levels = [r.level for r in job.ladder]
            print(json.dumps({"levels": levels}), flush=True)
        # Both stop after the same step: when either was told to.
        mine = np.full((1,), float(os.path.exists(sys.argv[1])), "f")
        mine = jax.device_put(mine, jax.local_devices()[0])
        stop = jax.make_array_from_single_device_arrays((2,), NamedSharding(mesh, P("x")), [mine])
        if float(any_says(stop)):
            break
plain, state = jax.jit(step, donate_argnums=0), start()
for k in range(min(5, len(losses))):
    state, value = plain(state, x)
    assert abs(float(value) - losses[k]) < 1e-6
print(json.dumps({"rungs": rungs, "switches": job.switches}), flush=True)
jax.distributed.shutdown()
