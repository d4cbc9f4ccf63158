"""Steps of jobs take turns, in threads and in other shapes, and errors give the turn back."""

import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtensile
import job_programs as programs
from jaxtensile.jobs import stepping
from jaxtensile.jobs.ladder import Ladder
from jaxtensile.jobs.tenancy import Tenancy
from jaxtensile.runtime.decide.leases import HOST
from jaxtensile.runtime.decide.ledger import Capacity
from job_training import ROOM, WAIT, Training, charged, ladder, office, plans, resize, same, until

pytestmark = pytest.mark.xdist_group("stepping")  # one process: what all of them need is made once

__all__ = ["ladder", "plans"]


def test_jobs_in_threads_never_hold_more_than_there_is(ladder):
    """Four jobs in room for the states of all and the temporaries of one and a half; the coordinator is asked all the
    time what it has charged, and the plans that run are added up beside it."""
    room = 4 * ladder[0].persistent + (ladder[0].temp + ladder[-1].temp) // 2
    over, stop, losses = [], threading.Event(), {}

    def audit():
        while not stop.is_set():
            if charged() > room:
                over.append(charged())
            time.sleep(0.002)

    def work(k):
        with jaxtensile.job(f"job{k}", config=programs.config(room)) as job:
            training = Training(job, seed=k)
            training.run(12)
            losses[k] = training.losses

    watching = threading.Thread(target=audit)
    with jaxtensile.job("keeps the coordinator", config=programs.config(room)):
        watching.start()
        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(WAIT)
        stop.set()
        watching.join(WAIT)
        assert not over
        assert charged() == 0
    assert sorted(losses) == [0, 1, 2, 3]
    for k, got in losses.items():
        same(got, seed=k)


def test_a_step_has_its_turn_on_each_of_its_devices(ladder, monkeypatch):
    """Of each the largest temporaries alone are charged, also where another job has only the last one of them."""
    names, ran = ("cpu:1", "cpu:0"), []
    with jaxtensile.job("wide", devices=names, config=programs.config(ROOM)) as job:
        office().resize(dict.fromkeys((*names, HOST), Capacity(capacity=1 << 30)))
        turns = [office().gate(name)._state for name in names]
        real = jax.block_until_ready
        monkeypatch.setattr(
            jax, "block_until_ready", lambda x: (ran.append([t.get().owner for t in turns]), real(x))[1]
        )
        training = Training(job)
        training.run(2)
        assert ran and all(one is other is not None for one, other in ran)
        assert [t.get().owner for t in turns] == [None, None]
    same(training.losses)


def test_a_step_that_raises_gives_its_turn_back(ladder):
    with jaxtensile.job("raises", config=programs.config(ROOM)) as job:
        step = jaxtensile.jit(programs.step, job=job, donate_argnums=0)
        with pytest.raises(TypeError):
            step(programs.start(), programs.X, "no array")
        training = Training(job)
        training.run(2)
    same(training.losses)


def test_calls_of_other_shapes_have_plans_of_their_own_in_the_same_lease(ladder):
    with jaxtensile.job("shapes", config=programs.config(ROOM)) as job:
        training = Training(job)
        training.run(1)
        assert job.wait(WAIT)
        low = job.ladder[0].level
        lease = office().status().leases[0].lease
        bigger = jnp.concatenate([programs.X] * 2), jnp.concatenate([programs.Y] * 2)
        training.step(programs.start(), *bigger)
        assert job.wait(WAIT)
        assert job.ladder[0].level > 1.5 * low, "its ladder holds what its largest step needs"
        assert [a.lease for a in office().status().leases] == [lease]
        training.run(2)
    same(training.losses)


def test_two_functions_of_one_job_share_its_lease(ladder):
    with jaxtensile.job("both", config=programs.config(ROOM)) as job:
        training = Training(job)
        answer = jaxtensile.jit(programs.predict, job=job)
        for _ in range(3):
            training.run(1)
            got = answer(training.weights, programs.X)
            np.testing.assert_allclose(got, programs.predict(training.weights, programs.X), rtol=1e-5, atol=1e-4)
        assert job.wait(WAIT)
        assert [a.job for a in office().status().leases] == ["both"]
    same(training.losses)


def test_under_another_transform_it_is_the_plain_function(ladder):
    with jaxtensile.job("outer", config=programs.config(ROOM)) as job:
        answer = jaxtensile.jit(programs.predict, job=job)
        grads = jax.grad(lambda w: answer(w, programs.X).sum())(programs.start())
        wanted = jax.grad(lambda w: programs.predict(w, programs.X).sum())(programs.start())
        for got, want in zip(grads, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
        assert charged() == 0, "the outermost transform owns the plan"


def while_compiling(monkeypatch, does):
    """``does`` runs in the first compile from now on, after which that goes on."""
    real, left = Ladder.compile, [does]

    def compile_(self, budget, *rest, **more):
        if left:
            left.pop()()
        return real(self, budget, *rest, **more)

    monkeypatch.setattr(Ladder, "compile", compile_)


def test_the_first_step_waits_for_no_smaller_plans_where_there_is_room(ladder, monkeypatch):
    monkeypatch.setattr(stepping, "_LONG", WAIT)
    with jaxtensile.job("first", config=programs.config(ROOM)) as job:
        steps, real = [], Ladder.sketch
        monkeypatch.setattr(Ladder, "sketch", lambda *args: (steps.append(job.steps), real(*args))[1])
        training = Training(job)
        training.step = jaxtensile.jit(lambda *args: programs.step(*args), job=job, donate_argnums=0)
        training.run(1)
        assert job.wait(WAIT)
        assert steps and min(steps) == 1
        assert [r.level for r in job.ladder] == [r.level for r in ladder]
    same(training.losses)


def test_others_do_not_wait_for_a_first_plan_that_takes_long(ladder, monkeypatch):
    """While it compiles, the job says what it could do with less, and stays where it is."""
    monkeypatch.setattr(stepping, "_LONG", 0.0)
    with jaxtensile.job("long", config=programs.config(ROOM)) as job:
        while_compiling(monkeypatch, lambda: until(lambda: len(job._tenancy.client.admit.ladder) > 1))
        training = Training(job)
        training.step = jaxtensile.jit(lambda *args: programs.step(*args), job=job, donate_argnums=0)
        training.run(2)
        assert job.wait(WAIT)
        assert job.rung == len(job.ladder) - 1
    same(training.losses)


def test_the_first_plan_runs_once_before_the_job_goes_to_a_smaller_one(ladder, monkeypatch):
    """Else it would compile the next one first, and wait for its first step as long as there are others."""
    ran = []
    with jaxtensile.job("first", config=programs.config(ROOM)) as job:
        low = ladder[-1].level - 1

        def shrinks():
            resize(low)
            until(job._tenancy.told)

        while_compiling(monkeypatch, shrinks)
        training = Training(job)
        training.step = jaxtensile.jit(lambda *args: programs.step(*args), job=job, donate_argnums=0)
        real = jax.block_until_ready
        monkeypatch.setattr(jax, "block_until_ready", lambda x: (ran.append(charged()), real(x))[1])
        training.run(1)
        assert ran[0] > low >= charged(), "where it was, and then where it was told to be"
        training.run(2)
        assert ran[1] <= low
    same(training.losses)


def test_a_first_plan_is_not_worth_more_than_half_of_the_time_there_is_to_shrink(ladder, monkeypatch):
    """A daemon may end who has not shrunk after that."""
    with jaxtensile.job("hurries", config=programs.config(ROOM, revoke_deadline="400ms")) as job:
        low, seen = ladder[-1].level - 1, []

        def shrinks():
            resize(low)
            until(lambda: charged() <= low)
            seen.append(charged())

        while_compiling(monkeypatch, shrinks)
        training = Training(job)
        training.step = jaxtensile.jit(lambda *args: programs.step(*args), job=job, donate_argnums=0)
        training.run(2)
        assert seen
    same(training.losses)


def test_a_job_that_compiles_goes_where_it_is_told_to_be(ladder, monkeypatch):
    """Others wait for its bytes, and nothing of it runs."""
    with jaxtensile.job("moves", config=programs.config(ROOM)) as job:
        training = Training(job)
        training.run(1)
        assert job.wait(WAIT)
        step, low = jaxtensile.jit(lambda x: x + 1, job=job), ladder[0].level + 4 * ladder[0].persistent
        seen = []

        def shrinks():
            resize(low)
            until(lambda: charged() <= low)
            seen.append(charged())

        while_compiling(monkeypatch, shrinks)
        step(jnp.zeros(8))
        assert seen
        training.run(2)
    same(training.losses)


def test_what_is_told_of_a_first_plan_covers_the_plan_that_runs(ladder, monkeypatch):
    """Another job compiles plans of the same step, and finds a smaller and faster one when the first is chosen."""
    ran, real, tell = [], jax.block_until_ready, Tenancy.tell
    with jaxtensile.job("first", config=programs.config(ROOM)) as job:
        training = Training(job)
        plan = job.plan

        def finds(tenancy):
            (steps,) = tenancy.ladders
            monkeypatch.setattr(steps.places()[-1], "seconds", 2 * max(p.seconds for p in steps.places()))
            monkeypatch.setattr(Tenancy, "tell", tell)
            tell(tenancy)

        def chosen(*args):
            fitted = plan(*args)
            ran.append(fitted.report.compiled.device)
            return fitted

        monkeypatch.setattr(job, "plan", chosen)
        monkeypatch.setattr(Tenancy, "tell", finds)
        monkeypatch.setattr(jax, "block_until_ready", lambda x: (ran.append(charged()), real(x))[1])
        training.run(1)
        assert Tenancy.tell is tell
        (needs, had) = ran
        assert needs <= had < ladder[-1].level
    same(training.losses)


def test_the_main_thread_takes_no_lock_of_an_event():
    """Ctrl-C at the end of ``Condition.__enter__`` leaves it taken, and who sets the event next waits for ever."""
    package, taken = str(Path(jaxtensile.__file__).parent), []

    def trace(frame, event, _):
        if frame.f_code is threading.Condition.__enter__.__code__:
            while frame.f_code.co_filename == threading.__file__:
                frame = frame.f_back
            if frame.f_code.co_filename.startswith(package):
                taken.append((frame.f_code.co_qualname, frame.f_lineno))

    with jaxtensile.job("events", config=programs.config(ROOM)) as job:
        step = jaxtensile.jit(lambda x: x + 1, job=job)
        sys.settrace(trace)
        try:
            state = job.resume(job.suspend(step(jnp.ones(8))))
            job.wait()
            step(state)
        finally:
            sys.settrace(None)
    assert not taken
