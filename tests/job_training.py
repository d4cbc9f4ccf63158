"""A training job whose losses are known, and what it is charged; fixtures for tests of jobs."""

import threading
import time

import numpy as np
import pytest

import jaxtensile
import job_programs as programs
from jaxtensile.errors import CoordinatorError
from jaxtensile.jobs import arbitration
from jaxtensile.jobs.ladder import Ladder
from jaxtensile.runtime.decide.leases import HOST
from jaxtensile.runtime.decide.ledger import Capacity

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


def to_and_fro(job, training, times):
    """A step in each of ``times`` devices, as small as the least plan and as large as the largest in turn; the levels
    of its plans."""
    levels = [rung.level for rung in job.ladder]
    for k in range(times):
        level = levels[0] if k % 2 else levels[-1]
        resize(level)
        training.run(1)
        assert job.budget <= level and charged() <= level
    return levels


def refused(call, said):
    """A thread that was started with a call that ends in a ``CoordinatorError``, whose text is then in ``said``."""

    def work():
        with pytest.raises(CoordinatorError) as caught:
            call()
        said.append(str(caught.value))

    thread = threading.Thread(target=work)
    thread.start()
    return thread
