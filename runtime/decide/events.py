"""Events and commands of a coordinator.

Invariant: both are plain values. The server makes events of sockets, clocks and dead processes, and carries out
commands in order. If a ``Record`` or ``Compact`` cannot be written, the batch sends no more ``after_record`` messages,
and ``JournalFailed`` is the next event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from msgspec import Struct

from jaxtensile.runtime.decide import journal
from jaxtensile.runtime.decide.journal import Replayed
from jaxtensile.runtime.decide.leases import Process
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.protocol.messages import Reply, Request
from jaxtensile.units import Seconds

Objective = Literal["slowdown", "fair", "priority", "fcfs"]
"""What the surplus is divided by; ``policy`` says how."""
OBJECTIVES: Final[tuple[Objective, ...]] = get_args(Objective)

Connection = int
"""Numbered as accepted: a process's later connection replaces an earlier one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the coordinator arbitrates; see ``jaxtensile.toml``."""

    policy: Objective = "slowdown"
    lease_ttl: Seconds = 10.0
    """Seconds in which a job must be heard. A guess: a compiler may stop Python threads for some seconds."""
    min_hold: Seconds = 30.0
    """Seconds that a job keeps its rung at least. A guess: a switch may be a compile."""
    min_gain: float = 0.05
    """Share of all slowdowns that a new division must save. A guess."""
    revoke_deadline: Seconds = 60.0
    """Seconds in which a job must shrink. A guess: a step and a compile."""
    on_overdue: Literal["wait", "terminate"] = "wait"
    max_clients: int = 1 << 10
    """Most jobs at once; decisions are timed up to 1,000 (``benchmarks/coordinator``)."""
    recovery: Seconds = 2.0
    """Seconds after a restart in which only reclaims are answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Safety rules of the protocol. All hold; tests switch one off to show that it is needed."""

    free_on_death: bool = True
    """Unreleased bytes are free when the process is dead, not when its connection ends."""
    ttl_quarantines: bool = True
    """Nor when it is silent for long."""
    journal_first: bool = True
    """A grant is recorded before it is sent."""
    idempotent_admit: bool = True
    """A repeated ADMIT, whose answer was lost, gets the same lease."""
    generations: bool = True
    """A connection's end and messages concern only leases that no later connection speaks for."""
    fencing: bool = True
    """An ACK counts only for the last GRANT or REVOKE."""
    charge_until_ack: bool = True
    """A job told to shrink keeps its charge until its ACK."""
    process_identity: bool = True
    """A reused pid is another process."""
    former_ladder: bool = True
    """A returning job that does not know its new ladder speaks of the former one."""
    turns_last: bool = True
    """The end of a connection or a restart ends no turn."""
    measured_wins: bool = True
    """Bytes that a job reports count, whatever its ladder says."""


class Connected(Struct, frozen=True):
    """A process has connected; the kernel names it."""

    connection: Connection
    process: Process


class Received(Struct, frozen=True):
    connection: Connection
    message: Request


class Garbled(Struct, frozen=True):
    """A connection brought no valid message, and can bring none any more."""

    connection: Connection
    detail: str


class Disconnected(Struct, frozen=True):
    """A connection ended, after everything received on it."""

    connection: Connection


class ProcessDied(Struct, frozen=True):
    """A process's memory is free. Also the answer to ``Watch`` for a dead process."""

    process: Process


class Tick(Struct, frozen=True):
    """Time has passed; due when ``Coordinator.wake`` says."""


class CapacityChanged(Struct, frozen=True):
    capacities: Mapping[str, Capacity]


class SettingsChanged(Struct, frozen=True):
    settings: Settings


class Restarted(Struct, frozen=True):
    """The first event: the last coordinator's journal, if any.

    Its ``Compact`` must be written before anything else: an unrecorded epoch may be used again.
    """

    replayed: Replayed
    boot_id: str = ""


class JournalFailed(Struct, frozen=True):
    """A record was not written, and no message after it was sent."""


class JournalWorks(Struct, frozen=True):
    """The journal can be written again."""


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
    """Do not send if a record before it was not written."""


class Record(Struct, frozen=True):
    """Append to the journal."""

    record: journal.Record


class Compact(Struct, frozen=True):
    """Replace the journal by these records, whole or not at all."""

    records: tuple[journal.Record, ...]


class Close(Struct, frozen=True):
    """Close a connection; its end becomes an event."""

    connection: Connection


class Watch(Struct, frozen=True):
    """Report a process's death, at once if it is dead."""

    process: Process


class Terminate(Struct, frozen=True):
    """End a process that keeps bytes after the deadline."""

    process: Process


Command = Send | Record | Compact | Close | Watch | Terminate
