"""A backend is a value: whoever adds one says what is true of it, and everything else knows it."""

from dataclasses import replace

import jax
import jax.numpy as jnp

import jaxtensile
from jaxtensile.devices import backends, profiles
from jaxtensile.devices.backends import CPU
from jaxtensile.xla import target
from programs import FAST


def test_a_backend_that_is_added_is_planned_for(monkeypatch):
    """One like this CPU, whose memory is its own and where values may wait on the host."""
    toy = replace(CPU, name="toy", own_memory=True, offloads=True)
    monkeypatch.setitem(backends.BACKENDS, "toy", toy)
    monkeypatch.setitem(profiles._BY_NAME, "toy-1", replace(profiles.profile("cpu"), name="toy-1", platform="toy"))
    monkeypatch.setitem(target._ONE, "toy", target._ONE["cpu"])

    def step(w, x):
        for _ in range(12):
            x = jnp.tanh(jnp.sin(x @ w))
        return (x * x).sum()

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (2048, 64))]
    reports = [
        jaxtensile.jit(jax.grad(step), budget="6MiB", host_budget="1GiB", target=name, compiler_options=FAST).plan(
            *shapes
        )
        for name in ("toy-1", "cpu")
    ]
    assert all(report.fits and not report.unchanged for report in reports)
    assert [any("host_budget= has no effect" in note for note in r.notes) for r in reports] == [False, True]
    assert jaxtensile.estimate(jax.grad(step), *shapes, target="toy-1").fits()
