"""What must not be cut in two by Ctrl-C? It is done in a thread that no signal reaches.

Python raises what a signal handler raises in the main thread, between any two instructions of it: also inside
``finally``, and between taking a lock and remembering that. Masking SIGINT does not help: handlers of other signals
raise too, and a thread can be sent an exception. So the technique, wherever something is taken or shared state changes:

- State changes run as ``uninterrupted(change)``: to their end, whatever happens to who waits for it. What they make is
  on record when they end, so that nothing is known only to the thread that was interrupted.
- The main thread itself only reads, waits, and takes what ``runtime.holds`` frees with the frame that took it.

Invariant: changes that the main thread asks for are made one after another, in the order in which it asked.
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
"""Seconds between two looks whether a change has ended, of who was interrupted while it waited: changes take
microseconds. A guess."""


class _Change:
    """``found``: what it returned, or ``error``: what it raised, once it is ``done``."""

    __slots__ = ("_call", "done", "ended", "error", "found")

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Callable[[], Any] | None = call
        self.ended = allocate_lock()
        self.ended.acquire()
        self.done = False
        self.found: Any = None
        self.error: BaseException | None = None

    def make(self) -> None:
        """Who made it holds nothing of it any more once it has ended: the frame of a thread that has not come to leave
        it is seen by no collector, and keeps alive what it holds."""
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
        """What came of it, once."""
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
    """What ``call`` returns or raises; it runs to its end. Who is interrupted meanwhile hears of it then, and a second
    time at once."""
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
    """Have it done soon, from wherever no lock may be waited for, as where Python collects what nobody holds."""
    if _have_worker():
        _asked.put(_Change(call))


def _have_worker() -> bool:
    """False where there will be none: at the end of the interpreter."""
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
