"""How often garbage is looked for is as it was before, however many threads plan at once."""

import gc

import pytest

from jaxtensile.collecting import SELDOM, seldom


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_the_thresholds_come_back_behind_the_last_however_it_ends():
    first, second = seldom(), seldom()
    first.__enter__()
    assert gc.get_threshold() == SELDOM
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == SELDOM  # the second still plans
    with pytest.raises(ZeroDivisionError), seldom():
        raise ZeroDivisionError
    assert gc.get_threshold() == SELDOM
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


def test_what_others_say_meanwhile_stays():
    with seldom():
        gc.set_threshold(1, 2, 3)
    assert gc.get_threshold() == (1, 2, 3)
