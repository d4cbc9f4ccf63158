"""The table of a lease says what its rules say: bytes are free by a release or a death, and by nothing else."""

import pytest

from jaxtensile.runtime.decide.leases import TABLE, Charge, Happening, LeaseError, State, after

CHARGED = {State.HELD, State.REVOKING, State.OVERDUE, State.QUARANTINED}


def test_the_table_is_total_over_its_states():
    assert TABLE.keys() == set(State)


@pytest.mark.parametrize("state", sorted(CHARGED, key=lambda s: s.value))
def test_only_a_release_or_a_death_frees_charged_bytes(state):
    freeing = {h for h, to in TABLE[state].items() if to is State.FREED}
    assert freeing == {Happening.RELEASE, Happening.DIED}


@pytest.mark.parametrize("state", sorted(CHARGED, key=lambda s: s.value))
def test_no_charged_state_goes_back_to_waiting(state):
    assert State.QUEUED not in TABLE[state].values()


def test_nothing_happens_to_a_lease_that_is_free():
    assert TABLE[State.FREED] == {}


def test_every_state_but_the_first_can_be_reached_and_left():
    reached = {to for row in TABLE.values() for to in row.values()}
    assert reached == set(State) - {State.QUEUED}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("happening", Happening)
def test_what_the_table_does_not_have_raises(state, happening):
    if happening in TABLE[state]:
        assert after(state, happening) is TABLE[state][happening]
    else:
        with pytest.raises(LeaseError, match=happening.value):
            after(state, happening)


def test_a_silent_job_is_quarantined_and_comes_back_by_reclaiming():
    for state in CHARGED - {State.QUARANTINED}:
        assert after(state, Happening.LOST) is State.QUARANTINED
    assert after(State.QUARANTINED, Happening.RECLAIM) is State.HELD
    assert Happening.GRANT not in TABLE[State.QUARANTINED] and Happening.ACK not in TABLE[State.QUARANTINED]


def test_a_charge_is_what_stays_and_what_a_step_needs():
    assert (Charge(3, 2).level, Charge(3).level) == (5, 3)
