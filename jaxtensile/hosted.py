"""Do stacks in host memory come back right? A small pair of loops, run on the very device, says so, and some layers.

Compilers have read such stacks in the wrong order without an error (``jaxtensile.loops``), so what a loop
stacks goes to the host on a device only after this has been tried there, and so do the stacks of straight-line code
(``jaxtensile.host_stacks``). Once per process and device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from jaxtensile.loops import rewrite_loops
from jaxtensile.passes.loops import Ladder
from jaxtensile.passes.offload import offload
from jaxtensile.plan import Link, Program
from jaxtensile.rewrite import rewrite
from jaxtensile.trace import trace_jaxpr

_SIDES, _TRIPS = (128, 512), 16
"""Slices of 64 KiB, the smallest that are stacked on the host, and of 1 MiB."""
_LAYERS, _PLENTY = 8, 1 << 30


def _gradient(x: Any, w: Any) -> Any:
    def step(h: Any, k: Any) -> tuple[Any, None]:
        # Every iteration has a residual and a number of its own, so that a wrong order shows.
        return [jnp.sin(a * b) + k * a for a, b in zip(h, w, strict=True)], None

    def loss(x: Any) -> Any:
        last, _ = lax.scan(step, x, jnp.linspace(0.2, 0.8, _TRIPS, dtype=x[0].dtype))
        return sum((h**2).sum() for h in last)

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
    # Small, so that what one compiler rounds otherwise than another stays small over all iterations.
    random = np.random.default_rng(0)
    args = tuple([_square(random, n, most) for n in _SIDES] for most in (1.0, 0.5))
    moved = _moved_as_wanted(device, _gradient, args, partial(with_hosted_stacks, load_index=load_index), rtol=1e-4)
    return moved >= sum(_TRIPS * x.nbytes for x in args[0])  # a stack of each, at least


def _layers(x: Any, w: Any) -> Any:
    """The gradient of some layers whose residuals are 1 MiB each, the smallest that is copied."""

    def loss(x: Any) -> Any:
        for _ in range(_LAYERS):
            x = jnp.matmul(jnp.sin(jnp.matmul(x, w, precision="highest")), w, precision="highest")
        return (x**2).sum()

    return jax.grad(loss)(x)


def with_hosted_copies(fun: Any, args: Any) -> tuple[Any, int]:
    """``fun`` with as much as can be of its straight-line code in stacks in host memory; and how many bytes that is."""
    traced = trace_jaxpr(jax.make_jaxpr(fun)(*args))
    free = Link(bandwidth=1e15, latency=0.0)
    away = offload(Program.unchanged(traced.graph), [1.0] * len(traced.graph.ops), free, 0, _PLENTY)
    evaluate = rewrite(traced, away.program, stacked=True)
    return (lambda *flat: evaluate(flat)), sum(copy.nbytes for copy in away.copies)


@cache
def copies_come_back(device: Any) -> bool:
    """Whether straight-line code on ``device`` gets from stacks in host memory what it put there."""
    random, side = np.random.default_rng(0), _SIDES[-1]
    x, w = (_square(random, side, most) for most in (2.0, 2.0 * side**-0.5))
    return _moved_as_wanted(device, _layers, (x, w), with_hosted_copies, rtol=1e-3) >= 2 * x.nbytes


def _square(random: np.random.Generator, side: int, most: float) -> Any:
    return random.uniform(-most, most, size=(side, side)).astype(np.float32)


def _moved_as_wanted(
    device: Any, fun: Any, args: Any, change: Callable[[Any, Any], tuple[Any, int]], *, rtol: float
) -> int:
    """Bytes that ``change`` takes to the host where what comes back is what ``fun`` makes; 0 where it is not, and
    where nothing is shown: the compiler refuses, or there is no memory."""
    try:
        there = jax.device_put(args, SingleDeviceSharding(device))
        changed, moved = change(fun, there)
        wanted = jax.device_get(jax.tree.leaves(jax.jit(fun)(*there)))
        found = jax.device_get(jax.jit(changed)(*jax.tree.leaves(there)))
    except jax.errors.JaxRuntimeError:
        return 0
    near = (np.allclose(a, b, rtol=rtol, atol=rtol / 10 * np.abs(b).max()) for a, b in zip(found, wanted, strict=True))
    return moved if all(near) else 0
