"""The journal's file.

Invariant: after every write the file is whole, or ends in an unfinished line. It is replaced whole or not at all.
Nothing is synced: the file must survive the coordinator, not the machine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

from jaxtensile.runtime.decide.journal import Journal, JournalError, Record, Replayed, decode, replay


def boot_id() -> str:
    """The machine's current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class JournalFile:
    """The journal file of one coordinator."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._new = path.with_name(path.name + ".new")
        self._file: FileIO | None = None
        self._journal: Journal | None = None

    def read(self, boot: str) -> Replayed:
        """Read the last coordinator's records, if they are of the boot ``boot``. Raises ``JournalError``."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            content = b""
        except OSError as error:
            raise JournalError(f"{self._path} cannot be read: {error.strerror}") from None
        try:
            return replay(decode(content), boot)
        except JournalError as error:
            raise JournalError(f"{self._path}: {error}") from None

    def append(self, records: Sequence[Record]) -> None:
        """Append records. Raises ``OSError``; the journal must then be replaced."""
        if self._journal is None:
            raise OSError("the journal has to be written anew first")
        try:
            self._journal.write(records)
        except OSError:
            self._close()
            raise

    def replace(self, records: Sequence[Record]) -> None:
        """Write these records and nothing else. Raises ``OSError``; the old journal is then still there."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        file = FileIO(os.open(self._new, flags, 0o600), "a")
        try:
            journal = Journal(file)
            journal.write(records)
            self._new.rename(self._path)
        except OSError:
            file.close()
            with suppress(OSError):
                self._new.unlink()
            self._close()
            raise
        self._close()
        self._file, self._journal = file, journal

    def lost(self) -> bool:
        """Whether the open file is no longer the one at the path."""
        if self._file is None:
            return False
        try:
            found = self._path.lstat()
        except OSError:
            return True
        mine = os.fstat(self._file.fileno())
        return (found.st_dev, found.st_ino) != (mine.st_dev, mine.st_ino)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._journal = None
