"""What do a job and the coordinator say to each other?

Invariant: a message that was decoded is in range: sizes below 2**60 bytes, finite positive times, bounded texts and
lists, no unknown field. ``wire`` frames them. A *lease* is named by its number, a state of the lease by a *token*
(epoch, sequence): every GRANT and REVOKE carries a higher one than all before, and what answers it repeats it.

    job → coordinator                      coordinator → job
    HELLO                                  WELCOME, or ERROR and the end
    ADMIT                                  QUEUED, GRANT or REJECT
    ACK, BEAT (no answer)                  GRANT (grow), REVOKE (shrink) at any time
    RECLAIM after a new connection         GRANT, or ERROR
    RENEW: another ladder                  RENEWED and GRANT, or ERROR; no answer if its token is not the last
    RELEASE                                RELEASED, or ERROR
    WITHDRAW: it does not wait any more    RELEASED of lease 0
    STATUS                                 SNAPSHOT
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from jaxtensile.units import Seconds

VERSION: Final = 3
"""Of the protocol; both sides must speak the same one. Goes up with every change of a message (3: asks of one process
have numbers)."""

MOST_BYTES: Final = 1 << 60
"""Bytes at most in a number of a message: 1 EiB, beyond every device and host, and what a job wants that names no
limit."""
MOST_COUNT: Final = 1 << 62
"""Of a count in a message: as far as any goes, and within the 64 bits of a signed number."""
LONGEST_NAME: Final = 128
"""Letters of a job's or a device's name: a line of a terminal. A guess."""
MOST_DEVICES: Final = 64
"""Devices of one job: more than one machine has. A guess."""
MOST_RUNGS: Final = 256
"""Rungs of one ladder: a job has 4 (``jobs.ladder``). A guess far above."""
LOWEST_PRIORITY, HIGHEST_PRIORITY = -1000, 1000
"""Of a job's class: as far as people write numbers. A guess."""
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3
"""Of a job's share inside its class, 1 where nothing is said: beyond, one of two gets next to nothing. A guess."""
Size = Annotated[int, Meta(ge=0, le=MOST_BYTES)]
Count = Annotated[int, Meta(ge=0, le=MOST_COUNT)]
Time = Annotated[float, Meta(gt=0, le=1e9)]
Name = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME, pattern=r"^[^\x00-\x1f\x7f-\x9f]+\Z")]
"""Without control characters: it is written into logs and terminals."""
Sizes = Annotated[tuple[Size, ...], Meta(max_length=MOST_DEVICES + 1)]
"""Bytes held on each device of the job, in its order, then of pinned host memory."""


class Token(Struct, frozen=True, array_like=True, order=True, forbid_unknown_fields=True):
    """Which GRANT or REVOKE: the coordinator's start, counted from 1, and a number that only grows."""

    epoch: Count
    sequence: Count


class Rung(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One plan of a job: bytes that stay on each device, bytes that a step needs beside them, pinned host bytes of the
    whole job, and seconds per step."""

    persistent: Size
    temp: Size = 0
    host: Size = 0
    seconds: Time

    @property
    def level(self) -> int:
        """Bytes on each device while a step runs."""
        return self.persistent + self.temp


Ladder = Annotated[tuple[Rung, ...], Meta(min_length=1, max_length=MOST_RUNGS)]
"""Plans by ascending level; a rung is named by its index."""


class _Message(Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    pass


class Hello(_Message, frozen=True, kw_only=True, tag="HELLO"):
    """The first message of a connection. Who is speaking is asked of the kernel, never of the message."""

    version: Count


class Admit(_Message, frozen=True, kw_only=True, tag="ADMIT"):
    """A job asks for a lease. Saying it again is harmless: a process has one lease for each name and number."""

    job: Name
    number: Count = 0
    """Which of the process's asks it is: a later job of the same name is another one, whatever of the former one is
    still on its way."""
    devices: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MOST_DEVICES)]
    ladder: Ladder
    floor: Size = 0
    """The level below which the job is never put; the lowest rung at or above it is guaranteed."""
    want: Size = MOST_BYTES
    """The level above which nothing is granted."""
    priority: Annotated[int, Meta(ge=LOWEST_PRIORITY, le=HIGHEST_PRIORITY)] = 0
    """The class: a higher one goes first."""
    weight: Annotated[float, Meta(ge=LEAST_WEIGHT, le=MOST_WEIGHT)] = 1.0
    """Share inside a class."""
    suspended: bool = False
    """Its state is on the host, and it runs no step: for people to see."""


class Ack(_Message, frozen=True, kw_only=True, tag="ACK"):
    """The job is at a rung and stays within it: what the last GRANT or REVOKE told."""

    lease: Count
    token: Token
    rung: Count
    in_use: Sizes


class Beat(_Message, frozen=True, kw_only=True, tag="BEAT"):
    """The process lives; what it measured since the last one."""

    lease: Count
    step: Count
    step_us: Count
    in_use: Sizes
    peak: Size


class Reclaim(_Message, frozen=True, kw_only=True, tag="RECLAIM"):
    """On a new connection: the job holds a rung of this lease, and will not grow before it is granted again."""

    lease: Count
    token: Token
    rung: Count
    in_use: Sizes


class Release(_Message, frozen=True, kw_only=True, tag="RELEASE"):
    """The job holds nothing any more; ``in_use`` says what of it the allocator kept."""

    lease: Count
    token: Token
    in_use: Sizes = ()


class Withdraw(_Message, frozen=True, kw_only=True, tag="WITHDRAW"):
    """A job that was told of no lease does not wait any more, nor will it use what it may be granted."""

    job: Name
    number: Count = 0


class Renew(_Message, frozen=True, kw_only=True, tag="RENEW"):
    """The job has another ladder from now on, and is on ``rung`` of it, which covers what it holds. It counts only for
    the last token, and while the job is where that told it to be: what crosses it is about the former ladder."""

    lease: Count
    token: Token
    ladder: Ladder
    rung: Count
    floor: Size = 0
    want: Size = MOST_BYTES
    in_use: Sizes = ()
    suspended: bool = False


class Status(_Message, frozen=True, kw_only=True, tag="STATUS"):
    """Asks for the state of the coordinator: leases with numbers above ``after``."""

    after: Count = 0


class Welcome(_Message, frozen=True, kw_only=True, tag="WELCOME"):
    version: int
    epoch: int
    beat_within: Seconds
    """A lease that says nothing for longer is quarantined."""


class Queued(_Message, frozen=True, kw_only=True, tag="QUEUED"):
    job: str
    ahead: int
    """Waiters before this one."""


class Grant(_Message, frozen=True, kw_only=True, tag="GRANT"):
    """The job may use the bytes of a rung, from now on."""

    job: str
    lease: int
    token: Token
    rung: int


class Renewed(_Message, frozen=True, kw_only=True, tag="RENEWED"):
    """The job's new ladder counts: from this token on every rung is one of it, and the job is on the one it said.

    Said again to a job that has not shown that it knows."""

    job: str
    lease: int
    token: Token
    former: int
    """The sequence of the token that RENEW carried."""


class Reject(_Message, frozen=True, kw_only=True, tag="REJECT"):
    job: str
    reason: str


class Revoke(_Message, frozen=True, kw_only=True, tag="REVOKE"):
    """The job is to go down to a rung at its next step boundary, within ``deadline`` seconds, and then to ACK.

    To a job that does not know of the lease yet, because the GRANT was lost, it is one."""

    job: str
    lease: int
    token: Token
    rung: int
    deadline: Seconds


class Released(_Message, frozen=True, kw_only=True, tag="RELEASED"):
    lease: int


Code = Literal["protocol", "version", "busy", "not yours", "unknown lease", "in use", "draining", "no room"]


class Error(_Message, frozen=True, kw_only=True, tag="ERROR"):
    code: Code
    detail: str
    retry_after: Seconds | None = None
    """Seconds after which asking again makes sense; None: never."""
    lease: int | None = None
    """The lease that it is about, if it is about one."""


class DeviceView(Struct, frozen=True, kw_only=True):
    """Bytes of one ledger."""

    device: str
    capacity: int
    reserve: int
    charged: int
    guaranteed: int


class LeaseView(Struct, frozen=True, kw_only=True):
    """What is known of one lease; ``rung`` is what it was told last, ``charged`` what it is charged per resource."""

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
    """Seconds until it was admitted, or so far."""
    in_use: tuple[int, ...] = ()
    """Measured by the job."""
    faults: tuple[str, ...] = ()


class EventView(Struct, frozen=True, kw_only=True):
    """What happened, ``ago`` seconds before the snapshot."""

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
    """The state of the coordinator; ``more`` leases have higher numbers than the last one told."""

    epoch: int
    phase: str
    policy: str
    devices: tuple[DeviceView, ...]
    leases: tuple[LeaseView, ...]
    more: bool
    waiting: int
    counters: dict[str, int]
    events: tuple[EventView, ...] = ()
    """The last ones, where the first leases are told."""


Request = Hello | Admit | Ack | Beat | Reclaim | Renew | Release | Withdraw | Status
Reply = Welcome | Queued | Grant | Renewed | Reject | Revoke | Released | Error | Snapshot
