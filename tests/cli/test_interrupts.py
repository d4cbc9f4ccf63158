"""Ctrl-C is known for what it was, whatever it came out as."""

import signal
import threading

import pytest

from jaxtensile.cli.interrupts import Interrupts


def pressed_within():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as error:
        raise ValueError("Cache keys should be comparable") from error


def test_an_interrupt_that_came_out_as_another_error():
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interrupts() as interrupts:
            assert not interrupts.pressed
            with pytest.raises(ValueError, match="Cache keys"):
                pressed_within()
            assert interrupts.pressed
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("own", [signal.SIG_IGN, lambda *_: None], ids=["ignored", "handled"])
def test_a_handler_of_the_users_own_stays(own):
    before = signal.signal(signal.SIGINT, own)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is own
        assert not interrupts.pressed
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_may_ask():
    asked = []

    def ask():
        with Interrupts() as interrupts:
            asked.append(interrupts.pressed)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert asked == [False]
