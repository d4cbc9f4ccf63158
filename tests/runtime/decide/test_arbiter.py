"""Who is admitted, who grows and who is asked to shrink, as a coordinator's jobs are told."""

from math import inf
from random import Random

import pytest

from coordinator_model import World
from coordinator_talk import GPU, LADDER, Talk
from jaxtensile.runtime.decide.arbiter import REST, Arbiter
from jaxtensile.runtime.decide.events import (
    CapacityChanged,
    Disconnected,
    ProcessDied,
    Send,
)
from jaxtensile.runtime.decide.leases import HOST, Process, State
from jaxtensile.runtime.decide.ledger import Capacity
from jaxtensile.runtime.decide.policy import _total
from jaxtensile.runtime.decide.rota import RESTLESS
from jaxtensile.runtime.protocol.messages import (
    Admit,
    Grant,
    Queued,
    Release,
    Released,
    Revoke,
    Rung,
)


def obey(talk):
    """Jobs do what they were told; how often they were told to shrink."""
    told = 0
    while asked := [c for c in talk.commands if isinstance(c, Send) and isinstance(c.message, Revoke)]:
        for send in asked:
            talk.ack(send.connection, send.message)
        told += len(asked)
    return told


def test_a_second_job_waits_until_the_first_has_shrunk():
    talk = Talk(capacity=9)
    first = talk.admit(1)
    assert isinstance(talk.admit(2), Queued)
    told = talk.said(Revoke, to=1)[0]
    assert (told.rung, told.deadline) == (0, 60.0) and told.token > first.token and talk.charged() == 8
    talk.ack(1, told, (4, 0))
    assert talk.said(Grant, to=2)[0].rung == 0 and talk.charged() == 8
    assert talk.hear(1, Release(lease=first.lease, token=told.token)) == [Released(lease=first.lease)]
    assert talk.said(Grant, to=2)[0].rung == 1 and talk.charged() == 8


def test_a_waiter_that_leaves_is_waited_for_no_more_and_a_late_ack_changes_nothing():
    talk = Talk(capacity=9)
    talk.admit(1)
    talk.admit(2)
    told = talk.said(Revoke, to=1)[0]
    talk.do(Disconnected(2))
    again = talk.said(Grant, to=1)[0]
    assert again.rung == 1 and again.token > told.token and talk.lease(1).state is State.HELD
    talk.ack(1, told, (4, 0))
    assert talk.charged() == 8 and talk.it.counters["stale"] == 1


def test_devices_and_host_memory_are_granted_at_once_or_not_at_all():
    talk = Talk(host=3)
    ladder = (Rung(persistent=1, host=2, seconds=1.0),)
    assert isinstance(talk.admit(1, ladder=ladder), Grant)
    assert isinstance(talk.admit(2, ladder=ladder), Queued)
    assert (talk.charged(), talk.charged(HOST)) == (1, 2)
    talk.do(ProcessDied(Process(1, 1)))
    assert talk.said(Grant, to=2) and (talk.charged(), talk.charged(HOST)) == (1, 2)


def test_room_is_made_on_one_device_whatever_the_steps_on_another_one_need():
    """Jobs of one process: a division takes the largest temporaries of all devices to be those of each."""
    talk = Talk()
    two = {GPU: Capacity(capacity=20, gated=True), "cuda:1": Capacity(capacity=12, gated=True)}
    talk.do(CapacityChanged({**two, HOST: Capacity(capacity=8)}))
    for k in (1, 2, 3):
        talk.meet(k)
    steps = Rung(persistent=1, temp=9, seconds=1.0)
    talk.hear(1, Admit(job="a", devices=(GPU,), ladder=(steps,)))
    both = tuple(Rung(persistent=p, temp=1, seconds=1 / p) for p in (1, 8))
    talk.hear(2, Admit(job="b", devices=(GPU, "cuda:1"), ladder=both))
    assert talk.lease(2).rung == 1
    talk.hear(3, Admit(job="c", devices=("cuda:1",), ladder=(Rung(persistent=4, seconds=1.0),)))
    told = talk.said(Revoke, to=2)[0]
    talk.ack(2, told)
    assert talk.said(Grant, to=3)


def test_a_minimum_hold_keeps_no_job_from_being_admitted():
    """A waiter runs no step meanwhile."""
    talk = Talk(capacity=9, min_hold=30.0)
    talk.admit(1)
    talk.admit(2)
    talk.ack(1, talk.said(Revoke, to=1)[0])
    assert talk.said(Grant, to=2)


def beside_host(capacity, *ladders, last=GPU):
    """Jobs that have come to the highest rungs that there is room for, of bytes on a device and two on the host."""
    talk = Talk(host=2)
    talk.do(
        CapacityChanged({GPU: Capacity(capacity=capacity), "cuda:1": Capacity(capacity=6), HOST: Capacity(capacity=2)})
    )
    for k, rungs in enumerate(ladders, 1):
        ladder = tuple(Rung(persistent=p, host=h, seconds=1 + 1 / p) for p, h in rungs)
        talk.meet(k)
        device = GPU if k < len(ladders) else last
        talk.ack(k, talk.hear(k, Admit(job="a", devices=(device,), ladder=ladder))[-1])
        assert talk.lease(k).rung == len(ladder) - 1
    return talk


def test_who_finds_its_way_taken_by_another_one_is_asked_to_take_another_way():
    """On the host is one byte for the ways of two; when all have gone there is one for each."""
    talk = beside_host(18, [(2, 1), (6, 0)], [(1, 0), (2, 1), (6, 0)], [(2, 0), (6, 1)])
    assert isinstance(talk.admit(4, ladder=(Rung(persistent=10, seconds=1.0),)), Queued)
    assert {(told.lease, told.rung) for told in talk.said(Revoke)} == {(1, 0), (2, 0), (3, 0)}


@pytest.mark.parametrize("device", [GPU, "cuda:1"])
def test_who_goes_down_opens_the_way_of_another_one_for_a_waiter(device):
    """The host bytes that the first needs to shrink are those of the second, which has the same device or not."""
    talk = beside_host(12, [(2, 2), (6, 0)], [(2, 0), (6, 2)], last=device)
    assert isinstance(talk.admit(3, ladder=(Rung(persistent=8, seconds=1.0),)), Queued)
    for k in (2, 1):
        talk.ack(k, talk.said(Revoke)[0])
    assert talk.said(Grant, to=3)


def test_who_shrinks_for_two_waiters_does_so_when_one_of_them_is_admitted_without():
    """Each waits for another device of the first job."""
    talk = Talk()
    talk.do(CapacityChanged({**talk.capacities, "cuda:1": Capacity(capacity=13)}))
    asked = [(GPU, "cuda:1"), (2, 4, 8)], [("cuda:1",), (5,)], [(GPU,), (6,)], [("cuda:1",), (5,)]
    for k, (devices, sizes) in enumerate(asked, 1):
        talk.meet(k)
        ladder = tuple(Rung(persistent=n, seconds=1 / n) for n in sizes)
        talk.hear(k, Admit(job="a", devices=devices, ladder=ladder))
        assert talk.lease(k).state is (State.QUEUED if k > 2 else State.HELD)
        if k == 1:
            talk.ack(k, talk.said(Grant)[-1])
    assert [talk.lease(1).rung, talk.said(Revoke)[0].rung] == [0, 0]
    talk.do(ProcessDied(Process(2, 1)))
    assert talk.said(Grant, to=4)
    talk.ack(1, talk.said(Revoke, to=1)[0])
    assert talk.said(Grant, to=3)


@pytest.mark.parametrize(("gain", "moved"), [(0.05, True), (0.4, False)])
def test_surplus_moves_only_for_a_gain_that_is_worth_it(gain, moved):
    """The second job would gain far more than the first, which has the bytes, would lose."""
    talk = Talk(min_gain=gain)
    talk.admit(1, ladder=(Rung(persistent=4, seconds=1.7), Rung(persistent=8, seconds=1.0)), weight=0.1)
    talk.admit(2, ladder=(Rung(persistent=4, seconds=1.5), Rung(persistent=8, seconds=1.0)))
    assert talk.lease(2).rung == 0
    assert bool(talk.said(Revoke, to=1)) == moved


@pytest.mark.parametrize("policy", ["slowdown", "priority", "fcfs"])
def test_where_all_fit_what_is_given_is_what_a_division_gives(policy, monkeypatch):
    """Of ladders that are no faster with more bytes too, in room for all and in less."""

    def rungs(seed):
        random = Random(seed)
        talk = Talk(capacity=random.choice((60, 90, 1000)), policy=policy, min_gain=random.choice((0.0, 0.1)))
        for k in range(1, 6):
            sizes = sorted(random.sample(range(4, 40), random.randint(1, 4)))
            ladder = tuple(Rung(persistent=n, seconds=random.choice((1.0, 1.5, 1.5, 2.0, 4.0))) for n in sizes)
            talk.admit(k, f"job {k}", ladder, priority=random.choice((0, 0, 1)), weight=random.choice((1.0, 2.0)))
        return [(a.id, a.rung, a.state) for a in talk.it.arbiter.leases.values()]

    found = [rungs(seed) for seed in range(150)]
    monkeypatch.setattr(Arbiter, "_all_get", lambda *_: None)
    assert [rungs(seed) for seed in range(150)] == found


def test_a_rung_that_is_hardly_faster_is_not_gone_up_to():
    ladder = (Rung(persistent=4, seconds=1.04), Rung(persistent=8, seconds=1.0))
    assert Talk(min_gain=0.05).admit(1, ladder=ladder).rung == 0
    assert Talk(min_gain=0.01).admit(1, ladder=ladder).rung == 1


def test_a_lowered_capacity_is_drained_by_asking():
    talk = Talk()
    grant = talk.admit(1)
    talk.do(CapacityChanged({**talk.capacities, GPU: Capacity(capacity=5)}))
    told = talk.said(Revoke, to=1)[0]
    assert talk.charged() == 8 and told.lease == grant.lease
    talk.ack(1, told, (4, 0))
    assert talk.charged() == 4
    talk.do(CapacityChanged({**talk.capacities, GPU: Capacity(capacity=2)}))
    assert talk.charged() == 4 and not talk.said(Revoke)
    talk.do(CapacityChanged(talk.capacities))
    assert talk.said(Grant, to=1)[0].rung == 1


def test_several_plans_that_take_turns_share_the_largest_temp():
    ladder = (Rung(persistent=1, temp=8, seconds=1.0),)
    talk = Talk(capacity=12)
    talk.admit(1, ladder=ladder)
    assert isinstance(talk.admit(2, ladder=ladder), Queued)
    turns = {GPU: Capacity(capacity=12, gated=True), HOST: Capacity(capacity=8)}
    talk.do(CapacityChanged(turns))
    assert not talk.said(Grant, to=2), "while anybody has a lease there, whether turns are taken does not change"
    talk = Talk(capacity=12, gated=True)
    talk.admit(1, ladder=ladder)
    assert isinstance(talk.admit(2, ladder=ladder), Grant) and talk.charged() == 10


@pytest.mark.parametrize("seed", range(6))
def test_what_is_kept_between_decisions_changes_none(seed, monkeypatch):
    """Ways of leases that did not change, and parts in which there was nothing to do: without them all is the same."""

    def told():
        world = World(seed, most=12)
        rungs = []
        for _ in range(20):
            world.walk(20)
            leases = world.daemon.arbiter.leases.values() if world.daemon else ()
            rungs.append([(a.id, a.rung, a.sequence, a.state) for a in leases])
        return rungs

    found, settle = told(), Arbiter.settle

    def forgetful(self, *args, **kwargs):
        self._ways.clear()
        self._settled.clear()
        settle(self, *args, **kwargs)

    monkeypatch.setattr(Arbiter, "settle", forgetful)
    assert told() == found


def test_devices_on_which_nothing_happens_are_not_decided_about_again(monkeypatch):
    """Of two that both have too few bytes, only that on which a job comes or goes."""
    talk = Talk(min_hold=1000.0)
    talk.capacities = {name: Capacity(capacity=13) for name in (GPU, "cuda:1")} | {HOST: Capacity(capacity=0)}
    talk.do(CapacityChanged(talk.capacities))
    for k, device in enumerate((GPU, GPU, "cuda:1", "cuda:1"), 1):
        talk.meet(k)
        talk.hear(k, Admit(job="a", devices=(device,), ladder=LADDER))
    asked, decide = [], Arbiter._divide
    monkeypatch.setattr(Arbiter, "_divide", lambda self, part, *more: asked.append(part) or decide(self, part, *more))
    talk.do(ProcessDied(Process(1, 1)))
    assert [[a.id for a in part] for part in asked] == [[2]] and talk.lease(2).rung == 1


def test_among_many_jobs_bytes_are_shifted_only_now_and_then():
    many = RESTLESS + 2
    talk = Talk(capacity=4 * (many + 1), host=0)

    for k in range(1, many + 1):
        talk.meet(k)
        talk.hear(k, Admit(job=f"{k}", devices=(GPU,), ladder=LADDER))
        obey(talk)
    assert talk.charged() == 4 * (many + 1)
    talk.do(ProcessDied(Process(2, 1)))
    assert talk.charged() == 4 * (many + 1)  # what is free is given at once
    talk.meet(many + 1)
    talk.hear(many + 1, Admit(job="new", devices=(GPU,), ladder=LADDER, weight=100.0))
    assert obey(talk) == 1 and talk.lease(many + 1).rung == 0  # room is made at once
    assert talk.now < talk.it.arbiter.recheck <= talk.now + 2 * REST * many
    talk.tick(2 * REST * many)
    assert obey(talk) == 1 and talk.lease(many + 1).rung == 1


def fleet(seed, few, copying):
    """Thirty jobs on six devices come and go and obey, ``few`` of them in one turn; the slowdowns whenever all rest."""
    random = Random(seed)
    talk = Talk(host=random.randint(4, 12), min_gain=0.0, lease_ttl=1e6)
    devices = [f"cuda:{k}" for k in range(6)]
    talk.capacities |= {name: Capacity(capacity=random.randint(30, 60)) for name in devices}
    talk.do(CapacityChanged(talk.capacities))
    sums = []
    it = talk.it.arbiter
    it.rota.at_once = few

    def left_alone():
        for _ in range(200):
            obey(talk)
            if it.recheck is None:
                break
            talk.tick(it.recheck - talk.now + 1e-6)
        assert it.recheck is None, "it comes to rest"
        assert not it.ledger.over()
        held = [it._claim(a, (it._way(a).stay,)) for a in it.leases.values() if a.state is State.HELD]
        sums.append(_total(held, dict.fromkeys((c.id for c in held), 0), held))

    for k in range(1, 31):
        talk.meet(k)
        top = random.randint(6, 16)
        ladder = tuple(
            Rung(persistent=top * n // 3, host=host, seconds=1 + random.random() * (3 - n), into=moved, out=moved)
            for n, host, moved in ((1, 0, copying * (k % 2)), (2, random.randint(0, 2), 0.0), (3, 0, 0.0))
        )
        first = random.randrange(6)
        on = tuple(devices[(first + j) % 6] for j in range(random.choice((1, 1, 2))))
        talk.hear(k, Admit(job=f"{k}", devices=on, ladder=ladder, weight=random.choice((0.5, 1.0, 2.0))))
        left_alone()
        if k % 5 == 0:
            gone = random.choice([*it.leases.values()])
            talk.do(ProcessDied(gone.process))
            left_alone()
    return sums


@pytest.mark.parametrize("copying", (0.0, 0.4))
def test_shifted_by_turns_bytes_end_about_where_they_would_at_once(copying):
    """All devices have their turn after each change, in ever other company: host bytes go from one to the other."""
    more = []
    for seed in range(12):
        whole, by_turns = (fleet(seed, few, copying) for few in (1000, 4))
        more += [turned / at_once - 1 for turned, at_once in zip(by_turns, whole, strict=True)]
    assert any(more) and sum(more) / len(more) < 0.005 and max(more) < 0.05


def turning(few, capacities, **given):
    """A coordinator with turns of ``few`` jobs; what makes jobs of it, and what lets them obey until a time."""
    talk = Talk(lease_ttl=1e6, **given)
    it = talk.it.arbiter
    it.rota.at_once = few
    talk.do(CapacityChanged({name: Capacity(capacity=n) for name, n in capacities.items()}))

    def come(k, devices, *ladder, **more):
        talk.meet(k)
        talk.hear(k, Admit(job=f"{k}", devices=devices, ladder=ladder, **more))

    def until(end):
        told = obey(talk)
        while it.recheck is not None and it.recheck < end:
            assert it.recheck > talk.now
            talk.tick(it.recheck - talk.now)
            told += obey(talk)
        return told

    return talk, come, until


@pytest.mark.parametrize("before", (0.0001, 0.0003, 1.0))
def test_a_hold_that_ends_during_a_round_of_turns_is_not_missed(before):
    capacities = {"cuda:0": 12, "cuda:1": 12, HOST: 100}
    talk, come, until = turning(3, capacities, min_hold=30.0)
    for k, (device, seconds, weight) in enumerate(((0, 1.5, 0.1), (1, 1.5, 0.1), (1, 1.5, 0.1), (0, 4.0, 10.0)), 1):
        low, high = Rung(persistent=4, host=1, seconds=seconds), Rung(persistent=8, host=1, seconds=1.0)
        come(k, (f"cuda:{device}",), low, high, weight=weight)
        obey(talk)
    until(129)
    talk.tick(130 - before - talk.now)
    talk.do(CapacityChanged({name: Capacity(capacity=n) for name, n in (capacities | {HOST: 101}).items()}))
    until(inf)
    assert [a.rung for a in talk.it.arbiter.leases.values()] == [0, 1, 0, 1] and talk.it.arbiter.recheck is None


def test_many_jobs_have_their_turn_though_few_others_come_and_go_all_the_time():
    talk, come, until = turning(10, {"cuda:0": 4 * 13, "cuda:1": 4 * 9, HOST: 0})
    low, high = Rung(persistent=4, seconds=2.0), Rung(persistent=8, seconds=1.0)
    for k in range(1, 20):
        come(k, ("cuda:0" if k < 12 else "cuda:1",), low, high)
        obey(talk)
    until(inf)
    come(100, ("cuda:0",), low, high, weight=100.0)
    obey(talk)
    heavy, events = max(talk.it.arbiter.leases), 0
    while talk.lease(heavy).rung == 0:
        if events % 2:
            talk.do(ProcessDied(Process(100 + events, 1)))
        else:
            come(101 + events, ("cuda:1",), low, high)
        obey(talk)
        until(talk.now + 0.001)
        talk.now += 0.001
        events += 1
        assert events < 20


def test_what_a_copy_costs_is_seen_on_all_devices_of_those_beside_it():
    """If only those on its own were, it would be told to grow and to shrink again for ever."""
    _, come, until = turning(1000, {"cuda:0": 100, "cuda:1": 100, HOST: 100}, min_hold=30.0)
    much = {"persistent": 4, "seconds": 1.0, "into": 0.9, "out": 0.9}
    come(1, ("cuda:1",), Rung(wait=0.5, **much), Rung(persistent=4000, seconds=0.9))
    come(2, ("cuda:1",), Rung(wait=0.5, **much))
    come(3, ("cuda:0", "cuda:1"), Rung(wait=0.9, **much), weight=4.0)
    come(4, ("cuda:0",), Rung(wait=0.9, **much), Rung(persistent=8, seconds=2.0), weight=4.0)
    assert until(2000) <= 1


def test_room_on_the_host_is_made_by_the_lowest_class():
    talk, come, _ = turning(3, {**{f"cuda:{k}": 100 for k in range(5)}, HOST: 8})
    for k in range(4):
        more = {"priority": 9 if k < 3 else 0}
        come(k + 1, (f"cuda:{k}",), Rung(persistent=1, seconds=2.0), Rung(persistent=2, host=2, seconds=1.0), **more)
    talk.tick(100)
    come(5, ("cuda:4",), Rung(persistent=1, host=2, seconds=1.0), priority=0)
    assert [c.connection for c in talk.commands if isinstance(c, Send) and isinstance(c.message, Revoke)] == [4]


def test_surplus_moves_when_a_minimum_hold_ends_though_nothing_else_happens():
    talk = Talk(min_hold=30.0, lease_ttl=100.0)
    talk.admit(1, ladder=(Rung(persistent=4, seconds=1.7), Rung(persistent=8, seconds=1.0)), weight=0.1)
    talk.tick(20.0)
    talk.admit(2, ladder=(Rung(persistent=4, seconds=1.5), Rung(persistent=8, seconds=1.0)))
    assert not talk.said(Revoke)
    talk.tick(10.0)
    assert talk.said(Revoke, to=1)
