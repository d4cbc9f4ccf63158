"""Messages between a job and the coordinator; ``wire`` frames them.

A lease has a number, and each of its states a *token* (epoch, sequence). Every GRANT and REVOKE carries a higher token
than all before; answers repeat it.

    job → coordinator                      coordinator → job
    HELLO                                  WELCOME, or ERROR and the end
    ADMIT                                  QUEUED, GRANT or REJECT
    TURN: its next step is to run          BEGIN; END when others wait, at any time
    DONE: a turn is over (no answer)
    ACK, BEAT (no answer)                  GRANT (grow), REVOKE (shrink) at any time
    RECLAIM after a new connection         GRANT, or ERROR
    RENEW: another ladder                  RENEWED and GRANT, or ERROR; no answer if its token is not the last
    RELEASE                                RELEASED, or ERROR
    WITHDRAW: it does not wait any more    RELEASED of lease 0
    STATUS                                 SNAPSHOT

Invariant: a decoded message is in range: sizes below 2**60 bytes, finite positive times, bounded texts and lists, no
unknown field.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from jaxtensile.units import Seconds

VERSION: Final = 5
"""Protocol version; both sides need the same. Raised with every change of a message (5: seconds of the link)."""

MOST_BYTES: Final = 1 << 60
"""Bytes, the most in a message: 1 EiB, above every device and host; also the ``want`` of a job without a limit."""
MOST_COUNT: Final = 1 << 62
"""Largest count in a message: within the 64 bits of a signed number."""
LONGEST_NAME: Final = 128
"""Letters of a job's or device's name: a line of a terminal. A guess."""
MOST_DEVICES: Final = 64
"""Devices of one job: more than one machine has. A guess."""
MOST_RUNGS: Final = 256
"""Rungs of one ladder: a job has 4 (``jobs.ladder``). A guess far above."""
LOWEST_PRIORITY, HIGHEST_PRIORITY = -1000, 1000
"""Range of a job's class: as far as people write numbers. A guess."""
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3
"""Range of a job's share inside its class, by default 1: beyond it, one of two gets next to nothing. A guess."""
Size = Annotated[int, Meta(ge=0, le=MOST_BYTES)]
Count = Annotated[int, Meta(ge=0, le=MOST_COUNT)]
Turn = Annotated[int, Meta(ge=-1, le=MOST_COUNT)]
Time = Annotated[float, Meta(gt=0, le=1e9)]
Span = Annotated[float, Meta(ge=0, le=1e9)]
Name = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME, pattern=r"^[^\x00-\x1f\x7f-\x9f]+\Z")]
"""Without control characters, since it goes into logs and terminals."""
Sizes = Annotated[tuple[Size, ...], Meta(max_length=MOST_DEVICES + 1)]
"""Bytes held on each device of the job, in order, then of pinned host memory."""


class Token(Struct, frozen=True, array_like=True, order=True, forbid_unknown_fields=True):
    """Identifies a GRANT or REVOKE: the coordinator's start, from 1, and a number that only grows."""

    epoch: Count
    sequence: Count


class Rung(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One plan. Bytes on each device: ``persistent``, and ``temp`` more in a step. ``host``: pinned bytes of the whole
    job. ``seconds``: per step, alone on its devices; in ``wait`` of these they compute nothing, as copies are on their
    way. ``into``, ``out``: seconds that a step's copies take of each way of the link."""

    persistent: Size
    temp: Size = 0
    host: Size = 0
    seconds: Time
    wait: Span = 0.0
    into: Span = 0.0
    out: Span = 0.0

    @property
    def level(self) -> int:
        """Bytes on each device while a step runs."""
        return self.persistent + self.temp


Ladder = Annotated[tuple[Rung, ...], Meta(min_length=1, max_length=MOST_RUNGS)]
"""Plans by ascending level; a rung is an index of them."""


class _Message(Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    pass


class Hello(_Message, frozen=True, kw_only=True, tag="HELLO"):
    """The first message of a connection. The kernel says who sends it."""

    version: Count


class Admit(_Message, frozen=True, kw_only=True, tag="ADMIT"):
    """A job asks for a lease. Repeating it is harmless: a process has one lease per name and number."""

    job: Name
    number: Count = 0
    """The process's request number: separates jobs of one name from late messages about a former one."""
    devices: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MOST_DEVICES)]
    ladder: Ladder
    floor: Size = 0
    """The job is never put below this level, and is guaranteed the lowest rung at or above it."""
    want: Size = MOST_BYTES
    """Nothing is granted above this level."""
    priority: Annotated[int, Meta(ge=LOWEST_PRIORITY, le=HIGHEST_PRIORITY)] = 0
    """The class: higher ones go first."""
    weight: Annotated[float, Meta(ge=LEAST_WEIGHT, le=MOST_WEIGHT)] = 1.0
    """Share inside a class."""
    suspended: bool = False
    """The job's state is on the host and it runs no step; only displayed."""


class Ack(_Message, frozen=True, kw_only=True, tag="ACK"):
    """The job is on the rung of the last GRANT or REVOKE and stays within it."""

    lease: Count
    token: Token
    rung: Count
    in_use: Sizes


class Beat(_Message, frozen=True, kw_only=True, tag="BEAT"):
    """The process lives; its measurements since the last beat."""

    lease: Count
    step: Count
    step_us: Count
    in_use: Sizes
    peak: Size


class Reclaim(_Message, frozen=True, kw_only=True, tag="RECLAIM"):
    """On a new connection: the job holds a rung of this lease, and does not grow before a new grant."""

    lease: Count
    token: Token
    rung: Count
    in_use: Sizes
    turn: Turn = -1
    """The number of the turn that the job has; -1: none."""


class Release(_Message, frozen=True, kw_only=True, tag="RELEASE"):
    """The job holds nothing any more, except ``in_use`` bytes that the allocator kept."""

    lease: Count
    token: Token
    in_use: Sizes = ()


class Withdraw(_Message, frozen=True, kw_only=True, tag="WITHDRAW"):
    """A job without a known lease stops waiting, and will not use a grant."""

    job: Name
    number: Count = 0


class Renew(_Message, frozen=True, kw_only=True, tag="RENEW"):
    """The job has another ladder and is on its ``rung``, which covers the bytes held. Valid only with the last token,
    and while the job is where that sent it: orders that cross it concern the former ladder."""

    lease: Count
    token: Token
    ladder: Ladder
    rung: Count
    floor: Size = 0
    want: Size = MOST_BYTES
    in_use: Sizes = ()
    suspended: bool = False


class AskTurn(_Message, frozen=True, kw_only=True, tag="TURN"):
    """The job's next step is to run. ``turn``: a number that the job has not given before."""

    lease: Count
    turn: Count


class Done(_Message, frozen=True, kw_only=True, tag="DONE"):
    """The turn of that number is over, or is not waited for any more: the temporaries of a step are given back.

    ``cost``: seconds that handing it over took, allocating anew included. ``in_use``: what the job still holds.
    """

    lease: Count
    turn: Count
    cost: Span = 0.0
    in_use: Sizes = ()


class Status(_Message, frozen=True, kw_only=True, tag="STATUS"):
    """Asks for the coordinator's state, with leases above ``after``."""

    after: Count = 0


class Welcome(_Message, frozen=True, kw_only=True, tag="WELCOME"):
    version: int
    epoch: int
    beat_within: Seconds
    """Seconds of silence after which a lease is quarantined."""


class Queued(_Message, frozen=True, kw_only=True, tag="QUEUED"):
    job: str
    ahead: int
    """Waiters before this one."""


class Grant(_Message, frozen=True, kw_only=True, tag="GRANT"):
    """The job may use the bytes of a rung from now on; those of a step, if ``turns``, only during a turn."""

    job: str
    lease: int
    token: Token
    rung: int
    turns: bool = False


class Renewed(_Message, frozen=True, kw_only=True, tag="RENEWED"):
    """From this token on rungs are of the new ladder, and the job is on the one it said. Repeated until the job shows
    that it knows."""

    job: str
    lease: int
    token: Token
    former: int
    """The sequence of RENEW's token."""


class Reject(_Message, frozen=True, kw_only=True, tag="REJECT"):
    job: str
    reason: str


class Revoke(_Message, frozen=True, kw_only=True, tag="REVOKE"):
    """Go down to a rung at the next step boundary, within ``deadline`` seconds, then ACK.

    Also tells a job of its lease if the GRANT was lost.
    """

    job: str
    lease: int
    token: Token
    rung: int
    deadline: Seconds
    turns: bool = False


class Begin(_Message, frozen=True, kw_only=True, tag="BEGIN"):
    """The turn of that number begins: the job's steps may run until it says DONE."""

    lease: int
    turn: int


class End(_Message, frozen=True, kw_only=True, tag="END"):
    """Others wait: say DONE at the next step boundary."""

    lease: int
    turn: int


class Released(_Message, frozen=True, kw_only=True, tag="RELEASED"):
    lease: int


Code = Literal["protocol", "version", "busy", "not yours", "unknown lease", "in use", "draining", "no room"]


class Error(_Message, frozen=True, kw_only=True, tag="ERROR"):
    code: Code
    detail: str
    retry_after: Seconds | None = None
    """Seconds after which asking again makes sense; None: never."""
    lease: int | None = None
    """The lease concerned; None: no lease."""


class DeviceView(Struct, frozen=True, kw_only=True):
    """Bytes of one resource's ledger."""

    device: str
    capacity: int
    reserve: int
    charged: int
    guaranteed: int
    temps: int = 0
    """Of the bytes charged, those of running steps."""
    turns: bool = False
    """Whether steps take turns: then ``temps`` is not the sum over the jobs."""


class LeaseView(Struct, frozen=True, kw_only=True):
    """One lease; ``rung``: the one it was told last; ``charged``: bytes per resource."""

    lease: int
    job: str
    pid: int
    state: str
    resources: tuple[str, ...]
    charged: tuple[int, ...]
    rung: int
    rungs: int
    priority: int
    weight: float
    step: int
    step_us: int
    peak: int
    waited: Seconds = 0.0
    """Seconds until admission, or so far."""
    in_use: tuple[int, ...] = ()
    """Measured by the job."""
    faults: tuple[str, ...] = ()
    turn: str = ""
    """Empty, "waits", "has" or "ends": of its turn."""


class EventView(Struct, frozen=True, kw_only=True):
    """An event, ``ago`` seconds before the snapshot."""

    ago: Seconds
    what: str
    job: str = ""
    lease: int = 0
    pid: int = 0
    rung: int = -1
    detail: str = ""
    waited: Seconds = 0.0
    step: int = 0
    peak: int = 0


class Snapshot(_Message, frozen=True, kw_only=True, tag="SNAPSHOT"):
    """The coordinator's state; ``more``: there are leases with higher numbers than the last here."""

    epoch: int
    phase: str
    policy: str
    devices: tuple[DeviceView, ...]
    leases: tuple[LeaseView, ...]
    more: bool
    waiting: int
    counters: dict[str, int]
    events: tuple[EventView, ...] = ()
    """The latest, only in the message with the first leases."""


Request = Hello | Admit | Ack | Beat | Reclaim | Renew | Release | Withdraw | AskTurn | Done | Status
Reply = Welcome | Queued | Grant | Renewed | Reject | Revoke | Begin | End | Released | Error | Snapshot
