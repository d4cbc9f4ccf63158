"""The step gate: one turn at a time, shares by weight and class, and nobody is left waiting."""

import os
import signal
import threading
import time

import pytest

from jaxtensile.runtime.client.gate import Gate, GateError
from jaxtensile.runtime.decide.turns import CLASS

PATIENCE = 30.0


class Clock:
    """Seconds that pass when a step says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def until(condition):
    """Wait for a condition that other threads bring about."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.0005)


def turns_of(gate, clock, members, most):
    """Who had the first ``most`` turns, where every member always has a next step; ``members``: (turns, seconds)."""
    order, stop = [], threading.Event()

    def work(k, turns, seconds):
        while not stop.is_set():
            with turns():
                until(lambda: gate.waiting == len(members) - 1 or stop.is_set())
                clock.now += seconds
                order.append(k)
                if len(order) >= most:
                    stop.set()

    threads = [threading.Thread(target=work, args=(k, *m)) for k, m in enumerate(members)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(PATIENCE)
        assert not t.is_alive()
    return order[:most]


def test_one_turn_at_a_time():
    gate, inside, most = Gate(), [], []

    def work(turns):
        for _ in range(300):
            with turns():
                inside.append(None)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work, args=(gate.member(),)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(PATIENCE)
    assert most == [1] * 1200
    assert gate.waiting == 0


@pytest.mark.parametrize(("seconds", "weights"), [((1.0, 1.0), (1.0, 3.0)), ((9.0, 1.0), (1.0, 1.0))])
def test_time_is_shared_by_weight_whatever_a_step_takes(seconds, weights):
    clock = Clock()
    gate = Gate(clock)
    members = [(gate.member(weight=w), s) for w, s in zip(weights, seconds, strict=True)]
    order = turns_of(gate, clock, members, 120)
    time_of = [order.count(k) * seconds[k] for k in range(2)]
    assert time_of[1] / time_of[0] == pytest.approx(weights[1] / weights[0], rel=0.25)


def test_a_higher_class_has_most_of_the_time_and_a_lower_one_is_not_starved():
    clock = Clock()
    gate = Gate(clock)
    order = turns_of(gate, clock, [(gate.member(), 1.0), (gate.member(priority=1), 1.0)], 180)
    assert order.count(1) / order.count(0) == pytest.approx(CLASS, rel=0.2)


def test_who_seldom_asks_waits_for_one_turn_only():
    """Four trainers that always want the next turn, of long steps; a request is answered right after the turn that
    runs, and its own short steps never let it fall behind."""
    clock = Clock()
    gate = Gate(clock)
    trainers = [gate.member() for _ in range(4)]
    asked, order, stop = threading.Event(), [], threading.Event()
    server = gate.member()

    def train(k):
        while not stop.is_set():
            with trainers[k]():
                until(lambda: gate.waiting == 3 + asked.is_set() or stop.is_set())
                clock.now += 10.0
                order.append(k)

    def serve():
        for _ in range(20):
            before = len(order)
            until(lambda before=before: len(order) >= before + 5)
            asked.set()
            with server():
                asked.clear()
                order.append("answer")
                clock.now += 0.1
        stop.set()

    threads = [threading.Thread(target=train, args=(k,)) for k in range(4)] + [threading.Thread(target=serve)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(PATIENCE)
        assert not t.is_alive()
    assert order.count("answer") == 20
    assert min(order.count(k) for k in range(4)) > 10


def test_a_request_overtakes_all_that_wait_already():
    """Tags, without luck: three trainers have had turns and wait; who comes now goes first."""
    clock = Clock()
    gate = Gate(clock)
    trainers = [gate.member() for _ in range(3)]
    for t in trainers:
        with t():
            clock.now += 5.0
    holder, server, order = gate.member(), gate.member(), []

    def work(name, turns):
        with turns():
            order.append(name)

    with holder():
        threads = []
        for k, (name, turns) in enumerate([*zip("abc", trainers, strict=True), ("request", server)]):
            threads.append(threading.Thread(target=work, args=(name, turns)))
            threads[-1].start()
            until(lambda k=k: gate.waiting == k + 1)
    for t in threads:
        t.join(PATIENCE)
    assert order[0] == "request"
    assert sorted(order[1:]) == ["a", "b", "c"]


def test_idle_time_is_not_saved_up():
    clock = Clock()
    gate = Gate(clock)
    idle, busy = gate.member(), gate.member()
    for _ in range(100):
        with busy():
            clock.now += 1.0
    order = turns_of(gate, clock, [(idle, 1.0), (busy, 1.0)], 20)
    assert abs(order.count(0) - order.count(1)) <= 2


def test_who_ends_a_turn_lets_the_next_one_begin(monkeypatch):
    """Otherwise it would go on until it waits for something, with the device standing still."""
    monkeypatch.setattr("jaxtensile.runtime.client.gate.HANDED_OVER", PATIENCE)
    gate, saw, over = Gate(), [], threading.Event()

    def work():
        with gate.member()():
            over.wait(PATIENCE)

    other = threading.Thread(target=work)
    with gate.member()():
        other.start()
        until(lambda: gate.waiting == 1)
        (waiter,) = gate._state.get().waiting
        waiter.begun = threading.Semaphore(0)
        real = waiter.begun.release
        waiter.begun.release = lambda: (saw.append(threading.get_ident()), real())
    assert saw == [other.ident]
    over.set()
    other.join(PATIENCE)


def test_who_ends_a_turn_does_not_wait_for_one_that_never_begins(monkeypatch):
    monkeypatch.setattr("jaxtensile.runtime.client.gate.HANDED_OVER", 0.01)
    gate = Gate()
    other = threading.Thread(target=lambda: gate.member()().__enter__())
    with gate.member()():
        other.start()
        until(lambda: gate.waiting == 1)
        (waiter,) = gate._state.get().waiting
        waiter.begun = threading.Semaphore(0)
        waiter.begun.release = lambda: None
    other.join(PATIENCE)
    assert not other.is_alive() and gate.waiting == 0


def test_a_step_that_raises_ends_its_turn():
    gate = Gate()
    turns = gate.member()
    with pytest.raises(ZeroDivisionError), turns():
        _ = 1 / 0
    done = []
    other = threading.Thread(target=lambda: done.append(gate.member()().__enter__()))
    other.start()
    other.join(PATIENCE)
    assert done == [None]


def test_a_step_inside_a_step_is_an_error_and_no_deadlock():
    gate = Gate()
    one, other = gate.member(), gate.member()
    with one(), pytest.raises(GateError, match="inside a step"), other():
        pass
    with other():
        pass
    assert gate.waiting == 0


def test_a_waiter_that_is_interrupted_leaves_the_queue():
    """Ctrl-C in the main thread, while another has the turn."""
    gate = Gate()
    has, over = threading.Event(), threading.Event()

    def work():
        with gate.member()():
            has.set()
            over.wait(PATIENCE)

    def interrupt():
        until(lambda: gate.waiting == 1)
        os.kill(os.getpid(), signal.SIGUSR1)

    def stop(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, stop)
    threads = [threading.Thread(target=work), threading.Thread(target=interrupt)]
    try:
        threads[0].start()
        has.wait(PATIENCE)
        threads[1].start()
        with pytest.raises(KeyboardInterrupt), gate.member()():
            pass
    finally:
        over.set()
        for t in threads:
            t.join(PATIENCE)
        signal.signal(signal.SIGUSR1, before)
    assert gate.waiting == 0
    with gate.member()():
        pass
