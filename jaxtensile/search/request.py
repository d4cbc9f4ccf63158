"""What is asked and what is given back: one call of one function for one device, and the jit object that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtensile._compat import JAX_VERSION
from jaxtensile.devices.profiles import DeviceProfile
from jaxtensile.faults import Faults
from jaxtensile.ir.plan import Leaf, Link
from jaxtensile.passes.seconds.steptime import StepTime
from jaxtensile.report.facts import Setting
from jaxtensile.report.report import Report
from jaxtensile.settings.options import AUTO
from jaxtensile.units import Bytes
from jaxtensile.xla.compile import Options

Evaluate = Callable[[list[Any]], list[Any]]
"""Flat arguments → flat outputs, on tracers."""
Make = Callable[[Evaluate | None, Options], Any]
"""A jit object that runs ``evaluate`` (None: the user's function as it is) under compiler options."""
Placer = Callable[[Sequence[Leaf]], tuple[tuple[Any, ...], Mapping[str, Any]]]
"""The arguments as the program is called with them that has these leaves on the host."""

LINK_SHARE = 0.8
"""Share of the link's peak rate that copies are planned for, where it was not measured. A guess: after encoding and
headers PCIe carries about as much."""


def loads_index(device: DeviceProfile) -> bool:
    """Whether slices of stacks in host memory have to be read at an index that comes from memory."""
    return device.backend.reads_backwards_from > JAX_VERSION


@dataclass(frozen=True, kw_only=True)
class Request:
    """What ``pipeline.fit`` works on: one call of one function for one device.

    ``solver``: a name of ``passes.solvers``; ``undo``: whether the user's own checkpoints may recompute less than they
    say; ``chunk``: whether work on many rows may be done in parts: wherever that is cheaper, or with ``AUTO`` where it
    is by much. ``place`` is set where donated arguments may wait on the host between calls, of at most ``state_budget``
    bytes; ``state`` are those that do. ``names``: of the flat arguments; ``settings``: where its options are from.
    ``stacks_come_back``: whether the device has been seen to read right what is stacked in host memory; asked before
    anything is. ``faults``: what of the planner failed for it, and is left out.
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
    chunk: bool | str = False
    solver: str = "auto"
    place: Placer | None = None
    state_budget: Bytes | None = None
    state: tuple[Leaf, ...] = ()
    names: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    stacks_come_back: Callable[[], bool] = lambda: True
    faults: Faults = field(default_factory=Faults, compare=False, repr=False)

    @property
    def decides_on_parts(self) -> bool:
        """Whether parts are worked on only where that is shorter by much, or nothing else fits."""
        return self.chunk == AUTO and self.shards == 1

    @property
    def way(self) -> Link:
        """The way to host memory, wherever it is."""
        return Link(bandwidth=self.device.reached("link_bandwidth", LINK_SHARE), latency=self.device.link_latency)

    @property
    def link(self) -> Link | None:
        """The way to host memory, where copies take time and the compiler keeps to their places."""
        if self.shards > 1 or not self.device.backend.offloads or not (self.host_budget or self.state):
            return None
        if self.device.backend.places_copies and not self.stacks_come_back():
            return None  # there copies are slices of stacks
        return self.way

    @property
    def loop_link(self) -> Link | None:
        """The way to host memory for what loops stack."""
        return self.way if self.may_stack_on_host and self.stacks_come_back() else None

    @property
    def may_stack_on_host(self) -> bool:
        """Whether loops may stack in host memory if the device can read it there."""
        return self.shards == 1 and self.host_budget > 0 and self.device.backend.offloads

    @property
    def load_index(self) -> bool:
        """Whether slices of such stacks have to be read at an index that comes from memory."""
        return loads_index(self.device)

    @property
    def state_bytes(self) -> Bytes:
        """Bytes that wait on the host between calls."""
        return sum(leaf.nbytes for leaf in self.state)

    def with_state(self, state: tuple[Leaf, ...]) -> Request:
        """The same request with ``state`` on the host."""
        if not state or self.place is None:
            return self
        left = max(self.host_budget - sum(leaf.nbytes for leaf in state), 0)
        return replace(self, state=state, host_budget=left)

    def arguments(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """What a planned program is compiled for."""
        if self.place is None or not self.state:
            return self.args, self.kwargs
        return self.place(self.state)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The jit object that fits, what it evaluates (None: the user's function), and the report.

    ``state``: the flat arguments that it takes from host memory. ``time``: of a step, None where the function runs as
    it is and where it runs on several devices; ``key``: equal for equal programs.
    """

    jitted: Any
    evaluate: Evaluate | None
    options: Options
    report: Report
    state: frozenset[int] = frozenset()
    time: StepTime | None = None
    key: int = 0
