"""Seconds of a step that runs here, with arguments made up from their shapes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from jaxtensile.units import Seconds

CALLS: Final = 5
"""Calls of which the median is taken. A guess."""


def raced(step: Callable[..., Any], args: Sequence[Any]) -> Seconds:
    """The median time of a few calls. Arguments are made anew for each, since a step may be given them to reuse."""
    took: list[Seconds] = []
    for _ in range(CALLS + 1):
        given = jax.block_until_ready(jax.tree.map(_made, tuple(args)))
        began = time.perf_counter()
        jax.block_until_ready(step(*given))
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])


def _made(x: Any) -> Any:
    """An array of ones for a shape, a key of random numbers for a shape of keys; anything else as it is."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x.copy() if isinstance(x, jax.Array) else x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), x.shape) if x.shape else jax.random.key(0)
    return jnp.ones(x.shape, x.dtype, device=x.sharding)


__all__ = ["raced"]
