"""In which states can a lease be, and what may happen in each?

Invariant: bytes are charged in every state but QUEUED and FREED, and only a release by the job or the death of its
process leads from a charged state to FREED. A silent or disconnected job is QUARANTINED: leases may expire, bytes may
not, because nothing but the end of a process takes device memory away from it.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from msgspec import Struct, field

from jaxtensile.errors import CoordinatorError
from jaxtensile.runtime.protocol.messages import Rung
from jaxtensile.units import Bytes, Seconds


class LeaseError(CoordinatorError):
    """Something happened to a lease that cannot happen in its state."""


class State(Enum):
    """Of a lease."""

    QUEUED = "queued"
    """Waits for its floor and holds nothing."""
    HELD = "held"
    REVOKING = "revoking"
    """Was told to shrink, and is charged what it had until it says that it has."""
    OVERDUE = "overdue"
    """Has not shrunk by the deadline."""
    QUARANTINED = "quarantined"
    """Charged, and nobody speaks for it."""
    FREED = "freed"

    __hash__ = object.__hash__  # there is one of each


class Happening(Enum):
    """To a lease."""

    GRANT = "grant"
    REVOKE = "revoke"
    ACK = "ack"
    DEADLINE = "deadline"
    LOST = "lost"
    """The connection ended, beats stayed away, or the coordinator was started again."""
    RECLAIM = "reclaim"
    RELEASE = "release"
    DIED = "died"

    __hash__ = object.__hash__


# Their names by themselves: to look a member up in its class costs as much as a call (Python 3.11).
QUEUED, HELD, REVOKING, OVERDUE, QUARANTINED, FREED = State
GRANT, REVOKE, ACK, DEADLINE, LOST, RECLAIM, RELEASE, DIED = Happening

_S, _H = State, Happening
TABLE: Final[dict[State, dict[Happening, State]]] = {
    _S.QUEUED: {
        _H.GRANT: _S.HELD,
        _H.LOST: _S.FREED,
        _H.RELEASE: _S.FREED,
        _H.DIED: _S.FREED,
    },
    _S.HELD: {
        _H.GRANT: _S.HELD,
        _H.REVOKE: _S.REVOKING,
        _H.ACK: _S.HELD,
        _H.LOST: _S.QUARANTINED,
        _H.RECLAIM: _S.HELD,  # the end of the old connection was not seen yet
        _H.RELEASE: _S.FREED,
        _H.DIED: _S.FREED,
    },
    _S.REVOKING: {
        _H.GRANT: _S.HELD,  # called off
        _H.REVOKE: _S.REVOKING,  # lower still
        _H.ACK: _S.HELD,
        _H.DEADLINE: _S.OVERDUE,
        _H.LOST: _S.QUARANTINED,
        _H.RECLAIM: _S.HELD,
        _H.RELEASE: _S.FREED,
        _H.DIED: _S.FREED,
    },
    _S.OVERDUE: {
        _H.ACK: _S.HELD,
        _H.LOST: _S.QUARANTINED,
        _H.RECLAIM: _S.HELD,
        _H.RELEASE: _S.FREED,
        _H.DIED: _S.FREED,
    },
    _S.QUARANTINED: {
        _H.RECLAIM: _S.HELD,
        _H.RELEASE: _S.FREED,  # on a connection that has not reclaimed it
        _H.DIED: _S.FREED,
    },
    _S.FREED: {},
}


def after(state: State, happening: Happening) -> State:
    """The next state. Raises ``LeaseError`` where there is none."""
    try:
        return TABLE[state][happening]
    except KeyError:
        able = ", ".join(h.value for h in TABLE[state]) or "nothing"
        raise LeaseError(f"{happening.value!r} cannot happen to a lease that is {state.value}: {able} can") from None


class Process(Struct, frozen=True):
    """A process, as the kernel names it: pids are used again, a pid and a start time are not."""

    pid: int
    started: int
    """In clock ticks after boot, field 22 of ``/proc/PID/stat``."""


class Charge(Struct, frozen=True, array_like=True, gc=False):
    """Bytes of one resource: those that stay, and those of a running step."""

    persistent: Bytes
    temp: Bytes = 0

    @property
    def level(self) -> Bytes:
        return self.persistent + self.temp


NOTHING: Final = Charge(0)
HOST: Final = "host"
"""The resource that pinned host memory is, beside the devices."""


class Lease(Struct, kw_only=True, eq=False):
    """One job's lease. Only the coordinator changes it."""

    id: int
    process: Process
    job: str
    number: int = 0
    """Which ask of its process it answers."""
    resources: tuple[str, ...]
    """The devices of the job, then ``HOST``."""
    ladder: tuple[Rung, ...]
    low: int
    """The guaranteed rung."""
    high: int
    """The highest rung the job wants."""
    needs: tuple[tuple[Charge, ...], ...]
    """What each rung needs of each resource."""
    slowdowns: tuple[float, ...]
    """Seconds per step on each rung ÷ those on the fastest."""
    best: tuple[int, ...]
    """For each rung the least of those above it on which the job is fastest; itself where there is none."""
    touched: frozenset[str]
    """Resources of which any of its rungs needs bytes."""
    priority: int
    weight: float
    state: State = State.QUEUED
    rung: int = -1
    """The one it was told last; -1 while it waits."""
    sequence: int = 0
    """Of the token of that."""
    epoch: int = 0
    former: int = -1
    """The sequence of the last token that was about the ladder the job had before, where it had one."""
    knows: bool = True
    """The job has shown that it knows of its ladder."""
    connection: int | None = None
    """The one that speaks for it: its generation. None only in quarantine."""
    since: Seconds = 0.0
    """When it last changed its rung."""
    beat: Seconds = 0.0
    asked: Seconds = 0.0
    """When it asked to be admitted."""
    waited: Seconds = 0.0
    """How long it took until it was."""
    deadline: Seconds | None = None
    wanted_by: int | None = None
    """The waiter that it was told to shrink for."""
    stuck: bool = False
    """Does not give bytes back: asking again is no use."""
    written: tuple[Charge, ...] = ()
    """What it is charged by the journal, as far as is known; empty: the journal does not know of it."""
    suspended: bool = False
    """Its state is on the host, and it runs no step."""
    faults: set[str] = field(default_factory=set[str])
    step: int = 0
    step_us: int = 0
    in_use: tuple[Bytes, ...] = ()
    """Measured by the job, of each resource; empty: it did not say."""
    peak: Bytes = 0
