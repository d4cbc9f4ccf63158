"""``jaxtensile.job``: what it takes, gives back and refuses."""

import gc

import jax.numpy as jnp
import pytest

import jaxtensile
import job_programs as programs
from jaxtensile.errors import BudgetError, ConfigError, CoordinatorError, RejectedError
from job_training import ROOM, WAIT, Training, charged, ladder, office, plans, same, until

pytestmark = pytest.mark.xdist_group("jobs")  # one process: what all of them need is made once

__all__ = ["ladder", "plans"]


def test_a_job_alone_runs_the_program_as_it_is_and_gives_all_back(ladder):
    assert len(ladder) >= 2
    with jaxtensile.job("alone", config=programs.config(ROOM)) as job:
        training = Training(job)
        training.run(3)
        assert job.wait(WAIT)
        assert job.rung == len(job.ladder) - 1
        assert charged() == job.budget == ladder[-1].level
        assert training.step.plan(training.weights, programs.X, programs.Y).compiled.device <= job.budget
    assert charged() == 0
    same(training.losses)


def test_an_error_in_the_block_gives_the_lease_back(ladder):
    with pytest.raises(ZeroDivisionError), jaxtensile.job("fails", config=programs.config(ROOM)) as job:
        Training(job).run(1)
        _ = 1 / 0
    assert charged() == 0
    with jaxtensile.job("fails", config=programs.config(ROOM)) as job:  # its name is free again
        training = Training(job)
        training.run(1)
    with pytest.raises(CoordinatorError, match="has ended: call its steps inside"):
        training.run(1)


def test_names_and_configs_are_looked_at_before_anything_runs():
    with jaxtensile.job("one", config=programs.config(ROOM)):
        with (
            pytest.raises(ConfigError, match="'one' is already there"),
            jaxtensile.job("one", config=programs.config(ROOM)),
        ):
            pass
        with (
            pytest.raises(ConfigError, match="by another config"),
            jaxtensile.job("two", config=programs.config("1GiB")),
        ):
            pass
    with pytest.raises(BudgetError, match="above want"):
        jaxtensile.job("x", least="2GiB", want="1GiB")
    with pytest.raises(BudgetError, match="cannot read 'many'"):
        jaxtensile.job("x", least="many")
    with pytest.raises(ConfigError, match="did you mean 'capacity'"):
        jaxtensile.job("x", config={"device": {"capacty": "1GiB"}})
    for wrong, said in (
        ({"priority": "high"}, "priority='high': give a whole number"),
        ({"priority": 1001}, "from -1000 to 1000"),
        ({"weight": 0}, "weight=0: give a number"),
        ({"weight": float("nan")}, "weight=nan"),
        ({"devices": "cpu:0"}, "devices='cpu:0': give a list"),
        ({"devices": []}, "give a list of names"),
        ({"devices": ["cpu:0", "cpu:0"]}, "each once"),
        ({"config": 5}, "give the path of a file"),
    ):
        with pytest.raises(ConfigError, match=said):
            jaxtensile.job("x", **wrong)

    class Optimizer:
        def step(self):
            pass

    for no_job in ("bert", Optimizer()):
        with pytest.raises(TypeError, match=r"takes a jaxtensile\.job"):
            jaxtensile.jit(programs.step, job=no_job)


def test_where_a_job_cannot_be_is_said_at_once(monkeypatch):
    with (
        jaxtensile.job("lost", devices=["cuda:7"], config=programs.config(ROOM)) as job,
        pytest.raises(RejectedError, match="no device 'cuda:7' here, only cpu:0: leave devices= out"),
    ):
        Training(job).run(1)
    assert repr(job) == "<job 'lost': has ended>"
    monkeypatch.setenv("JAXTENSILE_SOCKET", f"/tmp/{'long' * 30}")
    with pytest.raises(CoordinatorError, match="107 at most are possible"), jaxtensile.job("far"):
        pass


def test_what_the_config_says_of_a_job_holds_where_nothing_is_given():
    tables = {
        **programs.config(ROOM),
        "jobs": {"bert": {"least": "1MiB", "want": "2MiB", "priority": 3, "weight": 2.0}},
    }
    job = jaxtensile.job("bert", config=tables)
    assert (job.least, job.want, job.priority, job.weight) == (1 << 20, 2 << 20, 3, 2.0)
    assert jaxtensile.job("bert", want="4MiB", priority=0, config=tables).want == 4 << 20


def test_a_process_of_the_config_needs_no_name(monkeypatch):
    monkeypatch.setenv("JAXTENSILE_JOB", "bert")
    assert jaxtensile.job(config={"jobs": {"bert": {"least": "1MiB"}}}).least == 1 << 20
    monkeypatch.delenv("JAXTENSILE_JOB")
    with pytest.raises(CoordinatorError, match="not None: give it one, or start this with 'jaxtensile run'"):
        jaxtensile.job()


def test_a_job_that_is_dropped_without_its_end_has_ended():
    with jaxtensile.job("stays", config=programs.config(ROOM)):
        dropped = jaxtensile.job("dropped", config=programs.config(ROOM))
        dropped.__enter__()
        step = jaxtensile.jit(lambda x: x + 1, job=dropped)
        step(jnp.zeros(8))
        assert dropped.wait(WAIT)
        assert [lease.job for lease in office().status().leases] == ["dropped"]
        del dropped, step
        # The thread that compiled may still be on its way out, and holds what it had in hand.
        until(lambda: gc.collect() >= 0 and not office().status().leases)
        with jaxtensile.job("dropped", config=programs.config(ROOM)) as again:
            jaxtensile.jit(lambda x: x + 1, job=again)(jnp.zeros(8))
