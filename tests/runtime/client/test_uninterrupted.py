"""A change runs to its end, whatever happens to the thread that waits for it."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from interrupting import interrupted, lines_of
from jaxtensile.runtime.client import uninterrupted as module
from jaxtensile.runtime.client.uninterrupted import later, uninterrupted

PATIENCE = 30.0


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.0005)


def test_it_gives_what_the_call_gives():
    assert uninterrupted(lambda x, *, y: x + y, 1, y=2) == 3
    with pytest.raises(ZeroDivisionError):
        uninterrupted(lambda: 1 / 0)


def test_the_main_thread_does_nothing_of_it_and_others_do_all():
    where = []
    uninterrupted(lambda: where.append(threading.get_ident()))
    other = threading.Thread(target=lambda: uninterrupted(lambda: where.append(threading.get_ident())))
    other.start()
    other.join(PATIENCE)
    assert where[0] != threading.main_thread().ident and where[1] == other.ident
    within = uninterrupted(lambda: uninterrupted(threading.get_ident))
    assert within == where[0], "a change that another one makes is part of it"


def test_changes_are_made_in_the_order_in_which_they_were_asked_for():
    order = []
    for k in range(100):
        later(lambda k=k: order.append(k))
    uninterrupted(lambda: order.append("last"))
    assert order == [*range(100), "last"]


def test_it_ends_though_every_line_of_who_waits_is_interrupted():
    def change(made):
        made.append("begun")
        time.sleep(0.001)
        made.append("ended")

    total = lines_of("uninterrupted.py", lambda: uninterrupted(change, []))
    assert total > 5
    for at in range(1, total + 1):
        made = []
        interrupted("uninterrupted.py", lambda made=made: uninterrupted(change, made), at)
        uninterrupted(lambda: None)
        assert made in ([], ["begun", "ended"]), at


def test_who_is_interrupted_hears_of_it_when_the_change_has_ended():
    made = []

    def change():
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.05)
        made.append("ended")

    def stop(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            uninterrupted(change)
        assert made == ["ended"]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_forked_child_has_a_thread_of_its_own_for_it():
    uninterrupted(lambda: None)
    child = os.fork()
    if not child:
        os._exit(0 if uninterrupted(lambda: 7) == 7 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_thread_that_was_started_twice_is_one():
    uninterrupted(lambda: None)
    thread = module._worker["thread"]
    module._work(module._worker)  # returns at once
    assert module._worker["thread"] == thread


@pytest.mark.parametrize(
    "end", ["import atexit; atexit.register(lambda: print(uninterrupted(lambda: 7)))", "x = Last()"]
)
def test_the_interpreter_ends(end):
    code = (
        "from jaxtensile.runtime.client.uninterrupted import uninterrupted\n"
        "class Last:\n    def __del__(self): print(uninterrupted(lambda: 7))\n"
        f"uninterrupted(lambda: None)\n{end}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "7\n" and done.returncode == 0, done.stderr
