"""A job stays where it is until it is told, moves between two steps, and says so."""

from coordinator_talk import GPU, LADDER
from jaxtensile.runtime.client.holder import Holder
from jaxtensile.runtime.protocol.messages import (
    VERSION,
    Ack,
    Admit,
    AskTurn,
    Begin,
    Done,
    End,
    Grant,
    Hello,
    Reclaim,
    Reject,
    Release,
    Released,
    Revoke,
    Token,
    Withdraw,
)


def holder(**given):
    return Holder(Admit(job="a", devices=(GPU,), ladder=LADDER), **given)


def granted(rung=1, sequence=1):
    it = holder()
    it.connected(())
    it.received(Grant(job="a", lease=5, token=Token(1, sequence), rung=rung), ())
    return it


def test_a_job_moves_at_a_boundary_and_says_when_it_is_there():
    it = granted()
    told = Revoke(job="a", lease=5, token=Token(1, 2), rung=0, deadline=9.0)
    assert it.received(told, (8, 0)) == [] and it.boundary() == 0 and it.boundary() is None
    assert it.moved((4, 0)) == [Ack(lease=5, token=Token(1, 2), rung=0, in_use=(4, 0))] and it.held == 0


def test_a_job_that_is_there_already_says_so_at_once():
    it = granted(rung=0)
    it.received(Grant(job="a", lease=5, token=Token(1, 2), rung=1), ())
    told = Revoke(job="a", lease=5, token=Token(1, 3), rung=0, deadline=9.0)
    assert it.received(told, (4, 0)) == [Ack(lease=5, token=Token(1, 3), rung=0, in_use=(4, 0))]
    assert it.boundary() is None


def test_a_job_without_a_coordinator_stays_where_it_is():
    it = granted(rung=0)
    it.received(Grant(job="a", lease=5, token=Token(1, 2), rung=1), ())
    it.disconnected()
    assert it.boundary() is None
    hello, reclaim = it.connected((4, 0))
    assert hello == Hello(version=VERSION)
    assert reclaim == Reclaim(lease=5, token=Token(1, 2), rung=0, in_use=(4, 0))


def test_a_job_that_moves_while_it_comes_back_says_where_it_is_when_it_is_there():
    it = granted()
    it.received(Revoke(job="a", lease=5, token=Token(1, 2), rung=0, deadline=9.0), ())
    it.boundary()
    it.disconnected()
    assert it.connected((8, 0)) == [Hello(version=VERSION)]
    assert it.moved((4, 0)) == [Reclaim(lease=5, token=Token(1, 2), rung=0, in_use=(4, 0))]


def test_stale_words_and_words_to_others_are_passed_over():
    it = granted(sequence=5)
    it.received(Grant(job="a", lease=5, token=Token(1, 5), rung=0), ())
    it.received(Grant(job="b", lease=6, token=Token(1, 9), rung=0), ())
    it.received(Revoke(job="a", lease=6, token=Token(1, 9), rung=0, deadline=1.0), ())
    assert (it.lease, it.target, it.token) == (5, 1, Token(1, 5))


def test_a_release_is_said_until_it_is_answered():
    it = granted()
    assert it.release(()) == [Release(lease=5, token=Token(1, 1), in_use=())]
    it.disconnected()
    assert it.connected(())[-1] == Release(lease=5, token=Token(1, 1), in_use=())
    it.received(Released(lease=5), ())
    assert it.phase == "ended" and it.connected(()) == [Hello(version=VERSION)]


def test_who_waits_no_more_says_so_until_it_is_answered_whatever_it_is_granted_meanwhile():
    it = Holder(Admit(job="a", devices=(GPU,), ladder=LADDER), 3)
    assert it.connected(())[-1].number == 3
    assert it.release(()) == [Withdraw(job="a", number=3)]
    it.received(Grant(job="a", lease=5, token=Token(1, 1), rung=1), ())
    it.disconnected()
    assert it.held == -1 and it.connected(())[-1] == Withdraw(job="a", number=3)
    it.received(Released(lease=0), ())
    assert it.phase == "ended"
    never = holder()
    assert never.release(()) == [] and never.phase == "ended"


def test_a_rejected_job_knows_why():
    it = holder()
    it.connected(())
    it.received(Reject(job="a", reason="too large"), ())
    assert (it.phase, it.reason) == ("ended", "too large")


def turning():
    it = holder()
    it.connected(())
    it.received(Grant(job="a", lease=5, token=Token(1, 1), rung=1, turns=True), ())
    return it


def test_a_turn_is_asked_for_once_kept_and_given_back_when_others_wait():
    it = turning()
    assert it.ask_turn() == [AskTurn(lease=5, turn=1)] and it.ask_turn() == [] and it.turn == -1
    it.received(Begin(lease=5, turn=7), ())
    assert it.turn == -1, "of another turn"
    it.received(Begin(lease=5, turn=1), ())
    assert it.turn == 1 and it.ask_turn() == [] and not it.ending
    it.received(End(lease=5, turn=1), ())
    assert it.ending and it.ask_turn() == [Done(lease=5, turn=1), AskTurn(lease=5, turn=2)]
    assert it.end_turn(0.5, (3, 0)) == [Done(lease=5, turn=2, cost=0.5, in_use=(3, 0))]
    it.received(Begin(lease=5, turn=2), ())
    assert it.turn == -1, "it waits for it no more"


def test_who_comes_back_says_which_turn_it_has_and_asks_again():
    it = turning()
    it.ask_turn()
    it.disconnected()
    _, reclaim, asks = it.connected(())
    assert (reclaim.turn, asks) == (-1, AskTurn(lease=5, turn=1))
    it.received(Begin(lease=5, turn=1), ())
    it.received(End(lease=5, turn=1), ())
    it.disconnected()
    assert it.turn == 1 and not it.ending, "it goes on until somebody asks again"
    _, reclaim = it.connected(())
    assert reclaim.turn == 1
    it.disconnected()
    assert it.end_turn(0.0, ()) == [] and it.connected(())[-1].turn == -1
