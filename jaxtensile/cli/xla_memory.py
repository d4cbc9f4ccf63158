"""Environment variables that make XLA share a GPU with other processes.

What its allocators do with freed memory, and whether they stop at a limit:

    bfc (the default)      keeps it for good                                  stops at the fraction
    cuda_async             returns what is above the fraction                 does not stop
    platform               returns it at once, and waits for the device       does not stop

Invariant: the user's settings stay. The variables have no effect on non-CUDA devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from jaxtensile.devices.backends import ALLOCATOR
from jaxtensile.units import Bytes

PREALLOCATE: Final = "XLA_PYTHON_CLIENT_PREALLOCATE"
FRACTION: Final = "XLA_CLIENT_MEM_FRACTION"
OLD_FRACTION: Final = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""XLA refuses both names at once."""
_LEAST_FRACTION: Final = 0.01
"""Least share of a GPU for XLA's allocator, even if a job asks for next to nothing. A guess."""


def variables(
    least: Bytes, want: Bytes | None, device: Bytes, environment: Mapping[str, str], *, turns: bool = False
) -> dict[str, str]:
    """What to add to a job's environment. ``device``: bytes of the smallest GPU it may be on.

    A job of constant size gets the default allocator, which stops it there. One that grows and shrinks gets the one
    that returns everything above its guarantee, and where jobs take ``turns``, every job: it returns all it can.
    """
    fixed = want is not None and least == want and not turns
    least = 0 if turns else least
    chosen = {
        ALLOCATOR: "bfc" if fixed else "cuda_async",
        PREALLOCATE: "false",
        FRACTION: f"{min(max(least / device, _LEAST_FRACTION), 1.0):.4f}",
    }
    set_already = {FRACTION for name in (FRACTION, OLD_FRACTION) if name in environment}
    if environment.get(ALLOCATOR, chosen[ALLOCATOR]) != chosen[ALLOCATOR]:
        set_already.add(FRACTION)  # it means something else for the user's allocator
    return {name: value for name, value in chosen.items() if name not in environment and name not in set_already}
