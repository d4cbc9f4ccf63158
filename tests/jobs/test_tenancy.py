"""A job goes from plan to plan as it is told to; its plans fit what it is charged and compute the same."""

import itertools
import weakref

import pytest
from msgspec import structs

import jaxtensile
import job_programs as programs
from chaos_jobs import Log, Steps
from jaxtensile.jobs import stepping
from jaxtensile.jobs.ladder import Ladder
from job_training import ROOM, WAIT, Training, charged, ladder, plans, resize, same, to_and_fro, until

pytestmark = pytest.mark.xdist_group("tenancy")  # one process: what all of them need is made once

__all__ = ["ladder", "plans"]


def test_losses_do_not_change_across_many_switches(ladder):
    with jaxtensile.job("switching", config=programs.config(ROOM)) as job:
        training = Training(job)
        training.run(1)
        assert job.wait(WAIT)
        to_and_fro(job, training, 24)
        assert job.switches >= 20
    same(training.losses)


def test_the_next_job_has_what_the_config_says_and_not_what_was_left_of_it(ladder):
    with jaxtensile.job("last", config=programs.config(ROOM)) as job:
        Training(job).run(1)
        resize(ladder[0].level)
    with jaxtensile.job("next", config=programs.config(ROOM)) as job:
        training = Training(job)
        training.run(1)
        assert job.wait(WAIT)
        training.run(1)
        assert job.budget == ladder[-1].level
    same(training.losses)


def test_the_plan_that_runs_fits_the_rung_that_is_charged(ladder):
    with jaxtensile.job("fits", config=programs.config(ROOM)) as job:
        training = Training(job)
        training.run(1)
        assert job.wait(WAIT)
        levels, budgets = [rung.level for rung in job.ladder], list[int]()
        for level in levels:
            resize(level)
            training.run(1)
            training.run(1)
            compiled = training.step.lower(training.weights, programs.X, programs.Y).compile().memory_analysis()
            assert compiled.temp_size_in_bytes <= job._tenancy.now.temp
            assert job.budget <= level
            budgets.append(job.budget)
        # For a step that is hardly shorter a job does not move.
        assert (budgets[0], budgets[-1]) == (levels[0], levels[-1])


def test_what_a_job_may_use_is_within_both_ladders_while_another_is_on_its_way(ladder, monkeypatch):
    with jaxtensile.job("renews", config=programs.config(ROOM)) as job:
        Training(job).run(1)
        assert job.wait(WAIT)
        less = tuple(structs.replace(r, persistent=r.persistent - 64) for r in job.ladder)
        monkeypatch.setattr(job._tenancy, "together", lambda: less)
        with job._steps.alone("a step"):
            job._tenancy.renewal(job._tenancy.client)
            assert job.ladder != less == job._tenancy.client.admit.ladder
            assert job.budget == charged() == less[-1].level


def test_a_ladder_is_told_while_a_thread_goes_on_to_compile_it(ladder, monkeypatch):
    """Which is another ladder at each look."""
    with jaxtensile.job("compiles", config=programs.config(ROOM)) as job:
        Training(job).run(1)
        assert job.wait(WAIT)
        known, looks = job.ladder, itertools.count(2)

        def another():
            more = next(looks)
            return tuple(structs.replace(r, seconds=r.seconds * more) for r in known)

        monkeypatch.setattr(job._tenancy, "together", another)
        job._tenancy.renewal(job._tenancy.client)
        assert [r.level for r in job.ladder] == [r.level for r in known] and job.ladder != known


def test_a_chaos_job_writes_of_no_plan_that_it_has_given_up_unless_it_runs_it(ladder, tmp_path):
    with jaxtensile.job("writes", config=programs.config(ROOM)) as job:
        training = Training(job)
        Steps(job, training.step, Log(log := tmp_path / "log"))
        training.run(1)
        assert job.wait(WAIT)

        def runs(steps):
            before = log.read_text()
            training.run(steps)
            lines = [line.split() for line in log.read_text()[len(before) :].splitlines()]
            return [int(words[2]) for words in lines if words[1] == "run"]

        for rung in [*reversed(job.ladder), *job.ladder]:
            resize(rung.level)
            levels = runs(2)
            assert len(levels) >= 2 and max(levels) <= charged() <= rung.level
        job._tenancy.forget = lambda: None
        resize(ladder[0].level)
        assert min(runs(1)) > charged(), "it lies"


def test_an_idle_job_shrinks_at_once_when_another_comes(ladder):
    room = ladder[-1].level + ladder[-1].persistent - 1
    with jaxtensile.job("first", config=programs.config(room)) as first:
        one = Training(first)
        one.run(2)
        assert first.wait(WAIT)
        top = first.budget
        with jaxtensile.job("second", config=programs.config(room)) as second:
            two = Training(second, seed=1)
            two.run(1)  # nobody calls a step of the first meanwhile
            assert second.wait(WAIT)
            assert first.budget < top
            assert charged() <= room
            one.run(2)
            two.run(2)
            assert charged() <= room
        until(lambda: first.budget == top)
        one.run(2)
    same(one.losses)
    same(two.losses, seed=1)


def test_a_job_that_is_told_to_shrink_below_its_smallest_plan_gets_what_that_needs(ladder, monkeypatch):
    """It was admitted by a prediction that was too low, and the coordinator goes by that until it knows more."""
    predicted = Ladder._predicted

    def too_low(self, *args):
        low, *others = predicted(self, *args)
        low.temp //= 4
        return [low, *others]

    monkeypatch.setattr(Ladder, "_predicted", too_low)
    monkeypatch.setattr(stepping.Stepping, "_build", lambda *_: None)  # which would tell it
    with jaxtensile.job("misjudged", config=programs.config("63MiB")) as job:
        training = Training(job)
        training.step._ladders = weakref.WeakKeyDictionary()
        monkeypatch.setattr("jaxtensile.api.jit._SHARED", {})
        training.run(1)
        assert job.ladder[0].level < ladder[0].level
        lie, room = job.ladder[0].level, ladder[0].level + 4096
        assert room < job.ladder[1].level
        resize(room)
        assert job.budget == lie == charged()
        training.run(2)
        assert lie < job.budget == charged() <= room
    same(training.losses)


def test_what_is_wanted_bounds_what_is_granted(ladder):
    want = ladder[-1].level - 1
    with jaxtensile.job("modest", want=want, config=programs.config(ROOM)) as job:
        training = Training(job)
        training.run(1)
        assert job.wait(WAIT)
        training.run(2)
        assert job.budget <= want
    same(training.losses)
