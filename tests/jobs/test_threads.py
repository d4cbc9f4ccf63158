"""What several threads use at once: each piece of shared state by itself, then all of the front door together.

``docs/threads.md`` says what guards what. Switches between threads are made as frequent as Python can.
"""

import gc
import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from jax_lines import SOAK
from jaxtensile import _compat
from jaxtensile.jobs.ladder import Ladder, Position, together
from jaxtensile.jobs.stepping import Stepping
from jaxtensile.jobs.tenancy import Tenancy, Terms
from jaxtensile.spmd.processes import keystore
from paths import TESTS

TERMS = Terms(name="a", least=0, want=0, priority=0, weight=1.0, devices=None, overhead=None)


@pytest.fixture(autouse=True)
def often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*calls, times):
    """Each in a thread of its own, so often."""
    start = threading.Barrier(len(calls))

    def again(call):
        start.wait(60)
        for _ in range(times):
            call()

    with ThreadPoolExecutor(len(calls)) as pool:
        for made in [pool.submit(again, call) for call in calls]:
            made.result()


# ---- one piece of state at a time -----------------------------------------------------------------


def test_steps_are_added_to_a_job_that_tells_its_steps():
    class Step:
        def _clear_cache(self):
            pass

    tenancy, kept = Tenancy(TERMS), []

    def add():
        kept.append(Step())
        tenancy.used_by(kept[-1])

    for _ in range(2000):
        add()
    at_once(add, tenancy.forget, times=300)
    assert len(tenancy._users) == len(kept)
    kept.clear()
    gc.collect()
    assert not tenancy._users


def test_a_job_is_asked_where_it_is_while_it_ends():
    class Ending:
        """Its lease is given back whenever somebody has looked."""

        there = SimpleNamespace(rung=3)

        @property
        def client(self):
            found, self.there = self.there, None
            return found

    tenancy = Tenancy(TERMS)
    tenancy.taken = Ending()
    assert (tenancy.rung, tenancy.rung) == (3, -1)


def test_a_ladder_is_asked_for_its_rungs_while_plans_take_the_places_of_others():
    plans = itertools.cycle([Position(8, 8 * n, 0, 1.0 / n, 0, 0)] for n in (1, 2))
    ladder = object.__new__(Ladder)
    ladder._places = next(plans)

    @contextmanager
    def lock():
        """Whoever lets go of it is followed by who compiles."""
        yield
        ladder._places = next(plans)

    ladder.__class__ = type("", (Ladder,), {"_lock": property(lambda _: lock())})
    assert [together([ladder])[0].temp for _ in range(2)] == [8, 16]


def test_who_waits_for_plans_waits_for_a_thread_that_has_begun(monkeypatch):
    tenancy, start = Tenancy(TERMS), threading.Thread.start
    tenancy.ladders = [SimpleNamespace(complete=False, sketched=True, build=lambda *_, **__: None)]
    steps = Stepping(tenancy)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (steps.wait(0), start(thread)))
    steps._build()
    steps._ran.set()
    assert steps.compiles and steps.wait() and not steps.compiles


def test_threads_of_a_process_find_one_store(monkeypatch):
    clients, found = [], []
    monkeypatch.setattr(_compat, "key_value_client", lambda: clients[-1])
    for _ in range(20):
        clients.append(object())
        at_once(*[lambda: found.append(keystore.store())] * 8, times=1)
    assert len(found) == 160 and len({*found}) == 20


# ---- all of it ------------------------------------------------------------------------------------


def test_everything_at_once(tmp_path):
    """Of a process of its own: nothing is lost, left behind or said by nobody, and values are those of ``jax.jit``."""
    program, much = TESTS / "threads_at_once.py", "600s" if SOAK else "1"
    environment = {**os.environ, "JAXTENSILE_PLAN_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, program, "1", much], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
