"""Jobs are admitted, refused, or wait, and so is what needs more than they have."""

import threading

import jax.numpy as jnp
import pytest

import jaxtensile
import job_programs as programs
from jaxtensile.errors import CoordinatorError, RejectedError
from job_training import ROOM, WAIT, Training, charged, ladder, office, plans, refused, same, until

pytestmark = pytest.mark.xdist_group("waiting")  # one process: what all of them need is made once

__all__ = ["ladder", "plans"]


def test_what_can_never_fit_is_refused_at_once_with_the_smallest_floor(ladder):
    room = ladder[0].level // 3
    with jaxtensile.job("big", config=programs.config(room)) as job:
        training = Training(job)
        with pytest.raises(RejectedError, match=r"the smallest plan of step needs .*iB: shrink the batch"):
            training.run(1)
        assert charged() == 0


def test_a_job_in_barely_enough_room_is_admitted(ladder):
    """The prediction has a margin; where that does not fit, the plan is compiled before it is refused."""
    with jaxtensile.job("tight", config=programs.config(ladder[0].level + 65536)) as job:
        training = Training(job)
        training.run(2)
        assert job.budget <= ladder[0].level + 65536
    same(training.losses)


def test_others_make_room_for_a_larger_shape(ladder):
    """The second job has grown into all that is free; it is asked for what the first one's larger step needs."""
    big = jnp.concatenate([programs.X] * 2), jnp.concatenate([programs.Y] * 2)
    with jaxtensile.job("measure", config=programs.config(ROOM)) as job:
        kept = Training(job)  # and with it the plans of that shape
        kept.step(programs.start(), *big)
        least = job.wait(WAIT) and job.ladder[0]
    stays, top = ladder[-1].persistent, ladder[-1].temp
    room = max(least.persistent + stays + least.temp, 2 * stays + top) + 4096
    assert room < least.persistent + stays + top
    with jaxtensile.job("large", config=programs.config(room)) as first:
        one = Training(first)
        one.run(1)
        with jaxtensile.job("other", config=programs.config(room)) as second:
            two = Training(second, seed=1)
            two.run(2)
            until(lambda: second.budget == ladder[-1].level)
            one.step(programs.start(), *big)
            assert charged() <= room
            assert first.budget >= least.level
            assert second.budget < ladder[-1].level
            two.run(1)
            one.run(1)
    assert [a.job for a in office().status().leases] == []
    same(one.losses)
    same(two.losses, seed=1)
    del kept


def test_a_larger_shape_for_which_there_is_no_room_is_refused_and_the_job_goes_on(ladder):
    room = ladder[-1].level + 65536
    with jaxtensile.job("grows", config=programs.config(room)) as job:
        training = Training(job)
        training.run(1)
        assert job.wait(WAIT)
        bigger = jnp.concatenate([programs.X] * 16), jnp.concatenate([programs.Y] * 16)
        with pytest.raises(CoordinatorError, match="at least for arguments of this shape"):
            training.step(programs.start(), *bigger)
        training.run(2)
    same(training.losses)


def test_a_job_that_waits_can_be_ended_from_another_thread(ladder):
    room = ladder[0].level + 65536
    said = []
    with jaxtensile.job("holds", config=programs.config(room)) as first:
        Training(first).run(1)
        with jaxtensile.job("waits", config=programs.config(room)) as second:
            thread = refused(lambda: Training(second).run(1), said)
            until(lambda: office().status().waiting == 1)
        thread.join(WAIT)
        assert said == ["job 'waits' has ended while it waited"]
        assert office().status().waiting == 0
    assert charged() == 0


def test_a_job_that_waits_compiles_its_smallest_plan_meanwhile(ladder):
    """It needs no bytes for that, and waits for no more than that takes."""
    room = ladder[0].level + 65536
    with jaxtensile.job("holds", config=programs.config(room)) as first:
        Training(first).run(1)
        with jaxtensile.job("waits", config=programs.config(room)) as second:
            training = Training(second)
            training.step = jaxtensile.jit(lambda *args: programs.step(*args), job=second, donate_argnums=0)
            thread = threading.Thread(target=training.run, args=(1,))
            thread.start()
            until(lambda: [x.compiled for x in second._tenancy.ladders] == [1])
            known = second._tenancy.together()[0]
            until(lambda: (asks := second._tenancy.taken.asking) and asks.admit.ladder[0] == known)
            until(lambda: office().status().waiting == 1)
            first.close()
            thread.join(WAIT)
    same(training.losses)
