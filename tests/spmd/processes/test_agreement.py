"""Several processes come to one answer or to one error: a real coordination service, its clients in threads."""

import socket
import threading
import time

import pytest
from jax._src.lib import _jax

from jaxtensile.errors import AgreementError, BudgetError, Culprit, SolverError
from jaxtensile.spmd.processes.agreement import Question, agree
from jaxtensile.spmd.processes.keystore import Store

SHORT = "4"
"""Seconds of patience, the least that there may be."""


@pytest.fixture(scope="module")
def stores():
    """One for each of three processes."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(address, 3)
    clients = [_jax.get_distributed_runtime_client(address, i) for i in range(3)]
    together([client.connect for client in clients])
    yield [Store(client) for client in clients]
    together([client.shutdown for client in clients])
    service.shutdown()


def together(calls):
    """What each returns or raises, each in a thread of its own."""
    found = [None] * len(calls)

    def run(i):
        try:
            found[i] = calls[i]()
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def asked(stores, *, members=(0, 1, 2), name=None, same=None, lead=None, follow=None):
    """A round. ``name``, ``same``: by process; ``follow``: of a process and the answer."""

    def one(me):
        return lambda: agree(
            stores[me],
            me,
            members,
            (name or {}).get(me, "step"),
            Question({"budget": "1", "undo": "True", **(same or {}).get(me, {})}, str(me).encode()),
            lead or (lambda own, _: b"-".join(own)),
            lambda answer, _: follow(me, answer) if follow else (me, answer.decode()),
        )

    return together([one(me) for me in members])


def nothing_is_left(stores):
    return not stores[0].below("jaxtensile")


def one_error(found, kind=AgreementError):
    """The text of the error that all raise."""
    assert {type(f) for f in found} == {kind}, found
    (text,) = {str(f) for f in found}
    return text


def test_all_get_the_leaders_answer_and_nothing_is_left(stores):
    calls = []

    def lead(own, _):
        calls.append(own)
        return b"-".join(own)

    found = asked(stores, lead=lead)
    assert [made for made, _ in found] == [0, 1, 2]
    assert {agreed for _, agreed in found} == {found[0][1]}
    assert (found[0][1].answer, found[0][1].digest) == (b"0-1-2", "0-1-2")
    assert calls == [[b"0", b"1", b"2"]]
    assert nothing_is_left(stores)


def test_some_of_the_processes(stores):
    found = asked(stores, members=(1, 2))
    assert found[0][1].answer == b"1-2"


def test_what_differs_is_named_with_who_asked_for_what(stores):
    led = []
    found = asked(stores, same={2: {"budget": "2"}}, lead=lambda own, _: led.append(own) or b"")
    text = one_error(found)
    assert "budget is 1 in processes 0 and 1, 2 in process 2" in text and "undo" not in text
    assert not led and nothing_is_left(stores)
    assert asked(stores)[0][0] == 0  # the next round is another one


def test_functions_in_another_order_meet_in_one_round(stores):
    names = {0: "f", 1: "f", 2: "g"}
    text = one_error(asked(stores, name=names, same={i: {"the function": n} for i, n in names.items()}))
    assert "the function is f in processes 0 and 1, g in process 2" in text


def test_the_leaders_error_of_ours_is_everybodys(stores):
    culprit = Culprit(primitive="dot_general", source="f.py:1", nbytes=5)

    def lead(own, _):
        raise BudgetError("too small", needs=7, has=3, culprits=(culprit,))

    found = asked(stores, lead=lead)
    assert one_error(found, BudgetError) == "too small"
    assert {(f.needs, f.has, f.culprits) for f in found} == {(7, 3, (culprit,))}

    def other(own, _):
        raise SolverError("no chain")

    assert one_error(asked(stores, lead=other), SolverError) == "no chain"


@pytest.mark.parametrize("who", [0, 2])
def test_any_other_error_tells_where_it_was(who, stores):
    def follow(me, answer):
        if me == who:
            raise ZeroDivisionError("by zero")
        return me, "same"

    text = one_error(asked(stores, follow=follow))
    assert f"process {who} failed while it compiles" in text and "ZeroDivisionError: by zero" in text
    assert nothing_is_left(stores)


def test_who_would_run_another_program(stores):
    text = one_error(asked(stores, follow=lambda me, _: (me, "b" if me == 1 else "a")))
    assert "process 1 would not run the same step as process 0" in text


def test_an_interrupt_is_told_to_the_others(stores):
    def follow(me, answer):
        if me == 1:
            raise KeyboardInterrupt
        return me, "same"

    first, interrupted, last = asked(stores, follow=follow)
    assert isinstance(interrupted, KeyboardInterrupt)
    assert "process 1 was interrupted" in one_error([first, last])


def test_work_takes_as_long_as_it_takes_and_ends_once_another_has_failed(stores, monkeypatch):
    monkeypatch.setenv("JAXTENSILE_AGREEMENT_TIMEOUT", SHORT)

    def slow(own, watch):
        time.sleep(1.5 * float(SHORT))
        return b""

    assert [made for made, _ in asked(stores, lead=slow)] == [0, 1, 2]

    monkeypatch.delenv("JAXTENSILE_AGREEMENT_TIMEOUT")

    def endless(me, watch):
        while me == 0:
            watch("solve")
            time.sleep(0.1)
        raise ValueError("at once")

    def one(me):
        question = Question({})
        return lambda: agree(stores[me], me, (0, 2), "step", question, lambda *_: b"", lambda _, w: endless(me, w))

    assert "process 2 failed" in one_error(together([one(0), one(2)]))


def test_who_does_not_come_is_missed_and_gets_the_same_error(stores, monkeypatch):
    monkeypatch.setenv("JAXTENSILE_AGREEMENT_TIMEOUT", SHORT)

    def one(me, wait=0.0):
        def call():
            time.sleep(wait)
            return agree(stores[me], me, (0, 1, 2), "step", Question({}), lambda *_: b"", lambda *_: (me, ""))

        return call

    early = together([one(0), one(2)])
    text = one_error(early)
    assert "process 1 of processes 0, 1 and 2 did not come to this call of step within 4 s" in text
    started = time.monotonic()
    assert one_error(together([one(1)])) == text
    assert time.monotonic() - started < float(SHORT) / 2
    assert nothing_is_left(stores)
    assert [made for made, _ in together([one(0), one(1), one(2)])] == [0, 1, 2]


def test_what_is_put_first_stands(stores):
    values = [str(i).encode() for i in range(3)]
    found = together([lambda s=s, v=v: s.first("once", v) for s, v in zip(stores, values, strict=True)])
    assert len(set(found)) == 1 and found[0] in values
    assert stores[0].get("once") == found[0] and stores[0].get("never") is None
    stores[0].delete("once")


def test_a_variable_that_is_no_number(stores, monkeypatch):
    monkeypatch.setenv("JAXTENSILE_AGREEMENT_TIMEOUT", "soon")
    with pytest.raises(AgreementError, match=r"'soon' is no number of seconds"):
        agree(stores[0], 0, (0,), "step", Question({}), lambda *_: b"", lambda *_: (0, ""))
