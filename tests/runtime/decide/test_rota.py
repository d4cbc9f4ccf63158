"""Whose turn it is where many jobs share bytes."""

from collections import Counter
from dataclasses import dataclass
from random import Random

import pytest

from jaxtensile.runtime.decide.rota import Rota


@dataclass
class Held:
    """What a rota knows of a lease."""

    id: int
    devices: tuple[str, ...]


def fleet(seed, jobs=60, many=10):
    random, names = Random(seed), [f"cuda:{n}" for n in range(many)]
    return [Held(k, tuple(random.sample(names, random.choice((1, 1, 2))))) for k in range(jobs)]


def turns(held, count, at_once=15):
    rota = Rota()
    rota.at_once = at_once
    for _ in range(count):
        among, names = rota.next(held)
        rota.took(names)
        yield rota, among, names


def test_few_have_all_turns_together():
    held = fleet(0, jobs=12)
    for _, among, names in turns(held, 3):
        assert among == held and {*names} == {d for a in held for d in a.devices}


@pytest.mark.parametrize("seed", range(5))
def test_all_on_the_devices_of_a_turn_have_it_and_no_more_than_fit(seed):
    held = fleet(seed)
    for _, among, names in turns(held, 12):
        assert [a.id for a in held if {*a.devices} & {*names}] == sorted(a.id for a in among) and 0 < len(among) <= 15


@pytest.mark.parametrize("seed", range(5))
def test_whoever_waited_longest_is_among_the_next(seed):
    held, had = fleet(seed), dict.fromkeys((f"cuda:{n}" for n in range(10)), -1)
    for number, (_, _, names) in enumerate(turns(held, 30)):
        assert min(had.values()) in {had[name] for name in names}
        had |= dict.fromkeys(names, number)
    assert min(had.values()) > 0


def test_every_two_devices_meet():
    """What they share could not go from one to the other else."""
    met = Counter(frozenset((a, b)) for _, _, names in turns(fleet(1), 300, 30) for a in names for b in names if a < b)
    assert len(met) == 10 * 9 // 2


def test_equal_histories_get_equal_turns():
    held = fleet(2)
    assert [names for *_, names in turns(held, 20)] == [names for *_, names in turns(held, 20)]


def test_it_says_whether_all_had_a_turn_since():
    held, rota = fleet(3), Rota()
    rota.at_once = 15
    assert rota.waits_since(held) == -1
    began, count = rota.turn, 0
    while not rota.all_had(held, began):
        among, names = rota.next(held)
        rota.took(names)
        count += 1
        assert rota.all_had(among[:0], began)
    assert 4 <= count <= 12 and began < rota.waits_since(held) <= rota.turn
    assert not rota.all_had(held, rota.turn)


def test_a_device_with_more_than_one_turn_holds_has_one_alone():
    held = [Held(k, ("cuda:0",)) for k in range(40)] + [Held(40 + k, ("cuda:1",)) for k in range(4)]
    assert sorted(len(among) for _, among, _ in turns(held, 2)) == [4, 40]
