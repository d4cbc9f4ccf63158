"""What does a running step hold, and how is it free again when that step was interrupted anywhere?

A lock that is released in ``finally`` stays locked when Ctrl-C comes before that: in the call that took it, or in the
``finally`` itself. Here nobody has to be told. What is taken carries the *mark* of the frame that took it, and whoever
waits for it looks from time to time whether that frame still runs. So it is given back at once where all goes well, and
within ``LOOK`` seconds whatever happened.

A frame is known by its thread and address. The address alone may be another frame's by now, so the frame has a
``Hold`` among its variables, too: the mark knows it weakly. The hold is gone when the frame is, unless a traceback
keeps both; then the address is not given to another frame, and the frame is on no thread's stack.

Invariant: what is shared changes by one instruction (``Cell``), so it is as before or as after, and no lock guards it.
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
"""Seconds after which who waits looks whether what it waits for is still held: only where nobody could tell it. A
guess."""

T = TypeVar("T")


class Hold:
    """Made by a frame that takes something, and kept by it alone, in a variable. ``above``: callers between them."""

    __slots__ = ("__weakref__", "mark")

    def __init__(self, above: int = 0) -> None:
        self.mark = Mark(self, id(sys._getframe(1 + above)))  # pyright: ignore[reportPrivateUsage]


class Mark:
    """Whose something is, as others see it."""

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
        """Whether a frame of this thread has it, and still runs."""
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
        """Whether it was ``old``, that very object, and is ``new`` now."""
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
        """Until it is there, by the bell's next ring, or for so long. Whether it is."""
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
        """Something has changed."""
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
        """Who has it, or had when it was interrupted."""
        return self._cell.get()

    def taken(self, mark: Mark) -> bool:
        """Take it if it is free. Whether that was so."""
        holder = self._cell.get()
        return (holder is None or not holder.alive) and self._cell.replace(holder, mark)

    def take(self, mark: Mark) -> None:
        """Take it when it is free."""
        while not self.taken(mark):
            self.wait(LOOK)

    def give(self, mark: Mark) -> None:
        """It is free, if that mark has it."""
        if self._cell.replace(mark, None):
            self._bell.ring()

    def wait(self, timeout: Seconds) -> None:
        """Until it may be free, for so long at most."""
        self._bell.wait(lambda: self._cell.get() is None, timeout)

    def __call__(self) -> Held:
        """Take it for the body of a ``with``."""
        return Held(self.take, self.give)


class Held:
    """Something is taken for the body of a ``with``. The frame that has the body keeps this, and so its hold."""

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
    """Wait for what a bell tells of. Whether it came about within so long."""
    end = monotonic() + timeout
    while not there():
        left = end - monotonic()
        if left <= 0:
            return False
        bell.wait(there, min(left, LOOK))
    return True
