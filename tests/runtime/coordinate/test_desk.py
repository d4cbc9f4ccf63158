"""What is granted is on record before it is said, and what is said is told page by page."""

from msgspec import msgpack

from coordinator_talk import GPU, LADDER, Talk
from jaxtensile.runtime.coordinate.chronicle import SHORT
from jaxtensile.runtime.decide import journal
from jaxtensile.runtime.decide.events import (
    Compact,
    Garbled,
    JournalFailed,
    JournalWorks,
    Received,
    Record,
    Send,
    Watch,
)
from jaxtensile.runtime.decide.leases import HOST
from jaxtensile.runtime.protocol.messages import (
    Ack,
    Admit,
    Grant,
    Queued,
    Release,
    Released,
    Revoke,
    Rung,
    Snapshot,
    Status,
    Token,
)
from jaxtensile.runtime.protocol.wire import LIMIT, REQUESTS, take


def test_a_job_alone_gets_what_it_wants_written_down_before_it_is_said():
    talk = Talk()
    grant = talk.admit(1)
    assert (grant.job, grant.rung, grant.token) == ("a", 1, Token(1, 1)) and talk.charged() == 8
    kinds = [type(c) for c in talk.commands]
    assert kinds.index(Record) < kinds.index(Send) and Watch in kinds
    assert talk.admit(2, want=7).rung == 0


def test_without_a_journal_nothing_is_granted_and_what_was_lost_is_said_when_it_works_again():
    talk = Talk(capacity=9)
    first = talk.admit(1)
    talk.admit(2)
    told = talk.said(Revoke, to=1)[0]
    talk.it.handle_all([Received(1, Ack(lease=1, token=told.token, rung=0, in_use=(4, 0)))], talk.now)
    talk.do(JournalFailed())
    assert talk.hear(2, Admit(job="a", devices=(GPU,), ladder=LADDER)) == []
    assert isinstance(talk.admit(3, ladder=LADDER[:1]), Queued)
    assert talk.hear(1, Release(lease=1, token=first.token)) == []
    assert not [c for c in talk.commands if isinstance(c, Record)]
    talk.do(JournalWorks())
    assert isinstance(talk.commands[0], Compact)
    assert talk.said(Released, to=1) and talk.said(Grant, to=2) and talk.said(Grant, to=3)
    assert journal.replay(talk.journal, "boot").leases.keys() == {2, 3}


def test_a_journal_does_not_grow_without_end():
    talk = Talk()
    seen = 0
    talk.meet(1)
    for k in range(1500):
        talk.hear(1, Admit(job=f"job{k}", devices=(GPU,), ladder=LADDER[:1]))
        grant = talk.said(Grant)[0]
        talk.hear(1, Release(lease=grant.lease, token=grant.token))
        seen = max(seen, len(talk.journal))
    assert seen < 1100 and journal.replay(talk.journal, "boot").leases == {}
    later = Talk(records=talk.journal)
    assert later.admit(5).lease == 1501  # numbers are never used again


def test_what_is_kept_and_said_of_bytes_that_are_no_message_is_short():
    """msgspec repeats in its errors what is wrong, which may be as long as a frame."""
    body = msgpack.encode({"type": "HELLO", "x" * (LIMIT - 100): 1})
    error = take(len(body).to_bytes(4, "big") + body, REQUESTS).error
    assert "unknown field `xxx" in str(error) and len(str(error)) < 300
    talk = Talk()
    talk.meet(1)
    talk.do(Garbled(1, "y" * 1000))
    assert [*talk.it.chronicle.entries][-1].detail == "y" * (SHORT - 4) + " ..."


def test_the_state_is_told_page_by_page():
    talk = Talk(capacity=100)
    talk.meet(1)
    for k in range(70):
        talk.hear(1, Admit(job=f"job{k}", devices=(GPU,), ladder=(Rung(persistent=1, seconds=1.0),)))
    (page,) = talk.hear(1, Status())
    (rest,) = talk.hear(1, Status(after=page.leases[-1].lease))
    assert isinstance(page, Snapshot) and page.more and not rest.more
    assert [a.lease for a in (*page.leases, *rest.leases)] == list(range(1, 71))
    assert {d.device: (d.charged, d.guaranteed) for d in page.devices} == {GPU: (70, 70), HOST: (0, 0)}
    assert page.leases[0].state == "held" and page.policy == "slowdown"
