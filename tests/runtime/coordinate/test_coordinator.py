"""The coordinator keeps every invariant whatever happens, and each of its rules is needed for that.

``tests/coordinator_model.py`` is the world around it. ``JAXTENSILE_SOAK=1`` walks twelve times as far.
"""

import dataclasses
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from coordinator_model import Care, Violation, World, broken_walks
from coordinator_talk import GPU, LADDER, Talk
from jax_lines import SOAK
from jaxtensile.runtime.decide import journal
from jaxtensile.runtime.decide.events import (
    Close,
    Compact,
    Connected,
    Disconnected,
    JournalFailed,
    JournalWorks,
    ProcessDied,
    Received,
    Rules,
    Stopping,
    Terminate,
    Watch,
)
from jaxtensile.runtime.decide.leases import Process, State
from jaxtensile.runtime.protocol.messages import (
    Admit,
    Beat,
    Error,
    Grant,
    Queued,
    Reclaim,
    Reject,
    Release,
    Released,
    Renew,
    Renewed,
    Revoke,
    Welcome,
)

WALKS = 8
EVENTS = 1_250_000 if SOAK else 100_000
"""Of each of the walks together: 10^7 in all, or 8 x 10^5."""


def in_a_thread(call):
    """A client's changes are made in another thread where the main one asks for them, for the sake of Ctrl-C. Walks
    need none of that."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


# Long random walks.


@pytest.mark.parametrize("part", range(WALKS))
def test_every_invariant_holds_on_random_walks(part, record_property):
    counts = Counter()

    def walk():
        seed = part * 1_000_000
        while counts["events"] < EVENTS:
            world = World(seed, text=seed % 8 == 0)
            world.walk(2_000).settle_down().everybody_goes()
            counts.update(world.counted)
            seed += 1

    in_a_thread(walk)
    for what, count in counts.items():
        record_property(f"coordinator: {what}", count)
        assert count > EVENTS // 5_000, f"too few {what}"


def test_a_walk_is_the_same_every_time():
    one, other = in_a_thread(lambda: [World(3).walk(500) for _ in range(2)])
    assert (one.now, one.counted, one.token) == (other.now, other.counted, other.token)
    assert one.journal == other.journal


@pytest.mark.parametrize("left_out", [f.name for f in dataclasses.fields(Rules)])
def test_every_rule_is_missed_when_it_is_left_out(left_out):
    found = broken_walks(400, 400, rules=Rules(**{left_out: False}))
    assert in_a_thread(lambda: next(found, None)) is not None


@pytest.mark.parametrize("left_out", [f.name for f in dataclasses.fields(Care)])
def test_so_is_what_jobs_and_processes_take_care_of(left_out):
    likelier = {"_hang_up": 6} if left_out == "clamps" else None
    found = broken_walks(400, 400, care=Care(**{left_out: False}), likelier=likelier)
    assert in_a_thread(lambda: next(found, None)) is not None


# Hypothesis finds the way, the same world and checker follow it.


class Coordination(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 10_000))
    def begin(self, seed):
        self.world = World(Random(seed))
        self.world.crash = 0.0

    def act(self, *names):
        for name in names:
            if getattr(self.world, name)():
                self.world.check()

    @rule()
    def a_job_comes(self):
        self.act("_born", "_go_on", "_connect")

    @rule()
    def connect(self):
        self.act("_connect")

    @rule(n=st.integers(1, 6))
    def hear(self, n):
        self.act(*["_hear"] * n)

    @rule(n=st.integers(1, 6))
    def deliver(self, n):
        self.act(*["_deliver"] * n)

    @rule(n=st.integers(1, 4))
    def step(self, n):
        self.act(*["_step"] * n)

    @rule(what=st.sampled_from("_beat _finish _kill _hang_up _stop _say_again _mischief _resize _another_job".split()))
    def something(self, what):
        self.act(what)

    @rule(what=st.sampled_from("_compile _more _suspend _resume _renew".split()), n=st.integers(1, 4))
    def a_job_goes_on(self, what, n):
        self.act(what, *["_go_on"] * n)

    @rule()
    def a_job_is_interrupted(self):
        self.act("_interrupt", "_go_on")

    @rule(n=st.integers(1, 3))
    def a_process_forks(self, n):
        self.act("_fork", *["_child"] * n)

    @rule()
    def reap(self):
        self.act("_reap")

    @rule()
    def time_passes(self):
        self.act("_tick")

    @precondition(lambda self: self.world.daemon is not None)
    @rule(crash=st.booleans())
    def the_daemon_is_killed(self, crash):
        if crash:
            self.world.crash = 1.0  # in the middle of what it does next
            self.act("_hear")
            self.world.crash = 0.0
        else:
            self.act("_daemon_dies")

    @rule()
    def the_daemon_starts(self):
        self.act("_daemon_starts")

    def teardown(self):
        if hasattr(self, "world"):
            in_a_thread(lambda: self.world.settle_down().everybody_goes())


Coordination.TestCase.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
TestCoordination = Coordination.TestCase


@pytest.mark.parametrize("seed", range(4))
def test_the_checker_sees_bytes_that_nobody_is_charged(seed):
    world = World(seed)
    while world.daemon is None or not any(p + t for h in world.handles for p, t in h.real):
        world.walk(1)
    for lease in world.daemon.arbiter.leases.values():
        world.daemon.arbiter.ledger.release(lease.id, lease.resources)
    with pytest.raises(Violation, match="charged nothing"):
        world.check()


# One thing at a time.


def test_an_end_of_a_connection_frees_nothing_and_a_death_does():
    talk = Talk()
    talk.admit(1)
    talk.do(Disconnected(1))
    assert talk.lease(1).state is State.QUARANTINED and talk.charged() == 8
    talk.do(ProcessDied(Process(1, 2)))
    assert talk.charged() == 8
    talk.do(ProcessDied(Process(1, 1)))
    assert talk.charged() == 0 and journal.replay(talk.journal, "boot").leases == {}


def test_a_silent_job_is_quarantined_its_connection_closed_and_it_may_come_back():
    talk = Talk(lease_ttl=10.0)
    grant = talk.admit(1)
    talk.tick(9.0)
    talk.hear(1, Beat(lease=grant.lease, step=1, step_us=5, in_use=(8, 0), peak=8))
    assert talk.it.wake == talk.now + 10.0
    talk.tick(10.5)
    assert talk.lease(1).state is State.QUARANTINED and Close(1) in talk.commands and talk.charged() == 8
    assert talk.hear(1, Beat(lease=grant.lease, step=2, step_us=5, in_use=(8, 0), peak=8)) == []
    talk.meet(2, Process(1, 1))
    talk.hear(2, Reclaim(lease=grant.lease, token=grant.token, rung=0, in_use=(4, 0)))
    assert talk.said(Grant)[-1].rung == 1 and talk.lease(1).state is State.HELD
    talk.do(Disconnected(1))
    assert talk.lease(1).state is State.HELD


def test_what_is_overdue_stays_charged_and_its_process_ends_only_where_that_was_asked_for():
    for on_overdue in ("wait", "terminate"):
        talk = Talk(capacity=9, revoke_deadline=5.0, on_overdue=on_overdue, lease_ttl=100.0)
        talk.admit(1)
        talk.admit(2)
        told = talk.said(Revoke, to=1)[0]
        commands = talk.tick(5.0)
        assert talk.lease(1).state is State.OVERDUE and talk.charged() == 8
        assert (Terminate(Process(1, 1)) in commands) == (on_overdue == "terminate")
        assert Terminate(Process(1, 1)) not in talk.tick(5.0)
        talk.ack(1, told, (4, 0))
        assert talk.lease(1).state is State.HELD and talk.said(Grant, to=2)


def test_nobody_is_overdue_with_what_it_could_not_be_told():
    """The record of its new ladder was lost, and so it was not told to shrink either."""
    talk = Talk(capacity=9, revoke_deadline=5.0, on_overdue="terminate", lease_ttl=100.0)
    grant = talk.admit(1)
    talk.meet(2)
    renew = Renew(lease=grant.lease, token=grant.token, ladder=LADDER, rung=1)
    talk.do(Received(1, renew), Received(2, Admit(job="b", devices=(GPU,), ladder=LADDER)))
    assert talk.lease(grant.lease).state is State.REVOKING
    talk.do(JournalFailed())
    assert talk.it.wake > talk.now + 6.0 and Terminate(Process(1, 1)) not in talk.tick(6.0)
    talk.do(JournalWorks())
    assert talk.said(Renewed, to=1) and talk.said(Revoke, to=1)[0].deadline == 5.0
    assert Terminate(Process(1, 1)) not in talk.tick(4.9) and Terminate(Process(1, 1)) in talk.tick(0.2)


def test_after_a_restart_all_is_charged_reclaimed_first_and_fenced_by_the_epoch():
    talk = Talk()
    first = talk.admit(1)
    second = talk.admit(2, ladder=LADDER[:1])
    later = Talk(records=talk.journal)
    assert later.it.phase == "recovering" and later.charged() == 12 and later.it.epoch == 2
    assert {c.process.pid for c in later.commands if isinstance(c, Watch)} == {1, 2}
    assert isinstance(later.commands[0], Compact)
    assert isinstance(later.admit(9, ladder=LADDER[:1]), Queued)
    later.meet(10, Process(1, 1))
    later.hear(10, Reclaim(lease=first.lease, token=first.token, rung=1, in_use=(8, 0)))
    assert later.said(Grant, to=10)[0].token.epoch == 2 and later.it.phase == "recovering"
    later.tick(2.0)
    assert later.it.phase == "serving" and later.lease(second.lease).state is State.QUARANTINED
    assert later.said(Revoke, to=10)
    later.do(ProcessDied(Process(2, 1)))
    assert later.said(Grant, to=9) or later.lease(3).state is State.HELD


def test_recovery_ends_when_everybody_is_there():
    talk = Talk()
    grant = talk.admit(1)
    later = Talk(records=talk.journal)
    later.meet(10, Process(1, 1))
    later.hear(10, Reclaim(lease=grant.lease, token=grant.token, rung=1, in_use=(8, 0)))
    assert later.it.phase == "serving"
    assert Talk(records=[]).it.phase == "serving"


def test_too_many_clients_are_told_to_come_back():
    talk = Talk(max_clients=1)
    talk.meet(1)
    talk.do(Connected(2, Process(2, 1)))
    (answer,) = talk.said(Error, to=2)
    assert answer.code == "busy" and answer.retry_after and Close(2) in talk.commands
    talk.do(Disconnected(1), Disconnected(2))
    assert isinstance(talk.meet(3)[0], Welcome)


def test_a_stopping_coordinator_takes_nobody_new_and_keeps_who_is_there():
    talk = Talk(capacity=8)
    grant = talk.admit(1)
    talk.admit(2, ladder=LADDER[1:])
    talk.do(Stopping())
    assert talk.said(Reject, to=2) and isinstance(talk.admit(3), Reject)
    assert talk.hear(1, Release(lease=grant.lease, token=grant.token)) == [Released(lease=grant.lease)]


def test_events_that_happen_at_once_are_decided_once():
    talk = Talk(capacity=8)
    for k in (1, 2):
        talk.meet(k)
    asks = [Received(k, Admit(job="a", devices=(GPU,), ladder=LADDER)) for k in (1, 2)]
    talk.do(*asks)
    assert [m.rung for m in talk.said(Grant)] == [0, 0] and not talk.said(Revoke)
