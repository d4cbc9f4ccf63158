"""Parts of arrays whose elements depend on their position: a counter, or random bits for rows of a dropout mask.

Invariant: the elements equal those at the same positions of the whole array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtensile import _compat


def iota(dtype: Any, shape: Sequence[int], dim: int, at: Any, n: int) -> Any:
    """``lax.broadcasted_iota(dtype, shape, dim)`` at ``n`` positions from ``at`` along that dimension."""
    own = lax.broadcasted_iota(dtype, (*shape[:dim], n, *shape[dim + 1 :]), dim)
    return own + lax.convert_element_type(at, dtype)


def are_counted(eqn: Any) -> bool:
    """Whether random bits depend only on one key and each element's number, below 2^32."""
    return _compat.is_counted_threefry(eqn) and math.prod(eqn.params["shape"]) < 1 << 32


def bits(key: Any, width: int, shape: Sequence[int], dim: int, at: Any, n: int) -> Any:
    """``jax.random.bits`` of ``width`` bits per element, at ``n`` positions from ``at`` along ``dim``.

    Threefry-2x32 (Salmon et al., SC 2011) encrypts each element's number, as with ``jax_threefry_partitionable``. High
    and low words make 64 bits; for fewer they are XORed.
    """
    own = (*shape[:dim], n, *shape[dim + 1 :])
    strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    number = lax.convert_element_type(at, np.uint32) * np.uint32(strides[dim])
    for k, stride in enumerate(strides):
        number = number + lax.broadcasted_iota(np.uint32, own, k) * np.uint32(stride)
    words = jax.random.key_data(key)
    high, low = _compat.threefry2x32.bind(words[0], words[1], jnp.zeros_like(number), number)
    if width == 64:
        return (high.astype(jnp.uint64) << np.uint64(32)) | low.astype(jnp.uint64)
    return (high ^ low).astype(f"uint{width}")
