"""What copies of several jobs cost each other, and that the division of a device counts it."""

from itertools import product
from random import Random

import pytest

from coordinator_talk import GPU, Talk
from jaxtensile.runtime.decide.leases import Charge
from jaxtensile.runtime.decide.links import ALONE, Loads, added, copies, loads_of, stretch
from jaxtensile.runtime.decide.policy import Claim, Option, Room, divide
from jaxtensile.runtime.protocol.messages import Rung

OFFLOADS = Rung(persistent=2, temp=6, seconds=1.0, wait=0.1, into=1.0, out=0.5)
RECOMPUTES = Rung(persistent=2, temp=7, seconds=1.1)


def test_the_loads_of_a_step_are_its_parts_and_add_up_by_kind():
    assert loads_of(RECOMPUTES) == ALONE and loads_of(OFFLOADS) == Loads(0.9, 1.0, 0.5)
    assert copies((RECOMPUTES, OFFLOADS)) and not copies((RECOMPUTES,))
    assert added([loads_of(OFFLOADS)] * 3 + [ALONE]) == pytest.approx((3.7, 3.0, 1.5))
    assert stretch(Loads(0.5, 0.9, 0.1)) == 1.0 and stretch(Loads(1.5, 2.5, 0.1)) == 2.5


def claims_of(ladders, beside=(GPU,)):
    made = []
    for k, ladder in enumerate(ladders):
        fastest = min(r.seconds for r in ladder)
        options = tuple(
            Option(n, (Charge(r.persistent, r.temp),), r.seconds / fastest, r.level, loads_of(r))
            for n, r in enumerate(ladder)
        )
        floor = ladder[0].level
        made.append(
            Claim(
                id=k, priority=0, weight=1.0, arrived=k, resources=(GPU,), options=options, floor=floor, beside=beside
            )
        )
    return made


def together(ladders, picks):
    """The sum of slowdowns of jobs beside each other, once more."""
    chosen = [ladder[n] for ladder, n in zip(ladders, picks, strict=True)]
    kinds = ([r.seconds - r.wait for r in chosen], [r.into for r in chosen], [r.out for r in chosen])
    longer = max(1.0, *(sum(s / r.seconds for s, r in zip(kind, chosen, strict=True)) for kind in kinds))
    return longer * sum(r.seconds / min(x.seconds for x in ladder) for r, ladder in zip(chosen, ladders, strict=True))


def test_who_can_recompute_leaves_the_link_to_who_cannot():
    ladders = [(OFFLOADS, RECOMPUTES), (Rung(persistent=1, temp=1, seconds=1.0, wait=0.7, into=1.0),)]
    assert divide(claims_of(ladders, ()), {GPU: Room(100)}, "slowdown") == {0: 0, 1: 0}
    assert divide(claims_of(ladders), {GPU: Room(100)}, "slowdown") == {0: 1, 1: 0}
    assert divide(claims_of(ladders), {GPU: Room(10)}, "slowdown") == {0: 0, 1: 0}, "its bytes are not there"


def random_ladders(rnd):
    ladders = []
    for _ in range(3):
        rungs = []
        for n in range(4):
            seconds = 1.3 - 0.1 * n + rnd.uniform(-0.04, 0.04)
            into = rnd.choice((0.0, rnd.uniform(0.3, 1.0))) * seconds
            wait = rnd.uniform(0, 0.3) * into
            rungs.append(
                Rung(persistent=2, temp=3 + 4 * n, seconds=seconds, wait=wait, into=into, out=into * rnd.random())
            )
        ladders.append(tuple(rungs))
    return ladders


def test_a_division_beside_each_other_is_the_best_or_close_and_never_worse_than_without_the_link():
    exact = 0
    for seed in range(60):
        rnd = Random(seed)
        ladders, room = random_ladders(rnd), rnd.randint(20, 51)
        fitting = [
            p for p in product(range(4), repeat=3) if sum(x[n].level for x, n in zip(ladders, p, strict=True)) <= room
        ]
        best = min(together(ladders, p) for p in fitting)
        found, blind = (divide(claims_of(ladders, b), {GPU: Room(room)}, "slowdown") for b in ((GPU,), ()))
        ours = together(ladders, [found[k] for k in range(3)])
        assert ours <= together(ladders, [blind[k] for k in range(3)]) + 1e-9 and ours <= best * 1.05
        exact += ours <= best + 1e-9
    print(exact)
    assert exact >= 54


def test_the_coordinator_moves_a_job_off_a_link_that_another_needs():
    talk = Talk(capacity=100, min_hold=0.0, lease_ttl=1e6)
    grant = talk.admit(1, job="either", ladder=(OFFLOADS, RECOMPUTES))
    assert grant.rung == 0, "alone it hides its copies"
    talk.admit(2, job="copies", ladder=(Rung(persistent=1, temp=1, seconds=1.0, wait=0.7, into=1.0),))
    assert talk.lease(1).rung == 1


def test_where_jobs_take_turns_each_copies_alone():
    talk = Talk(capacity=100, gated=True, min_hold=0.0, lease_ttl=1e6)
    talk.admit(1, job="either", ladder=(OFFLOADS, RECOMPUTES))
    talk.admit(2, job="copies", ladder=(Rung(persistent=1, temp=1, seconds=1.0, wait=0.7, into=1.0),))
    assert talk.lease(1).rung == 0
