"""Turns: who has one, in which order, for how long, and that what they hold fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator_talk import GPU, Talk
from jaxtensile.runtime.decide.events import CapacityChanged, Disconnected, ProcessDied, Terminate
from jaxtensile.runtime.decide.journal import replay
from jaxtensile.runtime.decide.leases import HOST, Process
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.decide.turns import COST, SHORTEST, share
from jaxtensile.runtime.protocol.messages import Admit, AskTurn, Begin, Done, End, Reclaim, Rung, Token


def told(talk):
    return [(type(m), m.lease) for m in talk.said() if isinstance(m, Begin | End)]


class Jobs:
    """Jobs of one rung each, which step as they are told to."""

    def __init__(self, *temps, capacity=100, stays=1, settings=None, **given):
        self.talk = Talk(capacity=capacity, gated=True, lease_ttl=1e6, **settings or {})
        self.numbers = {}
        for k, temp in enumerate(temps, 1):
            rung = (Rung(persistent=stays, temp=temp, seconds=1.0),)
            grant = self.talk.admit(k, job=f"job{k}", ladder=rung, **{n: v[k - 1] for n, v in given.items()})
            assert grant.lease == k and grant.turns

    def ask(self, k):
        self.numbers[k] = self.numbers.get(k, 0) + 1
        self.talk.hear(k, AskTurn(lease=k, turn=self.numbers[k]))
        return told(self.talk)

    def done(self, k, **given):
        self.talk.hear(k, Done(lease=k, turn=self.numbers[k], **given))
        return told(self.talk)

    def tick(self, seconds):
        self.talk.tick(seconds)
        return told(self.talk)

    @property
    def having(self):
        return {k for k, lease in self.talk.it.arbiter.leases.items() if lease.turn >= 0}


def test_a_turn_begins_at_once_is_kept_and_ends_when_another_waits():
    jobs = Jobs(60, 60)
    assert jobs.ask(1) == [(Begin, 1)] and jobs.tick(100.0) == []
    assert jobs.ask(2) == [(End, 1)] and jobs.having == {1}
    assert jobs.done(1) == [(Begin, 2)] and jobs.having == {2}
    assert jobs.ask(1) == [] and jobs.tick(SHORTEST / 2) == []
    assert jobs.talk.it.wake == pytest.approx(jobs.talk.now + SHORTEST / 2)
    assert jobs.tick(SHORTEST / 2 + 1e-9) == [(End, 2)]
    assert jobs.done(2) == [(Begin, 1)]


def test_several_have_turns_at_once_where_their_temps_fit_together():
    jobs = Jobs(40, 30, 40)
    assert jobs.ask(1) == [(Begin, 1)] and jobs.ask(2) == [(Begin, 2)]
    assert jobs.ask(3) == [] and jobs.having == {1, 2}
    assert jobs.tick(SHORTEST) == [(End, 1), (End, 2)]
    assert jobs.done(2) == [(Begin, 3)] and jobs.done(1) == []
    assert jobs.ask(2) == [(Begin, 2)] and jobs.having == {2, 3}


def test_where_somebody_wants_bytes_turns_are_taken_one_at_a_time():
    jobs = Jobs(40, 30)
    jobs.ask(1), jobs.ask(2)
    talk = jobs.talk
    talk.admit(3, job="large", ladder=(Rung(persistent=40, temp=1, seconds=1.0),))
    assert told(talk) == [(End, 2)], "both temps would leave it no room, one does"
    talk.hear(2, Done(lease=2, turn=1))
    assert talk.lease(3).rung == 0 and jobs.having == {1}


def test_a_turn_lasts_as_long_as_handing_it_over_may_cost():
    jobs = Jobs(60, 60)
    jobs.ask(1), jobs.ask(2), jobs.done(1, cost=0.5), jobs.ask(1)
    jobs.tick(1.0)
    jobs.done(2), jobs.ask(2)
    assert jobs.having == {1} and jobs.tick(0.5 / COST - 0.1) == [] and jobs.tick(0.2) == [(End, 1)]


def test_a_higher_class_cuts_in_at_once():
    jobs = Jobs(60, 60, priority=(0, 1))
    assert jobs.ask(1) == [(Begin, 1)] and jobs.ask(2) == [(End, 1)]


def test_a_turn_that_nobody_waited_for_is_not_held_against_its_job():
    jobs = Jobs(60, 60)
    jobs.ask(1)
    jobs.tick(1000.0)
    jobs.ask(2), jobs.done(1), jobs.ask(1)
    order = []
    for _ in range(6):
        jobs.tick(1.0)
        (last,) = jobs.having
        jobs.done(last), jobs.ask(last)
        order.append(last)
    assert order == [2, 1, 2, 1, 2, 1]


@given(st.lists(st.sampled_from((0.5, 1.0, 2.0, 3.0)), min_size=2, max_size=4), st.lists(st.floats(0.1, 1.0)))
def test_shares_are_as_the_weights(weights, lengths):
    jobs = Jobs(*(60,) * len(weights), capacity=70, weight=weights)
    for k in range(1, len(weights) + 1):
        jobs.ask(k)
    had = dict.fromkeys(range(1, len(weights) + 1), 0.0)
    for k in range(400):
        took = lengths[k % len(lengths)] if lengths else 0.5
        (last,) = jobs.having
        had[last] += took
        if (End, last) in jobs.tick(took):
            jobs.done(last), jobs.ask(last)
    virtual = [had[k] / w for k, w in enumerate(weights, 1)]
    assert max(virtual) - min(virtual) < 3 * max([*lengths, 0.5]) / min(weights)


def test_silence_and_an_end_of_a_connection_end_no_turn_and_a_death_does():
    jobs = Jobs(60, 60)
    jobs.ask(1), jobs.ask(2)
    jobs.talk.do(Disconnected(1))
    assert jobs.having == {1} and jobs.tick(100.0) == []
    jobs.talk.do(ProcessDied(Process(1, 1)))
    assert told(jobs.talk) == [(Begin, 2)]


def test_after_a_restart_a_silent_job_may_have_a_turn_and_who_comes_back_says_so():
    jobs = Jobs(60, 60)
    jobs.ask(1)
    again = Talk(capacity=100, gated=False, records=jobs.talk.journal)
    again.now = jobs.talk.now
    account = again.it.arbiter.ledger.accounts[GPU]
    assert account.gated, "its jobs take turns, whatever the config says now"
    for k, turn in ((2, -1), (1, 1)):
        lease = again.lease(k)
        again.meet(10 + k, Process(k, 1))
        token = replay(jobs.talk.journal, "boot").leases[k].sequence
        again.hear(10 + k, Reclaim(lease=k, token=Token(1, token), rung=0, in_use=(), turn=turn))
        if k == 2:
            again.hear(12, AskTurn(lease=2, turn=5))
            assert lease.turn == -1 and not told(again)
    assert [*account.turns] == [1] and again.lease(1).turn == 1
    again.tick(SHORTEST)
    assert told(again) == [(End, 1)]


def test_what_an_allocator_keeps_stays_charged_and_is_what_the_next_step_uses():
    jobs = Jobs(60, 20)
    jobs.ask(1), jobs.done(1, in_use=(51,))
    lease = jobs.talk.lease(1)
    (charge, _) = jobs.talk.it.arbiter.charged(lease)
    assert (charge.persistent, charge.temp) == (51, 10) and lease.stuck
    assert "keeps bytes after its turn" in lease.faults
    assert jobs.talk.charged() == 51 + 1 + 20


def test_a_share_grows_with_the_class_up_to_a_bound():
    assert share(0, 2.0) == 2.0 and share(1, 1.0) == 8.0 and share(-1, 1.0) == 1 / 8
    assert share(1000, 1.0) == share(8, 1.0)


@pytest.mark.parametrize("what", ["wait", "terminate"])
def test_who_keeps_its_turn_is_overdue_and_ended_only_where_that_was_asked_for(what):
    jobs = Jobs(60, 60, settings={"on_overdue": what, "revoke_deadline": 60.0})
    jobs.ask(1), jobs.ask(2)
    assert (End, 1) in jobs.tick(SHORTEST)
    jobs.tick(59.0)
    assert not jobs.talk.it.counters["overdue"]
    commands = jobs.talk.tick(1.1)
    assert jobs.talk.it.counters["overdue"] == 1 and jobs.having == {1}
    assert [c.process for c in commands if isinstance(c, Terminate)] == [Process(1, 1)] * (what == "terminate")
    jobs.tick(100.0)
    assert jobs.talk.it.counters["overdue"] == 1


def test_a_job_of_two_devices_gets_its_turn_though_one_of_them_stands_still():
    """It is ahead on the second, where nobody runs: all who want it wait for the first."""
    two = {name: Capacity(capacity=100, gated=True) for name in (GPU, "cuda:1")}
    talk = Talk(lease_ttl=1e6)
    talk.do(CapacityChanged({**two, HOST: Capacity(capacity=8)}))
    rung = (Rung(persistent=1, temp=60, seconds=1.0),)
    numbers = dict.fromkeys((1, 2, 3, 4), 0)
    for k, devices in ((1, (GPU, "cuda:1")), (2, ("cuda:1",)), (3, (GPU,)), (4, (GPU,))):
        talk.meet(k)
        talk.hear(k, Admit(job=f"job{k}", devices=devices, ladder=rung))

    def ask(k):
        numbers[k] += 1
        talk.hear(k, AskTurn(lease=k, turn=numbers[k]))

    def done(k):
        talk.hear(k, Done(lease=k, turn=numbers[k]))

    ask(1), ask(2)
    talk.tick(500.0)
    done(1), done(2)  # the first ran for long while the second waited
    ask(3)
    talk.tick(500.0)
    done(3)
    had = dict.fromkeys((3, 4, 1), 0)
    for k in had:
        ask(k)
    for _ in range(60):
        (last,) = [k for k, lease in talk.it.arbiter.leases.items() if lease.turn >= 0]
        had[last] += 1
        talk.tick(1.0)
        done(last), ask(last)
    assert min(had.values()) >= 10, had
