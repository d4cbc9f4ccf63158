"""What takes longest is tested on one JAX line, or half of it on either; all of it with ``JAXTENSILE_SOAK=1``."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import jax
import pytest

from jaxtensile import _compat

T = TypeVar("T")
NEWER = _compat.JAX_VERSION >= (0, 11)
SOAK = bool(os.environ.get("JAXTENSILE_SOAK"))


def on_the_line_of(*, newer: bool) -> pytest.MarkDecorator:
    """A mark for tests and parameters: those of the other line are skipped, and say so."""
    return pytest.mark.skipif(newer != NEWER and not SOAK, reason="on the other jax line, or with JAXTENSILE_SOAK=1")


def shared_out(cases: Sequence[T]) -> Sequence[T]:
    """This line's half of ``cases``, of which it is all the same which line tests which."""
    return cases if SOAK else cases[NEWER::2]


CHECKPOINTS = ("remat2", "remat3") if NEWER else ("remat2",)
"""What ``jax.checkpoint`` may become: JAX's primitive, and what replaces that with ``jax_remat3``. JAX 0.10 has half of
that, without ``prevent_cse`` and offloading."""


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
