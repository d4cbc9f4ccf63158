"""Ownership of handles after ``fork``: they belong to the process that made them.

A child inherits descriptors, and locks held by threads that it lacks. The coordinator would take its words on an
inherited connection for the parent's, and free the lease while the parent uses its bytes.

Invariant: a child says nothing on its parent's connections and keeps none open, so that the coordinator sees the parent
end. It waits for no lock of the parent. There, ending a handle does nothing, and using it is an error.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

from jaxtensile.errors import CoordinatorError


class Owned:
    """A handle owned by the process that makes it; ``what``: its name in errors."""

    __slots__ = ("_owner", "_what")

    def __init__(self, what: str) -> None:
        self._owner, self._what = os.getpid(), what

    @property
    def mine(self) -> bool:
        """Whether this process made it."""
        return os.getpid() == self._owner

    def require_mine(self) -> None:
        """Raise ``CoordinatorError`` in a child of the process that made it."""
        if not self.mine:
            raise CoordinatorError(
                f"{self._what} belongs to process {self._owner}, and this one ({os.getpid()}) was forked from it: "
                "make a job of its own here"
            )


class Abandons(Protocol):
    """An object with something that must not stay open in a child."""

    def abandon(self) -> None:
        """Drop it in a child, without taking a lock or sending anything."""
        ...


_OPEN: WeakSet[Abandons] = WeakSet()


def abandoned_in_children(handle: Abandons) -> None:
    """From now on, child processes abandon ``handle``."""
    _OPEN.add(handle)


def _in_child() -> None:
    for handle in [*_OPEN]:
        handle.abandon()
    _OPEN.clear()


os.register_at_fork(after_in_child=_in_child)
