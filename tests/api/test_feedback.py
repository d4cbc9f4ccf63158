"""Steps that take another time than predicted: what is learned, what is planned anew, and that nobody notices.

The clock is turned by hand and the rates of the device are made up; programs, plans, compiles and switches are real.
"""

import gc
import subprocess
import sys
import threading
import time
from dataclasses import replace

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtensile
from adam_steps import batch, init, train_step, where
from jaxtensile.api import feedback
from jaxtensile.api import jit as api
from jaxtensile.api.feedback import OFF, PATIENCE, RENEWALS, SKIPPED, TIMED, slowed
from jaxtensile.devices.profiles import profile
from jaxtensile.planner import renewal
from paths import ROOT
from programs import chain_args, squeezed
from programs import step as descent

WATCHED = SKIPPED + TIMED
RENEW = renewal.renew
COMPILES = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **__: COMPILES.append(threading.current_thread()) if "backend_compile" in event else None
)


class Clock:
    """Every timed call takes ``took`` seconds."""

    def __init__(self):
        self.took = self.now = 0.0

    def __call__(self):
        self.now += self.took
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(feedback, "clock", made)
    return made


@pytest.fixture
def slow(monkeypatch):
    """Devices said to work a hundred times slower than a CPU, with a link to host memory of 1 GB/s."""
    cpu = profile("cpu")
    made = replace(slowed(cpu, 100.0), platform="cuda", link_bandwidth=1e9, measured=frozenset({"link_bandwidth"}))
    monkeypatch.setattr(api, "best_known", lambda *_: made)
    return made


def jitted(fun=train_step, **options):
    return jaxtensile.jit(fun, budget="1GiB", offload_state=True, donate_argnums=0, **options)


def fast(step, *args, **kwargs):
    """Whether this call stays in C++; it is made with state that is not used again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api._compat, "under_trace", None)  # what Python asks first
        try:
            step(*args, **kwargs)
        except TypeError:
            return False
    return True


def renewals():
    return [t for t in threading.enumerate() if t.name == "jaxtensile-renewal"]


def renewed():
    """Wait for what is under way."""
    for thread in renewals():
        thread.join()


def run(step, state, times, seed=0, **kwargs):
    value = None
    for k in range(seed, seed + times):
        state, value = step(state, batch(k), **kwargs)
    return state, value


def close(ours, theirs):
    """Equal but for what rounding becomes in many steps."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5 * np.abs(b).max())


def expected(times, **kwargs):
    return run(jax.jit(train_step, donate_argnums=0), init(), times, **kwargs)


# ---- what is measured -----------------------------------------------------------------------------


def test_a_plan_is_timed_and_then_costs_what_it_did(clock):
    args = chain_args()
    planned, report = squeezed(descent, *args)
    assert report.measured is None and report.step > 0
    clock.took = 1.1 * report.step
    wanted = jax.jit(descent)(*args)
    for _ in range(WATCHED):
        assert planned.plan(*args).measured is None and not fast(planned, *args)
        close(planned(*args), wanted)
    now = planned.plan(*args)
    assert now.measured == pytest.approx(clock.took) and now.renewed == 0 and now.notes == report.notes
    planned(*args)
    assert fast(planned, *args)
    assert "measured" in str(now) and now.to_dict()["measured"] == now.measured


def test_a_program_that_runs_as_it_is_is_not_timed(clock):
    planned, args = jaxtensile.jit(descent, budget="1TiB"), chain_args()
    planned(*args)
    assert clock.now == 0.0 and fast(planned, *args) and planned.plan(*args).measured is None


@pytest.mark.parametrize("factor", [1 / OFF / 1.01, OFF * 1.01, 50.0])
def test_one_factor_changes_no_plan_that_only_recomputes(clock, factor):
    args = chain_args()
    planned, report = squeezed(descent, *args)
    clock.took = factor * report.step
    for _ in range(WATCHED + 2):
        planned(*args)
    now = planned.plan(*args)
    assert any("recomputes alone" in note for note in now.notes) and now.renewed == 0 and not renewals()
    assert fast(planned, *args)


def test_calls_that_cannot_be_timed_are_given_up(clock):
    """Nothing says when a call that returns nothing has ended."""

    def silent(weights, x):
        jax.debug.callback(lambda *_: None, *descent(weights, x))

    args = chain_args()
    planned, report = squeezed(silent, *args)
    clock.took = 50 * report.step
    for _ in range(PATIENCE):
        planned(*args)
    asked = clock.now
    planned(*args)
    now = planned.plan(*args)
    assert asked > 0 and clock.now == asked and now.measured is None and now.notes == report.notes


# ---- renewal --------------------------------------------------------------------------------------


def measured_at(step, clock, share, **kwargs):
    """Steps that take this share of what is predicted, until that is known."""
    first = step.plan(init(), batch(0), **kwargs)
    clock.took = share * first.step
    state, _ = run(step, init(), WATCHED, **kwargs)
    assert step.plan(state, batch(0), **kwargs).measured == pytest.approx(clock.took)
    return first, state


def test_a_plan_is_renewed_between_two_steps(slow, clock):
    """Work is twenty times faster than thought, so copies have to start earlier: another program, the same values."""
    step = jitted()
    first, state = measured_at(step, clock, 0.05)
    before = str(step.lower(init(), batch(0)).as_text())
    state, _ = run(step, state, 2, WATCHED)
    renewed()
    assert not fast(step, state, batch(0)), "what is found is asked for without anybody's help"
    assert step.plan(state, batch(0)).renewed == 1
    del COMPILES[:]
    now = step.plan(state, batch(0))
    clock.took = now.step
    state, value = run(step, state, WATCHED + 2, WATCHED + 2)
    assert threading.current_thread() not in COMPILES, "what the other thread compiled is what runs"
    theirs, wanted = expected(2 * WATCHED + 4)
    close(state, theirs)
    np.testing.assert_allclose(value, wanted, rtol=1e-4)
    assert where(state) == where(run(jitted(), init(), 1)[0])
    assert fast(step, state, batch(0))
    last = step.plan(init(), batch(0))
    assert last.renewed == 1 and last.measured == pytest.approx(now.step)
    assert now.step < first.step * 0.05 / feedback.WORTH
    assert str(step.lower(init(), batch(0)).as_text()) != before
    assert last.state == first.state and last.fits and last.compiled.exact
    assert any("the plan was renewed with work 0.03" in note for note in last.notes)
    assert "after 1 renewal" in str(last)


def test_a_renewed_plan_that_takes_longer_is_given_up(slow, clock):
    step = jitted()
    first, state = measured_at(step, clock, 0.05)
    before, took = step.lower(init(), batch(0)).as_text(), clock.took
    renewed()
    clock.took *= 1.1
    state, _ = run(step, state, WATCHED + 2, WATCHED)
    last = step.plan(init(), batch(0))
    assert step.lower(init(), batch(0)).as_text() == before and last.measured == pytest.approx(took)
    assert any("was given up" in note for note in last.notes) and last.step == first.step
    state, _ = run(step, state, 1, 2 * WATCHED + 2)
    close(state, expected(2 * WATCHED + 3)[0])
    assert fast(step, state, batch(0))


def test_renewals_are_bounded(slow, clock, monkeypatch):
    """A clock that always halves what is predicted never agrees; every plan found is taken for a better one."""
    found = []

    def at_any_price(job, at_most, unlike, watch):
        found.append(job.device)
        return RENEW(job, float("inf"), 0, watch)

    monkeypatch.setattr(renewal, "renew", at_any_price)
    step, state, seed = jitted(), init(), 0
    for _ in range(RENEWALS + 2):
        clock.took = 0.5 * step.plan(state, batch(0)).step
        state, _ = run(step, state, WATCHED + 1, seed)
        seed += WATCHED + 1
        renewed()
    assert len(found) == RENEWALS == step.plan(state, batch(0)).renewed
    assert [d.memory_bandwidth for d in found] == sorted(d.memory_bandwidth for d in found)
    state, _ = run(step, state, 2, seed)
    close(state, expected(seed + 2)[0])
    assert fast(step, state, batch(0))
    assert any("renewed often enough" in note for note in step.plan(init(), batch(0)).notes)


@pytest.mark.parametrize(("share", "why"), [(1e-3, "its copies alone take longer"), (3.0, "no other is 2 % shorter")])
def test_the_plan_stays_and_the_report_says_why(slow, clock, share, why):
    step = jitted()
    first, state = measured_at(step, clock, share)
    renewed()
    state, _ = run(step, state, 2, WATCHED)
    last = step.plan(init(), batch(0))
    assert any(why in note for note in last.notes) and (last.renewed, last.step) == (0, first.step)
    assert fast(step, state, batch(0))


def test_without_the_links_rate_nothing_is_folded_in(slow, clock, monkeypatch):
    """This machine's compiler makes no copies, so none can be timed."""
    monkeypatch.setattr(api, "best_known", lambda *_: replace(slow, measured=frozenset()))
    step = jitted()
    _, state = measured_at(step, clock, 0.05)
    assert not renewals() and any("look alike" in note for note in step.plan(state, batch(0)).notes)


def test_with_keywords_and_static_arguments(slow, clock):
    def turned(sign, state, x, *, rate):
        return train_step(state, x, rate=sign * rate)

    step = jaxtensile.jit(
        turned, budget="1GiB", offload_state=True, donate_argnames="state", static_argnums=0, static_argnames="rate"
    )
    plain = jax.jit(turned, donate_argnames="state", static_argnums=0, static_argnames="rate")
    ours, theirs = init(), init()
    clock.took = 0.05 * step.plan(-1, ours, batch(0), rate=0.01).step
    for k in range(2 * WATCHED + 4):
        ours, value = step(-1, ours, batch(k), rate=0.01)
        theirs, wanted = plain(-1, theirs, x=batch(k), rate=0.01)
        np.testing.assert_allclose(value, wanted, rtol=1e-4)
        if k >= WATCHED:
            renewed()
            clock.took = step.plan(-1, ours, batch(0), rate=0.01).step
    close(ours, theirs)
    assert step.plan(-1, ours, batch(0), rate=0.01).renewed == 1
    assert step.plan(1, ours, batch(0), rate=0.01).renewed == 0
    assert fast(step, -1, ours, batch(0), rate=0.01)


def test_in_the_context_of_the_calls(slow, clock):
    """What a context of the caller's thread has set holds for the renewed program, and for nobody else."""
    with jax.enable_x64(True):
        step = jitted()
        _, state = measured_at(step, clock, 0.05)
        renewed()
        clock.took = step.plan(state, batch(0)).step
        del COMPILES[:]
        state, _ = run(step, state, WATCHED + 2, WATCHED)
        assert threading.current_thread() not in COMPILES
        assert step.plan(init(), batch(0)).renewed == 1
        assert state["w"][0].dtype == state["m"][0].dtype == jnp.float64
        close(state, expected(2 * WATCHED + 2)[0])
    assert jnp.zeros(1, float).dtype == jnp.float32
    in_another = []
    thread = threading.Thread(target=lambda: in_another.append(jnp.zeros(1, float).dtype))
    thread.start()
    thread.join()
    assert in_another == [jnp.float32]


def test_calls_are_as_fast_as_ever_while_a_plan_is_renewed(slow, clock, monkeypatch):
    begun, go = threading.Event(), threading.Event()

    def renew(*args):
        begun.set()
        assert go.wait(60)
        return RENEW(*args)

    monkeypatch.setattr(renewal, "renew", renew)
    step = jitted()
    _, state = measured_at(step, clock, 0.05)
    state, _ = run(step, state, 2, WATCHED)
    assert begun.wait(60)
    state, _ = run(step, state, 1, WATCHED + 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api._compat, "under_trace", None)
        state, _ = run(step, state, 3, WATCHED + 3)
    go.set()
    renewed()
    state, _ = run(step, state, 1, WATCHED + 6)
    assert step.plan(state, batch(0)).renewed == 1
    close(state, expected(WATCHED + 7)[0])


def test_from_several_threads_at_once(slow, clock, monkeypatch):
    def renew(*args):
        found = RENEW(*args)
        clock.took = found.report.step  # once it runs, it takes what is predicted
        return found

    monkeypatch.setattr(renewal, "renew", renew)
    step, outs = jitted(), {}
    measured_at(step, clock, 0.05)
    start = threading.Barrier(4)

    def work(i):
        start.wait()
        outs[i] = run(step, init(i), 10, 10 * i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    renewed()
    plain = jax.jit(train_step, donate_argnums=0)
    for i in range(4):
        state, value = run(plain, init(i), 10, 10 * i)
        close(outs[i][0], state)
        np.testing.assert_allclose(outs[i][1], value, rtol=1e-4)
    assert step.plan(init(), batch(0)).renewed == 1
    state, _ = run(step, init(), PATIENCE)
    assert fast(step, state, batch(0))


def test_who_clears_the_cache_and_who_decides_do_not_wait_for_each_other(clock, monkeypatch):
    """Each has a lock of its own; the one that decides asks what is wanted, which is guarded by the other's."""
    args = chain_args()
    planned, report = squeezed(descent, *args)
    clock.took, deciding = 50 * report.step, threading.Event()

    def has_the_other_lock():
        if planned._lock.acquire(blocking=False):
            planned._lock.release()
            return False
        return True

    def without_arrays(x):
        deciding.set()
        while clearing.is_alive() and not has_the_other_lock():
            time.sleep(1e-3)
        return feedback.without_arrays(x)

    monkeypatch.setattr(api, "without_arrays", without_arrays)
    clearing = threading.Thread(target=lambda: (deciding.wait(), planned.clear_cache()), daemon=True)
    calling = threading.Thread(target=lambda: [planned(*args) for _ in range(WATCHED)], daemon=True)
    for thread in (clearing, calling):
        thread.start()
    for thread in (clearing, calling):
        thread.join(60)
    assert deciding.is_set() and not clearing.is_alive() and not calling.is_alive()


# ---- what may go wrong ----------------------------------------------------------------------------


def test_a_failure_in_the_background_is_a_note(slow, clock, monkeypatch, capfd):
    def broken(*_):
        raise ValueError("the solver is out\nof order")

    monkeypatch.setattr(renewal, "renew", broken)
    step = jitted()
    _, state = measured_at(step, clock, 0.05)
    renewed()
    state, _ = run(step, state, 2, WATCHED)
    last = step.plan(init(), batch(0))
    assert last.renewed == 0 and any("failed: ValueError: the solver is out" in note for note in last.notes)
    close(state, expected(WATCHED + 2)[0])
    assert fast(step, state, batch(0)) and capfd.readouterr() == ("", "")


def test_a_context_that_no_other_thread_can_enter_is_a_note(slow, clock, monkeypatch):
    monkeypatch.setattr(api._compat, "configuration", lambda: lambda: False)
    step = jitted()
    _, state = measured_at(step, clock, 0.05)
    renewed()
    last = step.plan(state, batch(0))
    assert last.renewed == 0 and any("no other thread can enter" in note for note in last.notes)
    assert not fast(step, state, batch(0)) and run(step, state, 2, WATCHED)[1] > 0


def test_errors_of_a_timed_call_are_those_of_any_call(slow, clock):
    step, state = jitted(), init()
    state, _ = run(step, state, 2)
    gone = jax.tree.map(jnp.copy, state)
    run(step, gone, 1)
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        step(gone, batch(0))
    state, _ = run(step, state, WATCHED, 2)
    assert step.plan(state, batch(0)).measured is not None


def test_clear_cache_in_the_middle_begins_anew(slow, clock):
    step = jitted()
    _, state = measured_at(step, clock, 0.05)
    step.clear_cache()
    renewed()
    assert step.plan(state, batch(0)).measured is None
    state, _ = run(step, state, 2, WATCHED)
    close(state, expected(WATCHED + 2)[0])


def test_nothing_outlives_the_trace_it_was_made_for(slow, clock):
    step = jitted()
    for _ in range(2):
        _, state = measured_at(step, clock, 0.05)
        renewed()
        state, _ = run(step, state, 2, WATCHED)
        assert step.plan(state, batch(0)).renewed == 1
        del state
        jax.clear_caches()
        gc.collect()
    assert not step._entries


EXIT = """
import sys, threading
sys.path[:0] = ["tests", "tests/api"]
import jax
from dataclasses import replace
import jaxtensile
from jaxtensile.api import jit as api, feedback
from jaxtensile.planner import trial_compiles
from jaxtensile.devices.profiles import profile
from test_feedback import Clock, batch, init, jitted, renewals, run, WATCHED

api.best_known = lambda *_: replace(
    feedback.slowed(profile("cpu"), 100.0), platform="cuda", link_bandwidth=1e9, measured=frozenset({"link_bandwidth"})
)
clock = feedback.clock = Clock()
compiling, compile_program = threading.Event(), trial_compiles.compile_program

def told(*args):
    compiling.set()
    return compile_program(*args)

step = jitted()
clock.took = 0.05 * step.plan(init(), batch(0)).step
trial_compiles.compile_program = told
state, _ = run(step, init(), WATCHED)
"""


@pytest.mark.parametrize("end", ["", "compiling.wait()", "compiling.wait(); sys.exit(3)"])
def test_the_interpreter_ends_while_a_renewal_is_under_way(end):
    script = f"{EXIT}\nprint(len(renewals()), flush=True)\n{end}\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (done.stdout, done.stderr) == ("1\n", "") and done.returncode == (3 if "exit" in end else 0)
