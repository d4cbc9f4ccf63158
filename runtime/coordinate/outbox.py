"""The order of records and messages, also when the journal cannot be written.

Invariant: a batch's messages follow its records. While the journal fails, nothing is said of leases that it is behind
on, and no lease is said to be granted or free.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from jaxtensile.runtime.decide import journal
from jaxtensile.runtime.decide.events import Command, Compact, Record, Send

PER_LEASE: Final = 4
"""Records per lease before the journal is rewritten; a new journal has one per lease. A guess."""
COMPACT_AFTER: Final = 1000
"""Records, beyond ``PER_LEASE`` for each lease, after which the journal is rewritten. A guess."""


class Outbox:
    """The commands of one batch, and the outcome of the last."""

    __slots__ = ("_commands", "_first", "_free", "_last", "_owed", "_records", "_unwritten", "_written", "works")

    def __init__(self, *, journal_first: bool) -> None:
        self.works = True
        """Whether the journal can be written, as far as known."""
        self._first = journal_first
        self._records: list[Record | Compact] = []
        self._commands: list[Command] = []
        self._written = 0
        self._unwritten: set[int] = set()
        """Leases with a lost record."""
        self._owed: list[Command] = []
        """Messages that leases are free, not yet on record."""
        self._free: list[Command] = []
        """The commands of this batch that say so."""
        self._last: tuple[list[Record | Compact], tuple[int, ...], list[Command]] = ([], (), [])
        """Of the last batch: its records, all leases if it was a compaction, and its messages of free leases."""

    def write(self, record: journal.Record) -> bool:
        """Append to the journal, if it works; whether it does. Otherwise the record is in the next compaction."""
        if self.works:
            self._records.append(Record(record))
            self._written += 1
        return self.works

    def replace(self, records: tuple[journal.Record, ...]) -> None:
        """Rewrite the journal; this covers all records of the batch."""
        self._records = [Compact(records)]
        self._written = len(records)

    def do(self, command: Command) -> None:
        """Add a command that is not about the journal."""
        self._commands.append(command)

    def free(self, told: Send) -> None:
        """Say that a lease is free, once that is on record."""
        self._commands.append(told)
        self._free.append(told)

    def outgrown(self, leases: int) -> bool:
        """Whether to rewrite the journal."""
        return bool(self._records) and self._written > COMPACT_AFTER + PER_LEASE * leases

    def unsure(self, lease: int) -> bool:
        """Whether the journal is behind on a lease."""
        return lease in self._unwritten

    def failed(self) -> None:
        """The last batch was not written."""
        records, leases, free = self._last
        self.works = False
        for command in records:
            self._unwritten.update((command.record.lease,) if isinstance(command, Record) else leases)
        self._owed += free

    def restored(self) -> None:
        """The journal works again and is rewritten in this batch."""
        self.works = True
        self._commands += self._owed
        self._free += self._owed
        self._owed = []
        self._unwritten = set()

    def take(self, leases: Collection[int]) -> list[Command]:
        """The commands of the batch in order; ``leases``: all."""
        records, commands, free = self._records, self._commands, self._free
        self._commands = []
        if free:
            self._free = []
            if not self.works:
                self._owed += free
                commands = [c for c in commands if c not in free]
        if not records:
            self._last = records, (), free
            return commands
        self._records = []
        self._last = records, tuple(leases) if isinstance(records[0], Compact) else (), free
        return records + commands if self._first else commands + records
