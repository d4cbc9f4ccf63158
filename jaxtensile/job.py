"""What is asked and what is given back: one call of one function for one device, and the jit object that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtensile.compile import Options
from jaxtensile.device import DeviceProfile
from jaxtensile.plan import Link
from jaxtensile.report import Report
from jaxtensile.units import Bytes

Evaluate = Callable[[list[Any]], list[Any]]
"""Flat arguments → flat outputs, on tracers."""
Make = Callable[[Evaluate | None, Options], Any]
"""A jit object that runs ``evaluate`` (None: the user's function as it is) under compiler options."""

OFFLOADS = frozenset({"cuda"})
"""Platforms whose compiler keeps to the places of copies in straight-line code."""
LINK_SHARE = 0.8
"""Share of the link's peak rate that copies are planned for, where it was not measured."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What ``pipeline.fit`` works on: one call of one function for one device.

    ``solver``: a name of ``passes.solvers``; ``undo``: whether the user's own checkpoints may recompute
    less than they say.
    """

    name: str
    jaxpr: Any
    donated: tuple[bool, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    budget: Bytes
    device: DeviceProfile
    shards: int
    make: Make
    options: Options
    keep_unused: bool = False
    host_budget: Bytes = 0
    undo: bool = True
    solver: str = "auto"

    @property
    def link(self) -> Link | None:
        """The way to host memory, where values may wait there."""
        if not self.host_budget or self.shards > 1 or self.device.platform not in OFFLOADS:
            return None
        return Link(bandwidth=self.device.reached("link_bandwidth", LINK_SHARE), latency=self.device.link_latency)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The jit object that fits, what it evaluates (None: the user's function), and the report."""

    jitted: Any
    evaluate: Evaluate | None
    options: Options
    report: Report
