"""The coordinator that this process's jobs ask: one in this process, or one behind a socket.

``JAXTENSILE_SOCKET`` or the config's ``coordinator.socket`` names the socket; a process of Ray asks the machine's agent
for it, if the cluster has one. Otherwise the process has its own, for the devices JAX has here and the config's
settings. It begins with the first job and ends with the last.

Invariant: the jobs of one process that hold anything ask the same coordinator.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxtensile.clock import Watch
from jaxtensile.devices.hardware import allocator_stats, host_memory
from jaxtensile.errors import ConfigError, CoordinatorError
from jaxtensile.jobs import building
from jaxtensile.runtime.client.client import Client, Link
from jaxtensile.runtime.client.gate import Turns
from jaxtensile.runtime.client.uninterrupted import uninterrupted
from jaxtensile.runtime.cluster.nearby import socket_nearby
from jaxtensile.runtime.config.config import Config
from jaxtensile.runtime.daemon.endpoint import VARIABLE, checked
from jaxtensile.runtime.decide.events import Settings
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.protocol.messages import Rung, Snapshot
from jaxtensile.spmd.location import device_name, profile_of
from jaxtensile.units import Bytes, Seconds

if TYPE_CHECKING:
    from jaxtensile.runtime.client.local import LocalCoordinator

_ANSWERS: Seconds = 1.0
"""Seconds for a coordinator to say what is free. Without an answer, the job asks for the bytes it can get by with. A
guess."""

_lock = threading.Lock()
_jobs: set[str] = set()
_local: tuple[Config, LocalCoordinator] | None = None


def _in_child() -> None:
    global _lock, _jobs, _local
    _lock, _jobs, _local = threading.Lock(), set(), None


os.register_at_fork(after_in_child=_in_child)


@dataclass(frozen=True, slots=True)
class Arbitration:
    """How one job is arbitrated. ``local``: the coordinator if it is in this process, else None."""

    name: str
    connect: Callable[[Client], Link]
    local: LocalCoordinator | None
    status: Callable[[], Snapshot]
    socket: Path | None = None

    def has_room(self, devices: Sequence[str], rung: Rung) -> bool:
        """Whether a rung's bytes are free on each device and no job waits."""
        try:
            now = self.status()
        except CoordinatorError:
            return False
        there = {d.device: d for d in now.devices}
        if now.waiting or not there.keys() >= {*devices}:
            return False
        for d in (there[name] for name in devices):
            temps = max(d.temps, rung.temp) if d.turns else d.temps + rung.temp
            if d.charged - d.temps + rung.persistent + temps > d.capacity - d.reserve:
                return False
        return True

    def compiles(self, watch: Watch) -> AbstractContextManager[None]:
        """A place among those who compile in the background; waits for one."""
        return building.place(self.socket, watch)

    def turns(self, devices: Sequence[str], priority: int, weight: float) -> tuple[Turns, ...]:
        """The job's places at the gates of its devices, in the order all jobs use; none if the jobs are separate
        processes."""
        local = self.local
        return () if local is None else tuple(local.gate(d).member(priority, weight) for d in sorted(devices))

    def end(self) -> None:
        """Free the job's name."""
        uninterrupted(_end, self.name)


def arbitration(job: str, config: Config) -> Arbitration:
    """The arbitration of a job, which owns its name until ``end``. Raises ``ConfigError``.

    Call it inside ``uninterrupted`` and keep the result: a name taken here and lost to Ctrl-C would never be freed.
    """
    global _local
    config = config.of_jobs
    socket = os.environ.get(VARIABLE) or config.socket or socket_nearby()
    with _lock:
        if job in _jobs:
            raise ConfigError(f"a job {job!r} is already there: end it by close() or its 'with', or give another name")
        if socket:
            from jaxtensile.runtime.client.socket_link import SocketLink
            from jaxtensile.runtime.daemon.inquiry import ask

            place = checked(Path(socket).absolute())
            found = Arbitration(job, SocketLink.to(str(place)), None, lambda: ask(place, _ANSWERS), place)
        else:
            from jaxtensile.runtime.client.local import LOCAL, LocalCoordinator  # a coordinator: for who has no daemon

            if _local is None or not _jobs:
                _local = (
                    config,
                    LocalCoordinator(_capacities(config), LOCAL if config.settings == Settings() else config.settings),
                )
            elif _local[0] != config:
                raise ConfigError(
                    f"the jobs {', '.join(sorted(_jobs))} of this process share its devices by another config: give "
                    f"job {job!r} the same one, or end them first"
                )
            found = Arbitration(job, _local[1].link, _local[1], _local[1].status)
        _jobs.add(job)
    return found


def _end(name: str) -> None:
    with _lock:
        _jobs.discard(name)


def _capacities(config: Config) -> dict[str, Capacity]:
    return config.granted({device_name(d): _bytes_of(d) for d in jax.local_devices()}, host_memory())


def _bytes_of(device: Any) -> Bytes:
    stats, profile = allocator_stats(device), profile_of(device)
    known = stats.get("bytes_limit") or profile.capacity
    return known if profile.backend.own_memory else min(known, host_memory())


__all__ = ["Arbitration", "arbitration"]
