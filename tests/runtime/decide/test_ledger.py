"""No charge that is not measured exceeds a limit; sums are what adding up from the start gives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtensile.runtime.decide.leases import HOST, NOTHING, Charge
from jaxtensile.runtime.decide.ledger import Capacity, Ledger, OvercommitError

DEVICES = ("cuda:0", "cuda:1", HOST)


def ledger(*, gated=False):
    return Ledger({name: Capacity(capacity=12, reserve=2, gated=gated and name != HOST) for name in DEVICES})


def used(charges, gated):
    persistent, temps = sum(c.persistent for c in charges), [c.temp for c in charges]
    return persistent + (max(temps, default=0) if gated else sum(temps))


def test_a_reserve_is_never_granted_and_a_limit_is_never_negative():
    assert Capacity(capacity=12, reserve=2).limit == 10
    assert Capacity(capacity=1, reserve=2).limit == 0


def test_all_resources_or_none():
    book = ledger()
    book.charge(1, DEVICES, (Charge(4, 4), Charge(1), Charge(9)))
    with pytest.raises(OvercommitError, match="for lease 2 do not fit on host"):
        book.charge(2, DEVICES, (Charge(1), Charge(1), Charge(2)))
    assert book.charged(2, DEVICES) == (NOTHING,) * 3
    assert [a.used for a in book.accounts.values()] == [8, 1, 9]


def test_steps_that_take_turns_count_only_the_largest_temp():
    book = ledger(gated=True)
    book.charge(1, ("cuda:0",), (Charge(2, 6),))
    book.charge(2, ("cuda:0",), (Charge(2, 5),))
    assert book.accounts["cuda:0"].used == 10
    assert not book.fits(3, ("cuda:0",), (Charge(1, 0),))
    assert book.fits(1, ("cuda:0",), (Charge(3, 4),))
    assert not ledger().fits(1, ("cuda:0",), (Charge(2, 9),))


def test_what_covers_a_move_covers_both_ends():
    old, new = (Charge(5, 1),) * 3, (Charge(2, 6), Charge(1, 2), Charge(9))
    assert ledger().wider(DEVICES, old, new) == (Charge(2, 6), Charge(5, 1), Charge(9))
    assert ledger(gated=True).wider(DEVICES, old, new) == (Charge(5, 6), Charge(5, 2), Charge(9))


def test_a_lowered_capacity_takes_nothing_away_and_what_adds_nothing_still_fits():
    book = ledger()
    book.charge(1, ("cuda:0",), (Charge(8),))
    book.resize({"cuda:0": Capacity(capacity=6)})
    assert book.accounts["cuda:0"].free == -2 and book.accounts["cuda:1"].limit == 0
    assert book.over() == {"cuda:0"} == book.over()
    assert book.fits(1, ("cuda:0",), (Charge(7),)) and not book.fits(1, ("cuda:0",), (Charge(9),))
    assert not book.fits(2, ("cuda:0",), (Charge(1),)) and book.fits(2, ("cuda:0",), (NOTHING,))
    book.resize({"cuda:2": Capacity(capacity=3)})
    assert book.accounts["cuda:2"].limit == 3 and book.accounts["cuda:0"].used == 8


def test_what_is_measured_is_charged_whatever_the_limit():
    book = ledger()
    book.measured(1, ("cuda:0",), (Charge(50),))
    assert book.accounts["cuda:0"].free == -40 and book.over() == {"cuda:0"}
    book.release(1, ("cuda:0",))
    assert book.over() == set()


def test_the_temps_of_all_whose_turn_it_is_count_where_they_are_more_than_the_largest():
    book = ledger(gated=True)
    account = book.accounts["cuda:0"]
    for lease, temp in ((1, 3), (2, 2), (3, 4)):
        book.charge(lease, ("cuda:0",), (Charge(1, temp),))
    assert account.used == 7 and account.turn_fits(1)
    account.turn(1, its=True)
    assert account.used == 7 and account.turn_fits(2) and account.turn_fits(3)
    account.turn(2, its=True)
    assert (account.used, account.beside) == (8, 7) and not account.turn_fits(3)
    assert not book.fits(1, ("cuda:0",), (Charge(2, 5),)) and book.fits(1, ("cuda:0",), (Charge(2, 4),))
    assert not book.fits(4, ("cuda:0",), (Charge(3),)) and book.fits(4, ("cuda:0",), (Charge(2, 5),))
    assert book.over() == set(), "turns end by themselves: nobody is to shrink for them"
    book.release(2, ("cuda:0",))
    assert account.used == 6 and [*account.turns] == [1]


def test_what_turns_add_to_a_sum_hides_nothing_else():
    """After a restart all may have turns: their sum may be above the limit, and is none that is held."""
    book = ledger(gated=True)
    for lease in (1, 2, 3):
        book.charge(lease, ("cuda:0",), (Charge(1, 5),))
    for lease in (1, 2, 3):
        book.accounts["cuda:0"].turn(lease, its=True)
    assert book.accounts["cuda:0"].used == 18 and book.over() == set()
    assert book.fits(1, ("cuda:0",), (Charge(1, 4),)) and book.fits(1, ("cuda:0",), (Charge(2, 4),))
    assert not book.fits(1, ("cuda:0",), (Charge(1, 6),))
    book.accounts["cuda:0"].turn(3, its=False), book.accounts["cuda:0"].turn(2, its=False)
    book.put(2, ("cuda:0",), (Charge(1, 7),))
    for lease in (2, 3):
        book.accounts["cuda:0"].turn(lease, its=True)
    assert not book.fits(3, ("cuda:0",), (Charge(1, 8),)), "the largest alone would be too much"


def test_whether_turns_are_taken_changes_only_while_nobody_is_charged():
    book = ledger(gated=True)
    book.charge(1, ("cuda:0",), (Charge(2, 6),))
    book.charge(2, ("cuda:0",), (Charge(2, 5),))
    book.resize({name: Capacity(capacity=12, reserve=2) for name in DEVICES})
    assert book.accounts["cuda:0"].gated and not book.accounts["cuda:1"].gated
    book.release(1, ("cuda:0",))
    assert book.accounts["cuda:0"].gated
    book.release(2, ("cuda:0",))
    assert not book.accounts["cuda:0"].gated


charges = st.just(NOTHING) | st.builds(Charge, st.integers(0, 9), st.integers(0, 9))
small = st.just(NOTHING) | st.builds(Charge, st.integers(0, 3), st.integers(0, 3))
moves = st.lists(st.tuples(st.integers(1, 4), st.tuples(charges, charges, charges), st.booleans()), max_size=30)


@given(moves, st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=30))
def test_with_turns_sums_are_what_adding_up_gives(steps, turns):
    book, held, its = ledger(gated=True), {}, set()
    for (lease, wanted, free), (turned, on) in zip(steps, turns, strict=False):
        account = book.accounts["cuda:0"]
        account.turn(turned, its=on)
        its = (its | {turned}) if on else its - {turned}
        if free:
            book.release(lease, ("cuda:0",))
            held.pop(lease, None)
            its -= {lease}
        for instead in ({lease: wanted[0]}, {}):
            after = {**held, **instead}
            largest = max((c.temp for c in after.values()), default=0)
            added = sum(after[k].temp for k in its if k in after)
            total = sum(c.persistent for c in after.values()) + max(largest, added)
            assert account.used_instead(instead) == total
            if instead:
                assert account.used_with(lease, wanted[0]) == total
                fits = total <= 10 or total <= account.used
                assert book.fits(lease, ("cuda:0",), (wanted[0],)) == fits
        assert account.used == total and account.used == account.persistent + account.temps
        if fits and not free:
            book.put(lease, ("cuda:0",), (wanted[0],))
            held[lease] = wanted[0]
            its |= set()


@given(moves, st.booleans())
def test_sums_are_what_adding_up_gives_and_never_exceed_the_limit(steps, gated):
    book, held = ledger(gated=gated), {}
    for lease, wanted, free in steps:
        if free:
            book.release(lease, DEVICES)
            held.pop(lease, None)
            continue
        others = [c for k, c in held.items() if k != lease]
        fits = all(used([*(c[k] for c in others), wanted[k]], gated and DEVICES[k] != HOST) <= 10 for k in range(3))
        # Where a sum is not above its limit, what fits is what adds up to no more than it.
        assert book.fits(lease, DEVICES, wanted) == fits
        if fits:
            book.charge(lease, DEVICES, wanted)
            held[lease] = wanted
        for k, name in enumerate(DEVICES):
            account = book.accounts[name]
            assert account.used == used([c[k] for c in held.values()], account.gated) <= account.limit
            assert account.used == account.persistent + account.temps
        assert all(book.charged(k, DEVICES) == held.get(k, (NOTHING,) * 3) for k in range(1, 5))
    for lease in range(1, 5):
        book.release(lease, DEVICES)
    assert all(a.used == a.persistent == a.temps == 0 and not a.charges for a in book.accounts.values())


@given(
    st.lists(st.tuples(st.integers(1, 4), st.tuples(small, small, small)), max_size=6),
    st.dictionaries(st.integers(1, 4), st.tuples(small, small, small)),
    st.booleans(),
)
def test_several_fit_together_if_what_they_would_be_charged_adds_up_to_no_more(steps, wanted, gated):
    book, held = ledger(gated=gated), {}
    for lease, now in steps:
        book.measured(lease, DEVICES, now)
        held[lease] = now
        assert book.over() == {name for name, a in book.accounts.items() if a.used > a.limit}
    after = [*{**held, **wanted}.values()]
    fit = all(used([c[k] for c in after], book.accounts[DEVICES[k]].gated) <= 10 for k in range(3))
    assert book.fit([(k, DEVICES, c) for k, c in wanted.items()]) == (fit or not wanted)
