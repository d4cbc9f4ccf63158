"""Jobs whose steps run in groups: others go between two of them, and what they hold is charged."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtensile
import job_programs as programs
from daemons import Daemon
from jaxtensile.errors import ConfigError
from jaxtensile.runtime.config import config as configs
from job_training import ROOM, WAIT, Training, charged, office, plans, resize, same, to_and_fro, until
from paths import ROOT

pytestmark = pytest.mark.xdist_group("grouped")

__all__ = ["plans"]


ONE = {**programs.config(ROOM), "jobs": {name: {"max_overhead": 1} for name in ("train", "answer")}}
"""Each job has one plan, the fastest: there is nothing else to compile."""


def test_a_training_in_groups_trains_as_it_does_whole():
    with jaxtensile.job("train", groups=4, config=ONE) as job:
        step = jaxtensile.jit(programs.step, job=job, donate_argnums=0)
        weights, losses = programs.start(), []
        for k in range(8):
            weights, loss = step(weights, programs.X, programs.Y)
            losses.append(float(loss))
            if k == 3:
                assert job.wait(WAIT)
        report = step.plan(weights, programs.X, programs.Y)
        assert any(note.startswith("in 4 groups") for note in report.notes)
        assert all(rung.temp == 0 for rung in job.ladder)  # between its groups others run beside all that it has
        assert charged() == job.budget
    same(losses)


def test_it_moves_between_its_plans_and_away_and_back():
    """In a device that shrinks and grows, suspended and resumed."""
    with jaxtensile.job("train", groups=2, config=programs.config(ROOM)) as job:
        training = Training(job)
        training.run(1)
        assert job.wait(WAIT)
        levels = to_and_fro(job, training, 6)
        resize(1 << 26)
        training.weights = job.suspend(training.weights)
        assert charged() < levels[0]
        training.weights = job.resume(training.weights)
        training.run(1)
        assert charged() == job.budget
        assert all(rung.temp == 0 for rung in job.ladder)
        assert job.switches >= 4
    same(training.losses)


def test_a_job_has_steps_of_several_shapes():
    with jaxtensile.job("train", groups=2, config=ONE) as job:
        training = Training(job)
        training.run(1)
        few = programs.X[:64], programs.Y[:64]
        _, value = training.step(programs.start(), *few)
        np.testing.assert_allclose(float(value), programs.undisturbed(1, rows=64)[0], rtol=2e-6)
        training.run(1)
        assert charged() == job.budget
        assert all(rung.temp == 0 for rung in job.ladder)
    same(training.losses)


def test_between_processes_a_step_runs_whole(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    daemon = Daemon()
    daemon.file.write_text('[device]\ncapacity = "64MiB"\nreserve = 0\n[coordinator]\nmin_hold = 0\n')
    with daemon:
        monkeypatch.setenv("JAXTENSILE_SOCKET", str(daemon.path))
        with jaxtensile.job("train", groups=4) as job:
            training = Training(job)
            training.run(2)
            assert job.groups == 1
            assert any(rung.temp for rung in job.ladder)
    same(training.losses)


def test_others_go_between_two_groups():
    """The training's first group waits until the other job waits for its turn; that job's step is then done before the
    training's last group begins. With whole steps it would come after all of it."""
    waits, order = threading.Event(), []

    def step(weights, x, y):
        jax.debug.callback(lambda: waits.wait(WAIT))
        value, grads = jax.value_and_grad(programs.loss)(weights, x, y)
        jax.debug.callback(lambda _: order.append("trained"), value + grads[0].sum())
        return value, grads

    def predict(weights, x):
        found = programs.predict(weights, x)
        jax.debug.callback(lambda _: order.append("answered"), found.sum())
        return found

    with (
        jaxtensile.job("train", groups=4, config=ONE) as train,
        # In groups too: JAX keeps no entry for steps with effects, and whoever asks for a plan gives its turn back.
        jaxtensile.job("answer", groups=2, priority=5, config=ONE) as answer,
    ):
        run = jaxtensile.jit(step, job=train)
        say = jaxtensile.jit(predict, job=answer)
        weights = programs.start()
        say(weights, programs.X)
        waits.set()
        jax.block_until_ready(run(weights, programs.X, programs.Y))
        assert train.wait(WAIT) and answer.wait(WAIT)
        run(weights, programs.X, programs.Y)  # from now on nobody asks for a plan within a step
        say(weights, programs.X)
        jax.effects_barrier()
        waits.clear()
        order.clear()
        gate = office().gate("cpu:0")
        training = threading.Thread(target=lambda: run(weights, programs.X, programs.Y))
        training.start()
        until(lambda: gate._state.get().owner is not None)
        asking = threading.Thread(target=lambda: say(weights, programs.X))
        asking.start()
        until(lambda: gate.waiting == 1)
        waits.set()
        training.join(WAIT)
        asking.join(WAIT)
        jax.effects_barrier()
    assert order == ["answered", "trained"]


def test_an_error_between_two_groups_gives_the_turn_back():
    with (
        jaxtensile.job("train", groups=4, config=ONE) as train,
        jaxtensile.job("answer", config=ONE) as answer,
    ):
        run = jaxtensile.jit(programs.step, job=train)
        say = jaxtensile.jit(programs.predict, job=answer)
        weights = programs.start()
        run(weights, programs.X, programs.Y)
        between, count = train._steps.between, []

        def broken():
            count.append(1)
            raise KeyboardInterrupt

        train._steps.between = broken
        with pytest.raises(KeyboardInterrupt):
            run(weights, programs.X, programs.Y)
        train._steps.between = between
        assert count == [1]
        say(weights, programs.X)
        run(weights, programs.X, programs.Y)


def test_a_step_of_ordered_effects_runs_whole(caplog):
    def step(x):
        jax.debug.callback(lambda: None, ordered=True)
        return jnp.sin(x @ x) @ x

    with jaxtensile.job("train", groups=4, config=ONE) as job:
        run = jaxtensile.jit(step, job=job)
        run(jnp.eye(8))
        assert job.ladder
    assert any("runs whole, not in 4 groups: its effects keep their order" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("wrong", [0, -1, 65, 2.0, "4", True])
def test_a_wrong_number_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"groups=.*: give a whole number from 1 to 64"):
        jaxtensile.job("a", groups=wrong)


def test_the_config_says_it_too():
    found = configs.from_tables({"jobs": {"a": {"groups": 8}, "b": {}}})
    assert (found.jobs["a"].groups, found.jobs["b"].groups) == (8, 1)
    with pytest.raises(ConfigError, match="must be a whole number from 1 to 64"):
        configs.from_tables({"jobs": {"a": {"groups": 65}}})
    with jaxtensile.job("a", config={"jobs": {"a": {"groups": 3}}}) as job:
        assert job.groups == 3
    with jaxtensile.job("a", groups=2, config={"jobs": {"a": {"groups": 3}}}) as job:
        assert job.groups == 2
