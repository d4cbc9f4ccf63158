"""Changes that Ctrl-C must not split: they run in a thread that no signal reaches.

Python raises a signal handler's exception in the main thread between any two instructions, even in ``finally`` or
between taking a lock and recording it. Masking SIGINT does not help: other handlers raise, and a thread can be sent an
exception. So:

- State changes run to their end as ``uninterrupted(change)``. Their results are on record by then, not known only to an
  interrupted thread.
- The main thread only reads, waits, and takes what ``runtime.holds`` frees with the taking frame.

Invariant: the main thread's changes are made one after another, in the order asked.
"""

from __future__ import annotations

import os
import sys
from _thread import allocate_lock, get_ident, start_new_thread
from collections.abc import Callable
from queue import SimpleQueue
from threading import main_thread
from time import sleep
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_LOOK_AGAIN: Final = 5e-4
"""Seconds between checks of an interrupted caller for the end of its change, which takes microseconds. A guess."""


class _Change:
    """A change. Once ``done``: ``found`` is the value it returned, or ``error`` the exception it raised."""

    __slots__ = ("_call", "done", "ended", "error", "found")

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Callable[[], Any] | None = call
        self.ended = allocate_lock()
        self.ended.acquire()
        self.done = False
        self.found: Any = None
        self.error: BaseException | None = None

    def make(self) -> None:
        """Run the call once, and drop all references to it. The collector does not see a frame that its thread has yet
        to leave, and the frame keeps its objects alive."""
        call, self._call = self._call, None
        if call is None:
            return  # it was asked for again
        try:
            self.found = call()
        except BaseException as error:
            self.error = error
        finally:
            del call
            self.done = True
            self.ended.release()

    def given(self) -> Any:
        """Return the result, or raise the error; only once."""
        found, error, self.found, self.error = self.found, self.error, None, None
        if error is None:
            return found
        try:
            raise error
        finally:
            del error  # else its traceback would hold what holds it


_asked: SimpleQueue[_Change] = SimpleQueue()
_worker: dict[str, int] = {}


def uninterrupted(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The value or error of ``call``, which runs to its end. An interrupt meanwhile is raised then, a second one at
    once."""
    if get_ident() != main_thread().ident or sys.is_finalizing() or not _have_worker():
        return call(*args, **kwargs)
    change = _Change(lambda: call(*args, **kwargs))
    try:
        _asked.put(change)
        change.ended.acquire()
    except BaseException:
        _asked.put(change)  # it may have come before that
        while not change.done:
            sleep(_LOOK_AGAIN)
        raise
    return change.given()


def later(call: Callable[[], object]) -> None:
    """Run ``call`` soon. Usable where no lock may be waited for, such as in the garbage collector."""
    if _have_worker():
        _asked.put(_Change(call))


def _have_worker() -> bool:
    """Whether there is a worker; False at the end of the interpreter."""
    if "thread" in _worker:
        return True
    try:
        start_new_thread(_work, (_worker,))
    except RuntimeError:
        return False
    return True


def _work(mine: dict[str, int]) -> None:
    if mine.setdefault("thread", get_ident()) != get_ident():
        return  # who started it was interrupted, and another one was started
    while True:
        _asked.get().make()


def _in_child() -> None:
    global _asked, _worker
    _asked, _worker = SimpleQueue(), {}


os.register_at_fork(after_in_child=_in_child)
