"""Whose is a handle after ``fork``? The process's that made it.

A child has its parent's descriptors, and its locks as they were at that moment, held by threads that it does not have.
What it said on a connection of its parent, the coordinator would take for the parent's word: the lease would be free
while the parent still uses its bytes.

Invariant: in a child nothing is said on a connection of its parent, none of them is kept open there, so that the
coordinator sees when the parent ends, and no lock of the parent's is waited for. To end a handle there does nothing; to
use it is an error.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

from jaxtensile.errors import CoordinatorError


class Owned:
    """Of the process that makes it; ``what``: as an error names it."""

    __slots__ = ("_owner", "_what")

    def __init__(self, what: str) -> None:
        self._owner, self._what = os.getpid(), what

    @property
    def mine(self) -> bool:
        """Whether this process made it."""
        return os.getpid() == self._owner

    def require_mine(self) -> None:
        """Raises ``CoordinatorError`` in a child of the process that made it."""
        if not self.mine:
            raise CoordinatorError(
                f"{self._what} belongs to process {self._owner}, and this one ({os.getpid()}) was forked from it: "
                "make a job of its own here"
            )


class Abandons(Protocol):
    """What has something that is not to stay open in a child."""

    def abandon(self) -> None:
        """Let go of it, in a child, without a lock and without a word."""
        ...


_OPEN: WeakSet[Abandons] = WeakSet()


def abandoned_in_children(handle: Abandons) -> None:
    """From now on children of this process let go of ``handle``."""
    _OPEN.add(handle)


def _in_child() -> None:
    for handle in [*_OPEN]:
        handle.abandon()
    _OPEN.clear()


os.register_at_fork(after_in_child=_in_child)
