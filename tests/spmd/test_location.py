"""The devices of a call whose arguments name none: those that the program names inside, whichever way it does."""

import json

from four_devices import on_four_devices

PROGRAM = """
import json

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxtensile
from jaxtensile.spmd.location import location

MESH = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))
ROWS = NamedSharding(MESH, P("rows"))


def layers(w, x):
    for _ in range(6):
        x = x + jnp.sin(jnp.tanh(x @ w))
    return jnp.mean(x**2)


def mapped(w, x):
    def of_rows(w, x):
        loss, grad = jax.value_and_grad(layers)(w, x)
        return jax.lax.pmean(loss, "rows"), jax.lax.pmean(grad, "rows")

    return jax.shard_map(of_rows, mesh=MESH, in_specs=(P(), P("rows")), out_specs=P(), check_vma=False)(w, x)


plain = jax.value_and_grad(layers)
KINDS = {
    "none": (1, plain),
    "shard_map": (4, mapped),
    "constraint": (4, lambda w, x: plain(w, jax.lax.with_sharding_constraint(x, ROWS))),
    "device_put": (4, lambda w, x: plain(w, jax.device_put(x, ROWS))),
    "inner jit": (4, lambda w, x: jax.jit(plain, in_shardings=(NamedSharding(MESH, P()), ROWS))(w, x)),
}
ARGS = jnp.eye(64) / 2, jnp.ones((4096, 64))
found = {k: (n, location(jax.jit(f).trace(*ARGS), ARGS, {}, {}).count) for k, (n, f) in KINDS.items()}

memory = jax.jit(mapped).lower(*ARGS).compile().memory_analysis()
needs = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
guess = jaxtensile.estimate(mapped, *ARGS)
step = jaxtensile.jit(mapped, budget=needs - memory.temp_size_in_bytes // 3)
report = step.plan(*ARGS)
same = all(jnp.allclose(a, b, rtol=1e-5) for a, b in zip(step(*ARGS), jax.jit(mapped)(*ARGS), strict=True))
print(json.dumps([found, guess.low <= needs <= guess.high, report.fits and not report.unchanged, bool(same)]))
"""


def test_a_program_runs_on_the_devices_that_it_names_inside(tmp_path):
    done = on_four_devices(PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    counts, estimated, planned, same = json.loads(done.stdout.splitlines()[-1])
    assert all(wanted == found for wanted, found in counts.values()), counts
    assert estimated and planned and same, done.stdout
