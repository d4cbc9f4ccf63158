"""What an estimate says, as data."""

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
    """Values of one op, type and line that are there at the peak: how many, and their bytes together.

    Without a ``dtype``: what the bodies of a loop or branch need inside, or holes between buffers.
    """

    primitive: str
    dtype: str
    shape: tuple[int, ...]
    source: str
    count: int
    nbytes: Bytes


@dataclass(frozen=True, slots=True)
class Room:
    """What bounds are made of: the temporaries of the order that needs least, and the largest array that is stored."""

    least: Bytes = 0
    largest: Bytes = 0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Peak device bytes of a function, as XLA's memory analysis divides them; printable.

    ``low``, ``high``: bounds of ``device`` that are believed in (equal where XLA said it); ``capacity``: of the target;
    ``parts``: what a process needs, each with how it was found, ``process`` their sum; ``held``: what is there at the
    peak, largest first (by the model in both modes); ``seconds``: wall time of each step; ``refusal``: why the target's
    compiler gave no program; ``xla``: what XLA recomputes by itself under ``jax.jit``, and ``spared``: the device bytes
    that a GPU then needs, where that was asked and it does; ``budget``: device bytes that the config gives the
    function, None where it gives it none, ``settings``: where that is from.
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
        """Bytes of temporaries at their most."""
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
        """Whether XLA said so."""
        return self.use.exact

    @property
    def process(self) -> Bytes:
        """What a process needs of its device for it: allocator and context included."""
        return total(self.parts)

    def fits(self, target: str | None = None) -> bool:
        """Whether the process fits a device: a name of ``jaxtensile.targets()``, this estimate's own without one.

        Where a config gives the function fewer bytes, it has to fit them too.
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
    """Bytes of a device, and those that a config leaves the function; ``names``: of the very devices, if known."""
    names = names or (device.platform,)
    capacity = wanted.capacity(names, device.capacity)
    if not wanted.says_budget and wanted.limit(names, device.capacity) is None:
        return capacity, None, ()
    budget, setting = wanted.budget(names, device.capacity)
    return capacity, budget, (setting,)
