"""Trials on the very device: whether values that wait in host memory come back right.

Compilers have read host stacks in the wrong order without an error (``rewrites.loops.loops``). So stacks of loops go
to the host only after a trial on the device. The same holds for state between steps, and on TPUs for stacks of
straight-line code (``jaxtensile.program.host_stacks``). Each trial runs once per process and device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from jaxtensile import _compat
from jaxtensile.ir.plan import Link, Program
from jaxtensile.passes.offload.loops import LoopLadder
from jaxtensile.passes.offload.offload import offload
from jaxtensile.program.emit import emit
from jaxtensile.program.trace import trace_jaxpr
from jaxtensile.rewrites.loops.loops import rewrite_loops
from jaxtensile.rewrites.state import choose, on_host
from jaxtensile.xla.target import PINNED_HOST

_SIDES, _TRIPS = (128, 512), 16
"""Sides of f32 matrices: slices of 64 KiB, the smallest on the host (``loops.SLICE``), and of 1 MiB; iterations of the
small ones (``offload.SMALLEST``)."""
_LAYERS, _PLENTY = 8, 1 << 30
"""Layers of the trial of copies, so that the first residuals leave long before they are read; host bytes for it."""
_LEAVES, _STEPS = 3, 3
"""Weights and steps of the trial of state: the first step moves it, the second finds it moved, the third
repeats that."""
_NEAR, _NEARLY = 1e-4, 1e-3
"""Relative tolerances of results: of loops, and with rounding products. A wrong slice differs in the first digit."""


def _gradient(x: Any, w: Any) -> Any:
    def step(h: Any, k: Any) -> tuple[Any, None]:
        # Every iteration has a residual and a number of its own, so that a wrong order shows.
        return [jnp.sin(a * b) + k * a for a, b in zip(h, w, strict=True)], None

    def loss(x: Any) -> Any:
        last, _ = lax.scan(step, x, jnp.linspace(0.2, 0.8, _TRIPS, dtype=x[0].dtype))
        return sum((h**2).sum() for h in last)

    return jax.grad(loss)(x)


def with_hosted_stacks(fun: Any, args: Any, *, load_index: bool) -> tuple[Any, int]:
    """``fun`` with all eligible stacks of its loops in host memory, and their bytes."""
    closed = jax.make_jaxpr(fun)(*args)
    traced = trace_jaxpr(closed)
    free = Link(bandwidth=1.0, latency=0.0)
    ladder = LoopLadder(traced.graph, lambda body: [1.0] * len(body.ops), free, lambda body: [1.0] * len(body.ops))
    way = ladder.away(ladder.rungs[0])
    changed = rewrite_loops(traced, closed, way, load_index=load_index)
    return _compat.jaxpr_as_fun(changed), sum(plan.aside for plan in way)


@cache
def stacks_come_back(device: Any, *, load_index: bool) -> bool:
    """Whether a backward loop on ``device`` reads from host memory what its forward loop put there."""
    # Small, so that what one compiler rounds otherwise than another stays small over all iterations.
    random = np.random.default_rng(0)
    args = tuple([_square(random, n, most) for n in _SIDES] for most in (1.0, 0.5))
    moved = _moved_as_wanted(device, _gradient, args, partial(with_hosted_stacks, load_index=load_index), rtol=_NEAR)
    return moved >= sum(_TRIPS * x.nbytes for x in args[0])  # a stack of each, at least


def _layers(x: Any, w: Any) -> Any:
    """The gradient of some layers with residuals of 1 MiB each, the smallest that are copied."""

    def loss(x: Any) -> Any:
        for _ in range(_LAYERS):
            x = jnp.matmul(jnp.sin(jnp.matmul(x, w, precision="highest")), w, precision="highest")
        return (x**2).sum()

    return jax.grad(loss)(x)


def with_hosted_copies(fun: Any, args: Any) -> tuple[Any, int]:
    """``fun`` with as much as possible of its straight-line code in host stacks, and the bytes."""
    traced = trace_jaxpr(jax.make_jaxpr(fun)(*args))
    free = Link(bandwidth=1e15, latency=0.0)
    away = offload(Program.unchanged(traced.graph), [1.0] * len(traced.graph.ops), free, 0, _PLENTY)
    evaluate = emit(traced, away.program, stacked=True)
    return (lambda *flat: evaluate(flat)), sum(copy.nbytes for copy in away.copies)


@cache
def copies_come_back(device: Any) -> bool:
    """Whether straight-line code on ``device`` reads from host stacks what it put there."""
    random, side = np.random.default_rng(0), _SIDES[-1]
    x, w = (_square(random, side, most) for most in (2.0, 2.0 * side**-0.5))
    return _moved_as_wanted(device, _layers, (x, w), with_hosted_copies, rtol=_NEARLY) >= 2 * x.nbytes


def _step(state: Any, x: Any) -> Any:
    """A step that replaces weights and their moments, of 1 MiB each."""

    def loss(weights: Any) -> Any:
        h = x
        for w in weights:
            h = jnp.sin(jnp.matmul(h, w, precision="highest"))
        return (h**2).mean()  # small steps, so that roundings stay small over all of them

    weights, moments = state
    grads = jax.grad(loss)(weights)
    moments = [0.5 * m + g for m, g in zip(moments, grads, strict=True)]
    return [w - 100 * m for w, m in zip(weights, moments, strict=True)], moments


def with_hosted_state(fun: Any, args: Any) -> tuple[Any, tuple[int, ...]]:
    """``fun`` on flat arguments, with the eligible leaves of its first argument on the host between calls, and their
    positions.

    ``fun`` replaces its first argument.
    """
    closed = jax.make_jaxpr(fun)(*args)
    count, donated = len(jax.tree.leaves(args)), len(jax.tree.leaves(args[0]))
    traced = trace_jaxpr(closed, tuple(i < donated for i in range(count)))
    seconds = [1.0] * len(traced.graph.ops)
    leaves, _ = choose(traced, seconds, [""] * count, None)
    placed = on_host(traced, leaves, seconds, Link(bandwidth=1e15, latency=0.0))
    evaluate = emit(placed, Program.unchanged(placed.graph))
    changed = jax.jit(lambda *flat: evaluate(flat), donate_argnums=tuple(range(donated)))
    return changed, tuple(leaf.argument for leaf in leaves)


@cache
def state_comes_back(device: Any) -> bool:
    """Whether steps on ``device`` read from host memory what earlier steps left there."""
    random, side = np.random.default_rng(0), _SIDES[-1]
    weights = [_square(random, side, 2.0 * side**-0.5) for _ in range(_LEAVES)]
    state, x = (weights, [np.zeros_like(w) for w in weights]), _square(random, side, 1.0)
    here, there = SingleDeviceSharding(device), SingleDeviceSharding(device, memory_kind=PINNED_HOST)
    try:
        x = jax.device_put(x, here)
        wanted = jax.device_put(state, here)
        changed, moved = with_hosted_state(_step, (state, x))
        found = [jax.device_put(v, there if i in moved else here) for i, v in enumerate(jax.tree.leaves(state))]
        plain = jax.jit(_step, donate_argnums=0)
        for _ in range(_STEPS):
            wanted, found = plain(wanted, x), changed(*found, x)
            if moved != tuple(i for i, v in enumerate(found) if v.sharding.memory_kind == PINNED_HOST):
                return False
        wanted, found = jax.device_get((jax.tree.leaves(wanted), found))
    except jax.errors.JaxRuntimeError:
        return False
    return len(moved) == _LEAVES and _near(found, wanted, rtol=_NEARLY)


def _square(random: np.random.Generator, side: int, most: float) -> Any:
    return random.uniform(-most, most, size=(side, side)).astype(np.float32)


def _moved_as_wanted(
    device: Any, fun: Any, args: Any, change: Callable[[Any, Any], tuple[Any, int]], *, rtol: float
) -> int:
    """Bytes that ``change`` moves to the host if results match ``fun``; 0 on a mismatch, a compiler's refusal or lack
    of memory."""
    try:
        there = jax.device_put(args, SingleDeviceSharding(device))
        changed, moved = change(fun, there)
        wanted = jax.device_get(jax.tree.leaves(jax.jit(fun)(*there)))
        found = jax.device_get(jax.jit(changed)(*jax.tree.leaves(there)))
    except jax.errors.JaxRuntimeError:
        return 0
    return moved if _near(found, wanted, rtol) else 0


def _near(found: Any, wanted: Any, rtol: float) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(np.allclose(a, b, rtol=rtol, atol=rtol / 10 * np.abs(b).max()) for a, b in pairs)
