"""The states of a lease, and what may happen in each.

Invariant: bytes are charged in all states but QUEUED and FREED. Only the job's release or its process's death frees a
charged lease. A silent or disconnected job is QUARANTINED: a lease may expire, but only the end of the process frees
device memory.
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
    """Was told to shrink; keeps its charge until its ACK."""
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
    """The connection ended, beats stayed away, or the coordinator restarted."""
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
    """The next state. Raises ``LeaseError`` if there is none."""
    try:
        return TABLE[state][happening]
    except KeyError:
        able = ", ".join(h.value for h in TABLE[state]) or "nothing"
        raise LeaseError(f"{happening.value!r} cannot happen to a lease that is {state.value}: {able} can") from None


class Process(Struct, frozen=True):
    """A process by pid and start time: pids are reused, the pair is not."""

    pid: int
    started: int
    """Clock ticks after boot, field 22 of ``/proc/PID/stat``."""


class Charge(Struct, frozen=True, array_like=True, gc=False):
    """Bytes of one resource: ``persistent``, and ``temp`` more during a step."""

    persistent: Bytes
    temp: Bytes = 0

    @property
    def level(self) -> Bytes:
        return self.persistent + self.temp


NOTHING: Final = Charge(0)
HOST: Final = "host"
"""The resource of pinned host memory."""


class Lease(Struct, kw_only=True, eq=False):
    """One job's lease. Only the coordinator changes it. ``ladder`` to ``touched``: as in ``Demand``."""

    id: int
    process: Process
    job: str
    number: int = 0
    """The number of the process's request."""
    resources: tuple[str, ...]
    """The job's devices, then ``HOST``."""
    ladder: tuple[Rung, ...]
    low: int
    high: int
    needs: tuple[tuple[Charge, ...], ...]
    slowdowns: tuple[float, ...]
    best: tuple[int, ...]
    touched: frozenset[str]
    priority: int
    weight: float
    state: State = State.QUEUED
    rung: int = -1
    """The rung it was told last; -1 while it waits."""
    sequence: int = 0
    """The sequence of the last token."""
    epoch: int = 0
    former: int = -1
    """The sequence of the last token for the former ladder; -1: none."""
    knows: bool = True
    """The job has shown that it knows its ladder."""
    connection: int | None = None
    """The connection that speaks for it. None only in quarantine."""
    since: Seconds = 0.0
    """When it last changed its rung."""
    beat: Seconds = 0.0
    gated: tuple[str, ...] = ()
    """Its devices on which it was told that steps take turns."""
    turn: int = -1
    """The number of the turn that it has; -1: none, 0: perhaps one, before a restart."""
    ending: bool = False
    """It was told to end its turn."""
    end_by: Seconds | None = None
    """When it is overdue with that."""
    asks: int = -1
    """The number of the turn that it asks for; -1: none."""
    tags: dict[str, float] = field(default_factory=dict[str, float])
    """On each device, the virtual time at which its turn began, or is to begin (``decide.turns``)."""
    served: dict[str, float] = field(default_factory=dict[str, float])
    """And at which its last turn ended."""
    turned: Seconds = 0.0
    """When its turn began."""
    hands_over: Seconds = 0.0
    """Seconds that giving its turn to another takes, as last measured."""
    asked: Seconds = 0.0
    """When it asked to be admitted."""
    waited: Seconds = 0.0
    """Seconds until it was admitted."""
    deadline: Seconds | None = None
    wanted_by: int | None = None
    """The waiter that it must shrink for."""
    stuck: bool = False
    """Does not give bytes back: asking again is no use."""
    written: tuple[Charge, ...] = ()
    """Its charge in the journal, as far as known; empty: not in the journal."""
    suspended: bool = False
    """Its state is on the host, and it runs no step."""
    faults: set[str] = field(default_factory=set[str])
    step: int = 0
    step_us: int = 0
    in_use: tuple[Bytes, ...] = ()
    """Measured by the job, of each resource; empty: not reported."""
    peak: Bytes = 0

    @property
    def devices(self) -> tuple[str, ...]:
        """Its resources without ``HOST``."""
        return self.resources[:-1]
