"""The coordinator keeps every invariant whatever happens, and each of its rules is needed for that.

``tests/coordinator_model.py`` is the world around it. ``JAXTENSILE_SOAK=1`` walks ten times as far.
"""

import dataclasses
import os
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from coordinator_model import Violation, World, broken_walks
from jaxtensile.runtime import journal
from jaxtensile.runtime.arbiter import Arbiter
from jaxtensile.runtime.coordinator import Coordinator
from jaxtensile.runtime.events import (
    CapacityChanged,
    Close,
    Compact,
    Connected,
    Disconnected,
    JournalFailed,
    JournalWorks,
    ProcessDied,
    Received,
    Record,
    Restarted,
    Rules,
    Send,
    Settings,
    Stopping,
    Terminate,
    Tick,
    Watch,
)
from jaxtensile.runtime.holder import Holder
from jaxtensile.runtime.leases import HOST, Process, State
from jaxtensile.runtime.ledger import Capacity
from jaxtensile.runtime.messages import (
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
    Snapshot,
    Status,
    Token,
    Welcome,
)

pytestmark = pytest.mark.without_jax

WALKS = 8
EVENTS = 135_000 * (10 if os.environ.get("JAXTENSILE_SOAK") == "1" else 1)
"""Of each of the walks together: 10^6 in all, or 10^7."""


# Long random walks.


@pytest.mark.parametrize("part", range(WALKS))
def test_every_invariant_holds_on_random_walks(part, record_property):
    seed, events, kills, deaths = part * 1_000_000, 0, 0, 0
    while events < EVENTS:
        world = World(seed, text=seed % 8 == 0)
        world.walk(2_000).settle_down().everybody_goes()
        seed, events, kills, deaths = seed + 1, events + world.events, kills + world.kills, deaths + world.deaths
    for what, count in (("events", events), ("daemon kills", kills), ("process deaths", deaths)):
        record_property(f"coordinator: {what}", count)
    assert kills > events // 1_000 and deaths > events // 1_000


def test_a_walk_is_the_same_every_time():
    one, other = (World(3).walk(500) for _ in range(2))
    assert (one.now, one.events, one.token) == (other.now, other.events, other.token)
    assert one.journal == other.journal


@pytest.mark.parametrize("left_out", [f.name for f in dataclasses.fields(Rules)])
def test_every_rule_is_missed_when_it_is_left_out(left_out):
    assert next(broken_walks(400, 400, rules=Rules(**{left_out: False})), None) is not None


def test_a_job_that_grows_by_what_it_was_told_before_it_came_back_is_noticed():
    assert next(broken_walks(800, 400, clamp=False), None) is not None


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
        self.act("_born", "_connect")

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

    @rule(what=st.sampled_from("_beat _finish _kill _hang_up _stop _say_again _mischief _resize".split()))
    def something(self, what):
        self.act(what)

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
            self.world.settle_down().everybody_goes()


Coordination.TestCase.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
TestCoordination = Coordination.TestCase


@pytest.mark.parametrize("seed", range(4))
def test_the_checker_sees_bytes_that_nobody_is_charged(seed):
    world = World(seed)
    while world.daemon is None or not any(p + t for c in world.clients for p, t in c.real):
        world.walk(1)
    for lease in world.daemon.arbiter.leases.values():
        world.daemon.arbiter.ledger.release(lease.id, lease.resources)
    with pytest.raises(Violation, match="charged nothing"):
        world.check()


# One thing at a time.

GPU = "cuda:0"
LADDER = (Rung(persistent=4, seconds=2.0), Rung(persistent=8, seconds=1.0))


class Desk:
    """A coordinator with 12 bytes on one device, and what it said to whom."""

    def __init__(self, *, capacity=12, host=8, records=(), rules=None, **given):
        self.now = 100.0
        options = {"min_hold": 0.0, "recovery": 2.0, **given}
        self.capacities = {GPU: Capacity(capacity=capacity), HOST: Capacity(capacity=host)}
        self.it = Coordinator(self.capacities, Settings(**options), rules)
        self.commands = []
        self.journal = [*records]
        self.do(Restarted(journal.replay(records, "boot"), "boot"))

    def do(self, *events):
        """What it does about events; the journal follows."""
        self.commands = self.it.handle_all(events, self.now)
        for command in self.commands:
            if isinstance(command, Record):
                self.journal.append(command.record)
            elif isinstance(command, Compact):
                self.journal = [*command.records]
        return self.commands

    def said(self, kind=object, to=None):
        """Messages of a kind in the last commands."""
        sends = [c for c in self.commands if isinstance(c, Send) and (to is None or c.connection == to)]
        return [c.message for c in sends if isinstance(c.message, kind)]

    def hear(self, connection, *messages):
        for message in messages:
            self.do(Received(connection, message))
        return self.said(to=connection)

    def meet(self, connection, process=None):
        self.do(Connected(connection, process or Process(connection, 1)))
        return self.hear(connection, Hello(version=VERSION))

    def admit(self, connection, job="a", ladder=LADDER, **given):
        """A new process asks to be admitted; its grant, or what was said instead."""
        self.meet(connection)
        answers = self.hear(connection, Admit(job=job, devices=(GPU,), ladder=ladder, **given))
        return answers[-1]

    def ack(self, connection, told, in_use=()):
        return self.hear(connection, Ack(lease=told.lease, token=told.token, rung=told.rung, in_use=in_use))

    def lease(self, number):
        return self.it.arbiter.leases[number]

    def charged(self, name=GPU):
        return self.it.arbiter.ledger.accounts[name].used

    def tick(self, seconds):
        self.now += seconds
        return self.do(Tick())


def test_a_job_alone_gets_what_it_wants_written_down_before_it_is_said():
    desk = Desk()
    grant = desk.admit(1)
    assert (grant.job, grant.rung, grant.token) == ("a", 1, Token(1, 1)) and desk.charged() == 8
    kinds = [type(c) for c in desk.commands]
    assert kinds.index(Record) < kinds.index(Send) and Watch in kinds
    assert desk.admit(2, want=7).rung == 0


def test_a_second_job_waits_until_the_first_has_shrunk():
    desk = Desk(capacity=9)
    first = desk.admit(1)
    assert isinstance(desk.admit(2), Queued)
    told = desk.said(Revoke, to=1)[0]
    assert (told.rung, told.deadline) == (0, 60.0) and told.token > first.token and desk.charged() == 8
    desk.ack(1, told, (4, 0))
    assert desk.said(Grant, to=2)[0].rung == 0 and desk.charged() == 8
    assert desk.hear(1, Release(lease=first.lease, token=told.token)) == [Released(lease=first.lease)]
    assert desk.said(Grant, to=2)[0].rung == 1 and desk.charged() == 8


def test_a_waiter_that_leaves_is_waited_for_no_more_and_a_late_ack_changes_nothing():
    desk = Desk(capacity=9)
    desk.admit(1)
    desk.admit(2)
    told = desk.said(Revoke, to=1)[0]
    desk.do(Disconnected(2))
    again = desk.said(Grant, to=1)[0]
    assert again.rung == 1 and again.token > told.token and desk.lease(1).state is State.HELD
    desk.ack(1, told, (4, 0))
    assert desk.charged() == 8 and desk.it.counters["stale"] == 1


LONGER = (Rung(persistent=3, seconds=2.0), Rung(persistent=5, seconds=1.5), Rung(persistent=10, seconds=0.5))


def renewal(told, **given):
    given = {"ladder": LONGER, "rung": 1, **given}
    return Renew(lease=told.lease, token=told.token, **given)


def test_a_job_with_another_ladder_is_charged_by_it_and_granted_by_it():
    desk = Desk()
    first = desk.admit(1, want=4)
    assert (first.rung, desk.charged()) == (0, 4)
    renewed, grant = desk.hear(1, renewal(first))
    assert isinstance(renewed, Renewed) and (renewed.former, grant.rung) == (first.token.sequence, 2)
    assert first.token < renewed.token < grant.token and desk.charged() == 10
    assert desk.journal[-1].ladder == LONGER and desk.journal[-1].former == first.token.sequence
    desk.ack(1, grant)
    assert desk.lease(1).knows and desk.lease(1).state is State.HELD


def test_another_ladder_is_not_waited_for():
    desk = Desk()
    first, second = desk.admit(1, want=4), desk.admit(2, want=4)
    told = desk.hear(1, renewal(first, floor=10, rung=2))
    assert [m.code for m in told] == ["no room"] and "are free" in told[0].detail
    told = desk.hear(1, renewal(first, ladder=(Rung(persistent=13, seconds=1.0),), rung=0))
    assert "can ever grant" in told[0].detail
    assert desk.hear(1, renewal(first, rung=3))[0].code == "no room"
    assert desk.lease(1).ladder == LADDER and desk.charged() == 8
    assert isinstance(desk.hear(2, renewal(second))[0], Renewed)


def test_another_ladder_that_crosses_a_grant_does_not_count():
    desk = Desk()
    first = desk.admit(1)
    assert isinstance(desk.hear(1, renewal(first))[0], Renewed)
    assert desk.hear(1, renewal(first)) == [] and desk.it.counters["stale"] == 1


def test_a_job_that_comes_back_without_knowing_is_told_again_also_after_a_restart():
    desk = Desk()
    first = desk.admit(1, want=4)
    desk.hear(1, renewal(first))
    again = Desk(records=desk.journal)
    again.meet(7, Process(1, 1))
    renewed, grant = again.hear(7, Reclaim(lease=first.lease, token=first.token, rung=0, in_use=(4, 0)))
    assert isinstance(renewed, Renewed) and renewed.former == first.token.sequence and grant.rung == 2
    assert again.charged() == 10
    again.ack(7, grant)
    assert again.hear(7, Reclaim(lease=first.lease, token=grant.token, rung=2, in_use=()))[0].rung == 2


def test_devices_and_host_memory_are_granted_at_once_or_not_at_all():
    desk = Desk(host=3)
    ladder = (Rung(persistent=1, host=2, seconds=1.0),)
    assert isinstance(desk.admit(1, ladder=ladder), Grant)
    assert isinstance(desk.admit(2, ladder=ladder), Queued)
    assert (desk.charged(), desk.charged(HOST)) == (1, 2)
    desk.do(ProcessDied(Process(1, 1)))
    assert desk.said(Grant, to=2) and (desk.charged(), desk.charged(HOST)) == (1, 2)


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
    desk = Desk()
    answer = desk.admit(1, **given)
    assert isinstance(answer, Reject) and reason in answer.reason and not desk.it.arbiter.leases


def test_a_job_names_devices_that_are_there_and_each_once():
    desk = Desk()
    desk.meet(1)
    for devices, reason in ((("cuda:7",), "no device 'cuda:7'"), ((HOST,), "no device"), ((GPU, GPU), "named twice")):
        (answer,) = desk.hear(1, Admit(job="a", devices=devices, ladder=LADDER))
        assert reason in answer.reason


def test_an_end_of_a_connection_frees_nothing_and_a_death_does():
    desk = Desk()
    desk.admit(1)
    desk.do(Disconnected(1))
    assert desk.lease(1).state is State.QUARANTINED and desk.charged() == 8
    desk.do(ProcessDied(Process(1, 2)))
    assert desk.charged() == 8
    desk.do(ProcessDied(Process(1, 1)))
    assert desk.charged() == 0 and journal.replay(desk.journal, "boot").leases == {}


def test_a_silent_job_is_quarantined_its_connection_closed_and_it_may_come_back():
    desk = Desk(lease_ttl=10.0)
    grant = desk.admit(1)
    desk.tick(9.0)
    desk.hear(1, Beat(lease=grant.lease, step=1, step_us=5, in_use=(8, 0), peak=8))
    assert desk.it.wake == desk.now + 10.0
    desk.tick(10.5)
    assert desk.lease(1).state is State.QUARANTINED and Close(1) in desk.commands and desk.charged() == 8
    assert desk.hear(1, Beat(lease=grant.lease, step=2, step_us=5, in_use=(8, 0), peak=8)) == []
    desk.meet(2, Process(1, 1))
    desk.hear(2, Reclaim(lease=grant.lease, token=grant.token, rung=0, in_use=(4, 0)))
    assert desk.said(Grant)[-1].rung == 1 and desk.lease(1).state is State.HELD
    desk.do(Disconnected(1))
    assert desk.lease(1).state is State.HELD


def test_what_is_overdue_stays_charged_and_its_process_ends_only_where_that_was_asked_for():
    for on_overdue in ("wait", "terminate"):
        desk = Desk(capacity=9, revoke_deadline=5.0, on_overdue=on_overdue, lease_ttl=100.0)
        desk.admit(1)
        desk.admit(2)
        told = desk.said(Revoke, to=1)[0]
        commands = desk.tick(5.0)
        assert desk.lease(1).state is State.OVERDUE and desk.charged() == 8
        assert (Terminate(Process(1, 1)) in commands) == (on_overdue == "terminate")
        assert Terminate(Process(1, 1)) not in desk.tick(5.0)
        desk.ack(1, told, (4, 0))
        assert desk.lease(1).state is State.HELD and desk.said(Grant, to=2)


def test_nobody_is_asked_inside_the_minimum_hold_but_for_a_higher_class():
    desk = Desk(capacity=9, min_hold=30.0, lease_ttl=100.0)
    desk.admit(1)
    desk.admit(2)
    assert not desk.said(Revoke) and desk.it.wake == 130.0
    desk.tick(30.0)
    assert desk.said(Revoke, to=1)
    desk = Desk(capacity=9, min_hold=30.0)
    desk.admit(1)
    desk.admit(2, priority=1)
    assert desk.said(Revoke, to=1)


@pytest.mark.parametrize(("gain", "moved"), [(0.05, True), (0.4, False)])
def test_surplus_moves_only_for_a_gain_that_is_worth_it(gain, moved):
    """The second job would gain far more than the first, which has the bytes, would lose."""
    desk = Desk(min_gain=gain)
    desk.admit(1, ladder=(Rung(persistent=4, seconds=1.7), Rung(persistent=8, seconds=1.0)), weight=0.1)
    desk.admit(2, ladder=(Rung(persistent=4, seconds=1.5), Rung(persistent=8, seconds=1.0)))
    assert desk.lease(2).rung == 0
    assert bool(desk.said(Revoke, to=1)) == moved


@pytest.mark.parametrize("policy", ["slowdown", "priority", "fcfs"])
def test_where_all_fit_what_is_given_is_what_a_division_gives(policy, monkeypatch):
    """Of ladders that are no faster with more bytes too, in room for all and in less."""

    def rungs(seed):
        random = Random(seed)
        desk = Desk(capacity=random.choice((60, 90, 1000)), policy=policy, min_gain=random.choice((0.0, 0.1)))
        for k in range(1, 6):
            sizes = sorted(random.sample(range(4, 40), random.randint(1, 4)))
            ladder = tuple(Rung(persistent=n, seconds=random.choice((1.0, 1.5, 1.5, 2.0, 4.0))) for n in sizes)
            desk.admit(k, f"job {k}", ladder, priority=random.choice((0, 0, 1)), weight=random.choice((1.0, 2.0)))
        return [(a.id, a.rung, a.state) for a in desk.it.arbiter.leases.values()]

    found = [rungs(seed) for seed in range(150)]
    monkeypatch.setattr(Arbiter, "_all_get", lambda *_: None)
    assert [rungs(seed) for seed in range(150)] == found


def test_a_rung_that_is_hardly_faster_is_not_gone_up_to():
    ladder = (Rung(persistent=4, seconds=1.04), Rung(persistent=8, seconds=1.0))
    assert Desk(min_gain=0.05).admit(1, ladder=ladder).rung == 0
    assert Desk(min_gain=0.01).admit(1, ladder=ladder).rung == 1


def test_asking_again_is_answered_with_the_same_lease():
    desk = Desk()
    first = desk.admit(1)
    again = desk.hear(1, Admit(job="a", devices=(GPU,), ladder=LADDER))[-1]
    assert again.lease == first.lease and again.token > first.token and desk.charged() == 8
    desk.do(Disconnected(1))
    desk.meet(2, Process(1, 1))
    third = desk.hear(2, Admit(job="a", devices=(GPU,), ladder=LADDER))[-1]
    assert third.lease == first.lease and desk.lease(first.lease).connection == 2
    other = desk.hear(2, Admit(job="b", devices=(GPU,), ladder=LADDER[:1]))[-1]
    assert other.lease != first.lease and desk.charged() == 12


def test_what_is_anothers_or_long_over_is_refused_counted_and_changes_nothing():
    desk = Desk()
    grant = desk.admit(1)
    desk.meet(2)
    before = desk.it.arbiter.charged(desk.lease(1))
    for message in (
        Reclaim(lease=grant.lease, token=grant.token, rung=0, in_use=()),
        Release(lease=grant.lease, token=grant.token),
    ):
        (answer,) = desk.hear(2, message)
        assert isinstance(answer, Error) and answer.code == "not yours"
    assert desk.hear(2, Ack(lease=grant.lease, token=grant.token, rung=0, in_use=())) == []
    assert desk.hear(2, Beat(lease=grant.lease, step=1, step_us=1, in_use=(99,), peak=99)) == []
    (answer,) = desk.hear(2, Reclaim(lease=77, token=grant.token, rung=0, in_use=()))
    assert answer.code == "unknown lease" and answer.lease == 77
    assert desk.hear(1, Ack(lease=grant.lease, token=Token(0, 0), rung=0, in_use=())) == []
    assert desk.it.arbiter.charged(desk.lease(1)) == before
    assert desk.it.counters["not yours"] == 2 and desk.it.counters["stale"] == 3


def test_a_ladder_that_lies_is_charged_what_was_measured_and_does_not_shrink():
    desk = Desk(capacity=20)
    grant = desk.admit(1)
    desk.hear(1, Beat(lease=grant.lease, step=1, step_us=1, in_use=(11, 2), peak=12))
    assert (desk.charged(), desk.charged(HOST)) == (11, 2) and desk.lease(1).stuck and desk.lease(1).faults
    assert isinstance(desk.admit(2, ladder=(Rung(persistent=10, seconds=1.0),)), Queued) and not desk.said(Revoke)
    known = journal.replay(desk.journal, "boot")
    assert known.stuck == {1} and known.leases[1].charges[0].level == 11


def test_an_allocator_that_gives_nothing_back_keeps_its_rung_too():
    desk = Desk(capacity=9)
    desk.admit(1)
    desk.admit(2)
    told = desk.said(Revoke, to=1)[0]
    desk.ack(1, told, (8, 0))
    assert desk.charged() == 8 and desk.lease(1).stuck and desk.lease(2).state is State.QUEUED
    desk.do(Disconnected(2))
    assert desk.lease(1).rung == 1  # what it keeps anyway it may as well use
    (answer,) = desk.hear(1, Release(lease=1, token=told.token, in_use=(8, 0)))
    assert answer.code == "in use" and desk.charged() == 8
    desk.do(ProcessDied(Process(1, 1)))
    assert desk.charged() == 0


def test_after_a_restart_all_is_charged_reclaimed_first_and_fenced_by_the_epoch():
    desk = Desk()
    first = desk.admit(1)
    second = desk.admit(2, ladder=LADDER[:1])
    later = Desk(records=desk.journal)
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
    desk = Desk()
    grant = desk.admit(1)
    later = Desk(records=desk.journal)
    later.meet(10, Process(1, 1))
    later.hear(10, Reclaim(lease=grant.lease, token=grant.token, rung=1, in_use=(8, 0)))
    assert later.it.phase == "serving"
    assert Desk(records=[]).it.phase == "serving"


def test_a_lowered_capacity_is_drained_by_asking():
    desk = Desk()
    grant = desk.admit(1)
    desk.do(CapacityChanged({**desk.capacities, GPU: Capacity(capacity=5)}))
    told = desk.said(Revoke, to=1)[0]
    assert desk.charged() == 8 and told.lease == grant.lease
    desk.ack(1, told, (4, 0))
    assert desk.charged() == 4
    desk.do(CapacityChanged({**desk.capacities, GPU: Capacity(capacity=2)}))
    assert desk.charged() == 4 and not desk.said(Revoke)
    desk.do(CapacityChanged(desk.capacities))
    assert desk.said(Grant, to=1)[0].rung == 1


def test_without_a_journal_nothing_is_granted_and_what_was_lost_is_said_when_it_works_again():
    desk = Desk(capacity=9)
    first = desk.admit(1)
    desk.admit(2)
    told = desk.said(Revoke, to=1)[0]
    desk.it.handle_all([Received(1, Ack(lease=1, token=told.token, rung=0, in_use=(4, 0)))], desk.now)
    desk.do(JournalFailed())
    assert desk.hear(2, Admit(job="a", devices=(GPU,), ladder=LADDER)) == []
    assert isinstance(desk.admit(3, ladder=LADDER[:1]), Queued)
    assert desk.hear(1, Release(lease=1, token=first.token)) == []
    assert not [c for c in desk.commands if isinstance(c, Record)]
    desk.do(JournalWorks())
    assert isinstance(desk.commands[0], Compact)
    assert desk.said(Released, to=1) and desk.said(Grant, to=2) and desk.said(Grant, to=3)
    assert journal.replay(desk.journal, "boot").leases.keys() == {2, 3}


def test_a_journal_does_not_grow_without_end():
    desk = Desk()
    seen = 0
    desk.meet(1)
    for k in range(1500):
        desk.hear(1, Admit(job=f"job{k}", devices=(GPU,), ladder=LADDER[:1]))
        grant = desk.said(Grant)[0]
        desk.hear(1, Release(lease=grant.lease, token=grant.token))
        seen = max(seen, len(desk.journal))
    assert seen < 1100 and journal.replay(desk.journal, "boot").leases == {}
    later = Desk(records=desk.journal)
    assert later.admit(5).lease == 1501  # numbers are never used again


def test_who_does_not_say_hello_or_speaks_another_version_is_closed():
    desk = Desk()
    desk.do(Connected(1, Process(1, 1)))
    (answer,) = desk.hear(1, Hello(version=VERSION + 1))
    assert answer.code == "version" and Close(1) in desk.commands
    assert desk.hear(1, Hello(version=VERSION)) == []
    desk.do(Connected(2, Process(2, 1)))
    assert desk.hear(2, Status())[0].code == "protocol"
    assert isinstance(desk.meet(3)[0], Welcome)
    assert desk.hear(3, Hello(version=VERSION))[0].code == "protocol"


def test_too_many_clients_are_told_to_come_back():
    desk = Desk(max_clients=1)
    desk.meet(1)
    desk.do(Connected(2, Process(2, 1)))
    (answer,) = desk.said(Error, to=2)
    assert answer.code == "busy" and answer.retry_after and Close(2) in desk.commands
    desk.do(Disconnected(1), Disconnected(2))
    assert isinstance(desk.meet(3)[0], Welcome)


def test_a_stopping_coordinator_takes_nobody_new_and_keeps_who_is_there():
    desk = Desk(capacity=8)
    grant = desk.admit(1)
    desk.admit(2, ladder=LADDER[1:])
    desk.do(Stopping())
    assert desk.said(Reject, to=2) and isinstance(desk.admit(3), Reject)
    assert desk.hear(1, Release(lease=grant.lease, token=grant.token)) == [Released(lease=grant.lease)]


def test_the_state_is_told_page_by_page():
    desk = Desk(capacity=100)
    desk.meet(1)
    for k in range(70):
        desk.hear(1, Admit(job=f"job{k}", devices=(GPU,), ladder=(Rung(persistent=1, seconds=1.0),)))
    (page,) = desk.hear(1, Status())
    (rest,) = desk.hear(1, Status(after=page.leases[-1].lease))
    assert isinstance(page, Snapshot) and page.more and not rest.more
    assert [a.lease for a in (*page.leases, *rest.leases)] == list(range(1, 71))
    assert {d.device: (d.charged, d.guaranteed) for d in page.devices} == {GPU: (70, 70), HOST: (0, 0)}
    assert page.leases[0].state == "held" and page.policy == "slowdown"


def test_events_that_happen_at_once_are_decided_once():
    desk = Desk(capacity=8)
    for k in (1, 2):
        desk.meet(k)
    asks = [Received(k, Admit(job="a", devices=(GPU,), ladder=LADDER)) for k in (1, 2)]
    desk.do(*asks)
    assert [m.rung for m in desk.said(Grant)] == [0, 0] and not desk.said(Revoke)


def test_several_plans_that_take_turns_share_the_largest_temp():
    ladder = (Rung(persistent=1, temp=8, seconds=1.0),)
    desk = Desk(capacity=12)
    desk.admit(1, ladder=ladder)
    assert isinstance(desk.admit(2, ladder=ladder), Queued)
    desk.do(CapacityChanged({GPU: Capacity(capacity=12, gated=True), HOST: Capacity(capacity=8)}))
    assert desk.said(Grant, to=2) and desk.charged() == 10


# The job's side.


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


def test_a_rejected_job_knows_why():
    it = holder()
    it.connected(())
    it.received(Reject(job="a", reason="too large"), ())
    assert (it.phase, it.reason) == ("ended", "too large")
