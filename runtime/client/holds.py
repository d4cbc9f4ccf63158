"""Things held by a running step, free again however the step is interrupted.

A lock released in ``finally`` stays locked if Ctrl-C comes in the taking call or in the ``finally``. Here the holder is
the *mark* of the frame that took it, and waiters check from time to time whether the frame still runs. So it is given
back at once normally, and within ``LOOK`` seconds always.

A frame is its thread and address. Another frame may reuse the address, so the frame also keeps a ``Hold`` in a
variable, to which the mark refers weakly. The hold dies with the frame, unless a traceback keeps both; then the address
is not reused, and the frame is on no stack.

Invariant: shared state changes by one instruction (``Cell``): it is as before or as after, and no lock guards it.
"""

from __future__ import annotations

import sys
from _thread import allocate_lock, get_ident
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from types import TracebackType
from typing import Any, Final, Generic, TypeVar
from weakref import ref

from jaxtensile.units import Seconds

LOOK: Final = 0.1
"""Seconds between a waiter's checks for a dead holder, used only if nobody could tell it. A guess."""

T = TypeVar("T")


class Hold:
    """Made by a frame that takes something, and kept by it alone in a variable. ``above``: callers in between."""

    __slots__ = ("__weakref__", "mark")

    def __init__(self, above: int = 0) -> None:
        self.mark = Mark(self, id(sys._getframe(1 + above)))  # pyright: ignore[reportPrivateUsage]


class Mark:
    """The owner of something, as others see it."""

    __slots__ = ("_frame", "_hold", "thread")

    def __init__(self, hold: Hold, frame: int) -> None:
        self._hold, self._frame, self.thread = ref(hold), frame, get_ident()

    @property
    def alive(self) -> bool:
        """Whether the frame still runs."""
        if self._hold() is None:
            return False
        frame = sys._current_frames().get(self.thread)  # pyright: ignore[reportPrivateUsage]
        while frame is not None:
            if id(frame) == self._frame:
                return True
            frame = frame.f_back
        return False

    @property
    def mine(self) -> bool:
        """Whether the frame is of this thread, and still runs."""
        return self.thread == get_ident() and self.alive


class _Link(Generic[T]):
    __slots__ = ("next", "value")

    def __init__(self, value: T) -> None:
        self.value = value
        self.next: dict[int, _Link[T]] = {}


class Cell(Generic[T]):
    """A value that several threads replace, each by a single instruction and without a lock."""

    __slots__ = ("_link",)

    def __init__(self, value: T) -> None:
        self._link = _Link(value)

    def get(self) -> T:
        """The value."""
        return self._last().value

    def replace(self, old: T, new: T) -> bool:
        """Replace ``old``, that very object, by ``new``; whether that succeeded."""
        last, link = self._last(), _Link(new)
        return last.value is old and last.next.setdefault(0, link) is link

    def _last(self) -> _Link[T]:
        link = self._link
        while (following := link.next.get(0)) is not None:
            link = self._link = following
        return link


class Bell:
    """Wakes all who wait."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()

    def wait(self, there: Callable[[], bool], timeout: Seconds) -> bool:
        """Wait until ``there()``, the next ring, or ``timeout`` seconds; return ``there()``."""
        lock = allocate_lock()
        lock.acquire()
        self._waiting.append(lock)
        try:
            if not there() and timeout > 0:
                lock.acquire(timeout=timeout)
        finally:
            with suppress(ValueError):
                self._waiting.remove(lock)
        return there()

    def ring(self) -> None:
        """Wake all waiters: something has changed."""
        waiting = self._waiting
        while waiting:
            try:
                waiting.popleft().release()
            except IndexError:
                return


class Exclusive:
    """A lock that is held by a frame."""

    __slots__ = ("_bell", "_cell")

    def __init__(self) -> None:
        self._cell: Cell[Mark | None] = Cell(None)
        self._bell = Bell()

    @property
    def holder(self) -> Mark | None:
        """The current owner, or the one that was interrupted while it had it."""
        return self._cell.get()

    def taken(self, mark: Mark) -> bool:
        """Take it if it is free; whether it was."""
        holder = self._cell.get()
        return (holder is None or not holder.alive) and self._cell.replace(holder, mark)

    def take(self, mark: Mark) -> None:
        """Take it; waits until it is free."""
        while not self.taken(mark):
            self.wait(LOOK)

    def give(self, mark: Mark) -> None:
        """Free it, if that mark has it."""
        if self._cell.replace(mark, None):
            self._bell.ring()

    def wait(self, timeout: Seconds) -> None:
        """Wait until it may be free, for at most ``timeout`` seconds."""
        self._bell.wait(lambda: self._cell.get() is None, timeout)

    def __call__(self) -> Held:
        """Take it for the body of a ``with``."""
        return Held(self.take, self.give)


class Held:
    """Something taken for the body of a ``with``. The frame with the body keeps this object, and so its hold."""

    __slots__ = ("_give", "_hold", "_take")

    def __init__(self, take: Callable[[Mark], object], give: Callable[[Mark], object]) -> None:
        self._take, self._give = take, give

    def __enter__(self) -> None:
        self._hold = Hold(above=1)
        self._take(self._hold.mark)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._give(self._hold.mark)


def until(there: Callable[[], bool], bell: Bell, timeout: Seconds) -> bool:
    """Wait until ``there()``, for which ``bell`` rings; False if it takes longer than ``timeout`` seconds."""
    end = monotonic() + timeout
    while not there():
        left = end - monotonic()
        if left <= 0:
            return False
        bell.wait(there, min(left, LOOK))
    return True
