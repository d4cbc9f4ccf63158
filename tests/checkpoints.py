"""What ``jax.checkpoint`` may become: JAX's primitive, and what replaces that with ``jax_remat3``."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from jaxtensile import _compat

CHECKPOINTS = ("remat2", "remat3") if _compat.JAX_VERSION >= (0, 11) else ("remat2",)
"""JAX 0.10 has half of the second, without ``prevent_cse`` and offloading."""


@contextmanager
def checkpoints_are(kind: str) -> Iterator[None]:
    """Trace ``jax.checkpoint`` as one of ``CHECKPOINTS``."""
    if len(CHECKPOINTS) == 1:
        yield
        return
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", kind == "remat3")
    try:
        yield
    finally:
        jax.config.update("jax_remat3", before)
