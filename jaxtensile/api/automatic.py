"""The job of a process that ``jaxtensile run`` started, and whose program never heard of us.

Its large functions are steps of one job of the config's name, planned for what the coordinator grants. A program that
imports jaxtensile itself decides for itself: it is left alone, and its own ``jaxtensile.job`` ends the automatic one.
"""

from __future__ import annotations

import atexit
import sys
import threading
from types import FunctionType, ModuleType
from typing import Any, Final

from jaxtensile.spmd.location import Location, device_name, profile_of
from jaxtensile.units import Bytes

_LEFT_ALONE: Final = 64
"""Part of a device below which a function, all values together, is no step. A guess."""
_INSIDE: Final = ("jax", "jaxlib", "jaxtensile", "sitecustomize")
_OURS: Final = "jaxtensile"


class Automatic:
    """The job, from the first large function on; None where the program knows of us."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._begun = False
        self._job: Any = None
        self._room: dict[str, Bytes] = {}

    def job_for(self, most: Bytes | None, place: Location) -> Any:
        """The job of a function whose values are ``most`` bytes all together; None if it runs as written."""
        job = self._entered()
        if job is None or job.ended or most is None:
            return None
        whole = profile_of(place.device).capacity
        least = min(self._room.get(device_name(device), whole) for device in place.devices)
        return job if _LEFT_ALONE * most > least else None

    def _entered(self) -> Any:
        with self._lock:
            if not self._begun:
                self._begun = True
                self._job = None if _knows_of_us() else self._begin()
            return self._job

    def _begin(self) -> Any:
        from jaxtensile.jobs.job import begin_automatic  # what arbitrates takes a while to import

        job = begin_automatic(self._name)
        self._room = job.device_bytes()
        atexit.register(job.close)
        return job


def _knows_of_us() -> bool:
    """Whether a module outside of JAX and of ours holds jaxtensile, or anything from it."""
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.partition(".")[0] in _INSIDE:
            continue
        if any(_is_ours(value) for value in list(vars(module).values())):
            return True
    return False


def _is_ours(value: object) -> bool:
    if isinstance(value, ModuleType):
        name = value.__name__
    elif isinstance(value, type) or type(value) is FunctionType:
        # Our own ``jit`` stands in their modules under the name of JAX's.
        name = "" if "__wrapped__" in vars(value) else str(value.__module__)
    else:
        return False
    return name == _OURS or name.startswith(f"{_OURS}.")


__all__ = ["Automatic"]
