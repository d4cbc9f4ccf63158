"""Do stacks in host memory come back right? A small pair of loops, run on the very device, says so.

Compilers have read such stacks in the wrong order without an error (``jaxtensile.loops``), so what a loop
stacks goes to the host on a device only after this has been tried there. Once per process and device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from jaxtensile.loops import rewrite_loops
from jaxtensile.passes.loops import Ladder
from jaxtensile.plan import Link
from jaxtensile.trace import trace_jaxpr

_SIDE, _TRIPS = 512, 5
"""Slices of 1 MiB, the smallest that are stacked on the host."""


def _gradient(x: Any, w: Any) -> Any:
    def loss(x: Any) -> Any:
        # Every iteration has a residual of its own, so that a wrong order shows.
        last, _ = lax.scan(lambda h, k: (jnp.sin(h * w) + k * h, None), x, jnp.arange(1.0, _TRIPS + 1, dtype=x.dtype))
        return (last**2).sum()

    return jax.grad(loss)(x)


def with_hosted_stacks(fun: Any, args: Any, *, load_index: bool) -> tuple[Any, int]:
    """``fun`` with all that its loops stack, and that may be there, in host memory; and how many bytes that is."""
    closed = jax.make_jaxpr(fun)(*args)
    traced = trace_jaxpr(closed)
    free = Link(bandwidth=1.0, latency=0.0)
    ladder = Ladder(traced.graph, lambda body: [1.0] * len(body.ops), free, lambda body: [1.0] * len(body.ops))
    way = ladder.away(ladder.rungs[0])
    changed = rewrite_loops(traced, closed, way, load_index=load_index)
    return jax.extend.core.jaxpr_as_fun(changed), sum(plan.aside for plan in way)


@cache
def stacks_come_back(device: Any, *, load_index: bool) -> bool:
    """Whether a backward loop on ``device`` gets from host memory what its forward loop put there."""
    values = np.random.default_rng(0).normal(size=(2, _SIDE, _SIDE)).astype(np.float32)
    x, w = (jax.device_put(v, SingleDeviceSharding(device)) for v in values)
    try:
        changed, moved = with_hosted_stacks(_gradient, (x, w), load_index=load_index)
        wanted = jax.jit(_gradient)(x, w)
        (found,) = jax.jit(changed)(x, w)
    except jax.errors.JaxRuntimeError:
        return False  # refused by the compiler, or no memory: nothing has been shown
    wanted, found = jax.device_get((wanted, found))
    return moved > 0 and np.allclose(wanted, found, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
