"""What a ladder asks for is worked out rung by rung, once for all that bring the same."""

from jaxtensile.runtime.decide.demand import demand_of, needs_of
from jaxtensile.runtime.decide.leases import HOST, Charge
from jaxtensile.runtime.protocol.messages import Rung


def test_the_needs_of_a_rung_are_on_each_device_and_once_on_the_host():
    ladder = (Rung(persistent=4, temp=2, host=1, seconds=2.0), Rung(persistent=9, seconds=1.0))
    assert needs_of(ladder, 2) == ((Charge(4, 2), Charge(4, 2), Charge(1)), (Charge(9), Charge(9), Charge(0)))


def test_a_demand_knows_what_it_can_touch_and_how_slow_its_rungs_are():
    ladder = (Rung(persistent=4, host=3, seconds=2.0), Rung(persistent=9, seconds=1.0))
    demand = demand_of(ladder, ("cuda:0", HOST), 1, 1)
    assert demand.touched == {"cuda:0"}
    assert demand.slowdowns == (2.0, 1.0)


def test_the_best_rung_above_is_the_least_of_the_fastest_that_are_wanted():
    ladder = tuple(Rung(persistent=k + 1, seconds=s) for k, s in enumerate((4.0, 2.0, 3.0, 2.0, 1.0)))
    assert demand_of(ladder, ("cuda:0", HOST), 0, 3).best == (1, 3, 3, 3, 4)
    assert demand_of(ladder, ("cuda:0", HOST), 0, 4).best == (4, 4, 4, 4, 4)


def test_the_same_ladder_is_worked_out_once():
    def ladder():
        return tuple(Rung(persistent=k + 1, seconds=9.0 - k) for k in range(4))

    assert demand_of(ladder(), ("cuda:0", HOST), 0, 3) is demand_of(ladder(), ("cuda:0", HOST), 0, 3)
    assert demand_of(ladder(), ("cuda:1", HOST), 0, 3) is not demand_of(ladder(), ("cuda:0", HOST), 0, 3)
