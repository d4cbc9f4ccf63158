"""Messages among the cluster's coordinator, its agents and the submitters of jobs, as msgpack.

A *record* is the state of a job. Only the coordinator changes it, and each change raises its revision. Agents keep
copies; the next coordinator takes the copy with the highest revision. An *attempt* is one try to run a job. Agents end
processes of an attempt that is not the record's.

Invariant: decoded messages have no unknown field. No object is unpickled.
"""

from __future__ import annotations

from typing import Final, Literal, TypeVar

from msgspec import Struct, msgpack

from jaxtensile.runtime.placement.asks import Place
from jaxtensile.runtime.placement.nodes import Room
from jaxtensile.units import Bytes, Seconds

S = TypeVar("S", bound=Struct)

State = Literal["waiting", "placed", "done", "failed", "refused", "cancelled"]
ENDED: Final[tuple[State, ...]] = ("done", "failed", "refused", "cancelled")


class Spec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job as it is submitted."""

    job: str
    """Unique in the cluster; submitting it again is harmless."""
    name: str
    """In the config, and of its lease."""
    command: tuple[str, ...]
    folder: str
    """Where the command is started: a path that every machine has."""
    environment: dict[str, str] = {}
    """What is added to the machine's own."""
    floor: Bytes
    """On each device: its smallest plan, or its ``least``."""
    want: Bytes | None = None
    devices: int = 1
    """On each host."""
    kind: str = ""
    """Of the devices; empty: any."""
    hosts: int = 1
    priority: int = 0
    retries: int = 0
    """How often it is started again after it has failed by itself."""


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job and what has become of it."""

    spec: Spec
    order: int
    revision: int = 0
    state: State = "waiting"
    floor: Bytes
    """As of the spec, or what a machine's coordinator has asked for since."""
    attempt: int = 0
    places: tuple[Place, ...] = ()
    """Of this attempt."""
    failures: int = 0
    moves: int = 0
    """Attempts that were ended by something else than the job."""
    waited: Seconds = 0.0
    """Seconds since it was submitted, when this was written."""
    status: int | None = None
    """Exit status, of one that has failed."""
    reason: str = ""
    """Why it was refused, has failed or was placed anew."""


class Launch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Start a job's process on this host."""

    record: Record
    rank: int = 0
    """Which of the job's hosts this is."""
    meet: str = ""
    """``ADDRESS:PORT`` where its processes meet, if there are several; empty for the first, which chooses it."""


class Tick(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the coordinator tells an agent. Repeating it is harmless."""

    epoch: int
    """Agents heed only the highest they have heard."""
    everything: bool = False
    """Say all records too."""
    launch: tuple[Launch, ...] = ()
    stop: tuple[tuple[str, int], ...] = ()
    """Jobs and attempts to end."""
    forget: tuple[tuple[str, int], ...] = ()
    """Jobs and attempts that have ended, as the coordinator knows."""
    keep: tuple[Record, ...] = ()
    drop: tuple[str, ...] = ()
    """Jobs whose records need not be kept."""


class Task(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One attempt of a job on a host."""

    job: str
    attempt: int
    ended: bool = False
    status: int = 0
    """Exit status, of one that has ended."""
    stopped: bool = False
    """Was told to end."""
    reason: str = ""
    """Why it could not be started, or the last line of one that has failed."""
    rejected: Bytes | None = None
    """The bytes of the device whose coordinator said that the job will never fit; None: it did not."""
    lease: Literal["", "waits", "held"] = ""
    waited: Seconds = 0.0
    """For its lease."""
    granted: Bytes = 0
    rung: int = -1
    rungs: int = 0
    step: int = 0
    meet: str = ""
    """As in ``Launch``, of the first of several hosts."""


class Report(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent says: the state of its machine."""

    node: str
    start: str
    """Another text for each start of the agent: its jobs end with it."""
    epoch: int
    serving: bool
    """Whether the machine's coordinator answers."""
    why: str = ""
    rooms: tuple[Room, ...] = ()
    tasks: tuple[Task, ...] = ()
    records: tuple[Record, ...] = ()


class Submitted(Struct, frozen=True, forbid_unknown_fields=True):
    """The state of jobs: their records, and what runs of them."""

    records: tuple[Record, ...]
    tasks: tuple[Task, ...] = ()


def encode(message: Struct) -> bytes:
    """A message as bytes."""
    return msgpack.encode(message)


def decode(data: bytes, kind: type[S]) -> S:
    """A message from its bytes."""
    return msgpack.decode(data, type=kind)
