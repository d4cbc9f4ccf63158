"""The planner's input and output: one call of one function on one device, and the jit object that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from jaxtensile._compat import JAX_VERSION
from jaxtensile.devices.profiles import DeviceProfile
from jaxtensile.faults import Faults
from jaxtensile.groups.pieces import Pieces
from jaxtensile.ir.ir import Graph
from jaxtensile.ir.plan import Leaf, Link
from jaxtensile.passes.seconds.steptime import StepTime
from jaxtensile.program.trace import Context, Traced
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
"""From leaves to the call's arguments with those leaves on the host."""


class Local(Protocol):
    """From a program to the same with the sizes of one device. ``inside``: for a body, given its graph with them."""

    def __call__(self, traced: Traced, /) -> Traced: ...
    def inside(self, closed: Any, graph: Graph, /) -> Local: ...


LINK_SHARE = 0.8
"""Share of the link's peak rate assumed for copies, if unmeasured. A guess: PCIe carries about as much after encoding
and headers."""


def loads_index(device: DeviceProfile) -> bool:
    """Whether slices of host stacks must be read at an index loaded from memory."""
    return device.backend.reads_backwards_from > JAX_VERSION


@dataclass(frozen=True, kw_only=True)
class Request:
    """The input of ``pipeline.fit``: one call of one function on one device.

    ``solver``: a name in ``passes.solvers``. ``undo``: whether the user's checkpoints may recompute less than they say.
    ``chunk``: whether rows may be worked on in parts: wherever cheaper, or with ``AUTO`` only if by much. ``place``:
    set if donated arguments may wait on the host between calls, at most ``state_budget`` bytes; ``state``: those that
    do. ``names``: of the flat arguments. ``settings``: the sources of its options. ``stacks_come_back``: whether the
    device was seen to read host stacks correctly, asked before anything is stacked. ``divided``: into how many parts
    each flat argument is divided over several devices; empty on one. ``manual``: on several devices, its program is
    that of one, with collectives as ops; ``within``: where such a program is traced. ``local``: gives its programs the
    sizes of one device; None if they are not known. ``sizes``: finds that, with notes; it takes seconds, so it is asked
    where a plan is needed. ``notes``: for its report. ``in_full``: whether all is compiled with all
    optimizations, also for its bytes alone. ``faults``: failed parts of the planner, which are left out.
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
    divided: tuple[int, ...] = ()
    manual: bool = False
    within: Context = nullcontext
    local: Local | None = None
    sizes: Callable[[], tuple[Local | None, tuple[str, ...]]] | None = None
    notes: tuple[str, ...] = ()
    in_full: bool = False
    faults: Faults = field(default_factory=Faults, compare=False, repr=False)

    @property
    def whole(self) -> bool:
        """Whether its program is of one device: the only one, or one of several that exchange values by its own ops."""
        return self.shards == 1 or self.manual

    @property
    def sized(self) -> bool:
        """Whether the sizes of its values are those of one device, and not of all together."""
        return self.whole or self.local is not None

    @property
    def decides_on_parts(self) -> bool:
        """Whether parts are used only if much shorter, or if nothing else fits."""
        return self.chunk == AUTO and self.whole

    @property
    def way(self) -> Link:
        """The link to host memory."""
        return Link(bandwidth=self.device.reached("link_bandwidth", LINK_SHARE), latency=self.device.link_latency)

    @property
    def link(self) -> Link | None:
        """The same, if copies take time and the compiler keeps their places; else None."""
        if self.shards > 1 or not self.device.backend.offloads or not (self.host_budget or self.state):
            return None
        if self.device.backend.places_copies and not self.stacks_come_back():
            return None  # there copies are slices of stacks
        return self.way

    @property
    def loop_link(self) -> Link | None:
        """The link for stacks of loops; None if they may not be on the host."""
        return self.way if self.may_stack_on_host and self.stacks_come_back() else None

    @property
    def may_stack_on_host(self) -> bool:
        """Whether loops may stack in host memory, if the device can read it there."""
        return self.shards == 1 and self.host_budget > 0 and self.device.backend.offloads

    @property
    def load_index(self) -> bool:
        """Whether slices of host stacks must be read at an index loaded from memory."""
        return loads_index(self.device)

    @property
    def state_bytes(self) -> Bytes:
        """Bytes that wait on the host between calls."""
        return sum(leaf.nbytes for leaf in self.state)

    def with_sizes(self) -> Request:
        """The same request with the sizes of one device, if they can be found."""
        if self.sizes is None:
            return self
        local, notes = self.sizes()
        return replace(self, local=local, sizes=None, notes=(*self.notes, *notes))

    def with_state(self, state: tuple[Leaf, ...]) -> Request:
        """The same request with ``state`` on the host."""
        if not state or self.place is None:
            return self
        left = max(self.host_budget - sum(leaf.nbytes for leaf in state), 0)
        return replace(self, state=state, host_budget=left)

    def arguments(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments that a planned program is compiled for."""
        if self.place is None or not self.state:
            return self.args, self.kwargs
        return self.place(self.state)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The jit object that fits, its evaluation (None: the user's function), and the report.

    ``state``: flat arguments it takes from host memory. ``time``: of a step; None if the function runs as it is or on
    several devices. ``key``: equal for equal programs. ``pieces``: the same program in groups, which run instead.
    """

    jitted: Any
    evaluate: Evaluate | None
    options: Options
    report: Report
    state: frozenset[int] = frozenset()
    time: StepTime | None = None
    key: int = 0
    pieces: Pieces | None = None
