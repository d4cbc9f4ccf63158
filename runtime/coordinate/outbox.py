"""In which order is something written down and said, and what if it cannot be written?

Invariant: what is said in a batch comes after all that is written in it; and while the journal does not work, nothing
is said of a lease that the journal knows less of than the coordinator, nor that one is granted or free.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from jaxtensile.runtime.decide import journal
from jaxtensile.runtime.decide.events import Command, Compact, Record, Send

PER_LEASE: Final = 4
"""Records for each lease that a journal may have before it is written anew: a lease is one in a new one. A guess."""
COMPACT_AFTER: Final = 1000
"""Records beyond some per lease after which the journal is written anew. A guess."""


class Outbox:
    """The commands of one batch, and what became of those of the last one."""

    __slots__ = ("_commands", "_first", "_free", "_last", "_owed", "_records", "_unwritten", "_written", "works")

    def __init__(self, *, journal_first: bool) -> None:
        self.works = True
        """Whether the journal can be written, as far as is known."""
        self._first = journal_first
        self._records: list[Record | Compact] = []
        self._commands: list[Command] = []
        self._written = 0
        self._unwritten: set[int] = set()
        """Leases of which a record was lost."""
        self._owed: list[Command] = []
        """That leases are free, said when that is on record."""
        self._free: list[Command] = []
        """Those of the commands that say so."""
        self._last: tuple[list[Record | Compact], tuple[int, ...], list[Command]] = ([], (), [])
        """Of the last batch: what was written, all leases where that is about all, and what was said to be free."""

    def write(self, record: journal.Record) -> bool:
        """Append to the journal, if it works. What is not written is in what replaces it when it works again."""
        if self.works:
            self._records.append(Record(record))
            self._written += 1
        return self.works

    def replace(self, records: tuple[journal.Record, ...]) -> None:
        """The journal anew; it says all that was to be written in this batch."""
        self._records = [Compact(records)]
        self._written = len(records)

    def do(self, command: Command) -> None:
        """Anything that is not about the journal."""
        self._commands.append(command)

    def free(self, told: Send) -> None:
        """Say that a lease is no more: not before that is on record."""
        self._commands.append(told)
        self._free.append(told)

    def outgrown(self, leases: int) -> bool:
        """Is it time to replace the journal?"""
        return bool(self._records) and self._written > COMPACT_AFTER + PER_LEASE * leases

    def unsure(self, lease: int) -> bool:
        """Is the journal behind what the coordinator knows of a lease?"""
        return lease in self._unwritten

    def failed(self) -> None:
        """The last batch was not written."""
        records, leases, free = self._last
        self.works = False
        for command in records:
            self._unwritten.update((command.record.lease,) if isinstance(command, Record) else leases)
        self._owed += free

    def restored(self) -> None:
        """The journal works, and is to be replaced in this batch."""
        self.works = True
        self._commands += self._owed
        self._free += self._owed
        self._owed = []
        self._unwritten = set()

    def take(self, leases: Collection[int]) -> list[Command]:
        """The batch, in its order; ``leases``: all there are."""
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
