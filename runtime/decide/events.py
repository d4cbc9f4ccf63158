"""What happens to a coordinator, and what does it have done?

Invariant: both are plain values. The server turns sockets, clocks and dead processes into events, and carries commands
out in their order. When a ``Record`` or ``Compact`` cannot be written, nothing that is to be said ``after_record`` is
sent any more in that batch, and ``JournalFailed`` is the next event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from msgspec import Struct

from jaxtensile.runtime.decide import journal
from jaxtensile.runtime.decide.journal import Replayed
from jaxtensile.runtime.decide.leases import Process
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.decide.policy import Objective
from jaxtensile.runtime.protocol.messages import Reply, Request
from jaxtensile.units import Seconds

MAX_CLIENTS: Final = 1 << 10
"""Jobs that a coordinator serves unless told otherwise: decisions are timed up to 1,000
(``benchmarks/coordinator``)."""

Connection = int
"""Numbered in the order in which they were accepted: a later one of a process replaces an earlier one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the coordinator arbitrates; see ``jaxtensile.toml``."""

    policy: Objective = "slowdown"
    lease_ttl: Seconds = 10.0
    """In which a job has to be heard. A guess: a compiler may keep Python threads from running for some seconds."""
    min_hold: Seconds = 30.0
    """How long a job keeps its rung at least. A guess: a switch may be a compile."""
    min_gain: float = 0.05
    """Share of all slowdowns that a new division has to save. A guess."""
    revoke_deadline: Seconds = 60.0
    """In which a job has to shrink. A guess: a step and a compile."""
    on_overdue: Literal["wait", "terminate"] = "wait"
    max_clients: int = MAX_CLIENTS
    recovery: Seconds = 2.0
    """How long after a restart only reclaims are answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the protocol needs to be safe. All hold; each can be left out for tests that show that it is missed."""

    free_on_death: bool = True
    """Bytes of a job that did not release them are free when its process is dead, not when its connection ends."""
    ttl_quarantines: bool = True
    """Nor when it is silent for long."""
    journal_first: bool = True
    """A grant is written down before it is sent."""
    idempotent_admit: bool = True
    """A job that asks again, because the answer was lost, gets the same lease."""
    generations: bool = True
    """The end of a connection, or what was said on it, is about leases only that no later connection speaks for."""
    fencing: bool = True
    """An ACK counts only for the last GRANT or REVOKE."""
    charge_until_ack: bool = True
    """A job that is told to shrink is charged what it had until it says that it has."""
    process_identity: bool = True
    """A pid that is used again is another process."""
    former_ladder: bool = True
    """A job that comes back and does not know that its new ladder counts is not taken to speak of that."""
    measured_wins: bool = True
    """Bytes that a job reports count, whatever its ladder says."""


class Connected(Struct, frozen=True):
    """A process has connected; the kernel says which."""

    connection: Connection
    process: Process


class Received(Struct, frozen=True):
    connection: Connection
    message: Request


class Garbled(Struct, frozen=True):
    """What came by a connection is no message, and nothing more can be understood on it."""

    connection: Connection
    detail: str


class Disconnected(Struct, frozen=True):
    """The end of a connection, after all that was received on it."""

    connection: Connection


class ProcessDied(Struct, frozen=True):
    """Its memory is free. Also the answer to a ``Watch`` of a process that is no more."""

    process: Process


class Tick(Struct, frozen=True):
    """Time has passed: at the latest when ``Coordinator.wake`` says."""


class CapacityChanged(Struct, frozen=True):
    capacities: Mapping[str, Capacity]


class SettingsChanged(Struct, frozen=True):
    settings: Settings


class Restarted(Struct, frozen=True):
    """The first event: what the journal of the last coordinator said, if there was one.

    Its ``Compact`` has to be written before anything else is done: an epoch that is not on record may be used again."""

    replayed: Replayed
    boot_id: str = ""


class JournalFailed(Struct, frozen=True):
    """A record was not written, and nothing that was to be said after it was sent."""


class JournalWorks(Struct, frozen=True):
    """It can be written again."""


class Stopping(Struct, frozen=True):
    """No new jobs from now on."""


Event = (
    Connected
    | Received
    | Garbled
    | Disconnected
    | ProcessDied
    | Tick
    | CapacityChanged
    | SettingsChanged
    | Restarted
    | JournalFailed
    | JournalWorks
    | Stopping
)


class Send(Struct, frozen=True):
    connection: Connection
    message: Reply
    after_record: bool = False
    """Not to be sent when a record before it was not written."""


class Record(Struct, frozen=True):
    """Append to the journal."""

    record: journal.Record


class Compact(Struct, frozen=True):
    """Replace the journal by these records, whole or not at all."""

    records: tuple[journal.Record, ...]


class Close(Struct, frozen=True):
    """Close a connection; its end is an event as any other."""

    connection: Connection


class Watch(Struct, frozen=True):
    """Tell the death of a process, at once if it is dead."""

    process: Process


class Terminate(Struct, frozen=True):
    """End a process that keeps bytes after the deadline."""

    process: Process


Command = Send | Record | Compact | Close | Watch | Terminate
