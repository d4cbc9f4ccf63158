"""Requests of jobs, the rules of placement, and its decisions."""

from __future__ import annotations

from msgspec import Struct

from jaxtensile.runtime.placement.nodes import Some
from jaxtensile.units import Bytes, Seconds


class Rules(Struct, frozen=True, kw_only=True):
    """``[cluster]`` of the config, in seconds."""

    hold_after: Seconds = 600.0
    """After so long the oldest job of a class goes first, and its floor is held. A guess: less costs utilisation, more
    lets large jobs wait for longer (``benchmarks/concurrent/fleet.md``)."""
    refuse_after: Seconds = 60.0
    """For so long a job waits when no node is large enough, even empty, and none comes that is larger: another may, or
    its coordinator may start. A guess."""
    move_after: Seconds = 30.0
    """For so long a placed job waits for its lease, before it goes to another node that has room. A guess: what others
    do not need for good they give back within a step."""


class Ask(Struct, frozen=True, kw_only=True):
    """What a job needs to begin: ``floor`` bytes on each of ``devices`` of each of ``hosts`` nodes."""

    job: str
    floor: Bytes
    devices: int = 1
    kind: str = ""
    """Of the devices, ``"cuda"``; empty: any."""
    hosts: int = 1
    priority: int = 0
    order: int
    """Its number in the order of submission; kept when it is placed again."""
    since: Seconds
    """When it was submitted."""

    @property
    def some(self) -> Some:
        """Its devices on a node."""
        return Some(self.kind, self.devices)

    @property
    def total(self) -> Bytes:
        """Its floors together."""
        return self.floor * self.devices * self.hosts


class Place(Struct, frozen=True):
    """One node of a job, and the devices there."""

    node: str
    devices: tuple[str, ...]


class Placed(Struct, frozen=True):
    """A job's nodes, by their names: the one order of all jobs."""

    job: str
    places: tuple[Place, ...]


class Refused(Struct, frozen=True):
    """A job that no node is large enough for."""

    job: str
    reason: str
