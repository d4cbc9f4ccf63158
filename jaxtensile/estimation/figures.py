"""The data of an estimate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxtensile.devices.profiles import DeviceProfile, profile
from jaxtensile.estimation.process import Part, total
from jaxtensile.ir.plan import NOTHING_AGAIN, MemoryUse, Recomputed
from jaxtensile.ir.timeline import Timeline
from jaxtensile.report.facts import Setting
from jaxtensile.settings.options import Resolved
from jaxtensile.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class Held:
    """Values of one op, type and line live at the peak: number and total bytes.

    Without a ``dtype``: needs inside the bodies of a loop or branch, or holes between buffers.
    """

    primitive: str
    dtype: str
    shape: tuple[int, ...]
    source: str
    count: int
    nbytes: Bytes


@dataclass(frozen=True, slots=True)
class Room:
    """Inputs of the bounds: the temporaries of the smallest order, and the largest stored array."""

    least: Bytes = 0
    largest: Bytes = 0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Peak device bytes of a function, as XLA's memory analysis divides them; printable.

    ``low``, ``high``: trusted bounds of ``device`` (equal if XLA's). ``capacity``: of the target. ``parts``: a
    process's needs, each with its origin. ``process``: the sum of ``parts``. ``held``: live at the peak, largest first
    (by the model in both modes). ``seconds``: wall time of each step. ``refusal``: why the target's compiler gave no
    program. ``xla``: what XLA recomputes by itself under ``jax.jit``. ``spared``: the device bytes that a GPU then
    needs, if that was asked for and it recomputes. ``budget``: device bytes that the caller or the config gives the
    function, None if none are given. ``settings``: the source of ``budget``.
    """

    name: str
    target: str
    capacity: Bytes
    use: MemoryUse
    low: Bytes
    high: Bytes
    parts: tuple[Part, ...]
    held: tuple[Held, ...]
    seconds: Mapping[str, Seconds]
    shards: int = 1
    notes: tuple[str, ...] = ()
    refusal: str = ""
    xla: Recomputed = NOTHING_AGAIN
    spared: Bytes | None = None
    budget: Bytes | None = None
    settings: tuple[Setting, ...] = ()
    resolved: Resolved = field(default=Resolved(), repr=False)
    room: Room = field(default=Room(), repr=False)
    timeline: Timeline | None = field(default=None, repr=False)

    @property
    def argument(self) -> Bytes:
        """Bytes of the arguments."""
        return self.use.argument

    @property
    def output(self) -> Bytes:
        """Bytes of the results."""
        return self.use.output

    @property
    def temp(self) -> Bytes:
        """Peak bytes of temporaries."""
        return self.use.temp

    @property
    def alias(self) -> Bytes:
        """Bytes of results that reuse donated arguments."""
        return self.use.alias

    @property
    def host(self) -> Bytes:
        """Bytes in pinned host memory."""
        return self.use.host

    @property
    def device(self) -> Bytes:
        """argument + output + temp - alias."""
        return self.use.device

    @property
    def exact(self) -> bool:
        """Whether the figures are XLA's."""
        return self.use.exact

    @property
    def process(self) -> Bytes:
        """Device bytes of a process that runs it, with allocator and context."""
        return total(self.parts)

    def fits(self, target: str | None = None) -> bool:
        """Whether the process fits a device: a name of ``jaxtensile.targets()``, by default this estimate's.

        With a budget it must fit that too.
        """
        if self.refusal:
            return False
        capacity, budget = self.capacity, self.budget
        if target is not None:
            capacity, budget, _ = room_of(self.resolved, profile(target))
        return self.process <= capacity and (budget is None or self.device <= budget)


def room_of(
    wanted: Resolved, device: DeviceProfile, names: Sequence[str] = ()
) -> tuple[Bytes, Bytes | None, tuple[Setting, ...]]:
    """Bytes of a device, and those that the function is given. ``names``: of the actual devices, if known."""
    names = names or (device.platform,)
    capacity = wanted.capacity(names, device.capacity)
    if not wanted.says_budget and wanted.limit(names, device.capacity) is None:
        return capacity, None, ()
    budget, setting = wanted.budget(names, device.capacity)
    return capacity, budget, (setting,)
