"""The last connection of a process that asked for a job speaks for it; a process that is gone is forgotten."""

import pytest

from jaxtensile.runtime.coordinate.speakers import Speakers
from jaxtensile.runtime.decide.demand import demand_of
from jaxtensile.runtime.decide.events import Rules
from jaxtensile.runtime.decide.leases import HOST, Lease, Process
from jaxtensile.runtime.protocol.messages import Rung

ONE, OTHER = Process(7, 1), Process(7, 2)


ASK = "a", 0


def lease(number, process=ONE, job="a"):
    d = demand_of((Rung(persistent=1, seconds=1.0),), ("cuda:0", HOST), 0, 0)
    more = {"needs": d.needs, "slowdowns": d.slowdowns, "best": d.best, "touched": d.touched}
    given = {"ladder": d.ladder, "resources": d.resources, "low": 0, "high": 0, "priority": 0, "weight": 1.0}
    return Lease(id=number, process=process, job=job, **given, **more)


def test_an_earlier_connection_is_late_once_a_later_one_has_spoken():
    them = Speakers(Rules())
    first, second = them.met(1, ONE), them.met(2, ONE)
    mine = lease(1)
    them.own(mine)
    them.speak(mine, 2, second, 0.0)
    assert them.late(1, first, ASK) and not them.late(2, second, ASK)
    assert not them.late(1, first, ("b", 0)) and not them.late(1, first, ("a", 1))
    them.heard(("b", 0), 2, second), them.heard(("b", 0), 1, first)
    assert them.late(1, first, ("b", 0)) and not them.late(2, second, ("b", 0))
    assert them.speaks(mine, 2) and not them.speaks(mine, 1)


def test_what_was_late_is_forgotten_with_the_last_connection_of_the_process():
    them = Speakers(Rules())
    peer = them.met(5, ONE)
    mine = lease(1)
    them.own(mine)
    them.speak(mine, 5, peer, 0.0)
    them.gone(5)
    assert not them.late(4, them.met(4, ONE), ASK)  # no word of it can come any more
    assert them.leases_of(ONE) == {1: mine}


def test_a_pid_that_is_used_again_is_another_process():
    them = Speakers(Rules())
    them.own(lease(1))
    peer = them.met(1, OTHER)
    assert not them.same(ONE, OTHER) and peer.known.asks == {} and them.leases_of(OTHER) == {}
    assert them.connected(ONE) == [] and them.connected(OTHER) == [peer]


@pytest.mark.parametrize("first", ["lease", "connection"])
def test_nothing_is_kept_of_a_process_without_connection_and_lease(first):
    them = Speakers(Rules())
    them.met(1, ONE)
    mine = lease(1)
    them.own(mine)
    for what in (first, "connection" if first == "lease" else "lease"):
        assert len(them) == 1
        them.disown(mine) if what == "lease" else them.gone(1)
    assert len(them) == 0 and not them.peers and them.gone(1) is None
