"""The coordinator's journal, and its state read back from it.

A record is one line: a checksum and JSON. A last line without its end counts as never written. Any other damaged line
may concern bytes that a job holds, so the coordinator stops and grants nothing. The file is not synced, since jobs die
with the machine; a journal of another boot is thrown away. Format 1 has no checksums; it is read, and rewritten at the
start.

Invariant: whatever the file's end lost, its charges are at least what jobs were told they may use: a record is written
before its message is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol
from zlib import crc32

from msgspec import MsgspecError, Struct, structs
from msgspec.json import Decoder, Encoder

from jaxtensile.errors import CoordinatorError
from jaxtensile.runtime.decide.demand import demand_of
from jaxtensile.runtime.decide.leases import Charge, Lease, Process, State
from jaxtensile.runtime.protocol.messages import Rung
from jaxtensile.units import Seconds

FORMAT: Final = 2
"""Version of the records (2: each has a checksum). Older ones are read, newer ones are an error."""


class JournalError(CoordinatorError):
    """An unreadable journal: of another format, or broken before its end."""


class _Record(Struct, frozen=True, kw_only=True, tag_field="what", forbid_unknown_fields=True):
    pass


class Opened(_Record, frozen=True, kw_only=True, tag="opened"):
    """A coordinator started. ``sequence`` and ``lease``: the highest numbers of a token and a lease so far."""

    format: int
    boot_id: str
    epoch: int
    sequence: int = 0
    lease: int = 0


class Admitted(_Record, frozen=True, kw_only=True, tag="admitted"):
    """A job got a lease, charged its first rung, or a lease got another ladder."""

    lease: int
    process: Process
    job: str
    resources: tuple[str, ...]
    ladder: tuple[Rung, ...]
    low: int
    high: int
    priority: int
    weight: float
    rung: int
    sequence: int
    charges: tuple[Charge, ...]
    former: int = -1
    suspended: bool = False
    number: int = 0
    gated: tuple[str, ...] = ()


class Charged(_Record, frozen=True, kw_only=True, tag="charged"):
    """A lease's new charge."""

    lease: int
    rung: int
    sequence: int
    charges: tuple[Charge, ...]
    stuck: bool = False


class Freed(_Record, frozen=True, kw_only=True, tag="freed"):
    lease: int


Record = Opened | Admitted | Charged | Freed

_DECODER: Final[Decoder[Record]] = Decoder(Record)
_ENCODER: Final = Encoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A journal's contents: leases with their last charges, and the highest numbers ever used."""

    epoch: int = 0
    sequence: int = 0
    lease: int = 0
    boot_id: str = ""
    leases: dict[int, Admitted] = field(default_factory=dict[int, Admitted])
    stuck: frozenset[int] = frozenset()


def encode(record: Record) -> bytes:
    """A record as a line."""
    text = _ENCODER.encode(record)
    return b"%08x %b\n" % (crc32(text), text)


def decode(content: bytes) -> list[Record]:
    """The records of a file. An unfinished last line is left out.

    Raises ``JournalError`` for any other invalid line.
    """
    *lines, last = content.split(b"\n")
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(_decoded(line))
        except ValueError as wrong:
            raise JournalError(
                f"line {number} of the journal is no record ({wrong}): it may be of bytes that a job holds. End the "
                "jobs that hold device memory, and remove the file"
            ) from None
    with suppress(ValueError):
        records.append(_decoded(last))  # all of it is there but its end, which may be what is damaged
    return records


def _decoded(line: bytes) -> Record:
    """A line's record. Raises ``ValueError`` if invalid or changed."""
    if not line.startswith(b"{"):  # as those of format 1 do
        checksum, _, line = line.partition(b" ")
        if checksum != b"%08x" % crc32(line):
            raise ValueError("its checksum is another")
    try:
        return _DECODER.decode(line)
    except (MsgspecError, RecursionError) as wrong:
        raise ValueError(wrong) from None


def replay(records: Iterable[Record], boot_id: str = "") -> Replayed:
    """The state from the records. If the journal is of another boot than ``boot_id``, if given: no leases, only the
    numbers."""
    epoch = sequence = last = 0
    boot = ""
    leases: dict[int, Admitted] = {}
    stuck: set[int] = set()
    for record in records:
        match record:
            case Opened():
                if not 1 <= record.format <= FORMAT:
                    raise JournalError(f"the journal has format {record.format}, this version reads 1 to {FORMAT}")
                if record.boot_id != boot and boot:
                    leases.clear()
                epoch, boot = max(epoch, record.epoch), record.boot_id
                last, sequence = max(last, record.lease), max(sequence, record.sequence)
            case Admitted():
                leases[record.lease] = record
                last, sequence = max(last, record.lease), max(sequence, record.sequence)
            case Charged():
                sequence = max(sequence, record.sequence)
                if (old := leases.get(record.lease)) is not None:
                    leases[record.lease] = structs.replace(
                        old, rung=record.rung, sequence=record.sequence, charges=record.charges
                    )
                    if record.stuck:
                        stuck.add(record.lease)
            case Freed():
                leases.pop(record.lease, None)
    if boot_id and boot != boot_id:
        leases.clear()
    return Replayed(
        epoch=epoch, sequence=sequence, lease=last, boot_id=boot, leases=leases, stuck=frozenset(stuck & leases.keys())
    )


def admission(lease: Lease, charges: tuple[Charge, ...]) -> Admitted:
    """The record of a whole lease."""
    return Admitted(
        lease=lease.id,
        process=lease.process,
        job=lease.job,
        resources=lease.resources,
        ladder=lease.ladder,
        low=lease.low,
        high=lease.high,
        priority=lease.priority,
        weight=lease.weight,
        rung=lease.rung,
        sequence=lease.sequence,
        charges=charges,
        former=lease.former,
        suspended=lease.suspended,
        number=lease.number,
        gated=lease.gated,
    )


def charge(lease: Lease, charges: tuple[Charge, ...]) -> Charged:
    """The record of a lease's charge."""
    return Charged(lease=lease.id, rung=lease.rung, sequence=lease.sequence, charges=charges, stuck=lease.stuck)


def revived(replayed: Replayed, old: Admitted, now: Seconds) -> Lease:
    """A lease after a restart: charged, and nobody speaks for it yet."""
    demand = demand_of(old.ladder, old.resources, old.low, old.high)
    return Lease(
        id=old.lease,
        process=old.process,
        job=old.job,
        number=old.number,
        resources=old.resources,
        ladder=old.ladder,
        low=old.low,
        high=old.high,
        needs=demand.needs,
        slowdowns=demand.slowdowns,
        best=demand.best,
        touched=demand.touched,
        priority=old.priority,
        weight=old.weight,
        state=State.QUARANTINED,
        rung=old.rung,
        sequence=old.sequence,
        epoch=replayed.epoch,
        former=old.former,
        suspended=old.suspended,
        since=now,
        stuck=old.lease in replayed.stuck,
        written=old.charges,
        gated=old.gated,
    )


class Sink(Protocol):
    """The journal's target: an unbuffered file opened for appending, or a list in a test."""

    def write(self, data: bytes, /) -> int | None: ...


class Journal:
    """Writes records as lines to a sink, and raises its errors. A cut line is never continued: the coordinator rewrites
    the journal first."""

    __slots__ = ("_sink", "records")

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.records = 0

    def write(self, records: Sequence[Record]) -> None:
        """Append records, in one call of the sink."""
        data = b"".join(map(encode, records))
        written = self._sink.write(data)
        if written is not None and written != len(data):
            raise OSError(f"only {written} of {len(data)} bytes of the journal were written")
        self.records += len(records)
