"""What jobs say is answered, counted or refused, and what they hold is charged."""

import pytest

from coordinator_talk import GPU, LADDER, Talk
from jaxtensile.runtime.decide import journal
from jaxtensile.runtime.decide.events import (
    Close,
    Connected,
    Disconnected,
    ProcessDied,
)
from jaxtensile.runtime.decide.leases import HOST, Process, State
from jaxtensile.runtime.protocol.messages import (
    VERSION,
    Ack,
    Admit,
    Beat,
    Error,
    Grant,
    Hello,
    Queued,
    Reclaim,
    Reject,
    Release,
    Released,
    Renew,
    Renewed,
    Revoke,
    Rung,
    Status,
    Token,
    Welcome,
    Withdraw,
)

LONGER = (Rung(persistent=3, seconds=2.0), Rung(persistent=5, seconds=1.5), Rung(persistent=10, seconds=0.5))


def renewal(told, **given):
    given = {"ladder": LONGER, "rung": 1, **given}
    return Renew(lease=told.lease, token=told.token, **given)


def test_a_job_with_another_ladder_is_charged_by_it_and_granted_by_it():
    talk = Talk()
    first = talk.admit(1, want=4)
    assert (first.rung, talk.charged()) == (0, 4)
    renewed, grant = talk.hear(1, renewal(first))
    assert isinstance(renewed, Renewed) and (renewed.former, grant.rung) == (first.token.sequence, 2)
    assert first.token < renewed.token < grant.token and talk.charged() == 10
    assert talk.journal[-1].ladder == LONGER and talk.journal[-1].former == first.token.sequence
    talk.ack(1, grant)
    assert talk.lease(1).knows and talk.lease(1).state is State.HELD


def test_a_job_that_is_suspended_is_seen_to_be_also_after_a_restart():
    talk = Talk()
    first = talk.admit(1)
    _, grant = talk.hear(1, renewal(first, ladder=LADDER[:1], rung=0, suspended=True))

    def state(talk, connection):
        return talk.hear(connection, Status())[0].leases[0].state

    assert state(talk, 1) == "suspended"
    again = Talk(records=talk.journal)
    again.meet(7, Process(1, 1))
    assert state(again, 7) == "quarantined"
    back = again.hear(7, Reclaim(lease=first.lease, token=grant.token, rung=0, in_use=()))[-1]
    assert state(again, 7) == "suspended"
    refused = again.hear(7, renewal(back, ladder=(Rung(persistent=13, seconds=1.0),), rung=0))
    assert refused[0].code == "no room" and state(again, 7) == "suspended"
    again.hear(7, renewal(back, ladder=LADDER, rung=1))
    assert state(again, 7) == "held"


def test_another_ladder_is_not_waited_for():
    talk = Talk()
    first, second = talk.admit(1, want=4), talk.admit(2, want=4)
    told = talk.hear(1, renewal(first, floor=10, rung=2))
    assert [m.code for m in told] == ["no room"] and "are free" in told[0].detail
    told = talk.hear(1, renewal(first, ladder=(Rung(persistent=13, seconds=1.0),), rung=0))
    assert "can ever grant" in told[0].detail
    assert talk.hear(1, renewal(first, rung=3))[0].code == "no room"
    assert talk.lease(1).ladder == LADDER and talk.charged() == 8
    assert isinstance(talk.hear(2, renewal(second))[0], Renewed)


def test_another_ladder_that_crosses_a_grant_does_not_count():
    talk = Talk()
    first = talk.admit(1)
    assert isinstance(talk.hear(1, renewal(first))[0], Renewed)
    assert talk.hear(1, renewal(first)) == [] and talk.it.counters["stale"] == 1


def test_a_job_that_comes_back_without_knowing_is_told_again_also_after_a_restart():
    talk = Talk()
    first = talk.admit(1, want=4)
    talk.hear(1, renewal(first))
    again = Talk(records=talk.journal)
    again.meet(7, Process(1, 1))
    renewed, grant = again.hear(7, Reclaim(lease=first.lease, token=first.token, rung=0, in_use=(4, 0)))
    assert isinstance(renewed, Renewed) and renewed.former == first.token.sequence and grant.rung == 2
    assert again.charged() == 10
    again.ack(7, grant)
    assert again.hear(7, Reclaim(lease=first.lease, token=grant.token, rung=2, in_use=()))[0].rung == 2


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"ladder": (Rung(persistent=13, seconds=1.0),)}, "the smallest plan needs 13B on cuda:0"),
        ({"ladder": (Rung(persistent=1, host=9, seconds=1.0),)}, "9B on host, which can ever grant 8B"),
        ({"ladder": LADDER[::-1]}, "must ascend"),
        ({"floor": 9}, "no plan reaches the floor"),
        ({"floor": 5, "want": 7}, "no plan lies between"),
        ({"want": 3}, "no plan lies between"),
    ],
)
def test_what_can_never_be_admitted_is_rejected_with_the_reason(given, reason):
    talk = Talk()
    answer = talk.admit(1, **given)
    assert isinstance(answer, Reject) and reason in answer.reason and not talk.it.arbiter.leases


def test_a_job_names_devices_that_are_there_and_each_once():
    talk = Talk()
    talk.meet(1)
    for devices, reason in ((("cuda:7",), "no device 'cuda:7'"), ((HOST,), "no device"), ((GPU, GPU), "named twice")):
        (answer,) = talk.hear(1, Admit(job="a", devices=devices, ladder=LADDER))
        assert reason in answer.reason


def test_asking_again_is_answered_with_the_same_lease():
    talk = Talk()
    first = talk.admit(1)
    again = talk.hear(1, Admit(job="a", devices=(GPU,), ladder=LADDER))[-1]
    assert again.lease == first.lease and again.token > first.token and talk.charged() == 8
    talk.do(Disconnected(1))
    talk.meet(2, Process(1, 1))
    third = talk.hear(2, Admit(job="a", devices=(GPU,), ladder=LADDER))[-1]
    assert third.lease == first.lease and talk.lease(first.lease).connection == 2
    other = talk.hear(2, Admit(job="b", devices=(GPU,), ladder=LADDER[:1]))[-1]
    assert other.lease != first.lease and talk.charged() == 12


def test_a_later_job_of_the_same_name_has_a_lease_of_its_own_also_after_a_restart():
    """The release of the former one, which may come late, is not about it; nor is its ladder."""
    talk = Talk()
    first = talk.admit(1, ladder=LADDER[:1], number=1)
    again = Talk(records=talk.journal)
    again.meet(7, Process(1, 1))
    second = again.hear(7, Admit(job="a", number=2, devices=(GPU,), ladder=LADDER[1:]))
    assert isinstance(second[0], Queued)
    again.tick(2.0)
    (grant,) = again.said(Grant, to=7)
    assert grant.lease != first.lease and again.charged() == 12
    again.meet(8, Process(1, 1))
    again.hear(8, Release(lease=first.lease, token=first.token))
    assert again.charged() == 8 and again.lease(grant.lease).state is State.HELD


@pytest.mark.parametrize("granted", [True, False])
def test_what_is_withdrawn_is_free_whether_it_was_granted_or_not(granted):
    talk = Talk()
    talk.admit(1, ladder=LADDER[1:])
    asked = Admit(job="b", number=3, devices=(GPU,), ladder=LADDER[not granted :])
    talk.meet(2, Process(2, 1))
    assert isinstance(talk.hear(2, asked)[-1], Grant if granted else Queued)
    talk.meet(3, Process(2, 1))
    assert talk.hear(3, Withdraw(job="b", number=3)) == [Released(lease=0)]
    assert talk.charged() == 8 and len(talk.it.arbiter.leases) == 1
    assert talk.hear(2, asked) == []  # it was on its way on the connection before
    assert talk.hear(3, Withdraw(job="b", number=3)) == [Released(lease=0)]
    assert talk.charged() == 8


def test_who_never_heard_of_its_grant_has_it_from_when_it_is_told():
    """What it was granted was written down, and the coordinator killed before it said so."""
    ladder = Rung(persistent=4, seconds=1.7), Rung(persistent=8, seconds=1.0)
    talk = Talk(min_hold=30.0)
    talk.admit(1, ladder=ladder, weight=0.1)
    again = Talk(records=talk.journal, min_hold=30.0, lease_ttl=100.0)
    again.tick(1.5)
    again.meet(7, Process(1, 1))
    grant = again.hear(7, Admit(job="a", devices=(GPU,), ladder=ladder))[-1]
    assert (grant.rung, again.charged()) == (1, 8)
    again.admit(8, job="b", ladder=(Rung(persistent=4, seconds=1.5), Rung(persistent=8, seconds=1.0)))
    again.tick(29.0)
    assert not again.said(Revoke, to=7), "30.5 s after the start, 29 s after it was told"
    again.tick(1.0)
    assert again.said(Revoke, to=7)


def test_what_is_anothers_or_long_over_is_refused_counted_and_changes_nothing():
    talk = Talk()
    grant = talk.admit(1)
    talk.meet(2)
    before = talk.it.arbiter.charged(talk.lease(1))
    for message in (
        Reclaim(lease=grant.lease, token=grant.token, rung=0, in_use=()),
        Release(lease=grant.lease, token=grant.token),
    ):
        (answer,) = talk.hear(2, message)
        assert isinstance(answer, Error) and answer.code == "not yours"
    assert talk.hear(2, Ack(lease=grant.lease, token=grant.token, rung=0, in_use=())) == []
    assert talk.hear(2, Beat(lease=grant.lease, step=1, step_us=1, in_use=(99,), peak=99)) == []
    (answer,) = talk.hear(2, Reclaim(lease=77, token=grant.token, rung=0, in_use=()))
    assert answer.code == "unknown lease" and answer.lease == 77
    (answer,) = talk.hear(2, Beat(lease=77, step=1, step_us=1, in_use=(), peak=0))  # it holds what nobody knows of
    assert answer.code == "unknown lease" and answer.lease == 77
    assert talk.hear(1, Ack(lease=grant.lease, token=Token(0, 0), rung=0, in_use=())) == []
    assert talk.it.arbiter.charged(talk.lease(1)) == before
    assert talk.it.counters["not yours"] == 2 and talk.it.counters["stale"] == 3


def test_a_ladder_that_lies_is_charged_what_was_measured_and_does_not_shrink():
    talk = Talk(capacity=20)
    grant = talk.admit(1)
    talk.hear(1, Beat(lease=grant.lease, step=1, step_us=1, in_use=(11, 2), peak=12))
    assert (talk.charged(), talk.charged(HOST)) == (11, 2) and talk.lease(1).stuck and talk.lease(1).faults
    assert isinstance(talk.admit(2, ladder=(Rung(persistent=10, seconds=1.0),)), Queued) and not talk.said(Revoke)
    known = journal.replay(talk.journal, "boot")
    assert known.stuck == {1} and known.leases[1].charges[0].level == 11


def test_an_allocator_that_gives_nothing_back_keeps_its_rung_too():
    talk = Talk(capacity=9)
    talk.admit(1)
    talk.admit(2)
    told = talk.said(Revoke, to=1)[0]
    talk.ack(1, told, (8, 0))
    assert talk.charged() == 8 and talk.lease(1).stuck and talk.lease(2).state is State.QUEUED
    talk.do(Disconnected(2))
    assert talk.lease(1).rung == 1  # what it keeps anyway it may as well use
    (answer,) = talk.hear(1, Release(lease=1, token=told.token, in_use=(8, 0)))
    assert answer.code == "in use" and talk.charged() == 8
    talk.do(ProcessDied(Process(1, 1)))
    assert talk.charged() == 0


def test_who_comes_back_with_more_than_it_was_granted_is_charged_that_with_an_alarm_and_asked_to_shrink():
    talk = Talk(capacity=9)
    first, second = talk.admit(1, want=4), talk.admit(2)
    assert (second.rung, talk.charged()) == (0, 8)
    talk.meet(3, Process(2, 1))
    (told,) = talk.hear(3, Reclaim(lease=second.lease, token=second.token, rung=1, in_use=()))
    assert isinstance(told, Revoke) and told.rung == 0 and talk.charged() == 12
    assert talk.lease(second.lease).faults == {"is on a rung that it was not granted"}
    assert "alarm" in [e.what for e in talk.it.chronicle.entries]
    talk.ack(3, told, (4, 0))
    talk.meet(4, Process(1, 1))
    talk.hear(4, Reclaim(lease=first.lease, token=first.token, rung=0, in_use=()))
    assert talk.charged() == 8 and not talk.lease(first.lease).faults


def test_who_does_not_say_hello_or_speaks_another_version_is_closed():
    talk = Talk()
    talk.do(Connected(1, Process(1, 1)))
    (answer,) = talk.hear(1, Hello(version=VERSION + 1))
    assert answer.code == "version" and Close(1) in talk.commands
    assert talk.hear(1, Hello(version=VERSION)) == []
    talk.do(Connected(2, Process(2, 1)))
    assert talk.hear(2, Status())[0].code == "protocol"
    assert isinstance(talk.meet(3)[0], Welcome)
    assert talk.hear(3, Hello(version=VERSION))[0].code == "protocol"
