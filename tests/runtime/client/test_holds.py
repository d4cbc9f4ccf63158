"""What a frame holds is free when it has ended, and not before, wherever it was interrupted."""

import threading
import time

import pytest

from interrupting import interrupted, lines_of
from jaxtensile.runtime.client.holds import LOOK, Bell, Cell, Exclusive, Hold, until

PATIENCE = 30.0


def takes(lock):
    hold = Hold()
    lock.take(hold.mark)
    return hold.mark, hold.mark.alive


def test_a_mark_lives_as_long_as_its_frame():
    lock = Exclusive()
    mark, alive = takes(lock)
    assert alive and not mark.alive
    assert lock.holder is mark, "nobody has given it back"
    hold = Hold()
    assert lock.taken(hold.mark)
    assert hold.mark.alive and hold.mark.mine


def test_a_frame_that_only_a_traceback_keeps_holds_nothing():
    lock = Exclusive()

    def fails():
        hold = Hold()
        lock.take(hold.mark)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        fails()
    assert caught.traceback[-1].frame.f_locals["hold"] is not None
    assert not lock.holder.alive
    assert lock.taken(Hold().mark)


def test_another_call_of_the_same_function_is_not_that_frame():
    """Its frame may have the very address of the one that ended."""
    lock = Exclusive()
    for _ in range(100):
        mark, _ = takes(lock)
        assert not mark.alive
        assert takes(Exclusive())[1] and not mark.alive


def test_a_thread_sees_what_another_ones_frame_holds():
    lock, inside, over = Exclusive(), threading.Event(), threading.Event()

    def works():
        with lock():
            inside.set()
            over.wait(PATIENCE)

    thread = threading.Thread(target=works)
    thread.start()
    inside.wait(PATIENCE)
    holder, hold = lock.holder, Hold()
    assert holder.alive and not holder.mine and not lock.taken(hold.mark)
    over.set()
    thread.join(PATIENCE)
    assert lock.holder is None and not holder.alive and lock.taken(hold.mark)


def test_a_lock_is_free_after_an_interrupt_at_any_line():
    def works(lock):
        with lock():
            pass

    total = lines_of("holds.py", lambda: works(Exclusive()))
    assert total > 15
    for at in range(1, total + 1):
        lock = Exclusive()
        interrupted("holds.py", lambda lock=lock: works(lock), at)
        assert lock.taken(Hold().mark), at


def test_who_waits_takes_it_though_nobody_was_told():
    lock, took = Exclusive(), []
    takes(lock)

    def waits():
        began = time.monotonic()
        with lock():
            took.append(time.monotonic() - began)

    thread = threading.Thread(target=waits)
    thread.start()
    thread.join(PATIENCE)
    assert took


@pytest.mark.parametrize("threads", [2, 8])
def test_a_cell_loses_no_change(threads):
    cell, each = Cell((0,)), 2000

    def adds():
        for _ in range(each):
            while True:
                old = cell.get()
                if cell.replace(old, (old[0] + 1,)):
                    break

    all_ = [threading.Thread(target=adds) for _ in range(threads)]
    for t in all_:
        t.start()
    for t in all_:
        t.join(PATIENCE)
    assert cell.get() == (threads * each,)


def test_only_what_is_there_is_replaced():
    one, other = (1,), (2,)
    cell = Cell(one)
    assert cell.replace(one, other) and not cell.replace(one, (3,))
    assert cell.get() is other


def test_one_at_a_time_in_the_order_of_nobody():
    lock, inside, most = Exclusive(), [], []

    def works():
        for _ in range(200):
            with lock():
                inside.append(None)
                most.append(len(inside))
                inside.pop()

    all_ = [threading.Thread(target=works) for _ in range(4)]
    for t in all_:
        t.start()
    for t in all_:
        t.join(PATIENCE)
    assert most == [1] * 800


def test_a_bell_wakes_all_and_forgets_who_has_left():
    bell, there, woken = Bell(), [], []

    def waits():
        woken.append(until(lambda: bool(there), bell, PATIENCE))

    all_ = [threading.Thread(target=waits) for _ in range(3)]
    for t in all_:
        t.start()
    there.append(1)
    bell.ring()
    for t in all_:
        t.join(PATIENCE)
    assert woken == [True] * 3
    assert not until(lambda: False, bell, LOOK / 10)
    assert not bell._waiting
