"""What takes longest is tested on one JAX line, or half of it on either; all of it with ``JAXTENSILE_SOAK=1``."""

import os
from collections.abc import Sequence
from typing import TypeVar

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
