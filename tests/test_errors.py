"""Every error is catchable as ours and as the builtin a caller would expect, and carries its facts."""

import pickle

import pytest

import jaxtensile
from jaxtensile.errors import BudgetError, Culprit
from jaxtensile.units import GIB


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (jaxtensile.BudgetError, ValueError),
        (jaxtensile.TargetError, ValueError),
        (jaxtensile.ConfigError, ValueError),
        (jaxtensile.VerifyError, RuntimeError),
        (jaxtensile.InternalError, RuntimeError),
        (jaxtensile.PlanningError, jaxtensile.InternalError),
        (jaxtensile.PlanningError, jaxtensile.BudgetError),
        (jaxtensile.CoordinatorError, RuntimeError),
        (jaxtensile.errors.NotAdmittedError, TimeoutError),
        (jaxtensile.errors.RejectedError, jaxtensile.CoordinatorError),
        (jaxtensile.errors.UnreachableError, jaxtensile.CoordinatorError),
        (jaxtensile.errors.LostLeaseError, jaxtensile.CoordinatorError),
    ],
)
def test_every_error_is_ours_and_a_builtin(error, builtin):
    assert issubclass(error, jaxtensile.JaxtensileError)
    assert issubclass(error, builtin)
    with pytest.raises(jaxtensile.JaxtensileError, match="the text"):
        raise error("the text")


def test_a_budget_error_carries_what_a_caller_needs_to_try_again():
    culprit = Culprit(primitive="dot_general", source="model.py:41", nbytes=2 * GIB)
    error = BudgetError("too small", needs=3 * GIB, has=GIB, culprits=(culprit,))
    assert (error.needs, error.has, error.culprits) == (3 * GIB, GIB, (culprit,))
    assert str(error) == "too small"
    assert str(culprit) == "dot_general at model.py:41 needs 2.00GiB"


def test_a_budget_that_could_not_be_read_has_no_facts():
    error = BudgetError("cannot read 'much'")
    assert error.needs is None
    assert error.has is None
    assert error.culprits == ()


def test_errors_survive_the_way_back_from_a_worker_process():
    culprit = Culprit(primitive="dot_general", source="model.py:41", nbytes=2 * GIB)
    error = BudgetError("too small", needs=3 * GIB, has=GIB, culprits=(culprit,))
    back = pickle.loads(pickle.dumps(error))
    assert str(back) == str(error)
    assert (back.needs, back.has, back.culprits) == (error.needs, error.has, error.culprits)


def test_a_culprit_is_named_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    culprit = Culprit(primitive="dot_general", source=f"{tmp_path}/nets/model.py:41:8 (block)", nbytes=1024)
    assert str(culprit) == "dot_general at nets/model.py:41 (block) needs 1.00KiB"
