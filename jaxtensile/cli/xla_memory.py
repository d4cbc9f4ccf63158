"""Which environment variables make XLA share a GPU with other processes?

What its allocators do with memory that a program has given back, and whether they stop at a limit:

    bfc (the default)      keeps it for good                                  stops at the fraction
    cuda_async             returns what is above the fraction                 does not stop
    platform               returns it at once, and waits for the device       does not stop

Invariant: what the user has set stays as it is. On other devices than CUDA ones the variables mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from jaxtensile.units import Bytes

ALLOCATOR: Final = "XLA_PYTHON_CLIENT_ALLOCATOR"
PREALLOCATE: Final = "XLA_PYTHON_CLIENT_PREALLOCATE"
FRACTION: Final = "XLA_CLIENT_MEM_FRACTION"
OLD_FRACTION: Final = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""XLA refuses both names at once."""
_LEAST_FRACTION: Final = 0.01
"""Share of a GPU that XLA's allocator is given at least, also to a job that asks for next to nothing. A guess."""


def variables(least: Bytes, want: Bytes | None, device: Bytes, environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to a job's environment; ``device``: bytes of the smallest GPU it may be on.

    A job that always has the same bytes gets the default allocator, which stops it there. One that grows and shrinks
    gets the one that gives back what is above what it is guaranteed.
    """
    fixed = want is not None and least == want
    chosen = {
        ALLOCATOR: "bfc" if fixed else "cuda_async",
        PREALLOCATE: "false",
        FRACTION: f"{min(max(least / device, _LEAST_FRACTION), 1.0):.4f}",
    }
    set_already = {FRACTION for name in (FRACTION, OLD_FRACTION) if name in environment}
    if environment.get(ALLOCATOR, chosen[ALLOCATOR]) != chosen[ALLOCATOR]:
        set_already.add(FRACTION)  # it means something else for the user's allocator
    return {name: value for name, value in chosen.items() if name not in environment and name not in set_already}
