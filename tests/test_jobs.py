"""Jobs that share a device: admitted, refused, moved from plan to plan, and what they compute stays the same."""

import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtensile
import job_programs as programs
from jaxtensile import arbitration
from jaxtensile.errors import BudgetError, ConfigError, CoordinatorError, RejectedError
from jaxtensile.ladder import Ladder
from jaxtensile.runtime.leases import HOST
from jaxtensile.runtime.ledger import Capacity

ROOM = "64MiB"
WAIT = 120.0


@pytest.fixture(scope="module", autouse=True)
def plans(tmp_path_factory):
    """One folder of plans for all tests here: what one has planned the next need not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXTENSILE_PLAN_CACHE", str(tmp_path_factory.mktemp("plans")))
        # Which plan is faster on a busy machine is luck; here it is what the model says.
        patch.setattr(Ladder, "took", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def ladder(plans):
    """The compiled ladder of the step; as long as it is there, all jobs here share its plans."""
    with jaxtensile.job("measure", config=programs.config(ROOM)) as job:
        step = jaxtensile.jit(programs.step, job=job, donate_argnums=0)
        step(programs.start(), programs.X, programs.Y)
        assert job.wait(WAIT) and job.compiled
        found = job.ladder
    yield found
    del step


def office():
    return arbitration._local[1]


def resize(capacity):
    """The device of all jobs here has so many bytes from now on."""
    office().resize({"cpu:0": Capacity(capacity=capacity), HOST: Capacity(capacity=1 << 30)})


def charged():
    return next(d for d in office().status().devices if d.device == "cpu:0").charged


def until(condition):
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def same(got, seed=0):
    """The losses of an undisturbed run: other plans may round otherwise in the last bits."""
    np.testing.assert_allclose(got, programs.undisturbed(len(got), seed), rtol=2e-6)


class Training:
    """A job, its step and its weights."""

    def __init__(self, job, seed=0):
        self.step = jaxtensile.jit(programs.step, job=job, donate_argnums=0)
        self.weights, self.losses = programs.start(seed), []

    def run(self, steps):
        for _ in range(steps):
            self.weights, value = self.step(self.weights, programs.X, programs.Y)
            self.losses.append(float(value))


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


def test_losses_do_not_change_across_many_switches(ladder):
    with jaxtensile.job("switching", config=programs.config(ROOM)) as job:
        training = Training(job)
        training.run(1)
        assert job.wait(WAIT)
        levels = [r.level for r in job.ladder]
        for k in range(24):
            level = levels[0] if k % 2 else levels[-1]
            resize(level)
            training.run(1)
            assert job.budget <= level and charged() <= level
        assert job.switches >= 20
    same(training.losses)


def test_the_plan_that_runs_fits_the_rung_that_is_charged(ladder):
    with jaxtensile.job("fits", config=programs.config(ROOM)) as job:
        training = Training(job)
        training.run(1)
        assert job.wait(WAIT)
        for rung in job.ladder:
            resize(rung.level)
            training.run(1)
            training.run(1)
            compiled = training.step.lower(training.weights, programs.X, programs.Y).compile().memory_analysis()
            assert compiled.temp_size_in_bytes <= job._now.temp
            assert job.budget == rung.level


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


def test_a_job_that_is_told_to_shrink_below_its_smallest_plan_gets_what_that_needs(ladder, monkeypatch):
    """It was admitted by a prediction that was too low, and the coordinator goes by that until it knows more."""
    predicted = Ladder._predicted

    def too_low(self):
        low, *others = predicted(self)
        low.temp //= 4
        return [low, *others]

    monkeypatch.setattr(Ladder, "_predicted", too_low)
    monkeypatch.setattr(jaxtensile.jobs.Job, "_build", lambda _: None)  # which would tell it
    with jaxtensile.job("misjudged", config=programs.config("63MiB")) as job:
        training = Training(job)
        training.step._ladders = weakref.WeakKeyDictionary()
        monkeypatch.setattr("jaxtensile.api._SHARED", {})
        training.run(1)
        assert job.ladder[0].level < ladder[0].level
        lie, room = job.ladder[0].level, ladder[0].level + 4096
        assert room < job.ladder[1].level
        resize(room)
        assert job.budget == lie == charged()
        training.run(2)
        assert lie < job.budget == charged() <= room
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
    with pytest.raises(TypeError, match=r"takes a jaxtensile\.job"):
        jaxtensile.jit(programs.step, job="bert")


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


def test_what_is_wanted_bounds_what_is_granted(ladder):
    want = ladder[-1].level - 1
    with jaxtensile.job("modest", want=want, config=programs.config(ROOM)) as job:
        training = Training(job)
        training.run(1)
        assert job.wait(WAIT)
        training.run(2)
        assert job.budget <= want
    same(training.losses)


def test_a_process_of_the_config_needs_no_name(monkeypatch):
    monkeypatch.setenv("JAXTENSILE_JOB", "bert")
    assert jaxtensile.job(config={"jobs": {"bert": {"least": "1MiB"}}}).least == 1 << 20
    monkeypatch.delenv("JAXTENSILE_JOB")
    with pytest.raises(CoordinatorError, match="not None: give it one, or start this with 'jaxtensile run'"):
        jaxtensile.job()


def refused(call, said):
    """A thread that was started with a call that ends in a ``CoordinatorError``, whose text is then in ``said``."""

    def work():
        with pytest.raises(CoordinatorError) as caught:
            call()
        said.append(str(caught.value))

    thread = threading.Thread(target=work)
    thread.start()
    return thread


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
